"""The stand-in for ``python`` does with a program what ``python`` does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
print(__name__, sys.argv[1:], os.environ["SAID"], os.path.basename(os.getcwd()), sys.stdin.read())
print("beside it", file=sys.stderr)
os.write(int(sys.argv[1]), b"through a descriptor")
sys.exit(7)
"""


def start(python: str, *words: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen([python, *words], stdout=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize("way", ["file", "module", "text"])
def test_a_program_has_its_words_variables_folder_and_descriptors(way, warm_python, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    words = {"file": ["program.py"], "module": ["-m", "program"], "text": ["-c", PROGRAM]}[way]
    found = []
    for python in (sys.executable, warm_python):
        there, here = os.pipe()
        os.dup2(here, 240, inheritable=True)  # one number for both
        done = subprocess.run(
            [python, "-u", *words, "240", "b c"],
            cwd=tmp_path,
            env={**os.environ, "SAID": "ä"},
            input="asked",
            capture_output=True,
            text=True,
            pass_fds=[240],
        )
        os.close(here)
        os.close(240)
        found.append((done.returncode, done.stdout, done.stderr, os.read(there, 100)))
        os.close(there)
    assert found[0] == found[1]
    assert found[0][0] == 7
    assert found[0][1].startswith("__main__ ['240', 'b c'] ä")
    assert found[0][3] == b"through a descriptor"


def test_an_error_is_told_as_python_tells_it(warm_python, tmp_path):
    (tmp_path / "wrong.py").write_text("def inner():\n    raise ValueError('no')\n\ninner()\n")
    for words in (["wrong.py"], ["-m", "wrong"]):
        told = []
        for python in (sys.executable, warm_python):
            done = subprocess.run([python, *words], cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 1
            told.append([line for line in done.stderr.splitlines() if "runpy" not in line])
        assert told[0][-4:] == told[1][-4:]
        assert not any("warm_python" in line for line in told[1])


def test_signals_and_ends_go_through(warm_python):
    sleeps = "import os, time; print(os.getpid(), os.getppid(), flush=True); time.sleep(600)"
    process = start(warm_python, "-c", sleeps)
    assert process.stdout.readline().split()[1] == str(os.getpid())
    process.send_signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM

    process = start(warm_python, "-c", sleeps)
    number = process.stdout.readline().split()[0]
    process.kill()
    assert process.wait() == -signal.SIGKILL
    end = time.monotonic() + 120
    while Path("/proc", number).exists():
        assert time.monotonic() < end, "the program outlives its stand-in"
        time.sleep(0.01)

    process = start(warm_python, "-c", "import os; os.kill(os.getpid(), 9)")
    assert process.wait() == -signal.SIGKILL


def test_what_it_does_not_know_is_run_by_python_itself(warm_python):
    ask = "import sys; print(sys.flags.isolated, 'torch' in sys.modules)"
    for words, said in ((["-I", "-c", ask], "1 False"), (["-c", ask], "0 True")):
        done = subprocess.run([warm_python, *words], capture_output=True, text=True)
        assert done.stdout.strip() == said
