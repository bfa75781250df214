"""A rank that has done its work ends well, although something still holds its group."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
import zlib

from torsh_trainer.comm.ending import settle

HOLDS_ITS_GROUP = """
import sys
import torch, torch.distributed as dist
from torsh_trainer.distributed import InitMethod, init_process_group
init_process_group("gloo", InitMethod.file(sys.argv[1]), world_size=2, rank=int(sys.argv[2]))
group = dist.group.WORLD
sys.setswitchinterval(100)  # gloo's threads get Python when this thread ends, and not before
for _ in range(20):
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    work.wait()
    del work
"""
"""Without ``settle`` one rank in four of these aborts."""


OWNED_BY_DDP = """
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torsh_trainer.distributed import destroy_process_group, init_process_group
sys.setswitchinterval(100)
for _ in range(50):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
    ddp(torch.ones(2, 4)).sum().backward()
    destroy_process_group()
    del ddp
print("the end")
"""
"""With torch's own ``destroy_process_group`` one of the first ten waits for ever, most often."""


def test_settle_waits_for_a_thread_of_gloo_that_is_at_work():
    let_go = []

    def lets_go_late():
        ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop")  # PR_SET_NAME
        named.set()
        data = bytes(64 << 20)
        for _ in range(4):
            zlib.crc32(data)  # without the GIL, like gloo
        let_go.append(True)
        ended.wait()

    named, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=lets_go_late)
    thread.start()
    named.wait()
    settle()
    try:
        assert let_go
        begin = time.monotonic()
        settle()  # at rest now, and not waited for
        assert time.monotonic() - begin < 0.5
    finally:
        ended.set()
        thread.join()


def test_ranks_end_well_while_a_variable_holds_their_group(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDS_ITS_GROUP, tmp_path / f"meeting-{pair}", str(rank)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for pair in range(3)
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=480)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 6, said


def test_a_model_in_ddp_may_be_what_holds_the_group_last():
    done = subprocess.run(
        [sys.executable, "-c", OWNED_BY_DDP],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=480,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "the end\n", done.stderr
