"""The contract of gradient compression: what is done to gradients before they cross processes.

Knobs are apart from the running thing. A ``Compression`` is a frozen dataclass (what YAML names); a
strategy that honours it makes a ``reducer.GradientReducer`` of it, which holds all state.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from torsh_trainer.errors import ConfigError, nearest

if TYPE_CHECKING:
    from torsh_trainer.comm.compression.method import Draw, Method
    from torsh_trainer.comm.compression.wire import Wire

Memory = Literal["residual", "none"]


class Compression:
    """What is done to gradients before they cross processes; frozen knobs."""

    name: ClassVar[str]


@dataclass(frozen=True)
class NoCompression(Compression):
    """Gradients travel as they are."""

    name: ClassVar[str] = "none"


@dataclass(frozen=True, kw_only=True)
class Compressing(Compression, abc.ABC):
    """The knobs that every method has.

    ``memory`` is residual (what was not sent is kept in fp32 and added to the next gradient) or
    none (it is lost). The first ``warmup_steps`` optimizer steps send gradients as they are. So do
    parameters whose names match a pattern in ``exclude`` (fnmatch) and those with fewer than
    ``min_size`` elements.

    Raises:
        ConfigError: a knob is out of range.
    """

    memory: Memory = "residual"
    warmup_steps: int = 0
    exclude: tuple[str, ...] = ()
    min_size: int = 1024

    sums: ClassVar[bool] = False
    """What is sent can be added up in the network; else everybody receives everybody's."""

    def __post_init__(self) -> None:
        if self.memory not in ("residual", "none"):
            raise ConfigError(
                f"compression.memory={self.memory} is unknown",
                fix=nearest(str(self.memory), ("residual", "none")),
            )
        exclude: object = self.exclude
        if isinstance(exclude, str):
            raise ConfigError(
                f"compression.exclude={exclude} is not a list",
                fix=f"write compression.exclude=[{exclude}]",
            )
        at_least(self, "warmup_steps", 0)
        at_least(self, "min_size", 0)

    @property
    def keeps_residual(self) -> bool:
        """Whether what was not sent is kept."""
        return self.memory == "residual"

    @abc.abstractmethod
    def method(self, wire: Wire, draw: Draw) -> Method:
        """The running part: how the values of one bucket are sent and averaged."""


def at_least(knobs: Compression, name: str, least: int) -> None:
    """Refuses a count below ``least``.

    Raises:
        ConfigError: names the knob.
    """
    value = getattr(knobs, name)
    if value < least:
        raise ConfigError(
            f"compression.{name}={value} is below {least}", fix=f"give {least} or more"
        )


def check_ratio(ratio: float, *, usual: str) -> None:
    """Refuses a share of elements outside (0, 1].

    Raises:
        ConfigError: names the knob and a usual value.
    """
    if not 0.0 < ratio <= 1.0:
        raise ConfigError(
            f"compression.ratio={ratio} is not in (0, 1]",
            fix=f"it is the share of elements that is sent: {usual} is usual",
        )


def choose(knobs: Compression, name: str, known: tuple[str, ...]) -> None:
    """Refuses a word that a knob does not know.

    Raises:
        ConfigError: names the knob and the nearest word.
    """
    value = getattr(knobs, name)
    if value not in known:
        raise ConfigError(f"compression.{name}={value} is unknown", fix=nearest(str(value), known))
