"""The test matrix of a repository as values: its contract classes, and its matrix of resumption.

Test modules are imported, so that what is read is what pytest would run.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torsh_trainer.errors import ResourceError
from torsh_trainer.testing import reference, strategy
from torsh_trainer.testing.communicator import CommunicatorContract
from torsh_trainer.testing.compare import Tolerance
from torsh_trainer.testing.environment import EnvironmentContract
from torsh_trainer.testing.fuzzing.record import FuzzRecord, read_record
from torsh_trainer.testing.launcher import LauncherContract
from torsh_trainer.testing.strategy import StrategyContract
from torsh_trainer.training.resume import strategy_facts

FOLDERS = ("tests", "plugins/*/tests")
RANKS = ("distributed", "tests")
"""Folders of tests on real ranks: ours, and a plugin's."""
FUZZED = "tests/distributed/fuzzed.json"
"""Figures of the last random combinations."""
CONTRACTS = (StrategyContract, CommunicatorContract, LauncherContract, EnvironmentContract)
ARITHMETICS: Mapping[str, reference.Scenario] = {
    "fp32, SGD": reference.Scenario(),
    "fp32, AdamW": reference.Scenario(optimizer="adamw"),
    "bf16 mixed": reference.Scenario(precision=strategy.BF16_MIXED),
    "bf16 true": reference.Scenario(precision=strategy.BF16_TRUE),
    "fp16 mixed": reference.Scenario(precision=strategy.FP16_MIXED),
    "reduced in bf16": reference.Scenario(precision=strategy.BF16_REDUCED),
}
NEEDED: Mapping[str, str] = {
    "bf16 mixed": "bf16_mixed",
    "bf16 true": "bf16_true",
    "fp16 mixed": "fp16_mixed",
    "reduced in bf16": "reduce_bf16",
}
"""The capability that an arithmetic is, where it is one."""
_COMPARES = re.compile(r"_equals\(|_compare\(|same_tensors\(|same_resumed\(")
_PRECISIONS = {
    "BF16_MIXED": "bf16 mixed",
    "BF16_TRUE": "bf16 true",
    "FP16_MIXED": "fp16 mixed",
    "BF16_REDUCED": "reduced in bf16",
}


@dataclass(frozen=True)
class Case:
    """A contract class: ``file`` and ``name``, what it is about, on how many ranks, over what."""

    file: str
    name: str
    about: str
    ranks: tuple[int, ...]
    backend: str
    refuses: Mapping[str, str]
    bounds: Mapping[str, Tolerance]

    @property
    def test(self) -> str:
        """As pytest takes it."""
        return f"{self.file}::{self.name}"


@dataclass(frozen=True)
class Property:
    """A test of a contract: its sentence, what it needs, and the arithmetic that bounds it."""

    name: str
    needs: str
    arithmetic: str

    @property
    def sentence(self) -> str:
        """Its name as words."""
        return sentence_of(self.name)


@dataclass(frozen=True)
class TestReference:
    """Another test: its file and name, and in how many cases it runs."""

    file: str
    name: str
    cases: int

    @property
    def sentence(self) -> str:
        """Its name as words."""
        return sentence_of(self.name)


@dataclass(frozen=True)
class Moves:
    """A matrix of resumption: who goes on as whom, on how many ranks before and after."""

    file: str
    strategies: Mapping[int, tuple[str, ...]]
    moves: tuple[tuple[int, int], ...]
    bounds: Mapping[str, float]

    @property
    def journeys(self) -> int:
        """How many pairs of a source and a target there are."""
        return sum(len(self.strategies[a]) * len(self.strategies[b]) for a, b in self.moves)


@dataclass(frozen=True)
class Matrix:
    """All that the page tells."""

    cases: Mapping[str, tuple[Case, ...]]
    properties: Mapping[str, tuple[Property, ...]]
    moves: tuple[Moves, ...]
    resumption: tuple[TestReference, ...]
    controls: tuple[TestReference, ...]
    fuzzed: FuzzRecord | None


def sentence_of(name: str) -> str:
    """``test_a_run_goes_on`` as words: ``a run goes on``."""
    return name.removeprefix("test_").replace("_", " ")


