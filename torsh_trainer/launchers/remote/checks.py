"""What hosts of a job must have in common, looked at before anything is started."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.hosts.versions import collect_versions, hash_code, hash_package
from torsh_trainer.launchers.remote.connection import AgentConnection, ask_all

Answers = Sequence[Mapping[str, Any]]


def check_versions(connections: Sequence[AgentConnection], greetings: Answers) -> None:
    """Refuses hosts with other versions than this one; of Python the first two numbers count.

    Raises:
        ConfigError: names what differs, and where.
    """
    here = {**collect_versions(), "code of torsh_trainer": hash_package()}
    for name, ours in here.items():
        said = {c.host: str(g["versions"][name]) for c, g in _pairs(connections, greetings)}
        others = {
            h: v
            for h, v in said.items()
            if _shorten_version(name, v) != _shorten_version(name, ours)
        }
        if others:
            raise ConfigError(
                f"{name} is {ours} here, and {_group(others)}: processes would exchange what the "
                "other does not expect",
                fix="install the same there (pip install -c constraints.txt), or name a Python "
                "that has it: launcher.python",
                versions={"here": ours, **others},
            )


def check_shared(
    connections: Sequence[AgentConnection], folder: Path, *, timeout_s: float, patience_s: float
) -> None:
    """Writes a file where runs go, has every host find it, and takes it away again.

    Raises:
        ConfigError: a host does not see it, or may not write there.
        ResourceError: it cannot be written here.
    """
    with _probe(folder) as (path, text):
        wanted = {"path": str(path), "text": text, "patience_s": patience_s}
        answers = ask_all(
            connections, "find_file", [wanted] * len(connections), timeout_s=timeout_s
        )
    pairs = list(_pairs(connections, answers))
    blind = [connection.host for connection, answer in pairs if not answer.get("seen")]
    if blind:
        raise ConfigError(
            f"the run folder is not shared: {', '.join(blind)} "
            f"{'does' if len(blind) == 1 else 'do'} not see a file that stands in {folder}, and "
            "checkpoints of the ranks there would be lost",
            fix="choose a folder on a file system that all hosts mount at that path "
            "(hydra.run.dir)",
            hosts=blind,
        )
    for connection, answer in pairs:
        if "unwritten" in answer:
            raise ConfigError(
                f"{connection.host} may not write to {folder}: {answer['unwritten']}",
                fix="give its user the right to, or choose another folder (hydra.run.dir)",
            )


def check_code(
    connections: Sequence[AgentConnection], folders: Sequence[str], *, timeout_s: float
) -> None:
    """Refuses hosts whose Python files in ``folders`` are other ones than those of this host.

    Raises:
        ConfigError: names the folder, and the hosts.
    """
    for last in (False, True):  # somebody may have saved a file between two looks
        differing = _compare_code(connections, folders, timeout_s=timeout_s)
        if not differing:
            return
        if last:
            folder, others = next(iter(differing.items()))
            raise ConfigError(
                f"the Python files of {folder} are not the same on {', '.join(others)}: ranks "
                "would run different code",
                fix=f"rsync -a {folder}/ {others[0]}:{folder}/, or put it on a file system that "
                "all hosts mount",
                hosts=others,
            )


def _compare_code(
    connections: Sequence[AgentConnection], folders: Sequence[str], *, timeout_s: float
) -> dict[str, list[str]]:
    """Folder -> the hosts on which it is another."""
    wanted = {"folders": list(folders)}
    for connection in connections:
        connection.send("ask", "hash_folders", wanted)
    ours = {folder: found for folder in folders if (found := hash_code(Path(folder)))}
    deadline_s = time.monotonic() + timeout_s
    answers = [connection.take_answer(deadline_s) for connection in connections]
    differing = {
        folder: [c.host for c, answer in _pairs(connections, answers) if answer[folder] != here]
        for folder, here in ours.items()
    }
    return {folder: hosts for folder, hosts in differing.items() if hosts}


def _pairs(
    connections: Sequence[AgentConnection], answers: Answers
) -> Iterator[tuple[AgentConnection, Mapping[str, Any]]]:
    return zip(connections, answers, strict=True)


def _shorten_version(name: str, version: str) -> str:
    return ".".join(version.split(".")[:2]) if name == "Python" else version


def _group(said: Mapping[str, str]) -> str:
    """``2.12.1 on a, b``."""
    places: dict[str, list[str]] = defaultdict(list)
    for host, value in said.items():
        places[value].append(host)
    return "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in places.items())


@contextlib.contextmanager
def _probe(folder: Path) -> Iterator[tuple[Path, str]]:
    text = secrets.token_hex(16)
    path = folder / f".torsh-probe-{text[:8]}"
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise ResourceError(
            f"cannot write to {folder}: {error.strerror}", fix="choose another folder"
        ) from error
    try:
        yield path, text
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
