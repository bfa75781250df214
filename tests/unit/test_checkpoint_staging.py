"""What makes saving and loading fast: kept memory, kept plans, sums on threads, direct reading."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import subprocess
import sys
import threading
import zlib
from array import array
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from torsh_trainer.checkpoint import saving
from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.checkpoint.store import summing
from torsh_trainer.checkpoint.store.summing import RunningSum, sum_up
from torsh_trainer.checkpoint.tensors import disk as tensors
from torsh_trainer.checkpoint.tensors.flat import boxes
from torsh_trainer.checkpoint.tensors.planner import Planner
from torsh_trainer.checkpoint.tensors.staging import Staging
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.errors import ResourceError

pytestmark = pytest.mark.usefixtures("warm_interpreters")


def checkpointer(folder: Path, mode: str = "sync") -> DcpCheckpointer:
    return DcpCheckpointer(folder, LocalCommunicator(), CheckpointOptions(mode=mode))


def odd_tensors() -> dict[str, Tensor]:
    """Of every type and way to lie in memory."""
    torch.manual_seed(0)
    base = torch.randn(40, 60)
    return {
        "plain": base.clone(),
        "large": torch.randn(3_000_001),  # more than a thread copies at a time
        "transposed": base.t(),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "part": base[3:7, ::2],
        "expanded": torch.randn(1, 3).expand(5, 3),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "half": torch.randn(5).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }


# -- staging --------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
def test_copies_are_what_the_originals_were_and_live_on_their_own(threads):
    originals = list(odd_tensors().values())
    expected = [tensor.detach().clone() for tensor in originals]
    staging = Staging(threads=threads)
    staging.prepare(originals)
    copies = staging.copy(originals)
    for tensor in originals[:2]:
        tensor.detach().zero_()
    for copy, value in zip(copies, expected, strict=True):
        assert copy.dtype == value.dtype
        assert torch.equal(copy, value)
        # torch.save writes the whole of a storage: a view of all copies would be all of them.
        assert copy.untyped_storage().nbytes() == copy.nbytes
    staging.close()
    assert torch.equal(copies[1], expected[1])  # a copy keeps its memory alive


class OnCuda(Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True
    device = torch.device("cuda", 1)


class Runtime:
    """Notes what the CUDA runtime is asked to lock and to let go; ``code`` is what it answers."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.device: torch.device | None = None
        self.locked: dict[int, int] = {}
        self.asked: list[tuple[int, torch.device | None]] = []

    def cudaHostRegister(self, base: int, size_bytes: int, flags: int) -> int:
        self.asked.append((size_bytes, self.device))
        if not self.code:
            self.locked[base] = size_bytes
        return self.code

    def cudaHostUnregister(self, base: int) -> int:
        del self.locked[base]
        return 0

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        self.device = device
        yield
        self.device = None


