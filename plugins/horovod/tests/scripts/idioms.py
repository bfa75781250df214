"""Training loops as users of Horovod write them, one an idiom: ``idioms.py OUT NAME...``.

Each leaves its losses, step by step, and its parameters in ``OUT.NAME.RANK``.
"""

import json
import math
import sys

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

IDIOMS = {}


def idiom(function):
    IDIOMS[function.__name__] = function
    return function


class Net(nn.Module):
    def __init__(self, norm=None):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, bias=False)  # a norm follows, which takes it away
        self.norm = norm(4) if norm else nn.BatchNorm2d(4)
        self.first = nn.Linear(4 * 6 * 6, 16)
        self.second = nn.Linear(16, 4)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x)))
        return self.second(F.relu(self.first(x.flatten(1))))


def images(count=96):
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(0, 4, (count,), generator=generator)
    pictures = torch.randn(count, 1, 8, 8, generator=generator) + labels.view(-1, 1, 1, 1) * 0.3
    return TensorDataset(pictures, labels)


def loader(batch_size=8, dataset=None):
    dataset = dataset or images()
    sampler = DistributedSampler(
        dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=True, seed=3
    )
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler), sampler


def build(seed=None, **kwargs):
    torch.manual_seed(11 + hvd.rank() if seed is None else seed)  # ranks begin apart
    model = Net(**kwargs)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model


def train(model, optimizer, losses, epochs=2, loss_of=F.cross_entropy):
    batches, sampler = loader()
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for data, target in batches:
            optimizer.zero_grad()
            loss = loss_of(model(data), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())


@idiom
def mnist(losses, op=None):
    """Broadcast, a sampler, a rate that grows with the job, momentum."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.5)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        op=hvd.Average if op is None else op,
    )
    train(model, optimizer, losses)
    return model


@idiom
def wrong_op(losses):
    """The same with a sum: what must not look like ``mnist``."""
    return mnist(losses, op=hvd.Sum)


@idiom
def passes(losses):
    """Several backward passes before a step, AdamW, and the wrapper given no names."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    batches, _ = loader(4)
    for step, (data, target) in enumerate(batches):
        loss = F.cross_entropy(model(data), target) / 2
        loss.backward()
        losses.append(loss.item())
        if step % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    return model


@idiom
def half(losses):
    """Gradients travel in 16 bits."""
    model = build()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16,
    )
    train(model, optimizer, losses)
    return model


@idiom
def grouped(losses):
    """Two groups, and a list of them."""
    for groups in (lambda model: 2, lambda model: [list(model.conv.parameters())]):
        model = build()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05),
            named_parameters=model.named_parameters(),
            groups=groups(model),
        )
        train(model, optimizer, losses, epochs=1)
    return model


@idiom
def predivided(losses):
    """Part of the average before the sum; clipping between ``synchronize`` and ``step``."""
    model = build()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        gradient_predivide_factor=2.0,
    )
    batches, _ = loader()
    for data, target in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.synchronize()
        losses.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        with optimizer.skip_synchronize():
            optimizer.step()
        losses.append(loss.item())
    return model


@idiom
def sliced(losses):
    """A batch in slices, as in Horovod's own ImageNet example, a warm-up and a metric."""

    class Metric:
        def __init__(self, name):
            self.name, self.sum, self.n = name, torch.tensor(0.0), torch.tensor(0.0)

        def update(self, value):
            self.sum += hvd.allreduce(value.detach().cpu(), name=self.name)
            self.n += 1

        @property
        def avg(self):
            return self.sum / self.n

    model, per_slice, allreduce_slices = build(), 4, 3
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05 * allreduce_slices * hvd.size(), momentum=0.9
    )
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.none,
        backward_passes_per_step=allreduce_slices,
        op=hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    batches, sampler = loader(per_slice * allreduce_slices)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        kept = Metric("train_loss")
        for number, (data, target) in enumerate(batches):
            reached = epoch + (number + 1) / len(batches)
            factor = 1.0 / hvd.size() * (reached * (hvd.size() - 1) / 5 + 1)
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * hvd.size() * allreduce_slices * factor
            optimizer.zero_grad()
            for at in range(0, len(data), per_slice):
                part, goal = data[at : at + per_slice], target[at : at + per_slice]
                loss = F.cross_entropy(model(part), goal)
                kept.update(loss)
                loss.div_(math.ceil(len(data) / per_slice))
                loss.backward()
            optimizer.step()
        losses.append(kept.avg.item())
    return model


