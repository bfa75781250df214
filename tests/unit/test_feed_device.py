"""Batches on their way to a device; ``meta`` stands for one, which has no values to wait for."""

import contextlib
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data._utils.pin_memory import pin_memory as pins_of_torch
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.data import feed as feed_module
from torsh_trainer.data.feed import TrainLoader
from torsh_trainer.data.loading import Loading
from torsh_trainer.data.moving import Mover, StreamMover, ToPin, mover_to, pin
from torsh_trainer.data.sampler import BatchPartition
from torsh_trainer.errors import ConfigError
from torsh_trainer.tasks.base import DataSource, Task

META = torch.device("meta")


class Counting(Task):
    """Samples that weigh as much as their number."""

    sample_weight = None

    def __init__(self) -> None:
        self.data = DataSource()
        self.data.train = torch.utils.data.TensorDataset(torch.arange(1.0, 9.0))

    def weight(self, batch):
        return float(batch[0].sum())


def known(task):
    task.sample_weight = 1.0
    return task


def test_counted_weights_wait_for_no_device():
    loading = Loading(batch_size=4, shuffle=False)
    feed = TrainLoader(
        Counting(), loading, BatchPartition(4, 2, 1, 0), LocalCommunicator(META), seed=0
    )
    steps = feed.steps()
    taken = [next(steps) for _ in range(3)]
    steps.close()
    assert [step.weight for step in taken] == [10.0, 26.0, 10.0]
    assert [micro.weight for micro in taken[0].micro_batches] == [3.0, 7.0]
    assert all(micro.batch[0].device == META for micro in taken[0].micro_batches)


# -- batches of every kind -------------------------------------------------------------------------


@dataclass
class Labelled:
    x: Tensor
    name: str = "one"
    later: Tensor = field(init=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    parts: list[Tensor]


class Pair(NamedTuple):
    to: Tensor
    size: int


class Own:
    """Moves itself, in place."""

    def __init__(self, x, device=None):
        self.x, self.device = x, device

    def to(self, device):
        self.x, self.device = self.x.to(device), device


class Graph:
    """Gives another one, with torch's arguments."""

    def __init__(self, x):
        self.x = x

    def to(self, device, non_blocking=False):
        assert non_blocking
        return Graph(self.x.to(device))


class Metres:
    """Its ``to`` is about something else."""

    def to(self, unit):
        raise ValueError(unit)


class Held:
    """Has tensors, and no way to move them."""

    def __init__(self, x):
        self.parts = {"x": [x]}


class Encoding(UserDict):
    """As transformers' ``BatchEncoding``: more than its data, and a ``to`` that works in place."""

    def __init__(self, data, n_sequences):
        super().__init__(data)
        self.n_sequences = n_sequences

    def to(self, device):
        raise AssertionError("it would change what the data set has")


class Points(tuple):
    """A tuple of one's own."""


def ones():
    return torch.ones(2)


KINDS = {
    "dict": lambda: {"x": ones(), "deep": {"y": (ones(), [ones()])}},
    "OrderedDict": lambda: OrderedDict(b=ones(), a=ones()),
    "defaultdict": lambda: defaultdict(list, x=[ones()]),
    "deque": lambda: deque([ones()], maxlen=3),
    "UserDict": lambda: UserDict(x=ones()),
    "BatchEncoding": lambda: Encoding({"input_ids": ones()}, 2),
    "MappingProxyType": lambda: MappingProxyType({"x": ones()}),
    "dataclass": lambda: Labelled(ones()),
    "frozen dataclass with slots": lambda: Frozen(ones(), [ones()]),
    "named tuple with a field `to`": lambda: Pair(ones(), 3),
    "tuple of one's own": lambda: Points([ones(), ones()]),
    "set": lambda: {ones()},
    "moves itself in place": lambda: Own(ones()),
    "moves itself": lambda: Graph(ones()),
    "dataclass of objects": lambda: Frozen(ones(), [Own(ones()), Graph(ones())]),
}


def tensors_in(value):
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [one for part in value.values() for one in tensors_in(part)]
    if isinstance(value, list | tuple | set | deque):
        return [one for part in value for one in tensors_in(part)]
    names = [*getattr(value, "__dict__", ()), *getattr(value, "__slots__", ())]
    return [one for name in names for one in tensors_in(getattr(value, name))]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_any_kind_arrives_on_the_device_as_what_it_was(kind):
    batch = KINDS[kind]()
    moved = mover_to(META)(batch)
    assert type(moved) is type(batch)
    assert len(tensors_in(moved)) == len(tensors_in(KINDS[kind]())) > 0
    assert {tensor.device for tensor in tensors_in(moved)} == {META}
    if kind not in ("moves itself in place", "dataclass of objects"):
        assert {tensor.device.type for tensor in tensors_in(batch)} == {"cpu"}
    assert getattr(moved, "n_sequences", 2) == 2
    assert mover_to(torch.device("cpu"))(batch) is batch


def test_sizes_of_a_packed_sequence_stay_on_the_cpu():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    x, text = mover_to(META)((packed, "text"))
    assert (type(x), x.data.device, x.batch_sizes.device.type) == (type(packed), META, "cpu")
    assert text == "text"


def test_what_holds_no_tensor_passes_as_it_is():
    for value in (Metres(), np.ones(2), torch.Size([2]), object(), Path("a"), None, 3, Tensor):
        (moved,) = mover_to(META)([value])
        assert moved is value or moved == value


@pytest.mark.parametrize("value", [Held(ones()), [{"deep": Held(ones())}]])
def test_an_object_that_hides_tensors_is_refused(value):
    with pytest.raises(ConfigError, match=r"a Held with tensors in it.*to meta; give it a method"):
        mover_to(META)(value)


def test_an_encoding_of_transformers_moves(tmp_path):
    batch = BatchEncoding({"input_ids": ones(), "text": ["a"]}, n_sequences=1)
    moved = mover_to(META)(batch)
    assert (type(moved), moved.n_sequences) == (type(batch), 1)
    assert (moved["input_ids"].device, batch["input_ids"].device.type) == (META, "cpu")
    output = BaseModelOutput(last_hidden_state=ones())
    moved = mover_to(META)(output)
    assert type(moved) is type(output)
    assert moved.last_hidden_state.device == META


# -- page-locked memory, and a stream ------------------------------------------------------------


@pytest.fixture
def pin_by_copy(monkeypatch):
    """Tensors that were pinned."""
    pinned = []

    def pin_memory(tensor, device=None):
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    return pinned


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "itself" not in kind])
def test_pinning_keeps_types_in_the_loop_and_behind_loader_processes(pin_by_copy, kind):
    for give in (pin, lambda batch: pins_of_torch(ToPin(batch))):
        pin_by_copy.clear()
        batch = KINDS[kind]()
        given = give(batch)
        assert type(given) is type(batch)
        found = {id(one) for one in tensors_in(given)}
        assert {id(one) for one in pin_by_copy} <= found
        assert pin_by_copy


