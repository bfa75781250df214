"""What a name of a script may mean, for who writes it in a file of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torsh_trainer.translate.python.frames import Frame, WalkedStep
from torsh_trainer.translate.python.training import WrittenExpression
from torsh_trainer.translate.python.values import Thing


@dataclass(frozen=True)
class Variable:
    """A name in one frame, or an attribute of one object."""

    owner: int
    name: str
    frame: Frame | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class ConstantValue:
    """A value that is written as it is."""

    value: Any


@dataclass(frozen=True)
class ImportBinding:
    """A name that import statements bind: those of the frame that has them."""

    steps: tuple[WalkedStep, ...]
    name: str


@dataclass(frozen=True)
class ProjectName:
    """Something at the top level of a module of the user's: ``attribute`` of ``file``; the module
    itself where ``attribute`` is empty."""

    file: str
    attribute: str


@dataclass(frozen=True)
class Arguments:
    """The namespace of argparse."""

    thing: Thing = field(compare=False)


@dataclass(frozen=True)
class Model:
    """The model that is trained, or the engine around it."""


@dataclass(frozen=True)
class LocalVariable:
    """A variable of the script: made by the steps of ``frame`` before ``at``."""

    variable: Variable
    frame: Frame
    at: int


@dataclass(frozen=True)
class GivenParameter:
    """A parameter: ``written`` is the expression of the call."""

    variable: Variable
    written: WrittenExpression


@dataclass(frozen=True)
class Builtin:
    """A name of Python's own."""


@dataclass(frozen=True)
class Lost:
    """What reading cannot carry: ``why``, and what to do."""

    why: str
    fix: str


Meaning = (
    ConstantValue
    | ImportBinding
    | ProjectName
    | Arguments
    | Model
    | LocalVariable
    | GivenParameter
    | Builtin
    | Lost
)
