"""What must not be committed, and what must stand in the repository."""

from __future__ import annotations

import re
import subprocess
from itertools import chain
from pathlib import Path

import pytest

# Written in two parts, so that this file does not match itself.
FORBIDDEN = {
    "a path of somebody's machine": r"(?<![\w.$}])/(home|root|Users|work|mnt)/(?!me\b|user\b)\w",
    "a package index of somebody's machine": r"--(extra-)?index" + r"-url|--find" + r"-links",
    "a key": r"-----BEGIN" + r" \w+ ?PRIVATE KEY|AKIA[0-9A-Z]{16}",
}
TEXT = {"", ".cfg", ".csv", ".json", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"}
NOT_OURS = {".git", ".venv", "runs", "multirun", "outputs", "site", "dist", "build", "__pycache__"}


def committed_files(root: Path) -> list[Path]:
    """What git has or would take; without git (a source archive), all but build results."""
    if (root / ".git").exists():
        command = ["git", "ls-files", "-co", "--exclude-standard"]
        listing = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
        files = [root / line for line in listing.stdout.splitlines()]
    else:
        files = [p for p in root.rglob("*") if not NOT_OURS & set(p.relative_to(root).parts)]
    return [path for path in files if path.is_file()]


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_holds(what, repository):
    pattern = re.compile(FORBIDDEN[what])
    found = [
        f"{path.relative_to(repository)}:{number}: {line.strip()}"
        for path in committed_files(repository)
        if path.suffix in TEXT
        for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def test_every_folder_of_conf_and_recipes_holds_no_code(repository):
    folders = [repository / "conf", repository / "recipes"]
    assert [path for folder in folders for path in folder.rglob("*.py")] == []


def test_every_recipe_has_its_yaml_and_a_readme(repository):
    recipes = [path for path in (repository / "recipes").iterdir() if path.is_dir()]
    assert recipes
    for recipe in recipes:
        assert (recipe / "recipe.yaml").is_file(), recipe.name
        assert (recipe / "README.md").is_file(), recipe.name


def test_constraints_pin_every_requirement_exactly(repository, project, plugins):
    lines = (repository / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    exact = re.compile(r"[\w.-]+==[\w.]+(; python_version .*)?")
    assert [pin for pin in pins if not exact.fullmatch(pin)] == []
    assert "torch==2.13.0" in pins

    assert plugins
    wanted = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    wanted += chain(*(plugin["dependencies"] for plugin in plugins))
    ours = {project["name"], *(plugin["name"] for plugin in plugins)}
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in wanted} - ours
    normal = {pin.split("==")[0].lower().replace("_", "-") for pin in pins}
    assert {name.lower().replace("_", "-") for name in names} - normal == set()


def test_pages_name_modules_that_exist(repository):
    package = repository / "torsh_trainer"
    rooms = "|".join(sorted(path.name for path in package.iterdir() if path.is_dir()))
    named = re.compile(rf"`(?:torsh_trainer/)?((?:{rooms})/[\w/]+\.py)`")
    pages = [page for page in (repository / "docs").rglob("*.md") if "decisions" not in page.parts]
    names = [
        (page.name, name)
        for page in [*pages, repository / "README.md", repository / "CONTRIBUTING.md"]
        for name in named.findall(page.read_text("utf-8"))
    ]
    assert len(names) > 20, "the pages name modules in another way"
    assert [(page, name) for page, name in names if not (package / name).is_file()] == []
