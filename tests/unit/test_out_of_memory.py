"""Out of memory: what counts as it, what is released before the next try, and what is told.

No GPU is here: errors are raised by hand, and what torch counts is patched.
"""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from torsh_trainer import DataSource, Loading, OptimizerSpec, Task, Trainer
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.environments.world import World
from torsh_trainer.errors import TrainingError
from torsh_trainer.launchers.local import Local
from torsh_trainer.optim.precision import Precision
from torsh_trainer.strategies.base import BatchPlan, Job
from torsh_trainer.testing.tiny import TinyTask
from torsh_trainer.training.finders import find_batch_size
from torsh_trainer.training.out_of_memory import MemoryUse, in_words, is_out_of_memory, measure_held

GIB = 1 << 30
ALONE = World()
TORCHS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.00 GiB of "
    "which 1.00 GiB is free. Process 4711 has 20.00 GiB memory in use. Including non-PyTorch "
    "memory, this process has 58.00 GiB memory in use."
)


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("no room"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tri"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("expected memory_format to be contiguous"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) == is_one


# -- the batch-size finder ------------------------------------------------------------------------


class Engine:
    """Fits micro-batches of up to four samples; holds a tensor that must be gone before the next.

    Like a real one it is in a cycle of references.
    """

    def __init__(self, micro_batch_size: int, alive: list[weakref.ref[Tensor]], words: str) -> None:
        self.micro_batch_size = micro_batch_size
        self.activations = torch.zeros(3)
        self.itself = self
        self.words = words
        alive.append(weakref.ref(self.activations))

    def zero_grad(self) -> None: ...

    def forward_backward(self, *given: Any) -> Any:
        activations = self.activations  # held by the frame of what is raised
        if self.micro_batch_size > 4:
            raise RuntimeError(self.words)
        return SimpleNamespace(parts=[(activations.sum(), 1.0)])

    def step(self, clip: Any) -> None: ...

    def close(self) -> None: ...


def find(monkeypatch: pytest.MonkeyPatch, words: str) -> tuple[Any, list[list[bool]]]:
    """What the finder finds, and which tensors were alive each time the cache was emptied."""
    alive: list[weakref.ref[Tensor]] = []
    emptied: list[list[bool]] = []

    def empty_cache() -> None:
        emptied.append([one() is not None for one in alive])

    module = SimpleNamespace(empty_cache=empty_cache)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    comm = LocalCommunicator()
    comm.device = torch.device("cuda", 0)  # type: ignore[misc]

    def prepare(size: int) -> tuple[Any, Any]:
        works = [SimpleNamespace(micro_batches=[], weight=1.0, samples=size)] * 4
        return Engine(size, alive, words), works

    gc.disable()  # nothing is freed by chance
    try:
        return find_batch_size(prepare, TinyTask(), comm, most=64), emptied
    finally:
        gc.enable()


def test_the_finder_empties_the_cache_after_the_engine_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, emptied = find(monkeypatch, "CUDA error: out of memory")
    assert (found.largest, found.limit) == (4, "memory")
    assert emptied == [[False] * tries for tries in range(1, 5)]


def test_the_finder_takes_no_other_failure_for_a_batch_that_is_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RuntimeError, match="illegal"):
        find(monkeypatch, "CUDA error: an illegal memory access was encountered")


# -- words ----------------------------------------------------------------------------------------


@pytest.fixture
def of_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device of 79 GiB that torch counts so much of; the rest but one is another process's."""

    def give(*, allocated: int, reserved: int) -> torch.device:
        module = SimpleNamespace(
            memory_stats=lambda _: {
                "allocated_bytes.all.current": allocated,
                "reserved_bytes.all.current": reserved,
            },
            mem_get_info=lambda _: (GIB, 79 * GIB),
        )
        monkeypatch.setattr(torch, "get_device_module", lambda _: module)
        return torch.device("cuda", 0)

    return give


def told(
    device: torch.device, *, world: World = ALONE, strategy: str = "ddp", **knobs: Any
) -> TrainingError:
    task = TinyTask()
    job = Job(task, task.build_model, BatchPlan(64, 32, 2, 1), **knobs)
    comm: Any = SimpleNamespace(device=device, world=world)
    error = torch.OutOfMemoryError(TORCHS)
    return in_words(error, comm, engine=None, job=job, strategy=strategy)


