"""The run directory: whose it is, and what is written into it."""

from __future__ import annotations

import enum
import json
import logging
import math
import os
import subprocess
import sys
import threading
from datetime import datetime, timezone
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml

from torsh_trainer import rundir
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.rundir import RESULT_KEYS, RunDir, fresh_name
from torsh_trainer.rundir.logs import setup_logging
from torsh_trainer.rundir.provenance import gather_provenance, git_state, installed_packages


def result_of(home: RunDir) -> dict:
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads((home.path / "result.json").read_text(), parse_constant=refuse)


# -- whose directory it is ------------------------------------------------------------------------


def test_without_a_path_every_run_gets_a_directory_of_its_own(tmp_path):
    homes = [RunDir.create(base=tmp_path / "runs") for _ in range(4)]
    assert len({home.path for home in homes}) == 4
    for home in homes:
        assert home.path.parent == tmp_path / "runs"
        datetime.strptime(home.path.name[:19], "%Y-%m-%d_%H-%M-%S")


def test_a_directory_that_somebody_else_filled_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match=r"is no run directory: it holds thesis\.tex") as caught:
        RunDir.create(tmp_path)
    assert "choose another run directory" in caught.value.fix
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_checking_a_directory_changes_nothing(tmp_path):
    RunDir.check(tmp_path / "new")
    RunDir.check(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="is no run directory"):
        RunDir.check(tmp_path)


@pytest.mark.parametrize("made", [[], [".hydra/config.yaml", "__main__.log", "logs/rank-0.log"]])
def test_a_directory_that_hydra_or_the_launcher_made_just_before_is_taken(tmp_path, made):
    for name in made:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert RunDir.create(tmp_path).path == tmp_path


def test_a_name_that_was_made_fresh_is_taken(tmp_path):
    path = fresh_name(tmp_path)
    assert RunDir.create(path).path == path


@pytest.mark.parametrize("ours", [".torsh_run", "config.yaml provenance.json"])
def test_a_directory_of_an_earlier_run_is_used_again_and_its_files_are_kept(tmp_path, ours):
    for name in ours.split():
        (tmp_path / name).write_text("first")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "result.json").write_text("first")
    for turn in ("second", "third"):
        home = RunDir.create(tmp_path)
        assert not (tmp_path / "result.json").exists()
        home.write_result({"strategy": turn})
    assert (tmp_path / "result.1.json").read_text() == "first"
    assert json.loads((tmp_path / "result.2.json").read_text())["strategy"] == "second"
    assert result_of(home)["strategy"] == "third"


