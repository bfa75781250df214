"""What is said of a rank that SIGKILL has ended: what the kernel's counters say."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from torsh_trainer.errors import WorkerError
from torsh_trainer.launchers.base import LaunchContext
from torsh_trainer.launchers.local import Local
from torsh_trainer.launchers.oom import OomKills

GUESS = "when nobody killed it by hand"
GIB = 2**30


class Kernel:
    """Files as the kernel has them; nothing here can make it kill for memory."""

    def __init__(self, folder: Path, membership: str) -> None:
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"
        self.write("proc/self/cgroup", membership)

    def write(self, name: str, text: str) -> None:
        path = self.proc.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def kills(self) -> OomKills:
        return OomKills(self.proc, self.cgroups)


EVENTS = "low 0\nhigh 3\nmax 12\noom {0}\noom_kill {0}\n"


@pytest.mark.parametrize("place", ["job/7/", ""], ids=["its own folder", "seen as the root"])
def test_a_kill_in_the_control_group_is_said_with_its_limit(tmp_path: Path, place: str) -> None:
    kernel = Kernel(tmp_path, "0::/job/7\n")
    kernel.write(f"cgroup/{place}memory.events", EVENTS.format(2))
    kernel.write(f"cgroup/{place}memory.max", f"{8 * GIB}\n")
    before = kernel.kills()
    kernel.write(f"cgroup/{place}memory.events", EVENTS.format(3))
    assert before.since().startswith("the kernel killed it, or another of its control group")
    assert "its limit is 8.0 GiB" in before.since()


def test_version_1_of_control_groups_is_read_too(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, "4:memory:/job\n0::/\n")
    kernel.write("cgroup/memory/job/memory.oom_control", "oom_kill_disable 0\noom_kill 0\n")
    kernel.write("cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n")
    before = kernel.kills()
    kernel.write("cgroup/memory/job/memory.oom_control", "oom_kill_disable 0\noom_kill 1\n")
    assert "because memory ran out: use fewer" in before.since()


def test_a_kill_on_the_machine_and_none_at_all_are_told_apart(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, "0::/job\n")
    kernel.write("cgroup/job/memory.events", EVENTS.format(0))
    kernel.write("proc/vmstat", "pgfault 5\noom_kill 4\n")
    before = kernel.kills()
    assert before.since().startswith("the kernel has killed nobody for memory")
    kernel.write("proc/vmstat", "pgfault 5\noom_kill 5\n")
    assert before.since().startswith("the kernel has killed a process of this machine")


@pytest.mark.parametrize("text", ["", "nothing that it knows", "0::/job", "oom_kill many"])
def test_where_the_kernel_does_not_tell_it_is_a_guess(tmp_path: Path, text: str) -> None:
    kernel = Kernel(tmp_path, text)
    kernel.write("proc/vmstat", text)
    kernel.write("cgroup/job/memory.events", text)
    assert kernel.kills().since().startswith(GUESS)


def test_a_rank_that_was_killed_by_hand_is_not_told_that_memory_ran_out() -> None:
    def entry(world: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    before = OomKills()
    with pytest.raises(WorkerError) as caught:
        Local(num_processes=2).launch(entry, context=LaunchContext(env=dict(os.environ)))
    assert "was killed by SIGKILL" in caught.value.sentence
    assert caught.value.fix.startswith(before.since())
