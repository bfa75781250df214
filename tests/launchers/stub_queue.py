"""Stand-ins for the programs of PBS and LSF, which are in no registry: a queue in a folder.

Called by their names (qsub, qstat, ...). They take the options that the manuals name and no others,
run the script as a job would be, and answer in the form that the manuals print.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

QUEUE = Path(os.environ.get("STUB_QUEUE", "/nowhere"))  # mpirun needs none
NUMBERS = {"TERM": signal.SIGTERM, "SIGTERM": signal.SIGTERM}


def start(command: list[str], variables: dict[str, str]) -> str:
    """Runs a job in a session of its own; the queue learns its process and its exit code."""
    number = str(len(list(QUEUE.glob("*.pid"))) + 1)
    (QUEUE / f"{number}.pid").touch()
    keep = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    runner = (
        "import json, os, subprocess, sys, pathlib\n"
        f"job = subprocess.Popen({command!r}, start_new_session=True, stdin=subprocess.DEVNULL,\n"
        "    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        f"pathlib.Path({str(QUEUE / number)!r} + '.pid').write_text(str(job.pid))\n"
        f"pathlib.Path({str(QUEUE / number)!r} + '.code').write_text(str(job.wait()))\n"
    )
    subprocess.Popen(
        [sys.executable, "-c", runner],
        env={**keep, **variables},
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not (QUEUE / f"{number}.pid").read_text():
        time.sleep(0.01)
    return number


def code_of(number: str) -> int | None:
    """The exit code of a job as Popen has it, None while it runs."""
    path = QUEUE / f"{number}.code"
    return int(path.read_text()) if path.exists() and path.read_text() else None


def send(number: str, name: str | None) -> None:
    """A signal to all processes of a job, as both systems send it; None ends it."""
    (pid,) = (int((QUEUE / f"{number}.pid").read_text()),)
    os.killpg(pid, NUMBERS[name] if name else signal.SIGKILL)


def known(number: str) -> bool:
    return (QUEUE / f"{number}.pid").exists()


def qsub(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for option in ("-N", "-j", "-o", "-q", "-P", "-r", "-v"):
        parser.add_argument(option)
    parser.add_argument("-l", action="append")
    parser.add_argument("script")
    options = parser.parse_args(argv)
    assert (options.j, options.o) == ("oe", "/dev/null")
    assert len(options.N) <= 15
    assert options.N[0].isalpha()
    if options.q == "nosuch":
        print("qsub: Unknown queue", file=sys.stderr)
        return 170
    nodes = QUEUE / "nodefile"
    nodes.write_text("localhost\n")
    passed = {name: os.environ[name] for name in (options.v or "").split(",") if name}
    variables = {**passed, "PBS_JOBID": "1.stub", "PBS_NODEFILE": str(nodes)}
    print(start(["bash", options.script], variables) + ".stub")
    return 0


def qstat(argv: list[str]) -> int:
    assert argv[:4] == ["-x", "-f", "-F", "json"]
    number = argv[4].removesuffix(".stub")
    if not known(number):
        print(f"qstat: Unknown Job Id {argv[4]}", file=sys.stderr)
        return 153
    code = code_of(number)
    job: dict[str, object] = {"Job_Name": "a", "job_state": "R", "run_count": 1}
    if code is not None:
        job |= {"job_state": "F", "Exit_status": code if code >= 0 else 256 - code}
    print(json.dumps({"timestamp": 1, "pbs_version": "stub", "Jobs": {argv[4]: job}}))
    return 0


def qdel(argv: list[str]) -> int:
    send(argv[0].removesuffix(".stub"), None)
    return 0


def qsig(argv: list[str]) -> int:
    assert argv[0] == "-s"
    send(argv[2].removesuffix(".stub"), argv[1])
    return 0


def bsub(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for option in ("-J", "-o", "-n", "-gpu", "-W", "-q", "-P"):
        parser.add_argument(option)
    parser.add_argument("-R", action="append")
    parser.add_argument("-r", action="store_true")
    parser.add_argument("-rn", action="store_true")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    if options.q == "nosuch":
        print("nosuch: No such queue. Job not submitted.", file=sys.stderr)
        return 255
    words = ["sh", "-c", "exec bash " + " ".join(options.command)]  # a shell reads it once more
    variables = {**os.environ, "LSB_JOBID": "1", "LSB_MCPU_HOSTS": f"localhost {options.n}"}
    print(f"Job <{start(words, variables)}> is submitted to default queue <normal>.")
    return 0


def bjobs(argv: list[str]) -> int:
    assert argv[:2] == ["-json", "-o"]
    record: dict[str, str] = {"JOBID": argv[3]}
    if known(argv[3]):
        code = code_of(argv[3])
        record |= {"STAT": "RUN", "EXIT_CODE": "", "EXIT_REASON": "", "PEND_REASON": ""}
        if code is not None:
            number = code if code >= 0 else 128 - code
            record |= {"STAT": "EXIT" if code else "DONE", "EXIT_CODE": str(number or "")}
    else:
        record["ERROR"] = f"Job <{argv[3]}> is not found"
    print(json.dumps({"COMMAND": "bjobs", "JOBS": 1, "RECORDS": [record]}))
    return 0


def bkill(argv: list[str]) -> int:
    name = None
    if argv[0] == "-s":
        name, argv = argv[1], argv[2:]
    send(argv[0], name)
    print(f"Job <{argv[0]}> is being signaled")
    return 0


def mpirun(argv: list[str]) -> int:
    """As Open MPI's, so far as a process is told its place; all on this host."""
    assert argv[0] == "-n", shlex.join(argv)
    size = int(argv[1])
    told = {"OMPI_COMM_WORLD_SIZE": argv[1], "OMPI_COMM_WORLD_LOCAL_SIZE": argv[1]}
    ranks = []
    for rank in range(size):
        place = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)}
        ranks.append(subprocess.Popen(argv[2:], env={**os.environ, **told, **place}))
    return max(rank.wait() for rank in ranks)


if __name__ == "__main__":
    sys.exit(globals()[Path(sys.argv[0]).name](sys.argv[1:]))