def test_a_file_where_the_directory_should_be_is_an_error(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(ConfigError, match="runs is a file; choose another run directory"):
        RunDir.create(tmp_path / "runs")
    with pytest.raises(ResourceError, match="Not a directory"):
        RunDir.create(base=tmp_path / "runs")
    with pytest.raises(ResourceError, match="Not a directory"):
        RunDir.create(tmp_path / "runs" / "7")


# -- config.yaml ----------------------------------------------------------------------------------


class Colour(str, enum.Enum):
    RED = "red"


def test_config_is_yaml_that_gives_the_values_back_in_their_order(tmp_path):
    config = {"trainer": {"max_steps": 200, "seed": 0}, "lr": 1e-5, "b": [1, None, True], "ä": "ö"}
    home = RunDir.create(tmp_path)
    home.write_config(config)
    again = yaml.safe_load((tmp_path / "config.yaml").read_text(encoding="utf-8"))
    assert again == config
    assert list(again) == list(config)


def test_what_yaml_has_no_word_for_is_written_as_text(tmp_path):
    home = RunDir.create(tmp_path)
    home.write_config({"path": Path("data"), "betas": (0.9, 0.99), "colour": Colour.RED, 3: int})
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {
        "path": "data",
        "betas": [0.9, 0.99],
        "colour": str(Colour.RED),
        "3": str(int),
    }


# -- result.json ----------------------------------------------------------------------------------


def test_result_holds_every_promised_key_and_what_else_was_given(tmp_path):
    home = RunDir.create(tmp_path)
    home.write_result({"strategy": "ddp", "metrics": {"accuracy": 0.97}, "precision": "fp32"})
    result = result_of(home)
    assert list(result) == [*RESULT_KEYS, "precision"]
    assert result["metrics"] == {"accuracy": 0.97}
    assert result["train_loss"] is None


def test_result_is_strict_json_also_when_training_diverged(tmp_path):
    home = RunDir.create(tmp_path)
    home.write_result({"train_loss": math.nan, "metrics": {"loss": math.inf, "n": [-math.inf, 1]}})
    assert result_of(home)["train_loss"] is None
    assert result_of(home)["metrics"] == {"loss": None, "n": [None, 1]}


def test_a_failed_run_leaves_the_error_with_its_next_move_and_facts(tmp_path):
    home = RunDir.create(tmp_path)
    error = ConfigError("unknown strategy 'fspd'", fix="did you mean 'fsdp'?", name="fspd", at=home)
    home.write_error(error, {"steps": 12})
    result = result_of(home)
    assert result["steps"] == 12
    assert result["error"] == {
        "type": "ConfigError",
        "message": "unknown strategy 'fspd'",
        "fix": "did you mean 'fsdp'?",
        "facts": {"name": "fspd", "at": str(home)},
    }


def test_an_error_that_is_not_ours_is_left_too(tmp_path):
    home = RunDir.create(tmp_path)
    home.write_error(ZeroDivisionError("division by zero"))
    assert result_of(home)["error"] == {
        "type": "ZeroDivisionError",
        "message": "division by zero",
        "fix": "",
        "facts": {},
    }


def test_a_directory_that_is_gone_is_a_resource_error(tmp_path):
    home = RunDir(tmp_path / "gone")
    with pytest.raises(ResourceError, match=r"cannot write .*result\.json: No such file"):
        home.write_result({})


# -- provenance.json ------------------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository_of_a_user(tmp_path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "model.py").write_text("width = 1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def test_provenance_names_command_machine_and_threads(tmp_path):
    home = RunDir.create(tmp_path)
    home.start_provenance(command=["python", "train.py"], threads=3, devices=["H100"]).join()
    facts = json.loads((tmp_path / "provenance.json").read_text())
    assert facts["command"] == ["python", "train.py"]
    assert facts["threads_per_process"] == 3
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["hardware"]["devices"] == ["H100"]
    assert facts["hardware"]["cores"] == os.cpu_count()
    assert facts["hardware"]["memory_bytes"] > 0
    assert facts["hardware"]["cpu"]
    assert datetime.fromisoformat(facts["time"]).tzinfo is not None


def test_provenance_has_the_version_of_every_installed_package():
    found = installed_packages(sys.path)
    expected: dict[str, str] = {}
    for distribution in distributions():  # of a name that is there twice, the first is imported
        name = distribution.metadata["Name"].replace("_", "-").replace(".", "-").lower()
        expected.setdefault(name, distribution.version)
    known = {key.replace(".", "-"): version for key, version in found.items()}
    assert {name: known[name] for name in expected} == expected


def test_provenance_holds_commit_diff_and_untracked_files(repository_of_a_user):
    folder = repository_of_a_user
    (folder / "model.py").write_text("width = 2\n")
    (folder / "new.py").write_text("")
    state = git_state(folder)
    assert state == {
        "commit": git(folder, "rev-parse", "HEAD").strip(),
        "diff": git(folder, "diff", "HEAD"),
        "diff_truncated": False,
        "untracked": ["new.py"],
    }
    assert "+width = 2" in state["diff"]


def test_a_long_diff_is_cut_and_says_so(repository_of_a_user):
    (repository_of_a_user / "model.py").write_text("x = 1\n" * 10_000)
    state = git_state(repository_of_a_user, most_bytes=500)
    assert len(state["diff"]) == 500
    assert state["diff_truncated"]


def test_outside_of_a_repository_there_is_no_commit(tmp_path):
    now = datetime.now(timezone.utc)
    facts = gather_provenance(command=[], threads=None, devices=[], folder=tmp_path, now=now)
    assert facts["git"] is None


def test_no_environment_variable_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "very-secret-value")
    home = RunDir.create(tmp_path)
    home.start_provenance(command=["x"]).join()
    assert "very-secret-value" not in (tmp_path / "provenance.json").read_text()


