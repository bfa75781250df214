"""The launch line of a shell file is taken as bash would start it, and nothing is executed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from torsh_trainer.__main__ import main
from torsh_trainer.dropin.launch_file import take_line
from torsh_trainer.errors import ConfigError

SHIM = """#!/bin/sh
printf '%s\\0' "$@" > "$OUT"
printf '%s' "$PWD|$OMP_NUM_THREADS|$SEEN|$HIDDEN|$GONE" > "$OUT.env"
"""
FILES = {
    "variables": "N=${1:-2}\nLR=0.1\ndeepspeed --num_gpus $N train.py --lr $LR --name 'a b'\n",
    "exports": "export SEEN='x y'\nHIDDEN=1\nOMP_NUM_THREADS=3\ndeepspeed --num_gpus 2 train.py\n",
    "unset": "LR=1\nunset GONE LR\ndeepspeed --num_gpus 2 train.py --lr ${LR:-2}\n",
    "prefix": 'SEEN=2 deepspeed --num_gpus 2 train.py \\\n  --more ${MORE:-""} # words\n',
    "folder": "cd sub\ndeepspeed --num_gpus 2 train.py > log.txt 2>&1\n",
    "source": "source lr.sh\nhorovodrun -np 2 python train.py --lr $LR\n",
    "branch": 'if [ "$1" = "big" ]; then N=8; else N=2; fi\ndeepspeed --num_gpus $N train.py\n',
    "array": 'A=(--lr 0.1 --tag "x y")\nnohup deepspeed --num_gpus 2 train.py "${A[@]}"\n',
    "inherited": "deepspeed --num_gpus ${FROM_OUTSIDE:-7} train.py\n",
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "sub/train.py"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("raise SystemExit('it was run')\n")
    Path("lr.sh").write_text("LR=0.25\n")
    for name in ("deepspeed", "horovodrun"):
        Path("bin").mkdir(exist_ok=True)
        Path("bin", name).write_text(SHIM)
        Path("bin", name).chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("case", FILES)
def test_words_folder_and_variables_are_those_that_bash_hands_over(case, project):
    Path("run.sh").write_text(FILES[case])
    env = {"PATH": f"{project}/bin:/usr/bin:/bin", "OMP_NUM_THREADS": "1", "GONE": "here"}
    env |= {"FROM_OUTSIDE": "2", "OUT": str(project / "out")}
    subprocess.run(["bash", "run.sh"], env=env, check=True)
    said = Path("out").read_text().split("\0")[:-1]
    line = take_line(Path("run.sh"), job=None, settings={}, env=env)
    assert list(line.words[1:]) == said
    names = ("OMP_NUM_THREADS", "SEEN", "HIDDEN", "GONE")
    seen = [str(line.folder.resolve()), *(line.env.get(name, "") for name in names)]
    assert "|".join(seen) == Path("out.env").read_text()


def test_nothing_else_of_the_file_is_run_and_the_user_is_told(project):
    Path("run.sh").write_text(
        "touch made\nwget http://localhost/x\npython prepare.py\n"
        "deepspeed --num_gpus 2 train.py\nrm -rf sub\n"
    )
    line = take_line(Path("run.sh"), job=None, settings={}, env={})
    assert not Path("made").exists()
    assert Path("sub/train.py").exists()
    [note] = line.notes
    assert note == "not run, by line: python prepare.py (3), touch (1), wget (2), rm (5)"


SEVERAL = "deepspeed --num_gpus 2 train.py --a\nhorovodrun -np 2 python train.py --b\n"


def test_of_several_jobs_one_is_chosen_by_its_line(project):
    Path("run.sh").write_text(SEVERAL)
    for job in ("2", "run.sh:2"):
        line = take_line(Path("run.sh"), job=job, settings={}, env={})
        assert line.words == ("horovodrun", "-np", "2", "python", "train.py", "--b")


@pytest.mark.parametrize(
    ("text", "job", "words"),
    [
        (SEVERAL, None, "starts 2 jobs: run.sh:1, run.sh:2; choose one of them: --job run.sh:1"),
        (SEVERAL, "9", "--job 9 is no job of run.sh: they are run.sh:1, run.sh:2"),
        (
            "for i in 1 2; do deepspeed train.py --seed $i; done",
            None,
            "run.sh:1 (i=1), run.sh:1 (i=2); choose one of them: --job 'run.sh:1 (i=1)'",
        ),
        ("deepspeed train.py --lr $LR", None, "only a shell knows $LR; state it: --set LR=VALUE"),
        ("deepspeed train.py --lr $1", None, "only a shell knows $1; state it: --set 1=VALUE"),
        ("torchrun train.py", None, "is started by torchrun"),
        ("echo deepspeed", None, "starts no training"),
        ("cd gone; deepspeed train.py", None, "starts train.py, which is not in"),
        (
            "cat > ds.json <<EOF\n{}\nEOF\ndeepspeed train.py --deepspeed_config ds.json",
            None,
            "names ds.json, which line 1 writes",
        ),
    ],
)
def test_what_is_not_one_line_that_is_known_is_named(project, text, job, words):
    Path("run.sh").write_text(text)
    with pytest.raises(ConfigError) as caught:
        take_line(Path("run.sh"), job=job, settings={}, env={})
    assert words in str(caught.value).replace("\n", "; ").replace(str(project) + "/", "")


def test_what_the_user_states_counts(project):
    Path("run.sh").write_text("deepspeed --num_gpus $1 train.py --lr $LR\n")
    line = take_line(Path("run.sh"), job=None, settings={"1": "2", "LR": "0.5"}, env={})
    assert line.words == ("deepspeed", "--num_gpus", "2", "train.py", "--lr", "0.5")
    with pytest.raises(ConfigError, match="--set RL: nothing of this job hangs on it"):
        take_line(Path("run.sh"), job=None, settings={"RL": "0.5"}, env={})


@pytest.mark.parametrize(
    "words",
    [
        ["--launch", "gone.sh"],
        ["--launch", "run.sh", "--command", "deepspeed train.py"],
        ["--command", "deepspeed train.py", "--job", "2"],
        ["--job", "2", "--launch"],
    ],
)
def test_wrong_options_are_one_sentence(project, capsys, words):
    Path("run.sh").write_text(SEVERAL)
    assert main(["verify", *words]) in (1, 2)
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert "Traceback" not in told