def test_the_error_says_what_held_it_and_what_helps_most(of_gpu: Any) -> None:
    error = told(of_gpu(allocated=50 * GIB, reserved=58 * GIB))
    assert str(error) == (
        "out of memory on cuda:0, for 2.00 GiB more: of 79 GiB, 50 GiB were held (activations and "
        "all else 50 GiB), 8 GiB were reserved in pieces that did not fit, 20 GiB are the driver's "
        "and other programs' (process 4711 has 20.00 GiB); by what it would save, take "
        "trainer.activation_checkpointing=true, data.micro_batch_size=16 (was 32), "
        "precision=bf16_mixed"
    )
    assert error.facts["reserved"] == 58 * GIB


def test_knobs_follow_the_run(of_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = of_gpu(allocated=50 * GIB, reserved=50 * GIB)
    held = MemoryUse(15 * GIB, 15 * GIB, 15 * GIB, 50 * GIB, 50 * GIB, 0, 79 * GIB)
    monkeypatch.setattr("torsh_trainer.training.out_of_memory.measure_held", lambda *_: held)
    world = World(size=4, rank=3)
    error = told(device, world=world, activation_checkpointing=True)
    assert error.sentence.startswith("rank 3 is out of memory on cuda:0, for 2.00 GiB more: of 79")
    assert "(parameters 15 GiB, gradients 15 GiB, optimizer state 15 GiB" in error.sentence
    assert error.fix.endswith(
        "take strategy=fsdp, data.micro_batch_size=16 (was 32), precision=bf16_mixed"
    )
    assert "activation_checkpointing" not in error.fix
    bf16 = Precision(compute="bf16")
    shards = told(device, world=world, strategy="fsdp", precision=bf16, ema_decay=0.9).fix
    assert "take strategy.cpu_offload=true, trainer.ema_decay=null, trainer.activation" in shards


def test_pieces_that_do_not_fit_name_the_allocators_setting(of_gpu: Any) -> None:
    error = told(of_gpu(allocated=20 * GIB, reserved=58 * GIB))
    assert "take PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment," in error.fix
    whole = told(of_gpu(allocated=57 * GIB, reserved=58 * GIB))
    assert "PYTORCH" not in str(whole)


def test_tensors_are_counted_once_and_shared_ones_too() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    engine: Any = SimpleNamespace(model=model, optimizers={"main": optimizer})
    held = measure_held(torch.device("cpu"), engine)
    assert (held.parameters, held.gradients, held.state) == (400, 400, 804)


# -- runs -----------------------------------------------------------------------------------------


class Large(Task):
    """Runs out of memory in its third step."""

    def __init__(self) -> None:
        self.optimizer = OptimizerSpec("SGD", lr=0.01, options={"momentum": 0.9})
        self.data = DataSource()
        self.data.train = TensorDataset(torch.ones(64, 4), torch.ones(64, 1))
        self.steps = 0

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        self.steps += 1
        if self.steps == 3:
            raise torch.OutOfMemoryError("Tried to allocate 3.00 GiB. And so on")
        return F.mse_loss(outputs, batch[1])


def fit_large(folder: Path, **knobs: Any) -> None:
    Trainer(
        task=Large(),
        loading=Loading(batch_size=8),
        max_steps=4,
        run_dir=folder,
        device="cpu",
        **knobs,
    ).fit()


def test_a_run_that_is_out_of_memory_says_so_in_words(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"memory on cpu, for 3\.00 GiB more: the") as said:
        fit_large(tmp_path, strategy="single")
    assert said.value.fix == (
        "take trainer.activation_checkpointing=true, data.micro_batch_size=4 (was 8), "
        "strategy=fsdp on several devices"
    )
    assert isinstance(said.value.__cause__, torch.OutOfMemoryError)
    written = json.loads((tmp_path / "result.json").read_text())["error"]
    assert written["message"] == said.value.sentence
    assert written["facts"]["parameters"] == 20
    assert written["facts"]["optimizer_state"] == 20


def test_a_worker_that_is_out_of_memory_says_so_in_words(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"rank \d is out of memory on cpu, for 3\.00") as said:
        fit_large(tmp_path, strategy="ddp", launcher=Local(num_processes=2))
    assert "data.micro_batch_size=2 (was 4)" in said.value.fix
