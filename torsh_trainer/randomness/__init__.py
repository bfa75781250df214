"""What a training forward draws: by sample, or by micro-batch."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from torsh_trainer.data.batch import MicroBatch, Samples
from torsh_trainer.data.draws import forward_generators
from torsh_trainer.data.sampler import ForwardKeys
from torsh_trainer.errors import ConfigError, nearest
from torsh_trainer.randomness.kernels import install, set_current
from torsh_trainer.randomness.layout import layout_of
from torsh_trainer.randomness.words import counters_of, keys_of

log = logging.getLogger(__name__)

Randomness = Literal["by_sample", "by_micro_batch"]
_AT_ONCE = 64
_HOST = 1 << 32  # the first draw on a host beside an accelerator


def check_randomness(randomness: str) -> None:
    """Raises ConfigError where that is none of the ways."""
    ways = get_args(Randomness)
    if randomness not in ways:
        raise ConfigError(
            f"trainer.randomness={randomness} is unknown", fix=nearest(randomness, ways)
        )


def draws_of(randomness: Randomness, model: nn.Module, device: torch.device) -> ForwardDraws:
    """How the training forwards of ``model`` draw on ``device``.

    What torch.compile generates has a generator of its own: it draws by micro-batch.
    """
    return ForwardDraws(device) if randomness == "by_micro_batch" else SampleDraws(model, device)


class ForwardDraws:
    """Random numbers of forwards by micro-batch: ``with draws.of(micro): forward and backward``."""

    def __init__(self, device: torch.device) -> None:
        self._generators = forward_generators(device)

    def of(self, micro: MicroBatch) -> ForwardDraws:
        """The forward of ``micro`` is next."""
        if micro.rng_key is not None:
            for generator in self._generators:
                generator.manual_seed(micro.rng_key)
        return self

    def __enter__(self) -> None:
        """Begins."""

    def __exit__(self, *_: object) -> None:
        """Ends."""


class SampleDraws(ForwardDraws):
    """Random numbers of forwards by sample, whatever the micro-batch that it comes in.

    The number of a draw is kept in the seed of the device's generator, which is moved on with each
    of them: so whatever restores a generator to run a forward again (activation checkpointing)
    draws the same again, and what torch draws itself begins at a seed of the micro-batch.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(device)
        self._model = model
        self._device = device.type
        self._by_device = {g.device.type: g for g in self._generators}
        for kind in self._by_device:
            install(kind)
        self._time_major = _is_time_major(model)
        self._parameters = frozenset(tuple(p.shape) for p in model.parameters())
        self._told: set[tuple[str, str]] = set()
        self._counters: dict[tuple[int, range, torch.device], Tensor] = {}
        self._at_once = 1  # draws whose keys are computed together: those of a whole forward
        self._looks: list[Any] | None = []  # at Python's and NumPy's generators, in the first one
        self._key = 0
        self._samples: Samples | None = None
        self._numbers: dict[int, int] = {}
        self._kept: dict[tuple[int, bool, str], Tensor] = {}

    def of(self, micro: MicroBatch) -> ForwardDraws:
        super().of(micro)
        self._samples = None if micro.place is None else micro.place.samples
        if self._samples is not None and micro.rng_key is not None:
            self._key = micro.rng_key
            if len(self._numbers) - 1 > self._at_once:
                self._at_once = min(len(self._numbers) - 1, _AT_ONCE)
                self._counters.clear()
            self._numbers = {self._key: 0}
            self._kept.clear()
        else:
            self._samples = None
        return self

    def __enter__(self) -> None:
        if self._looks is not None:
            self._looks = _other_generators()
        if self._samples is not None:
            set_current(self)

    def __exit__(self, *_: object) -> None:
        set_current(None)
        if self._looks is not None:
            self._check_others(self._looks)
            self._looks = None

    # -- what kernels ask -----------------------------------------------------------------------

    def keys(
        self, shape: Sequence[int], device: torch.device, operation: str
    ) -> tuple[Tensor, tuple[int, ...]] | None:
        """Keys (samples,) of the next draw, and the shape of one sample's; None: torch draws."""
        samples, generator = self._samples, self._by_device.get(device.type)
        assert samples is not None
        number = None if generator is None else self._numbers.get(generator.initial_seed())
        layout = layout_of(
            shape, samples.size, time_major=self._time_major, parameters=self._parameters
        )
        if generator is None or number is None or layout is None:
            self.leave(operation, shape)
            return None
        following = ForwardKeys.of_micro_batch(self._key, number + 1)
        self._numbers[following] = number + 1
        generator.manual_seed(following)
        keys = self._keys_of(samples, number, device, shared=not layout.samples)
        return keys, layout.shape

    def leave(self, operation: str, shape: Sequence[int] = ()) -> None:
        """Says once where ``operation`` draws by micro-batch."""
        if torch._C._current_graph_task_id() != -1:  # a backward: what it runs again has been told
            return
        where = _module_at_work(self._model)
        if (operation, where) in self._told:
            return
        self._told.add((operation, where))
        log.warning(
            "%s in %s cannot be drawn by sample%s: it draws by micro-batch, other numbers on other "
            "numbers of processes",
            operation,
            where,
            f" in the shape {tuple(shape)}" if shape else "",
        )

    def _keys_of(
        self, samples: Samples, number: int, device: torch.device, *, shared: bool
    ) -> Tensor:
        block, row = divmod(number, self._at_once)
        kept = self._kept.get((block, shared, device.type))
        if kept is None:
            start = block * self._at_once + (0 if device.type == self._device else _HOST)
            draws = range(start, start + self._at_once)
            counters = self._counters_of(1 if shared else samples.size, draws, device)
            kept = keys_of(samples.key, -1 if shared else samples.first, counters)
            self._kept[block, shared, device.type] = kept
        return kept[row]

    def _counters_of(self, count: int, draws: range, device: torch.device) -> Tensor:
        found = self._counters.get((count, draws, device))
        if found is None:
            found = self._counters[count, draws, device] = counters_of(count, draws, device)
        return found

    def _check_others(self, before: list[Any]) -> None:
        for (name, old), (_, new) in zip(before, _other_generators(), strict=True):
            if old != new:
                log.warning(
                    "the forward draws from %s, which no key reaches: other numbers on other "
                    "numbers of processes; draw from torch",
                    name,
                )


def _other_generators() -> list[tuple[str, Any]]:
    numpy = sys.modules.get("numpy")
    found: list[tuple[str, Any]] = [("random", random.getstate())]
    if numpy is not None:
        state: Mapping[str, Any] = numpy.random.get_state(legacy=False)
        inner = state["state"]
        found.append(("numpy.random", (inner["key"].tobytes(), inner["pos"], state["gauss"])))
    return found


def _is_time_major(model: nn.Module) -> bool:
    """Whether something in it lays out time before samples, as recurrent layers do within."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            if module.dropout > 0.0:
                return True
        elif getattr(module, "batch_first", True) is False:
            return True
    return False


def _module_at_work(model: nn.Module) -> str:
    """The innermost module whose method runs, by its name in ``model``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            name = next((name for name, m in model.named_modules() if m is owner), None)
            if name:
                return f"{name} ({type(owner).__name__})"
            return type(owner).__name__
        frame = frame.f_back
    return "the forward"
