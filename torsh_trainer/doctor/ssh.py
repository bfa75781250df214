"""Other hosts over ssh: an agent on each, asked by lines; what keeps one out is told in words."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torsh_trainer.doctor.agent import MARK
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.hosts.names import is_host_name
from torsh_trainer.hosts.ssh import KnobNames, SshWords, explain_end

_PASSED_ON = ("PYTHONPATH", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS")
_KNOBS = KnobNames(hosts="--hosts", port="--ssh=-p2222", python="--python /usr/bin/python3")
_START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class SshOptions:
    """How hosts are reached: options for ssh, and the Python that is started there."""

    words: tuple[str, ...]
    python: str

    def command(self, host: str) -> list[str]:
        """The words that start an agent on ``host``. What is passed on is quoted word by word."""
        passed = [f"{name}={os.environ[name]}" for name in _PASSED_ON if os.environ.get(name)]
        remote = ["env", *passed, self.python, "-m", "torsh_trainer.doctor.agent"]
        return SshWords(self.words).running(host, shlex.join(remote))


class Agent:
    """The doctor's other end on one host; leaving the block ends it there."""

    def __init__(self, host: str, ssh: SshOptions) -> None:
        self.host = host
        self._process = subprocess.Popen(
            ssh.command(host),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._errors: list[str] = []
        for work in (self._read_answers, self._read_errors):
            threading.Thread(target=work, daemon=True).start()

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def ask(self, do: str, *, timeout_s: float = _START_TIMEOUT_S, **request: Any) -> Any:
        """The answer to a request.

        Raises:
            ResourceError: the host is not reached, or gives no answer; the message says why.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=timeout_s)
        except (BrokenPipeError, OSError):
            line = None
        except queue.Empty as error:
            raise ResourceError(
                f"{self.host}: no answer within {timeout_s:g} s", fix=f"ssh {self.host} uptime"
            ) from error
        if line is None:
            raise self._explain_end()
        answer = json.loads(line)
        if "error" in answer and do != "try_network":
            raise ResourceError(f"{self.host}: {answer['error']}", fix=f"see it there: {do}")
        return answer

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._lines.put(line[len(MARK) :])
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors.append(line.strip())

    def _explain_end(self) -> ResourceError:
        self._lines.put(None)  # for whoever asks next
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        time.sleep(0.05)  # its last words
        return explain_end(self.host, self._errors, code=self._process.returncode, knobs=_KNOBS)


def parse_hosts(text: str) -> list[str]:
    """The hosts of ``--hosts a,b``.

    Raises:
        ConfigError: one is no name of a host, or stands twice.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError("--hosts names none", fix="write --hosts node1,node2")
    for name in names:
        if not is_host_name(name):
            raise ConfigError(
                f"--hosts: {name!r} is no name of a host", fix="write --hosts user@node1,node2"
            )
        if names.count(name) > 1:
            raise ConfigError(f"--hosts names {name} twice", fix="name each host once")
    return names


def ask_all(agents: Sequence[Agent], do: str, requests: Sequence[dict[str, Any]]) -> list[Any]:
    """The answers of several agents to requests that they work on together."""

    def ask(pair: tuple[Agent, dict[str, Any]]) -> Any:
        try:
            return pair[0].ask(do, **pair[1])
        except ResourceError as error:
            return {"stage": "meet", "error": str(error)}

    with ThreadPoolExecutor(max(1, len(agents))) as pool:
        return list(pool.map(ask, zip(agents, requests, strict=True)))
