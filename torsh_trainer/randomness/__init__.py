"""What a training forward draws: by sample, or by micro-batch."""

from __future__ import annotations

import contextlib
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
from torsh_trainer.randomness import kernels
from torsh_trainer.randomness.kernels import install
from torsh_trainer.randomness.layout import Layout, layout_of, recurrent_layout_of
from torsh_trainer.randomness.words import keys_of, places_of

log = logging.getLogger(__name__)

Randomness = Literal["by_sample", "by_micro_batch"]
_AT_ONCE = 64
_KEPT = 256  # tables and layouts, of as many different shapes
_HOST = 1 << 32  # the first draw on a host beside an accelerator


def check_randomness(randomness: str) -> None:
    """Raises ConfigError where that is none of the ways."""
    ways = get_args(Randomness)
    if randomness not in ways:
        raise ConfigError(
            f"trainer.randomness={randomness} is unknown", fix=nearest(randomness, ways)
        )


def draws_of(randomness: Randomness, model: nn.Module, device: torch.device) -> ForwardDraws:
    """How the training forwards of ``model`` draw on ``device``."""
    return ForwardDraws(device) if randomness == "by_micro_batch" else SampleDraws(model, device)


class ForwardDraws:
    """Random numbers of forwards by micro-batch: ``with draws.of(micro): forward and backward``."""

    def __init__(self, device: torch.device) -> None:
        self._generators = forward_generators(device)

    def of(self, micro: MicroBatch) -> contextlib.AbstractContextManager[None]:
        """The forward of ``micro`` is next."""
        if micro.rng_key is not None:
            for generator in self._generators:
                generator.manual_seed(micro.rng_key)
        return self

    def state(self) -> Tensor:
        """uint8: where the forward at work is in its draws, for another process to go on from."""
        return torch.cat([generator.get_state() for generator in self._generators])

    def go_on(self, state: Tensor) -> None:
        """The forward at work draws next what it would where ``state`` was taken."""
        states = state.split([len(generator.get_state()) for generator in self._generators])
        for generator, own in zip(self._generators, states, strict=True):
            generator.set_state(own.clone())

    def keep(self) -> Any:
        """What ``again`` needs to run the forward at work, or parts of it, once more."""
        return None

    def again(self, micro: MicroBatch, kept: Any) -> contextlib.AbstractContextManager[None]:
        """As ``of``, where ``keep`` gave ``kept`` at the end of the forward of ``micro``."""
        return self.of(micro)

    def __enter__(self) -> None:
        """Begins."""

    def __exit__(self, *_: object) -> None:
        """Ends."""


