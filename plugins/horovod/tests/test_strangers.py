"""What connects to Horovod's ports at the start of a job and is no rank of it."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

LIMIT_S = 400
"""Only a hang reaches it."""
GARBAGE = b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256))


def test_bytes_of_a_stranger_end_a_job_with_its_rank_named_or_change_nothing(
    tmp_path: Path,
) -> None:
    """Horovod takes whoever connects for a rank, and may abort: then the job ends in words."""
    command = [sys.executable, "-m", "torsh_trainer", "+recipe=digits", "strategy=horovod"]
    command += ["launcher.num_processes=2", "trainer.max_steps=3", "hydra.run.dir=run"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        talked_to = disturb(job)
        _, errors = job.communicate(timeout=LIMIT_S)
    assert talked_to, "nobody listened: the test has disturbed nothing"
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    if job.returncode == 0:
        assert result["steps"] == 3
    else:
        assert job.returncode == 3
        assert "Traceback" not in errors
        assert "rank " in result["error"]["message"] or "rank " in errors


def disturb(job: subprocess.Popen[str]) -> set[int]:
    """Sends garbage to every port that a worker of ``job`` listens on, once; those ports."""
    begun, talked_to = time.monotonic(), set[int]()
    while job.poll() is None and time.monotonic() - begun < LIMIT_S:
        for port in ports_of(job.pid) - talked_to:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), 5) as s,
            ):
                s.sendall(GARBAGE)
                talked_to.add(port)
        time.sleep(0.02)
    return talked_to


def ports_of(parent: int) -> set[int]:
    """The loopback's ports on which the workers below ``parent`` listen."""
    found = set[int]()
    with contextlib.suppress(psutil.Error):
        for worker in psutil.Process(parent).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                for connection in worker.net_connections("tcp4"):
                    if connection.status == psutil.CONN_LISTEN:
                        found.add(connection.laddr.port)
    return found
