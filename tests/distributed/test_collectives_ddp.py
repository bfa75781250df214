"""Averaging outside an engine: by hand, in an optimizer, and in the guides' wrapper."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from torsh_trainer import distributed as tc
from torsh_trainer.errors import ConfigError
from torsh_trainer.testing.ranks import shared_pool

SIZES = (2, 4)
STEPS = 3


def run(world_size, case, *args):
    def with_place(communicator, *args):
        return case(communicator.world.rank, communicator.world.size, *args)

    return shared_pool(world_size).run(with_place, *args)


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 4, generator=generator, dtype=torch.float64)


def loss_of(outputs):
    return outputs.square().mean()


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def state(module):
    return {name.removeprefix("module."): t.clone() for name, t in module.state_dict().items()}


def close(first, second, parts=("weight", "bias")):
    """Whether the parameters of two states agree, to the rounding of one sum."""
    names = [name for name in first if name.endswith(parts)]
    return all(torch.allclose(first[n], second[n], rtol=1e-12, atol=1e-14) for n in names)


def expected(size, micro_batches=1, scale=1.0, steps=STEPS):
    """Plain PyTorch: the mean of the gradients of all micro-batches of all ranks, times scale."""
    module = model()
    optimizer = sgd(module)
    for step in range(steps):
        module.zero_grad()
        for rank in range(size):
            for micro in range(micro_batches):
                loss = loss_of(module(batch(rank, step * micro_batches + micro)))
                (loss * scale / (size * micro_batches)).backward()
        optimizer.step()
    return state(module)


# -- by hand and by an optimizer -----------------------------------------------------------------


@pytest.mark.parametrize("world_size", SIZES)
def test_average_gradients_is_the_mean_and_counts_what_one_rank_lacks_as_zero(world_size):
    def case(rank, size):
        used, odd, never = (nn.Parameter(torch.ones(3)) for _ in range(3))
        (used * rank).sum().backward()
        if rank == 1:
            (odd * 2).sum().backward()
        tc.average_gradients([used, odd, never], bucket_cap_mb=1e-5)
        return used.grad, odd.grad, never.grad

    for used, odd, never in run(world_size, case):
        assert torch.equal(used, torch.full((3,), (world_size - 1) / 2))
        assert torch.equal(odd, torch.full((3,), 2 / world_size))
        assert never is None


def trained(module, optimizer, rank, step_of=lambda optimizer: optimizer.step()):
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(module(batch(rank, step))).backward()
        step_of(optimizer)
    return state(module)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_distributed_optimizer_steps_with_the_mean(world_size, overlap):
    def case(rank, size, overlap):
        module = model()
        optimizer = tc.DistributedOptimizer(sgd(module), overlap=overlap)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
        answer = trained(module, optimizer, rank)
        scheduler.step()
        slots = optimizer.state_dict()["state"][0]
        optimizer.close()
        return answer, slots["momentum_buffer"]

    answers = run(world_size, case, overlap)
    assert close(answers[0][0], expected(world_size))
    for answer, slot in answers[1:]:
        assert all(torch.equal(answer[n], answers[0][0][n]) for n in answer if "running" not in n)
        assert torch.equal(slot, answers[0][1])


WRAPPERS = {
    "torch": lambda module: TorchDDP(module, broadcast_buffers=False),
    "ours": lambda module: tc.DistributedDataParallel(module, tc.BucketConfig()),
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_a_wrapper_has_reduced_is_not_averaged_again(wrapper, overlap):
    def case(rank, size, wrap, overlap):
        import torch.distributed as dist

        from torsh_trainer.distributed import averaging

        module = wrap(model())
        optimizer = tc.DistributedOptimizer(sgd(module), overlap=overlap)
        calls = []
        plain = averaging.average_gradients
        averaging.average_gradients = lambda *a, **k: (calls.append(a), plain(*a, **k))
        reductions = []
        reduce = dist.all_reduce
        dist.all_reduce = lambda *a, **k: (reductions.append(1), reduce(*a, **k))[1]
        try:
            answer = trained(module, optimizer, rank)
        finally:
            averaging.average_gradients, dist.all_reduce = plain, reduce
        return answer, len(calls), len(reductions)

    for answer, calls, reductions in run(2, case, WRAPPERS[wrapper], overlap):
        assert close(answer, expected(2))
        assert calls == 0
        # torch's reducer is in C++; ours makes one all-reduce for each step's only bucket.
        assert reductions == (STEPS if wrapper == "ours" else 0)


def test_what_was_averaged_by_hand_is_not_averaged_again_until_the_next_backward():
    def case(rank, size):
        from torsh_trainer.distributed import averaging

        module = model()
        optimizer = tc.DistributedOptimizer(sgd(module))
        counts = []
        plain = averaging.average_gradients

        def counting(*args, **kwargs):
            counts.append(len(args[0]))
            plain(*args, **kwargs)

        def by_hand(optimizer):
            plain(module)
            nn.utils.clip_grad_norm_(module.parameters(), 1e9)
            optimizer.step()

        averaging.average_gradients = counting
        try:
            first = trained(module, optimizer, rank, by_hand)
            trained(module, optimizer, rank)
        finally:
            averaging.average_gradients = plain
        return first, counts

    for answer, counts in run(2, case):
        assert close(answer, expected(2))
        assert counts == [6] * STEPS  # the six parameters, in the steps without a hand


def test_a_model_that_is_wrapped_too_late_is_refused():
    def case(rank, size):
        module = model()
        optimizer = tc.DistributedOptimizer(sgd(module))
        wrapped = TorchDDP(module)
        try:
            trained(wrapped, optimizer, rank)
        except tc.CollectiveArgumentError as error:
            return str(error)
        return ""

    assert all("averaged twice" in words for words in run(2, case))


# -- the wrapper ---------------------------------------------------------------------------------

CONFIGS = {
    "default": tc.BucketConfig(),
    "views": tc.BucketConfig(gradient_as_bucket_view=True),
    "small buckets": tc.BucketConfig(bucket_size_mb=1e-4),
    "no overlap": tc.BucketConfig(overlap_communication=False),
    "static": tc.BucketConfig(static_graph=True),
}


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_wrapper_trains_as_one_process_on_all_batches(world_size, name):
    def case(rank, size, config):
        module = model(seed=rank)  # rank 0's counts
        ddp = tc.DistributedDataParallel(module, config)
        ddp.with_optimizer(sgd(ddp))
        updates = []
        for step in range(STEPS):
            loss_of(ddp(batch(rank, step))).backward()
            updates.append(ddp.step())
        names = list(ddp.state_dict()) == list(TorchDDP(copy.deepcopy(module)).state_dict())
        return state(ddp), updates, names

    answers = run(world_size, case, CONFIGS[name])
    for answer, updates, names in answers:
        assert close(answer, expected(world_size))
        assert all(torch.equal(answer[n], answers[0][0][n]) for n in answer if "running" not in n)
        assert updates == [True] * STEPS
        assert names


@pytest.mark.parametrize("overlap", [False, True])
def test_accumulated_gradients_are_a_mean_passes_a_sum_and_both_communicate_once(overlap):
    def case(rank, size, overlap):
        import torch.distributed as dist

        config = tc.BucketConfig(
            gradient_accumulation_steps=2,
            backward_passes_per_step=2,
            overlap_communication=overlap,
        )
        ddp = tc.DistributedDataParallel(model(), config, broadcast_buffers=[])
        ddp.with_optimizer(sgd(ddp))
        reductions = []
        reduce = dist.all_reduce
        dist.all_reduce = lambda *a, **k: (reductions.append(1), reduce(*a, **k))[1]
        updates = []
        try:
            for micro in range(4 * STEPS):
                loss_of(ddp(batch(rank, micro))).backward()
                updates.append(ddp.step())
        finally:
            dist.all_reduce = reduce
        return state(ddp), updates, len(reductions)

    for answer, updates, reductions in run(2, case, overlap):
        # The mean over two and the sum over two is twice the mean over all four.
        assert close(answer, expected(2, micro_batches=4, scale=2.0))
        assert updates == [False, False, False, True] * STEPS
        assert reductions == STEPS


def test_the_last_incomplete_accumulation_is_flushed_with_its_own_divisor():
    def case(rank, size):
        config = tc.BucketConfig(gradient_accumulation_steps=4)
        ddp = tc.DistributedDataParallel(model(), config)
        ddp.with_optimizer(sgd(ddp))
        for micro in range(3):
            loss_of(ddp(batch(rank, micro))).backward()
            assert not ddp.step()
        return ddp.flush(), ddp.flush(), state(ddp)

    for first, second, answer in run(2, case):
        assert (first, second) == (True, False)
        assert close(answer, expected(2, micro_batches=3, steps=1))


def test_no_sync_communicates_nothing_and_the_next_backward_everything():
    def case(rank, size):
        ddp = tc.DistributedDataParallel(model(), tc.BucketConfig(), optimizer=None)
        optimizer = sgd(ddp)
        for step in range(STEPS):
            optimizer.zero_grad()
            with ddp.no_sync():
                (loss_of(ddp(batch(rank, 2 * step))) / 2).backward()
                local = ddp.module[0].weight.grad.clone()
                try:
                    ddp.with_optimizer(optimizer).step()
                except ConfigError as error:
                    refused = str(error)
            (loss_of(ddp(batch(rank, 2 * step + 1))) / 2).backward()
            optimizer.step()
        return state(ddp), local, refused

    answers = run(2, case)
    assert all(close(answer, expected(2, micro_batches=2)) for answer, _, _ in answers)
    assert not torch.equal(answers[0][1], answers[1][1])
    assert "within no_sync()" in answers[0][2]


def test_clipping_is_of_the_mean_gradient_and_a_scaler_is_undone_first():
    def case(rank, size):
        ddp = tc.DistributedDataParallel(model(), max_grad_norm=0.05)
        ddp.with_optimizer(sgd(ddp))
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(STEPS):
            scaler.scale(loss_of(ddp(batch(rank, step)))).backward()
            assert ddp.step(scaler)
        return state(ddp)

    module = model()
    optimizer = sgd(module)
    for step in range(STEPS):
        module.zero_grad()
        for rank in range(2):
            (loss_of(module(batch(rank, step))) / 2).backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.05)
        assert norm > 0.05
        optimizer.step()
    for answer in run(2, case):
        assert close(answer, state(module))


class TwoHeads(nn.Module):
    """Rank 0 uses one head, every other rank the other; the third nobody."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))

    def forward(self, x, head):
        return self.heads[head](x)