def test_that_provenance_cannot_be_written_is_only_logged(tmp_path, caplog):
    home = RunDir(tmp_path / "gone")
    home.start_provenance(command=["x"]).join()
    assert "provenance.json: No such file" in caplog.text


def test_provenance_goes_to_its_own_run_though_the_process_goes_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    home = RunDir.create(Path("run"))
    waits = threading.Event()

    def gather(**_):
        waits.wait(30)
        return {}

    monkeypatch.setattr(rundir, "gather_provenance", gather)
    thread = home.start_provenance(command=["x"])
    more = home.add_provenance({"numerics": {}})
    (tmp_path / "elsewhere" / "run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    waits.set()
    thread.join()
    more.join()
    assert list(Path("run").iterdir()) == []
    assert json.loads((tmp_path / "run/provenance.json").read_text()) == {"numerics": {}}


# -- logs -----------------------------------------------------------------------------------------

SPEAK = """
import logging, sys
from pathlib import Path
from torsh_trainer.rundir.logs import setup_logging
from torsh_trainer.environments.world import World
close = setup_logging(Path(sys.argv[1]), World(int(sys.argv[2]), 2), sys.argv[3])
for name in ("torsh_trainer.training.loop", "users.code"):
    for level in ("debug", "info", "warning"):
        getattr(logging.getLogger(name), level)(f"{name} {level}")
close()
logging.getLogger("torsh_trainer").warning("after the end")
"""


def speak(folder: Path, rank: int, level: str) -> tuple[list[str], list[str]]:
    command = [sys.executable, "-c", SPEAK, str(folder), str(rank), level]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    written = (folder / "logs" / f"rank-{rank}.log").read_text()
    return [_said(line) for line in written.splitlines()], [
        _said(line) for line in done.stderr.splitlines() if line != "after the end"
    ]


def _said(line: str) -> str:
    return line.partition(": ")[2]


@pytest.mark.parametrize(
    ("level", "ours", "others"),
    [("debug", 3, 2), ("info", 2, 2), ("warning", 1, 1), ("error", 0, 0)],
)
def test_rank_0_logs_to_its_file_and_to_standard_error(tmp_path, level, ours, others):
    levels = ["debug", "info", "warning"]
    expected = [f"torsh_trainer.training.loop {name}" for name in levels[3 - ours :]]
    expected += [f"users.code {name}" for name in levels[3 - others :]]
    written, shown = speak(tmp_path, 0, level)
    assert written == expected
    assert shown == expected


def test_other_ranks_log_to_their_file_alone(tmp_path):
    written, shown = speak(tmp_path, 1, "warning")
    assert written == ["torsh_trainer.training.loop warning", "users.code warning"]
    assert shown == []
    assert "[rank 1] WARNING" in (tmp_path / "logs" / "rank-1.log").read_text()


def test_a_log_that_exists_is_added_to(tmp_path):
    speak(tmp_path, 1, "warning")
    written, _ = speak(tmp_path, 1, "warning")
    assert len(written) == 4


def test_closing_puts_every_level_and_handler_back(tmp_path):
    root, ours = logging.getLogger(), logging.getLogger("torsh_trainer")
    before = (root.level, ours.level, list(root.handlers))
    with RunDir.create(tmp_path).logging(World(), "debug"):
        assert ours.isEnabledFor(logging.DEBUG)
        ours.debug("within")
    assert (root.level, ours.level, list(root.handlers)) == before
    assert "within" in (tmp_path / "logs" / "rank-0.log").read_text()


def test_where_the_application_shows_messages_already_they_are_not_shown_twice(tmp_path, capsys):
    root = logging.getLogger()
    assert root.handlers  # pytest's own
    close = setup_logging(tmp_path, World(), "info")
    logging.getLogger("torsh_trainer").warning("once")
    close()
    assert capsys.readouterr().err == ""


def test_an_unknown_level_offers_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'warning'"):
        setup_logging(tmp_path, World(), "warnin")
