"""What goes from one stage to the next: tensors, of which the other side knows the shapes.

Shapes follow from the micro-batch, which all stages have. The first message of a kind for batches
of some shapes tells them; all others are tensors alone.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torsh_trainer.comm.base import Communicator, Work
from torsh_trainer.errors import TorshError, Unsupported

_WAITING = 8  # messages that others may not have taken yet
_LAST_WORDS: list[Any] = []
"""What is under way to others when an engine has failed, and goes with the process."""


class TensorSpec(NamedTuple):
    """A tensor of a message: ``place`` is its place among the arguments where a stage begins."""

    place: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    trains: bool


class Edge(NamedTuple):
    """Messages of one kind for ``stage``, to or from process ``other``."""

    other: int
    kind: str
    stage: int


class Exchange:
    """Sends and receives over ``comm``, which nobody else uses.

    Messages of an edge arrive in the order in which they were sent; both sides name the same
    ``key`` for a message: what its shapes follow from.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._known: dict[tuple[str, int, Hashable], Sequence[TensorSpec]] = {}
        self._sending: deque[Work] = deque()
        self.failed: int | None = None
        """The process that has told of an error."""

    def send(
        self,
        edge: Edge,
        key: Hashable,
        specs: Sequence[TensorSpec],
        tensors: Sequence[Tensor],
    ) -> None:
        """Begins to send ``tensors``, as ``specs`` have them.

        Raises:
            Unsupported: the other side expects others, since they were others before.
        """
        known = self._known.get((edge.kind, edge.stage, key))
        if known is None:
            self._known[edge.kind, edge.stage, key] = list(specs)
            self._tell(edge, list(specs))
        elif list(specs) != known:
            raise Unsupported(
                f"mesh.pp: what goes to stage {edge.stage} ({edge.kind}) is "
                f"{_in_words(specs)} for a micro-batch, and was {_in_words(known)} for another one "
                "of the same shapes",
                fix="let shapes follow from those of the batch alone, and what trains stay as it "
                "is, or set mesh.pp=1",
            )
        for tensor in tensors:
            self._begin(tensor.detach(), edge)

    def tell_error(self, edge: Edge, key: Hashable, error: TorshError) -> None:
        """Has the other side raise ``error``, where it waits to be told shapes."""
        if (edge.kind, edge.stage, key) not in self._known:
            self._tell(edge, error)
            _LAST_WORDS.append(self._sending)  # nobody waits: the other side may have failed, too

    def receive(self, edge: Edge, key: Hashable) -> Incoming:
        """Begins to receive the next message.

        Raises:
            TorshError: the other side has met it, and says so in its place.
        """
        known = self._known.get((edge.kind, edge.stage, key))
        if known is None:
            said = self._listen(edge)
            if isinstance(said, TorshError):
                self.failed = edge.other
                raise said
            self._known[edge.kind, edge.stage, key] = known = said
        device = self._comm.device
        tensors = [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in known]
        works = [self._comm.recv(tensor, src=edge.other, async_op=True) for tensor in tensors]
        return Incoming(known, tensors, works)

    def finish(self) -> None:
        """Waits until the other sides have all that was sent."""
        while self._sending:
            self._sending.popleft().wait()

    def _begin(self, tensor: Tensor, edge: Edge) -> None:
        work = self._comm.send(tensor, dst=edge.other, async_op=True)
        assert work is not None
        self._sending.append(work)
        while len(self._sending) > _WAITING:
            self._sending.popleft().wait()

    def _tell(self, edge: Edge, said: Any) -> None:
        content = torch.frombuffer(bytearray(pickle.dumps(said)), dtype=torch.uint8)
        for part in (torch.tensor([len(content)]), content):
            self._begin(self._comm.to_device(part), edge)

    def _listen(self, edge: Edge) -> Any:
        length = self._comm.to_device(torch.zeros(1, dtype=torch.int64))
        self._comm.recv(length, src=edge.other)
        content = self._comm.to_device(torch.empty(int(length), dtype=torch.uint8))
        self._comm.recv(content, src=edge.other)
        return pickle.loads(content.cpu().numpy().tobytes())


class Incoming(NamedTuple):
    """A message under way."""

    specs: Sequence[TensorSpec]
    tensors: Sequence[Tensor]
    works: list[Work | None]

    def wait(self) -> Sequence[Tensor]:
        """Its tensors, once they are there, and nobody else has a hold on them."""
        while self.works:
            work = self.works.pop()
            assert work is not None
            work.wait()
        return self.tensors


def _in_words(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(
        f"{list(spec.shape)} {str(spec.dtype).removeprefix('torch.')}"
        + ("" if spec.trains else " without a gradient")
        for spec in specs
    )
