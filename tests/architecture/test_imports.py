"""Who may import what, where a static rule cannot see it: in a running interpreter."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

# Everything that answers before training, or on a login node: --help in under 0.6 s.
WITHOUT_TORCH = [
    "torsh_trainer",
    "torsh_trainer.__main__",
    "torsh_trainer.bench.command",
    "torsh_trainer.checkpoint.cli.command",
    "torsh_trainer.checkpoint.cli.inspection",
    "torsh_trainer.config",
    "torsh_trainer.environments",
    "torsh_trainer.doctor.agent",
    "torsh_trainer.doctor.checks",
    "torsh_trainer.doctor.hosts",
    "torsh_trainer.doctor.script",
    "torsh_trainer.errors",
    "torsh_trainer.launchers",
    "torsh_trainer.utils.registry",
    "torsh_trainer.report",
    "torsh_trainer.rundir",
    "torsh_trainer.translate",
    "torsh_trainer.environments.world",
]


def modules_below(name: str) -> list[str]:
    """The module and, for a package, every module in it."""
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"{name} is gone: take it off the list"
    if name == "torsh_trainer" or spec.submodule_search_locations is None:
        return [name]
    root = Path(next(iter(spec.submodule_search_locations)))
    parts = [path.relative_to(root).with_suffix("").parts for path in sorted(root.rglob("*.py"))]
    return [".".join((name, *(part for part in path if part != "__init__"))) for path in parts]


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_what_answers_before_training_does_not_import_torch(name, run_command, tmp_path):
    script = "\n".join(
        ["import sys"]
        + [f"import {module}" for module in modules_below(name)]
        + ["print(*sorted({'torch', 'numpy'} & set(sys.modules)))"]
    )
    result = run_command([sys.executable, "-c", script], cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ""


def third_party_imports(package: Path) -> dict[str, set[str]]:
    """Top-level names of imported modules that are neither ours nor Python's, and who has them."""
    found: dict[str, set[str]] = {}
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in {name.split(".")[0] for name in names}:
                if name not in sys.stdlib_module_names and name != "torsh_trainer":
                    found.setdefault(name, set()).add(path.name)
    return found


def test_every_library_that_the_package_imports_is_declared(repository, project):
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + [
        requirement
        for extra, requirements in extras.items()
        if extra not in ("dev", "bench")
        for requirement in requirements
    ]
    declared = {re.split(r"[^\w-]", requirement)[0].lower() for requirement in wanted}
    distributions = packages_distributions()
    undeclared = {
        name: sorted(files)
        for name, files in third_party_imports(repository / "torsh_trainer").items()
        if not {d.lower() for d in distributions.get(name, [name])} & declared
    }
    assert undeclared == {}