def beside_cuda(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", runtime.on)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)


def on_cuda(*sizes: int) -> list[Tensor]:
    return [torch.arange(float(size)).as_subclass(OnCuda) for size in sizes]


def test_beside_cuda_just_what_a_save_needs_is_page_locked_and_let_go(monkeypatch):
    runtime = Runtime()
    beside_cuda(monkeypatch, runtime)
    staging, originals = Staging(threads=1), on_cuda(1_000_003, 5)
    for _ in range(2):  # the second save has the memory of the first
        staging.prepare(originals)
        copies = staging.copy(originals)
    needed = 4_000_064 + 64
    assert runtime.asked == [(needed, torch.device("cuda", 1))]
    assert list(runtime.locked.values()) == [needed] == [staging.size_bytes]
    assert torch.equal(copies[0], torch.arange(1_000_003.0))
    staging.prepare(on_cuda(2_000_000))
    staging.copy(on_cuda(2_000_000))
    assert list(runtime.locked.values()) == [8_000_000]
    staging.close()
    assert runtime.locked == {}
    assert torch.equal(copies[1], torch.arange(5.0))


def test_memory_that_cannot_be_page_locked_takes_the_copy_all_the_same(monkeypatch, caplog):
    runtime = Runtime(code=2)
    beside_cuda(monkeypatch, runtime)
    staging, originals = Staging(threads=1), on_cuda(7)
    staging.prepare(originals)
    assert torch.equal(staging.copy(originals)[0], torch.arange(7.0))
    assert "are not page-locked (CUDA error 2)" in caplog.text
    staging.close()


def test_memory_is_kept_from_save_to_save_and_never_twice():
    few, many = [torch.ones(1000), torch.ones(3)], [torch.ones(5000)]
    staging = Staging(threads=1)
    staging.prepare(many)
    first = staging.copy(many)[0].data_ptr()
    size = staging.size_bytes
    assert 5000 * 4 <= size < 5000 * 4 + 64
    for originals in (many, few, many):
        staging.prepare(originals)
        assert staging.copy(originals)[0].data_ptr() == first
        assert staging.size_bytes == size
    staging.prepare([torch.ones(9000)])
    assert staging.copy([torch.ones(9000)])[0].sum() == 9000
    assert 9000 * 4 <= staging.size_bytes < 9000 * 4 + 64
    staging.close()
    assert staging.size_bytes == 0


def faults(action) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    action()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_the_first_copy_finds_every_page_in_place():
    original = torch.ones(16 << 20)
    pages = original.nbytes // mmap.PAGESIZE
    staging = Staging(threads=1)
    staging.prepare([original])
    staging._memory.within([])  # waits for the thread
    assert faults(lambda: staging.copy([original])) < pages / 100

    fresh = mmap.mmap(-1, original.nbytes)  # the control: memory that nobody touched
    fresh.madvise(mmap.MADV_NOHUGEPAGE)
    target = torch.frombuffer(fresh, dtype=original.dtype)
    assert faults(lambda: target.copy_(original)) >= pages


def test_no_memory_for_the_copy_is_an_error_that_names_the_way_out(tmp_path):
    script = (
        "import resource, sys, torch\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from test_checkpoint_staging import checkpointer\n"
        "saver = checkpointer(Path(sys.argv[1]), 'async')\n"
        "saver.save(1, {'w': torch.ones(9)}, {})\n"
        "saver.wait()\n"
        "w = torch.empty(1 << 28)\n"  # never touched
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), -1))\n"
        "saver.save(2, {'w': w}, {})\n"
        "saver.close()\n"
    )
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", script, str(tmp_path), here]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "ResourceError: there are no 1024 MiB of memory for the copy" in done.stderr
    assert "set checkpoint.mode=sync" in done.stderr
    assert checkpointer(tmp_path).steps() == [1]


# -- plans ----------------------------------------------------------------------------------------


@pytest.fixture
def plans(monkeypatch) -> list[list[str]]:
    """Names in every plan that is made."""
    made: list[list[str]] = []
    make = Planner.create_local_plan

    def noting(self):
        made.append(sorted(self.state_dict))
        return make(self)

    monkeypatch.setattr(Planner, "create_local_plan", noting)
    return made


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_has_not_changed_is_planned_once(tmp_path, plans, mode):
    saver = checkpointer(tmp_path, mode)
    saver.prepare(lambda: {"w": torch.zeros(3), "step": 0})
    assert len(plans) == (mode == "async")
    assert saver.steps() == []
    for step in (1, 2, 3):  # new tensors of the same kind, as a state_dict() may give
        saver.save(step, {"w": torch.full((3,), float(step)), "step": step}, {})
    assert plans == [["w"]]
    states = [
        {"w": torch.full((4,), 4.0), "step": 4},
        {"w": torch.full((4,), 5.0).double(), "step": 5},
        {"w": torch.full((4,), 6.0).double(), "step": 6, "more": torch.ones(2)},
        {"w": torch.full((4,), 7.0).double(), "step": 7},
    ]
    for state in states:
        saver.save(state["step"], state, {})
    assert plans == [["w"], ["w"], ["w"], ["more", "w"], ["w"]]
    saver.close()
    assert saver.steps() == list(range(1, 8))
    for step in range(1, 8):
        size, dtype = (3 if step < 4 else 4), (torch.float32 if step < 5 else torch.float64)
        state = {"w": torch.zeros(size, dtype=dtype), "step": 0}
        if step == 6:
            state["more"] = torch.zeros(2)
        loaded = saver.load(state, step)
        assert loaded["step"] == step
        assert torch.equal(loaded["w"], torch.full((size,), float(step), dtype=dtype))