class FakeStream:
    """Notes what a CUDA stream is asked for."""

    def __init__(self, log, name):
        self.log, self.name, self.events = log, name, 0

    def record_event(self):
        self.events += 1
        self.log.append(("recorded", self.events))
        return self.events

    def wait_event(self, event):
        self.log.append(("waits", event))


@pytest.fixture
def streams(monkeypatch):
    """CUDA's streams, faked: (what happened in order, the stream that copies are on)."""
    log, on = [], ["using"]
    using = FakeStream(log, "using")

    @contextlib.contextmanager
    def stream(which):
        on.append(which.name)
        yield
        on.pop()

    def to(tensor, device, non_blocking=False):
        assert non_blocking
        log.append(("copied on", on[-1]))
        return tensor.clone()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(log, "side"))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: using)
    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(
        Tensor, "record_stream", lambda tensor, which: log.append(("kept for", which.name))
    )
    return log


def test_a_step_is_copied_ahead_on_a_stream_of_its_own(streams):
    mover = StreamMover(torch.device("cuda", 0))
    steps = mover.in_turn(iter(map(mover, ([ones()], [ones()]))))
    next(steps)
    first = [("copied on", "side"), ("recorded", 1), ("copied on", "side"), ("recorded", 2)]
    assert streams == [*first, ("waits", 1), ("kept for", "using")]
    next(steps)
    assert streams[6:] == [("waits", 2), ("kept for", "using")]
    assert next(steps, None) is None


def test_what_moves_itself_is_moved_on_the_stream_that_uses_it(streams):
    class Moves:
        def to(self, device, non_blocking):
            ones().to(device, non_blocking=non_blocking)

    mover = StreamMover(torch.device("cuda", 0))
    mover([Moves(), ones()])
    assert streams == [("copied on", "using"), ("copied on", "side")]


@pytest.mark.parametrize("task", [Counting, lambda: known(Counting())])
def test_steps_are_the_same_with_and_without_a_stream(streams, monkeypatch, task):
    def take(ahead):
        monkeypatch.setattr(feed_module, "mover_to", lambda device: ahead)
        feed = TrainLoader(
            task(), Loading(batch_size=4), BatchPartition(4, 2, 1, 0), LocalCommunicator(), seed=3
        )
        steps = feed.steps()
        taken = [next(steps) for _ in range(5)]
        steps.close()
        return [
            (*step[1:], [(*micro[1:], micro.batch[0].tolist()) for micro in step.micro_batches])
            for step in taken
        ]

    plain = take(Mover(torch.device("cpu")))
    assert not streams
    assert take(StreamMover(torch.device("cuda", 0))) == plain
    assert streams.count(("kept for", "using")) == 10  # two micro-batches of each step handed out


@pytest.mark.parametrize("limit", [None, 1])
def test_an_evaluation_reads_the_same_batches_ahead(streams, monkeypatch, limit):
    task = known(Counting())
    task.data.eval = task.data.train

    def take(mover):
        monkeypatch.setattr(feed_module, "mover_to", lambda device: mover)
        cut, comm = BatchPartition(3, 3, 1, 0), LocalCommunicator()
        batches = feed_module.eval_batches(task, "eval", Loading(), cut, comm, limit=limit)
        return [(batch[0].tolist(), counts) for batch, counts in batches]

    assert take(StreamMover(torch.device("cuda", 0))) == take(Mover(torch.device("cpu")))
