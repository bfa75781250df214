"""How a model comes to the device under FSDP: rank 0's values on every rank, one unit at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError
from torsh_trainer.strategies import sharding
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.placing import move_all_but_parameters
from torsh_trainer.testing.cases import Driver
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.reference import Scenario
from torsh_trainer.testing.state import whole_state
from torsh_trainer.testing.tiny import TinyData, TinyTask

LAYERS, WIDTH = 8, 128
LAYER = 4 * (WIDTH * WIDTH + WIDTH)
"""Bytes of a layer."""


class Layers(nn.Module):
    """Layers, a parameter that cannot be cut, and a buffer; every element has the value given."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(WIDTH))
        with torch.no_grad():
            for tensor in [*self.parameters(), *self.buffers()]:
                tensor.fill_(value)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


class OtherOnEveryRank(TinyTask):
    """A task whose build_model draws what it likes: rank + 1 everywhere."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.value = comm.world.rank + 1.0

    def build_model(self) -> Any:
        return Layers(self.value)


def with_a_device(comm: Communicator, monkey: pytest.MonkeyPatch) -> list[int]:
    """Gives ``comm`` a device with memory of its own; the sizes of what is broadcast to it."""
    broadcast, sent = comm.broadcast, []

    def note(tensor: Tensor, **options: Any) -> Any:
        sent.append(tensor.numel())
        return broadcast(tensor, **options)

    monkey.setattr(comm, "to_device", lambda tensor: tensor.clone())
    monkey.setattr(comm, "broadcast", note)
    return sent


def start(comm: Communicator, knobs: FSDP) -> tuple[dict[str, Tensor], int]:
    """The state that training starts with, and the number of broadcasts."""
    with pytest.MonkeyPatch.context() as monkey:
        sent = with_a_device(comm, monkey)
        task = OtherOnEveryRank(comm)
        engine = Driver(comm, knobs, Scenario(data=TinyData()), task=task).engine
    state = whole_state(engine.state_dict(), comm)["model"]
    engine.close()
    return state, len(sent)


@pytest.mark.parametrize(
    ("knobs", "units"),
    [
        (FSDP(wrap_min_bytes=0), LAYERS),
        (FSDP(wrap_min_bytes=0, cpu_offload=True), LAYERS),
        (FSDP(cpu_offload=True), 1),
        (FSDP(wrap_min_bytes=2 * LAYER, shard_size=1), LAYERS // 2),
    ],
    ids=["units", "units on the host", "one unit on the host", "pairs, whole"],
)
def test_every_shard_is_of_rank_0s_weights_in_one_broadcast_a_unit(knobs: FSDP, units: int) -> None:
    for state, broadcasts in shared_pool(2).run(start, knobs):
        assert len(state) == 2 * LAYERS + 2
        for name, tensor in state.items():
            assert torch.equal(tensor, torch.ones_like(tensor)), name
        assert broadcasts == units + 1  # the buffer and the parameter without dimensions together


class Live(TorchDispatchMode):
    """Counts the bytes of the storages that operations have made and that still live."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if type(leaf) is Tensor and not leaf.is_meta:  # a DTensor has no memory of its own
                storage = leaf.untyped_storage()
                self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, self.nbytes)
        return made

    @property
    def nbytes(self) -> int:
        self._known = {key: one for key, one in self._known.items() if not one[0].expired()}
        return sum(size for _, size in self._known.values())


def memory_at_the_start(comm: Communicator, knobs: FSDP) -> tuple[int, int]:
    """Bytes at the most, while the model is built and cut, and just after that."""
    cut, after = sharding.shard, []
    with pytest.MonkeyPatch.context() as monkey, Live() as live:
        with_a_device(comm, monkey)

        def measure(*args: Any, **options: Any) -> None:
            cut(*args, **options)
            after.append((live.most, live.nbytes))

        monkey.setattr(sharding, "shard", measure)
        task = OtherOnEveryRank(comm)
        Driver(comm, knobs, Scenario(data=TinyData()), task=task).engine.close()
    return after[0]


@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "on the host"])
def test_never_more_than_one_unit_is_there_whole_beside_what_is_not_cut_yet(offload: bool) -> None:
    knobs = FSDP(wrap_min_bytes=0, cpu_offload=offload)
    small = LAYER // 4
    states = 4 * LAYERS * torch.get_rng_state().numel()  # before each draw of a constructor
    for most, after in shared_pool(2).run(memory_at_the_start, knobs):
        assert most <= LAYERS * LAYER + 2 * LAYER + small + states
        assert after <= LAYERS * LAYER // 2 + small


class Moved(nn.Module):
    """A module that is told where it is by ``to``, as Lightning's are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.recurrent = nn.LSTM(2, 2)
        self.again = self.linear
        self.register_buffer("mean", torch.zeros(2))
        self.where: Any = None

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.where = args[0]
        return super().to(*args, **kwargs)


def test_parameters_stay_where_they_are_until_their_unit_is_cut() -> None:
    model = Moved()
    before = dict(model.named_parameters(remove_duplicate=False))
    elsewhere = torch.device("meta")
    assert move_all_but_parameters(model, elsewhere) is model
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(after) == list(before)
    assert after["linear.weight"] is before["linear.weight"]
    assert after["linear.weight"].device.type == "cpu"
    assert model.where == elsewhere
    assert model.mean.is_meta
    assert after["recurrent.weight_ih_l0"].is_meta  # which moves its weights in a way of its own


def test_a_parameter_without_values_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ConfigError, match=r"'1\.weight' has no values"):
        move_all_but_parameters(model, torch.device("cpu"))
