"""One step of a pipeline on one process: its actions in the order of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.utils._pytree import tree_leaves

from torsh_trainer.errors import TorshError, Unsupported
from torsh_trainer.strategies.base import MicroBatch
from torsh_trainer.strategies.pipeline.crossing import Left, Received
from torsh_trainer.strategies.pipeline.exchange import Edge, Exchange, Incoming, TensorSpec
from torsh_trainer.strategies.pipeline.orders import Action


class StageForward(NamedTuple):
    """A forward of a stage: the loss of the last one, or what goes to the next.

    ``received`` is what it began with, ``state`` where it has come to in its draws, and ``draws``
    what is needed to run it, or parts of it, once more.
    """

    result: Tensor | Left
    received: Received | None
    state: Tensor
    draws: Any


class StageWork(Protocol):
    """What an engine does for a stage and a micro-batch."""

    def run_forward(self, stage: int, micro: MicroBatch, message: Message | None) -> StageForward:
        """The forward of ``stage``."""

    def run_backward(
        self, micro: MicroBatch, done: StageForward, gradients: Sequence[Tensor] | None
    ) -> None:
        """Adds the gradients of ``done``, whose outputs have ``gradients``."""


class Neighbours(Protocol):
    """Who has which stage, and how to reach them."""

    @property
    def exchange(self) -> Exchange:
        """Over the processes of the pipeline."""

    def rank_of(self, stage: int) -> int:
        """The process of the pipeline that has ``stage``."""


class Message(NamedTuple):
    """What a stage begins with, and where the forward before it has come to in its draws."""

    received: Received
    draws: Tensor


class PipelineStep:
    """The ``micro_batches`` of a step, over the stages ``held``."""

    def __init__(
        self, held: Neighbours, work: StageWork, micro_batches: Sequence[MicroBatch]
    ) -> None:
        self._held = held
        self._work = work
        self._micro_batches = micro_batches
        self._keys = [("train", shapes_of(micro.batch)) for micro in micro_batches]
        self._coming: dict[tuple[str, int, int], Incoming] = {}
        self._done: dict[tuple[int, int], StageForward] = {}
        self.losses: dict[int, Tensor] = {}

    def run(self, order: Sequence[Action]) -> None:
        """Everything that this process has to do, in that order.

        Raises:
            TorshError: also of another process, where that was met before shapes were known.
        """
        do: dict[str, Callable[[int, int], None]] = {
            "forward": self._forward,
            "backward": self._backward,
            "send_forward": self._send_forward,
            "receive_forward": self._receive_forward,
            "send_backward": self._send_backward,
            "receive_backward": self._receive_backward,
        }
        for number, action in enumerate(order):
            try:
                do[action.kind](action.stage, action.micro_batch)
            except TorshError as error:
                self._tell(error, order[number:])
                raise
        self._held.exchange.finish()

    # -- actions ----------------------------------------------------------------------------------

    def _receive_forward(self, stage: int, i: int) -> None:
        self._coming["forward", stage, i] = self._held.exchange.receive(
            self._edge("forward", stage, stage - 1), self._keys[i]
        )

    def _forward(self, stage: int, i: int) -> None:
        message = None
        if stage:
            message = unpack(self._coming.pop(("forward", stage, i)))
        done = self._work.run_forward(stage, self._micro_batches[i], message)
        self._done[stage, i] = done
        if not isinstance(done.result, Left):
            self.losses[i] = done.result.detach()

    def _send_forward(self, stage: int, i: int) -> None:
        done = self._done[stage, i]
        assert isinstance(done.result, Left)
        specs, tensors = pack(done.result, done.state)
        edge = self._edge("forward", stage + 1, stage + 1)
        self._held.exchange.send(edge, self._keys[i], specs, tensors)

    def _receive_backward(self, stage: int, i: int) -> None:
        self._coming["backward", stage, i] = self._held.exchange.receive(
            self._edge("backward", stage, stage + 1), self._keys[i]
        )

    def _backward(self, stage: int, i: int) -> None:
        done = self._done[stage, i]
        gradients = None
        if isinstance(done.result, Left):
            gradients = self._coming.pop(("backward", stage, i)).wait()
        self._work.run_backward(self._micro_batches[i], done, gradients)
        # What the stage before sends back for is all that is left of it.
        self._done[stage, i] = done._replace(result=_NOTHING)

    def _send_backward(self, stage: int, i: int) -> None:
        received = self._done.pop((stage, i)).received
        assert received is not None
        specs, tensors = [], []
        for spec, gradient in zip(received.specs, received.gradients, strict=True):
            if not spec.trains:
                continue
            if gradient is None:
                raise Unsupported(
                    f"mesh.pp: stage {stage} has no gradient for what stage {stage - 1} gives it "
                    f"({list(spec.shape)})",
                    fix="use what goes from one stage to the next, or detach it before",
                )
            specs.append(spec._replace(dtype=gradient.dtype, trains=False))
            tensors.append(gradient)
        edge = self._edge("backward", stage - 1, stage - 1)
        self._held.exchange.send(edge, self._keys[i], specs, tensors)

    # -- words ------------------------------------------------------------------------------------

    def _edge(self, kind: str, stage: int, other: int) -> Edge:
        return Edge(self._held.rank_of(other), kind, stage)

    def _tell(self, error: TorshError, rest: Sequence[Action]) -> None:
        """Has those raise ``error`` too who wait for a first message of this process."""
        told = set()
        beside = {"send_forward": ("forward", 1), "send_backward": ("backward", -1)}
        for action in rest:
            if action.kind in beside and (action.kind, action.stage) not in told:
                told.add((action.kind, action.stage))
                kind, step = beside[action.kind]
                edge = self._edge(kind, action.stage + step, action.stage + step)
                if edge.other != self._held.exchange.failed:
                    key = self._keys[action.micro_batch]
                    self._held.exchange.tell_error(edge, key, error)


_NOTHING = Left((), ())


def pack(left: Left, state: Tensor) -> tuple[list[TensorSpec], list[Tensor]]:
    """What goes to the next stage, and behind it the state of draws."""
    spec = TensorSpec(-1, tuple(state.shape), state.dtype, trains=False)
    return [*left.specs, spec], [*left.tensors, state]


def unpack(incoming: Incoming) -> Message:
    """The inverse of ``pack``, once it is there."""
    *tensors, state = incoming.wait()
    return Message(Received(incoming.specs[:-1], tensors), state.cpu())


def shapes_of(batch: Any) -> Hashable:
    """Of all tensors of a batch: what the shapes of a forward follow from."""
    return tuple(
        (tuple(leaf.shape), leaf.dtype) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)
    )