def test_a_save_that_failed_leaves_no_plan_behind(tmp_path, plans):
    saver = checkpointer(tmp_path)
    saver.save(1, {"w": torch.ones(2)}, {})
    with pytest.raises(Exception, match="odd"):
        saver.save(2, {"w": torch.ones(3), "odd": object()}, {})
    saver.save(2, {"w": torch.ones(3)}, {})
    loaded = saver.load({"w": torch.zeros(3)}, 2)
    assert torch.equal(loaded["w"], torch.ones(3))


def test_a_save_waits_until_the_one_under_way_is_on_disk(tmp_path, monkeypatch):
    seen: list[str] = []
    disk_answers = threading.Event()
    stage, write_tensors = Planner.stage, saving.write_tensors

    def staging(self):
        stage(self)
        seen.append("copied")

    def writing(planner, folder):
        disk_answers.wait(240)
        written = write_tensors(planner, folder)
        seen.append("written")
        return written

    monkeypatch.setattr(Planner, "stage", staging)
    monkeypatch.setattr(saving, "write_tensors", writing)
    saver = checkpointer(tmp_path, "async")
    saver.save(1, {"w": torch.full((9,), 1.0)}, {})  # the loop does not wait for the disk
    assert seen == ["copied"]
    second = threading.Thread(target=saver.save, args=(2, {"w": torch.full((9,), 2.0)}, {}))
    second.start()
    second.join(0.3)
    assert second.is_alive()  # for a second one it does, and does not even copy
    assert seen == ["copied"]
    disk_answers.set()
    second.join()
    saver.close()
    assert seen == ["copied", "written"] * 2
    for step in (1, 2):
        loaded = saver.load({"w": torch.zeros(9)}, step)
        assert torch.equal(loaded["w"], torch.full((9,), float(step)))


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def test_saves_in_quick_succession_hold_one_copy_of_memory(tmp_path):
    state = {"w": torch.ones(16 << 20)}
    own = state["w"].nbytes
    checkpointer(tmp_path / "warm").save(1, {"w": torch.ones(1 << 20)}, {})  # imports and the like
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = resident_bytes("VmRSS")
    saver = checkpointer(tmp_path / "here", "async")
    for step in range(1, 5):
        saver.save(step, state, {})
        assert own <= saver._planner.staging.size_bytes < own + 64
        for older in range(1, step):
            assert (tmp_path / f"here/step-{older:08d}/manifest.json").exists()
    saver.close()
    assert 0.9 * own < resident_bytes("VmHWM") - before < 1.5 * own
    assert resident_bytes("VmRSS") - before < 0.5 * own
    assert saver.steps() == [1, 2, 3, 4]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_only_the_file_is_summed_up_and_what_others_save_meanwhile_as_ever(
    tmp_path, monkeypatch, mode
):
    settings: list[bool] = []
    resolve = Planner.resolve_data

    def noting(self, item):
        settings.append(torch.serialization.get_crc32_options())
        other = threading.Thread(
            target=lambda: settings.append(torch.serialization.get_crc32_options())
        )
        other.start()
        other.join()
        return resolve(self, item)

    monkeypatch.setattr(Planner, "resolve_data", noting)
    saver = checkpointer(tmp_path, mode)
    path = saver.save(1, {"w": torch.ones(9)}, {})
    saver.close()
    assert settings == [False, True]
    assert torch.serialization.get_crc32_options()
    plain = {"w": torch.zeros(9)}
    dcp.load(plain, checkpoint_id=path, no_dist=True)  # plain PyTorch asks for no such sum
    assert torch.equal(plain["w"], torch.ones(9))
    piece = next(path.glob("*.distcp"))
    content = bytearray(piece.read_bytes())
    content[content.index(array("f", [1.0] * 9).tobytes())] ^= 1
    piece.write_bytes(content)
    with pytest.raises(ResourceError, match=f"{piece.name} is not what was written"):
        saver.load({"w": torch.zeros(9)})


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_tensors_that_lie_oddly_come_back_whatever_they_are_loaded_into(tmp_path, mode):
    saved = odd_tensors()
    saver = checkpointer(tmp_path, mode)
    saver.save(1, saved, {})
    saver.close()
    rows = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in saved.items()}
    columns = {
        name: torch.zeros(t.shape[::-1], dtype=t.dtype).permute(tuple(range(t.dim()))[::-1])
        for name, t in saved.items()
    }
    for target in (rows, columns):
        loaded = saver.load(target)
        for name, tensor in saved.items():
            assert loaded[name] is target[name]
            assert torch.equal(loaded[name], tensor), name


