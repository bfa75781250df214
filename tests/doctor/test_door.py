"""The verb as a user types it: quick, without torch, and clear where the words make no sense."""

from __future__ import annotations

import json
import sys

import pytest

from torsh_trainer.doctor import command
from torsh_trainer.doctor.examination import load_checks
from torsh_trainer.doctor.report import summarize
from torsh_trainer.doctor.ssh import SshOptions, parse_hosts
from torsh_trainer.errors import ConfigError
from torsh_trainer.utils import registry


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["scan"], r"doctor scan: no such word; write doctor, doctor explain LOG"),
        (["--only", "disk_spice"], r"there is no such check; did you mean 'disk_space'"),
        (["--only", ","], r"--only names nothing"),
        (["--nodes", "0"], r"--nodes 0 is out of range"),
        (["--port", "70000"], r"--port 70000 is out of range"),
        (["--port", "x"], r"doctor: argument --port: invalid int value"),
        (["--wrong"], r"unrecognized arguments: --wrong; doctor --help"),
        (["explain"], r"doctor explain: the following arguments are required: LOG"),
        (["script"], r"doctor script: the following arguments are required: FILE"),
        (["--launcher", "slurm"], r"--launcher slurm is not there.*srun python -m torsh_trainer"),
        (["--hosts", ","], r"--hosts names none"),
        (["--hosts", "a,a"], r"names a twice"),
        (["--hosts", "a", "--only", "disk_spice"], r"did you mean 'disk_space'"),
        (["--hosts", "-oProxyCommand=x"], r"expected one argument|no name of a host"),
        (["--hosts", "a;reboot"], r"'a;reboot' is no name of a host"),
        (["--hosts", "$(reboot)"], r"is no name of a host"),
        (["--hosts", "a", "--seconds", "0"], r"--seconds 0.0 is not positive"),
    ],
)
def test_what_makes_no_sense_is_refused(argv, words):
    with pytest.raises(ConfigError, match=words):
        command.main(argv)


def test_hosts_that_ssh_takes_for_options_are_refused():
    with pytest.raises(ConfigError, match="is no name of a host"):
        parse_hosts("a,-oProxyCommand=reboot")
    assert parse_hosts("me@node-1.example, node2,fd00::1") == [
        "me@node-1.example",
        "node2",
        "fd00::1",
    ]


def test_what_ssh_is_given_is_quoted_for_the_shell_there(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/a b/'c';$(reboot)")
    words = SshOptions(("-p2222",), "/my python/bin/python3").command("node1")
    assert words[0] == "ssh"
    assert "BatchMode=yes" in words
    assert words[-3:-1] == ["--", "node1"]
    assert "'/my python/bin/python3' -m torsh_trainer.doctor.agent" in words[-1]
    assert "'PYTHONPATH=/a b/'\"'\"'c'\"'\"';$(reboot)'" in words[-1]


def test_help_and_checks_wait_for_no_torch(run_command, tmp_path):
    script = (
        "import sys; from torsh_trainer.__main__ import main\n"
        "try: main(['doctor', '--help'])\n"
        "except SystemExit: pass\n"
        "main(['doctor', '--only', 'clock,versions,memory'])\n"
        "print('LOADED', *sorted({'torch', 'numpy', 'hydra'} & set(sys.modules)))"
    )
    done = run_command([sys.executable, "-c", script], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "doctor explain LOG" in done.stdout
    assert done.stdout.splitlines()[-1].strip() == "LOADED"


def test_the_list_of_checks_and_the_page_of_one(capsys):
    assert command.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(registry.CHECKS.registrations())
    assert command.main(["--only", "clock", "--all"]) == 0
    out = capsys.readouterr().out
    assert "1 checks in" in out
    assert "0 findings; fine: 1, nothing to look at here: 0" in out


def test_a_finding_exits_with_1_and_hides_secrets(capsys, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://me:hunter2@proxy:3128")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert command.main(["--only", "proxies"]) == 1
    out = capsys.readouterr().out
    assert "hunter2" not in out
    assert "why" in out
    assert "fix  export no_proxy=localhost,127.0.0.1" in out
    assert command.main(["--only", "proxies", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert "hunter2" not in json.dumps(told)
    assert told["findings"] == 1
    assert told["checks"][0]["outcome"] == "finding"


def test_within_a_job_of_torchrun_nothing_is_wrong(run_command, tmp_path):
    """Its agent has the port, both processes look at once, and one of them is not the first."""
    names = "master_port,firewall,master_address,rank_variables,duplicate_ranks,scheduler_tasks"
    words = ["doctor", "--json", "--only", f"{names},rank_environment,threads,local_ports"]
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    done = run_command([*run, sys.executable, "-m", "torsh_trainer", *words], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count('"findings": 0') == 2


def test_json_with_a_secret_is_json(capsys):
    command.print_json({"env": {"api_key": "hunter2", "said": "token=hunter2, x"}, "n": [1]})
    out = capsys.readouterr().out
    assert "hunter2" not in out
    assert json.loads(out)["n"] == [1]


def test_the_page_of_the_docs_lists_every_check(repository):
    page = (repository / "docs" / "doctor.md").read_text("utf-8")
    for name, check in load_checks().items():
        assert f"| `{name}` | {summarize(check).rstrip('.')} |" in page, name
        assert check.why[-1] not in ".;", name