def read(root: Path) -> Matrix:
    """The test matrix of the repository at ``root``.

    Raises:
        ResourceError: a test module cannot be imported: its engine is not installed.
    """
    files = [file for pattern in FOLDERS for file in sorted(root.glob(f"{pattern}/**/test_*.py"))]
    cases: dict[str, list[Case]] = {contract.__name__: [] for contract in CONTRACTS}
    moves: list[Moves] = []
    resumption: list[TestReference] = []
    controls: list[TestReference] = []
    for file in files:
        place = file.relative_to(root).as_posix()
        resumes = file.name.startswith("test_resume") and file.parent.name in RANKS
        has_teeth = file.name.endswith("_has_teeth.py")
        if not (resumes or has_teeth or _holds_a_contract(file)):
            continue
        module = import_test(file, place)
        for contract, case in _cases(module, place):
            cases[contract].append(case)
        if resumes:
            resumption += _trials(module, place)
            moves += _moves(module, place)
        if has_teeth:
            controls += _trials(module, place)
    return Matrix(
        cases={name: tuple(found) for name, found in cases.items()},
        properties={c.__name__: tuple(_properties(c)) for c in CONTRACTS},
        moves=tuple(moves),
        resumption=tuple(resumption),
        controls=tuple(controls),
        fuzzed=read_record(root / FUZZED),
    )


def _holds_a_contract(file: Path) -> bool:
    """Whether a class in it inherits a contract; found without importing it."""
    names = {contract.__name__ for contract in CONTRACTS}
    return any(
        isinstance(node, ast.ClassDef)
        and names & {getattr(base, "id", getattr(base, "attr", "")) for base in node.bases}
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    )


def import_test(file: Path, place: str) -> ModuleType:
    """The module of a test, which stands at ``place`` in the repository.

    Raises:
        ResourceError: it imports what is not installed.
    """
    name = "guarantees_" + re.sub(r"\W", "_", place.removesuffix(".py"))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None, "a file of Python has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up there
    sys.path.insert(0, str(file.parent))  # helpers of tests lie beside them
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise ResourceError(
            f"{place} cannot be imported: {error}", fix="install what it tests (make test does)"
        ) from error
    finally:
        sys.path.remove(str(file.parent))
    return module


def _cases(module: ModuleType, place: str) -> Iterator[tuple[str, Case]]:
    for name, value in vars(module).items():
        if not (isinstance(value, type) and name.startswith("Test")):
            continue
        for contract in CONTRACTS:
            tried = getattr(value, "device", "cpu") == "cpu"  # nobody has run them on a GPU
            if issubclass(value, contract) and value is not contract and tried:
                yield contract.__name__, _case(value, place, name)


def _case(cls: Any, place: str, name: str) -> Case:
    sizes = getattr(cls, "world_sizes", None) or (getattr(cls, "processes", 1),)
    options = getattr(cls, "comm_options", None)
    backend = "" if options is None else options.backend
    bounds = {}
    about = getattr(cls, "strategy", None) or getattr(cls, "launcher", None)
    if issubclass(cls, StrategyContract):
        judge = cls()
        bounds = {name: judge._tolerance(scenario) for name, scenario in ARITHMETICS.items()}
        words = strategy_facts(cls.strategy)["strategy"]
        for axis, count in (
            ("model_replicate", cls.model_replicate),
            ("tp", cls.tensor_parallel),
            ("pp", cls.pipeline_parallel),
        ):
            if count > 1:
                words += f" on mesh({axis}={count})"
                sizes = [size * count for size in sizes]
    else:
        words = getattr(about, "name", "") or name.removeprefix("Test").lower()
    refuses = dict(getattr(cls, "refuses", {}))
    backend = "gloo" if backend == "auto" else backend
    if max(sizes) == 1:
        backend = ""  # there is nobody to talk to
    return Case(place, name, words, tuple(sizes), backend, refuses, bounds)


def _properties(contract: type) -> Iterator[Property]:
    for name, function in vars(contract).items():
        if name.startswith("test_"):
            source = inspect.getsource(function)
            needs = re.search(r"""needs="(\w+)"|_refused\("(\w+)\"""", source)
            precision = re.search(r"precision=([A-Z]\w+)", source)
            adam = 'optimizer="adamw"' in source
            arithmetic = "fp32, AdamW" if adam else "fp32, SGD"
            if precision is not None:
                arithmetic = _PRECISIONS[precision[1]]
            found = needs and (needs[1] or needs[2])
            yield Property(name, found or "", arithmetic if _COMPARES.search(source) else "")


def _trials(module: ModuleType, place: str) -> Iterator[TestReference]:
    for name, function in vars(module).items():
        if name.startswith("test_") and callable(function):
            marks = getattr(function, "pytestmark", [])
            counts = [len(list(m.args[1])) for m in marks if m.name == "parametrize"]
            yield TestReference(place, name, math.prod(counts))


def _moves(module: ModuleType, place: str) -> Iterator[Moves]:
    """The matrix of a module that has one: ``MOVES``, ``BOUNDS`` and ``strategies(size)``."""
    if not all(hasattr(module, name) for name in ("MOVES", "BOUNDS", "strategies")):
        return
    sizes = sorted({size for move in module.MOVES for size in move})
    named = {size: tuple(module.strategies(size)) for size in sizes}
    yield Moves(place, named, tuple(module.MOVES), dict(module.BOUNDS))