@idiom
def by_hand(losses):
    """Gradients reduced by the script itself, all at once and then waited for."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches, _ = loader()
    for step, (data, target) in enumerate(batches):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        if step % 2:
            for p in model.parameters():
                hvd.allreduce_(p.grad)
        else:
            handles = [
                hvd.allreduce_async_(p.grad, name=name, op=hvd.Average)
                for name, p in model.named_parameters()
            ]
            for handle in handles:
                hvd.synchronize(handle)
        optimizer.step()
        losses.append(hvd.allreduce(loss, name="loss").item())
    return model


@idiom
def sparse(losses):
    """An embedding whose gradient is sparse, sent as it is and as a dense one."""
    for as_dense in (False, True):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Flatten(), nn.Linear(18, 4))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            named_parameters=model.named_parameters(),
            sparse_as_dense=as_dense,
        )
        generator = torch.Generator().manual_seed(hvd.rank())
        for _ in range(4):
            words = torch.randint(0, 20, (5, 3), generator=generator)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(words), words[:, 0] % 4)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return model


@idiom
def uneven(losses):
    """Ranks with different amounts of data, and ``join`` for those that have less."""
    model = nn.Linear(6, 4)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(3 + 2 * hvd.rank()):
        data = torch.randn(4, 6, generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), torch.tensor([0, 1, 2, 3]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    losses.append(hvd.join())
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    return model


@idiom
def unused(losses):
    """A parameter without a gradient, on one rank and on all, and one that does not train."""
    torch.manual_seed(2)
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 4)})
    model["c"].bias.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1),
        named_parameters=model.named_parameters(),
    )
    generator = torch.Generator().manual_seed(hvd.rank())
    for step in range(4):
        data = torch.randn(3, 4, generator=generator)
        optimizer.zero_grad()
        hidden = model["a"](data)
        if (step + hvd.rank()) % 2:
            hidden = model["b"](hidden)
        loss = hidden.square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model


@idiom
def resumed(losses):
    """Rank 0 reads a checkpoint, and tells all others the epoch."""
    model = build(seed=1 + hvd.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    resume_from = hvd.broadcast_object(4 if hvd.rank() == 0 else None, root_rank=0, name="epoch")
    number = hvd.broadcast(torch.tensor(3 * (hvd.rank() == 0)), root_rank=0, name="at").item()
    if hvd.rank() == 0:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.8)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    losses += [resume_from, number, optimizer.param_groups[0]["lr"]]
    train(model, optimizer, losses, epochs=1)
    losses += hvd.allgather_object([hvd.rank(), round(losses[-1], 4)])[1]
    return model


@idiom
def elastic(losses):
    """A state with commits, a sampler that records, and a failure that is gone back from."""
    model = build()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=model.named_parameters()
    )
    dataset = images()
    sampler = hvd.elastic.ElasticSampler(dataset, seed=4)
    batches = DataLoader(dataset, batch_size=8, sampler=sampler)
    failed = []

    def on_reset():
        losses.append(-1.0)

    @hvd.elastic.run
    def run(state):
        for state.epoch in range(state.epoch, 2):
            for number, (data, target) in enumerate(batches):
                if state.epoch == 1 and number == 3 and not failed:
                    failed.append(True)
                    hvd.allreduce(torch.ones(2 + hvd.rank()), name="differs")
                optimizer.zero_grad()
                loss = F.cross_entropy(model(data), target)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                state.sampler.record_batch(number, len(data))
                if number % 2 == 1:
                    state.commit()
            state.sampler.set_epoch(state.epoch + 1)

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)
    state.register_reset_callbacks([on_reset])
    run(state)
    return model


@idiom
def benchmark(losses):
    """A model of several buckets' worth of layers on made-up data, timed by nobody here."""
    torch.manual_seed(3)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(8)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), op=hvd.Average
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    data = torch.randn(16, 32, generator=torch.Generator().manual_seed(hvd.rank()))
    for _ in range(5):
        optimizer.zero_grad()
        loss = F.mse_loss(model(data), data)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model


@idiom
def adasum(losses):
    """What each rank changes is combined by Adasum."""
    model = build()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        named_parameters=model.named_parameters(),
        op=hvd.Adasum,
    )
    train(model, optimizer, losses, epochs=1)
    return model


@idiom
def normalised(losses):
    """Batch normalisation over the samples of all ranks."""
    model = build(norm=hvd.SyncBatchNorm)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=model.named_parameters()
    )
    train(model, optimizer, losses, epochs=1)
    return model


@idiom
def closure(losses):
    """A step that computes the loss itself."""
    model = build()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=model.named_parameters()
    )
    batches, _ = loader()
    for data, target in batches:

        def compute():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            return loss

        losses.append(optimizer.step(compute).item())
    return model


if __name__ == "__main__":
    out, *names = sys.argv[1:]
    hvd.init()
    for name in names:
        losses = []
        model = IDIOMS[name](losses)
        state = {key: value.tolist() for key, value in model.state_dict().items()}
        with open(f"{out}.{name}.{hvd.rank()}", "w") as file:
            json.dump({"losses": losses, "state": state}, file)
    print("done", *names)