@pytest.mark.parametrize("static", [False, True])
def test_parameters_that_a_rank_does_not_use_are_allowed_when_asked_and_named_else(static):
    def case(rank, size, static):
        torch.manual_seed(0)
        x = torch.ones(1, 2)
        config = tc.BucketConfig(find_unused_parameters=not static, static_graph=static)
        ddp = tc.DistributedDataParallel(TwoHeads(), config)
        for _ in range(2):
            ddp.zero_grad()
            ddp(x, min(rank, 1)).sum().backward()
        gradients = [head.weight.grad for head in ddp.module.heads]
        strict = tc.DistributedDataParallel(TwoHeads(), tc.BucketConfig())
        try:
            strict(x, 0).sum().backward()
        except ConfigError as error:
            return gradients, str(error)
        return gradients, ""

    for gradients, words in run(2, case, static):
        assert torch.equal(gradients[0], torch.full((2, 2), 0.5))
        assert torch.equal(gradients[1], torch.full((2, 2), 0.5))
        assert gradients[2] is None
        assert "2 parameters got no gradient: heads.1.weight, heads.2.weight" in words


def test_compression_averages_what_it_sends_and_is_insisted_on_when_asked_for():
    def case(rank, size):
        compressor = tc.GradientCompressor()
        try:
            insists = tc.DistributedDataParallel(
                model(), tc.BucketConfig(gradient_compression=True)
            )
            insists(batch(rank, 0))
        except ConfigError as error:
            words = str(error)
        whole = compressor.algorithm(tc.CompressionAlgorithm.TopK(1.0, min_size=0))
        some = compressor.algorithm(tc.CompressionAlgorithm.TopK(0.25, min_size=0))
        some = some.memory(tc.CompressorMemory.Residual())
        answers, steps = [], []
        for chosen in (tc.CompressionAlgorithm.NoCompression(), whole, some):
            module = model().float()
            ddp = tc.DistributedDataParallel(module, tc.BucketConfig(bucket_size_mb=1e-4))
            ddp.with_compression(chosen).with_optimizer(sgd(ddp))
            for step in range(STEPS):
                loss_of(ddp(batch(rank, step).float())).backward()
                ddp.step()
            answers.append(state(ddp))
            steps.append(None if ddp.compression is None else ddp.compression.step)
        return words, answers, steps

    def far(first, second):
        return max((first[n] - second[n]).abs().max().item() for n in first if "num" not in n)

    by_rank = run(2, case)
    for words, (plain, whole, some), steps in by_rank:
        assert "nothing says how" in words
        assert far(plain, whole) < 1e-6  # all of it was sent
        assert far(plain, some) > 1e-4
        assert steps == [None, STEPS, STEPS]
        trained = [n for n in some if n.endswith(("weight", "bias"))]
        assert all(torch.equal(some[n], by_rank[0][1][2][n]) for n in trained)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda: {"bucket_size_mb": 0}, "bucket_size_mb=0 is not positive"),
        (lambda: {"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0 is below 1"),
        (lambda: {"backward_passes_per_step": -1}, "backward_passes_per_step=-1 is below 1"),
    ],
)
def test_knobs_out_of_range_are_named(arguments, words):
    with pytest.raises(ConfigError, match=words):
        tc.BucketConfig(**arguments())


def test_a_device_on_which_the_module_is_not_and_a_step_without_an_optimizer_are_refused():
    def case(rank, size):
        answers = []
        for call in (
            lambda: tc.DistributedDataParallel(model(), [0], 0, [], True),
            lambda: tc.DistributedDataParallel(nn.Tanh()),
            lambda: tc.DistributedDataParallel(model(), [], None, [], True).step(),
        ):
            try:
                call()
            except ConfigError as error:
                answers.append(str(error))
        return answers

    for device, nothing, step in run(2, case):
        assert "name cuda:0, and the module is on cpu" in device
        assert "nothing in the module requires a gradient" in nothing
        assert "no optimizer to step" in step
