"""The fake accelerator itself: what it counts, what it leaves alone, and that it goes away."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from torsh_trainer.optim.precision import Precision
from torsh_trainer.strategies.base import BatchPlan, Clip, Job, MicroBatch
from torsh_trainer.strategies.builtin import NCCL
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.native import NativeEngine
from torsh_trainer.strategies.single import Single
from torsh_trainer.testing.fake_accelerator import (
    FakeAccelerator,
    count_step,
    fake_accelerator,
    run_on_fake_accelerator,
)
from torsh_trainer.testing.ranks import RankPool
from torsh_trainer.testing.tiny import TinyModelOptions, TinyTask


def make_job(task, precision=Precision()):
    return Job(
        task=task, build_model=task.build_model, batch=BatchPlan(8, 2, 1, 4), precision=precision
    )


def make_batch(device):
    tokens = torch.zeros(2, 5, dtype=torch.int64, device=device)
    factor = torch.ones(2, device=device)
    return MicroBatch({"tokens": tokens, "targets": tokens, "factor": factor}, 10.0, 7)


def test_a_step_in_fp16_waits_once_for_the_device_and_names_the_line():
    def case(accelerator: FakeAccelerator):
        task = TinyTask(optimizer="adamw")
        found = []
        for precision in (Precision(), Precision(compute="bf16"), Precision(compute="fp16")):
            engine = Single().prepare(make_job(task, precision), accelerator.comm)
            counts = count_step(engine, task, [make_batch(accelerator.device)], clip=Clip(norm=1.0))
            found.append((list(counts.synchronisations), counts.copies.total()))
        return found

    fp32, bf16, fp16 = run_on_fake_accelerator(case)
    assert fp32 == bf16 == ([], 0)
    assert len(fp16[0]) == 1
    assert fp16[0][0].startswith("_local_scalar_dense at torsh_trainer.strategies.clipping:")
    assert fp16[0][0].endswith(" in apply")


def test_an_engine_that_reads_a_number_in_its_step_is_counted():
    def case(accelerator: FakeAccelerator):
        class Reading(NativeEngine):
            def step(self, clip, *, measure_norm=False):
                self._parameters[0].grad.sum().item()
                return super().step(clip, measure_norm=measure_norm)

        task = TinyTask()
        job = make_job(task)
        model = task.build_model().to(accelerator.device)
        engine = Reading(job, accelerator.comm, model=model, module=model, eval_module=model)
        return list(count_step(engine, task, [make_batch(accelerator.device)]).synchronisations)

    (where,) = run_on_fake_accelerator(case)
    assert where.startswith("_local_scalar_dense at ")
    assert where.endswith(" in step")


def test_collectives_are_counted_with_their_bytes():
    def case(accelerator: FakeAccelerator, strategy):
        task = TinyTask()
        engine = strategy.prepare(make_job(task), accelerator.comm)
        counts = count_step(engine, task, [make_batch(accelerator.device)])
        return dict(counts.collectives), dict(counts.collective_bytes)

    size = sum(4 * p.numel() for p in TinyTask().build_model().parameters())
    calls, nbytes = run_on_fake_accelerator(case, NCCL(), world_size=4)
    assert calls == {"allreduce": 1}
    assert nbytes == {"allreduce": size}
    calls, nbytes = run_on_fake_accelerator(case, FSDP(), world_size=4)
    assert calls["_reduce_scatter_base"] >= 1
    assert nbytes["_reduce_scatter_base"] >= size


def test_autocast_chooses_dtypes_as_on_cuda():
    def case(accelerator: FakeAccelerator):
        linear, norm = nn.Linear(4, 4).to(accelerator.device), nn.LayerNorm(4)
        norm.to(accelerator.device)
        x = torch.zeros(2, 4, device=accelerator.device)
        with torch.autocast(accelerator.device.type, dtype=torch.bfloat16):
            hidden = linear(x)
            normed = norm(hidden)
            loss = F.cross_entropy(linear(normed), torch.zeros(2, dtype=torch.int64).to(x.device))
        loss.backward()
        return [hidden.dtype, normed.dtype, loss.dtype, linear.weight.grad.dtype, linear(x).dtype]

    fp32, bf16 = torch.float32, torch.bfloat16
    assert run_on_fake_accelerator(case) == [bf16, fp32, fp32, fp32, fp32]


def test_tied_weights_stay_one_parameter_and_the_host_keeps_its_values():
    def case(accelerator: FakeAccelerator):
        model = TinyTask(TinyModelOptions(tied=True)).build_model()
        count = len(list(model.parameters()))
        model.to(accelerator.device)
        assert model.head.weight is model.embedding.weight
        assert len(list(model.parameters())) == count
        return torch.arange(4).sum().item()

    assert run_on_fake_accelerator(case) == 6


@pytest.mark.parametrize(
    ("move", "waits", "copies"),
    [
        (lambda host, device: host.to(device), 1, 1),
        (lambda host, device: host.to(device, non_blocking=True), 0, 1),
        (lambda host, device: torch.zeros(3, device=device).to("cpu"), 1, 1),
        (lambda host, device: torch.tensor([1.0, 2.0], device=device), 1, 1),
        (lambda host, device: torch.zeros(3, device=device).copy_(host), 1, 1),
        (lambda host, device: torch.zeros(3, device=device).copy_(host, non_blocking=True), 0, 1),
        (lambda host, device: torch.full((3,), 2.0, device=device).nonzero(), 1, 0),
        (lambda host, device: torch.ones(3, device=device).tolist(), 1, 1),
        (lambda host, device: torch.gpu.synchronize(), 1, 0),
        (lambda host, device: torch.gpu.Event().synchronize(), 1, 0),
        (lambda host, device: host.tolist(), 0, 0),
    ],
)
def test_a_copy_that_blocks_and_a_read_number_are_waits(move, waits, copies):
    def case(accelerator: FakeAccelerator):
        host = torch.arange(3.0)
        with accelerator.count() as counts:
            move(host, accelerator.device)
        return counts.synchronisations.total(), counts.copies.total()

    assert run_on_fake_accelerator(case) == (waits, copies)


def test_nothing_is_left_after_the_block():
    def case(world):
        before = torch.utils.swap_tensors, dist.barrier, torch.accelerator.synchronize
        with fake_accelerator(8) as accelerator:
            assert accelerator.comm.world.size == 8
            assert dist.is_initialized()
        assert not dist.is_initialized()
        assert (torch.utils.swap_tensors, dist.barrier, torch.accelerator.synchronize) == before
        assert not torch.__future__.get_swap_module_params_on_conversion()
        return nn.Linear(2, 2)(torch.ones(1, 2)).shape

    with RankPool(1, join=False) as process:
        assert process.run(case) == [(1, 2)]