class SampleDraws(ForwardDraws):
    """Random numbers of forwards by sample, whatever the micro-batch that it comes in.

    The number of a draw is kept in the seed of the device's generator, which is moved on with each
    of them: so whatever restores a generator to run a forward again (activation checkpointing)
    draws the same again, and what torch draws itself begins at a seed of the micro-batch.

    A forward that draws nothing pays a microsecond: all else begins with the first draw.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(device)
        self._model = model
        self._device = device.type
        self._by_device = {g.device.type: g for g in self._generators}
        for kind in self._by_device:
            install(kind)
        self._parameters = frozenset(tuple(p.shape) for p in model.parameters())
        self._time_major = any(_is_time_major(module) for module in model.modules())
        self._recurrent = any(_drops_within(module) for module in model.modules())
        self._told: set[tuple[str, str]] = set()
        self._unseen = self._following = 1  # forwards until one is looked at, and then the next
        self._fresh: MicroBatch | None = None  # which has drawn nothing
        # Of the micro-batch, from its first draw on.
        self._key: int | None = None
        self._samples: Samples | None = None
        self._numbers: dict[int, int] = {}
        self._keys: dict[tuple[int, bool, str], Tensor] = {}
        # Kept from one step to the next.
        self._seen: dict[int, tuple[Sequence[int], int]] = {}  # the first shape, by number of draw
        self._told_of_growth = False
        self._at_once = 1  # draws whose keys are computed together: those of a whole forward
        self._places: dict[tuple[range, range, torch.device], Tensor] = {}
        self._layouts: dict[tuple[Sequence[int], int], Layout | None] = {}

    def of(self, micro: MicroBatch) -> contextlib.AbstractContextManager[None]:
        key = micro.rng_key
        if key is not None:
            for generator in self._generators:
                generator.manual_seed(key)
        self._fresh = micro
        self._unseen -= 1
        if self._unseen:
            return self
        self._unseen, self._following = self._following, self._following * 2
        return _Looking(self, self._told)

    def state(self) -> Tensor:
        self._begin_if_fresh()
        numbers = [self._numbers.get(g.initial_seed(), -1) for g in self._generators]
        counted = torch.tensor(numbers, dtype=torch.int64).view(torch.uint8)
        return torch.cat([super().state(), counted])

    def go_on(self, state: Tensor) -> None:
        self._begin_if_fresh()
        words = 8 * len(self._generators)
        super().go_on(state[:-words])
        numbers = state[-words:].clone().view(torch.int64).tolist()
        for generator, number in zip(self._generators, numbers, strict=True):
            if number >= 0:
                self._numbers[generator.initial_seed()] = number

    def keep(self) -> Any:
        self._begin_if_fresh()
        return self._numbers

    def again(self, micro: MicroBatch, kept: Any) -> contextlib.AbstractContextManager[None]:
        around = self.of(micro)
        self._begin_if_fresh()
        self._numbers = dict(kept)
        return around

    def _begin_if_fresh(self) -> None:
        if self._fresh is not None:
            self._begin(self._fresh)

    def __enter__(self) -> None:
        kernels.current = self

    def __exit__(self, *_: object) -> None:
        kernels.current = None

    # -- what kernels ask -----------------------------------------------------------------------

    def keys(
        self, shape: Sequence[int], device: torch.device, operation: str
    ) -> tuple[Tensor, Layout] | None:
        """Keys (samples,) of the next draw, and its layout; None: torch draws."""
        self._begin_if_fresh()
        kind = device.type
        generator, samples = self._by_device.get(kind), self._samples
        if generator is None or samples is None or self._key is None:
            self.leave(operation, shape)
            return None
        number = self._numbers.get(generator.initial_seed())
        layout = self._layout(shape, samples.size)
        if number is None or layout is None:
            self.leave(operation, shape)
            return None
        before = self._seen.setdefault(number, (shape, samples.size))
        if before[1] != samples.size:
            self._check_growth(operation, layout, shape, samples.size, *before)
        following = ForwardKeys.of_micro_batch(self._key, number + 1)
        self._numbers[following] = number + 1
        generator.manual_seed(following)
        block, row = divmod(number, self._at_once)
        shared = not layout.samples
        keys = self._keys.get((block, shared, kind))
        if keys is None:
            keys = self._keys[block, shared, kind] = self._keys_of(samples, block, device, shared)
        return keys[row], layout

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

    # -- parts ----------------------------------------------------------------------------------

    def _check_growth(
        self,
        operation: str,
        layout: Layout,
        shape: Sequence[int],
        samples: int,
        before: Sequence[int],
        samples_before: int,
    ) -> None:
        """Says once where a draw was taken for samples', and stays as long with others of them."""
        at = int(layout.time_first)
        if (
            self._told_of_growth
            or len(shape) != len(before)
            or shape[at : at + 1] != before[at : at + 1]
        ):
            return
        then = self._layout(before, samples_before)
        if layout.samples or (then is not None and then.samples):
            self._told_of_growth = True
            log.warning(
                "%s in %s draws in the shape %s for %d samples and %s for %d: it was taken for "
                "samples', which it may not be, and is then other numbers on other numbers of "
                "processes; draw it with one dimension more in front, of size 1",
                operation,
                _module_at_work(self._model),
                tuple(before),
                samples_before,
                tuple(shape),
                samples,
            )

    def _begin(self, micro: MicroBatch) -> None:
        """The first draw of a micro-batch."""
        self._fresh, self._key = None, micro.rng_key
        self._samples = None if micro.place is None else micro.place.samples
        drawn = len(self._numbers) - 1  # by the forward before
        if drawn > self._at_once:
            self._at_once = min(drawn, _AT_ONCE)
            self._places.clear()
        self._numbers = {} if self._key is None else {self._key: 0}
        self._keys.clear()

    def _layout(self, shape: Sequence[int], samples: int) -> Layout | None:
        """How ``shape`` is cut; the answers are kept."""
        if self._recurrent and _is_recurrent_at_work():
            return recurrent_layout_of(shape, samples)
        try:
            return self._layouts[shape, samples]
        except KeyError:
            if len(self._layouts) >= _KEPT:
                self._layouts.clear()
            layout = self._layouts[shape, samples] = layout_of(
                shape, samples, time_major=self._time_major, parameters=self._parameters
            )
            return layout

    def _keys_of(self, samples: Samples, block: int, device: torch.device, shared: bool) -> Tensor:
        """int64 (draws, samples): keys of the draws of a ``block``."""
        start = block * self._at_once + (0 if device.type == self._device else _HOST)
        draws = range(start, start + self._at_once)
        rows = range(-1, 0) if shared else range(samples.first, samples.first + samples.size)
        places = self._places.get((rows, draws, device))
        if places is None:
            if len(self._places) >= _KEPT:
                self._places.clear()
            places = self._places[rows, draws, device] = places_of(rows, draws, device)
        return keys_of(samples.key, places)


class _Looking:
    """Forwards after which it is said which other generators than torch's they drew from."""

    def __init__(self, draws: SampleDraws, told: set[tuple[str, str]]) -> None:
        self._draws = draws
        self._told = told
        self._before: list[tuple[str, Any]] = []

    def __enter__(self) -> None:
        self._before = _other_generators()
        self._draws.__enter__()

    def __exit__(self, *_: object) -> None:
        self._draws.__exit__()
        for (name, old), (_name, new) in zip(self._before, _other_generators(), strict=True):
            if old != new and (name, "") not in self._told:
                self._told.add((name, ""))
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


def _drops_within(module: nn.Module) -> bool:
    """Whether it is a recurrent layer that drops between its layers."""
    return isinstance(module, nn.RNNBase) and module.dropout > 0.0 and module.num_layers > 1


def _is_time_major(module: nn.Module) -> bool:
    """Whether it lays out time before samples, as recurrent layers always do within."""
    return getattr(module, "batch_first", True) is False or _drops_within(module)


_RECURRENT = frozenset(kind.forward.__code__ for kind in (nn.RNN, nn.LSTM, nn.GRU))
_BETWEEN = (__name__, "torch._dynamo.")
"""Whose frames stand between a layer and the question: ours, and those that hide ours."""


def _is_recurrent_at_work() -> bool:
    """Whether torch's own recurrent layer asks, which calls its kernels with nothing between."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_BETWEEN):
        frame = frame.f_back
    return frame is not None and frame.f_code in _RECURRENT


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