def test_a_file_holds_the_tensors_and_hardly_more_though_they_are_views(tmp_path):
    base = torch.randn(4000, 250)
    views = {"rows": base[:1000], "column": base[:, 0], "all": base}
    own = sum(view.nbytes for view in views.values())
    for mode in ("sync", "async"):
        saver = checkpointer(tmp_path / mode, mode)
        path = saver.save(1, views, {})
        saver.close()
        written = sum(file.stat().st_size for file in path.iterdir())
        assert own < written < 1.02 * own, mode


def test_metadata_that_promises_less_than_a_tensor_is_refused_by_name(tmp_path):
    path = checkpointer(tmp_path).save(1, {"w": torch.ones(4), "v": torch.ones(2)}, {})
    metadata = tensors.read_metadata(path)
    metadata.state_dict_metadata["w"].chunks.clear()
    target = {("v",): torch.zeros(2), ("w",): torch.zeros(4)}
    with pytest.raises(ResourceError, match="0 of the 4 elements of w"):
        tensors.read(path, metadata, target)
    assert not target["v",].any()


# -- boxes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(), (1,), (5,), (3, 4), (4, 1), (2, 3, 4), (1, 1, 5), (3, 1, 2, 2), (2, 2, 2, 2)]
)
def test_every_interval_is_boxes_that_are_it_in_order_and_as_few_as_promised(shape):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            found = boxes(shape, start, stop)
            assert len(found) <= max(1, 2 * len(shape) - 1)
            elements = []
            for box in found:
                places = [slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)]
                part = whole[tuple(places)]
                assert part.shape == box.sizes
                assert part.flatten()[0] == box.start
                elements += part.flatten().tolist()
            assert elements == list(range(start, stop))


# -- sums -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [0, 1, 5, 64, 4097, 3_000_001])
def test_the_sum_of_a_file_is_zlibs_however_many_threads_share_it(
    tmp_path, monkeypatch, threads, size
):
    monkeypatch.setattr(summing, "_WORTH_A_THREAD_BYTES", 10)
    content = os.urandom(size)
    (tmp_path / "file").write_bytes(content)
    assert sum_up(tmp_path / "file", threads=threads) == (size, zlib.crc32(content))


def test_the_running_sum_is_zlibs_for_blocks_large_and_small():
    content = os.urandom(5 << 20)
    cuts = [0, 3, 2 << 20, (2 << 20) + 1, (2 << 20) + 1, 5 << 20]
    running = RunningSum()
    for begin, end in pairwise(cuts):
        with running.adding(memoryview(content)[begin:end]):
            pass
    running.close()
    assert running.crc == zlib.crc32(content)
