"""What the launchers decide before any process starts."""

import os
import subprocess
import sys

import pytest
import torch

from torsh_trainer import environments
from torsh_trainer.environments.world import ALONE, World
from torsh_trainer.errors import ConfigError
from torsh_trainer.launchers import hardware
from torsh_trainer.launchers.base import LaunchContext
from torsh_trainer.launchers.inline import Inline
from torsh_trainer.launchers.local import Local

TORCHRUN = environments.detect(
    {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "head",
        "MASTER_PORT": "29500",
    }
)


def here(world, *args):
    return os.getpid(), world, args


def launch(launcher, *args, found=None):
    return launcher.launch(here, *args, context=LaunchContext(env={}, found=found))


@pytest.mark.parametrize("launcher", [Inline(), Local(num_processes=1), Local()])
def test_a_single_process_runs_right_here(launcher):
    assert launch(launcher, "x") == (os.getpid(), ALONE, ("x",))


@pytest.mark.parametrize(
    "launcher", [Inline(), Local(), Local(num_processes=2), Local(num_processes=1)]
)
def test_a_world_that_exists_is_joined_and_not_started_again(launcher):
    assert launch(launcher, found=TORCHRUN)[:2] == (os.getpid(), TORCHRUN)


def test_a_number_that_contradicts_the_world_is_refused():
    with pytest.raises(ConfigError, match="torchrun already started 4 processes") as caught:
        launch(Local(num_processes=4), found=TORCHRUN)
    assert "num_processes=auto" in caught.value.fix


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"num_processes": 0}, "launcher.num_processes=0"),
        ({"num_processes": -2}, "launcher.num_processes=-2"),
        ({"num_processes": "two"}, "launcher.num_processes=two"),
        ({"num_processes": True}, "launcher.num_processes=True"),
        ({"num_processes": 1.5}, "launcher.num_processes=1.5"),
        ({"threads_per_process": 0}, "launcher.threads_per_process=0"),
        ({"port": 0}, "launcher.port=0"),
        ({"port": 70000}, "launcher.port=70000"),
        ({"startup_timeout_s": 0}, "launcher.startup_timeout_s=0"),
        ({"grace_s": -1}, "launcher.grace_s=-1"),
    ],
)
def test_knobs_out_of_range_are_refused_by_name(knobs, says):
    with pytest.raises(ConfigError) as caught:
        Local(**knobs)
    assert says in str(caught.value)
    assert caught.value.fix


def test_a_port_cannot_be_chosen_where_torchrun_serves_one():
    with pytest.raises(ConfigError, match="torchrun already serves head:29500"):
        launch(Local(port=1234), found=TORCHRUN)


def test_a_port_can_be_chosen_where_rank_0_will_serve_it():
    found = environments.detect(
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "head"}
    )
    world = launch(Local(port=1234, address="other"), found=found)[1]
    assert (world.rendezvous.address, world.rendezvous.port) == ("other", 1234)


def test_inline_refuses_a_nodes_place_that_several_processes_would_fill():
    found = World(rank=2, size=4, local_size=2, node_rank=1, nodes=2, told="node")
    with pytest.raises(ConfigError, match="launcher=inline starts none"):
        launch(Inline(), found=found)


def test_a_rank_that_is_no_nodes_first_is_refused():
    found = environments.detect({"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "head"})
    with pytest.raises(ConfigError, match="cannot start at rank 3 of 8"):
        launch(Local(num_processes=4), found=found)


def test_a_nodes_share_that_contradicts_the_environment_is_refused():
    variables = {"NODE_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "h"}
    with pytest.raises(ConfigError, match="tells 4 processes per node"):
        launch(Local(num_processes=2), found=environments.detect(variables))


def test_one_process_per_node_runs_here_with_its_place():
    found = environments.detect({"NODE_RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "h"})
    pid, world, _ = launch(Local(), found=found)
    assert (pid, world.rank, world.told) == (os.getpid(), 3, "process")


def test_threads_of_a_process_that_runs_here_are_set_for_the_run_alone():
    before = torch.get_num_threads()

    def entry(world):
        return torch.get_num_threads()

    context = LaunchContext(env={})
    assert Local(threads_per_process=before + 1).launch(entry, context=context) == before + 1
    assert torch.get_num_threads() == before


def test_explain_prints_what_decided_and_what_is_started(capsys):
    launch(Local(explain=True))
    out = capsys.readouterr().out
    assert "it stands alone" in out
    assert "the launcher runs in this process" in out
    launch(Inline(explain=True))
    assert "it stands alone" in capsys.readouterr().out


def test_explain_is_printed_by_one_process_only(capsys):
    launch(Local(explain=True), found=TORCHRUN)
    assert capsys.readouterr().out == ""


def test_accelerators_are_counted_as_torch_counts_them():
    assert hardware.accelerators(os.environ) == torch.accelerator.device_count()
    assert hardware.accelerators({"CUDA_VISIBLE_DEVICES": ""}) == 0


def test_a_container_s_quota_bounds_the_cores(tmp_path):
    file = tmp_path / "cpu.max"
    file.write_text("150000 100000\n")
    assert hardware._quota(file) == 2
    file.write_text("max 100000\n")
    assert hardware._quota(file) == sys.maxsize
    assert 1 <= hardware.cores() <= (os.cpu_count() or 1)


def test_launchers_and_environments_load_without_torch():
    code = (
        "import sys, torsh_trainer.launchers.local, torsh_trainer.launchers.inline, "
        "torsh_trainer.launchers.inside, torsh_trainer.environments; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
