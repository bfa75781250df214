"""Habits of other engines live in ``emulation``; the rest of the core does not know their names.

Where a product may be named, it is not as something whose steps are reproduced: what reads its
files and jobs, what says how it starts processes, which plugin brings it.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from torsh_trainer.emulation import NONE, combine, knobs
from torsh_trainer.emulation.common import ZeroUnused
from torsh_trainer.emulation.deepspeed import RoundedProducts
from torsh_trainer.optim.precision import LossScaling, Precision
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.training.run_spec import RunSpec

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "torsh_trainer"

PARTS = {
    knobs.StartKnobs: RunSpec,
    knobs.RoundingKnobs: Precision,
    knobs.GrowthKnobs: LossScaling,
    knobs.UnusedKnobs: FSDP,
    knobs.SumKnobs: DDP,
}
"""Knobs of an emulation -> whose knobs they are in conf/."""

WORDS = {field.name for part in PARTS for field in fields(part)} - {"op"} | {"whole_shape"}
"""Names of habits. ``op`` is a word of collectives too."""
HABITS = re.compile(rf"\b_?({'|'.join(sorted(WORDS))})\b|phantom", re.IGNORECASE)
OP = re.compile(r"\b(_?knobs|strategy)\.op\b")
PRODUCTS = re.compile(r"deepspeed|horovod", re.IGNORECASE)

ROOMS = {
    "emulation/": "it is for this",
    "translate/": "it reads and writes these products' files",
    "dropin/": "it stands in the place of such a product for the product's own scripts",
}
"""Where habits and products are named."""

HABITS_ELSEWHERE = {
    "assemble/proving.py": (1, "an original is trained without a habit that its file asks for"),
    "distributed/data_parallel.py": (
        5,
        "a wrapper for scripts: how many backward passes it sums up",
    ),
    "integrations/horovod.py": (6, "the translation of a job, as options of that wrapper"),
}
PRODUCTS_ELSEWHERE = {
    "__init__.py": "names of integrations",
    "checkpoint/cli/": "checkpoints that these products have written",
    "config/": "the verbs that translate and prove, and their help",
    "comm/devices.py": "how each launcher is told the number of processes",
    "doctor/script/": "launch lines and images that name them",
    "hosts/": "hostfiles of these products",
    "environments/": "who started this process",
    "optim/schedule/": "schedules with the names that this product gives them",
    "integrations/": "translations in a script",
    "utils/registry.py": "which plugin brings which strategy",
    "testing/": "the plugins' tests",
    "utils/user_code.py": "which modules are libraries",
    "verify/": "an original beside its translation",
}
"""File or room -> why it names a product."""


def lines_of(path: Path, *patterns: re.Pattern[str]) -> int:
    lines = path.read_text().splitlines()
    return sum(any(pattern.search(line) for pattern in patterns) for line in lines)


def found(*patterns: re.Pattern[str]) -> dict[str, int]:
    counts = {
        path.relative_to(PACKAGE).as_posix(): lines_of(path, *patterns)
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    return {
        name: count for name, count in counts.items() if count and not name.startswith(tuple(ROOMS))
    }


def test_a_habit_is_named_in_the_room_of_emulation_alone() -> None:
    """A line that is missing here was put somewhere else: take it off the list."""
    assert found(HABITS, OP) == {name: count for name, (count, _) in HABITS_ELSEWHERE.items()}


def test_a_product_is_named_where_its_files_and_processes_are_met_and_nowhere_else() -> None:
    places = tuple(PRODUCTS_ELSEWHERE)
    assert [name for name in found(PRODUCTS) if not name.startswith(places)] == []


@pytest.mark.parametrize("place", PRODUCTS_ELSEWHERE)
def test_every_place_that_may_name_a_product_does(place: str) -> None:
    assert any(name.startswith(place) for name in found(PRODUCTS)), f"{place}: off the list"


def test_the_search_sees_what_it_is_to_see() -> None:
    assert HABITS.search("if self._knobs.zero_unused:")
    assert HABITS.search("self._zero_unused()")
    assert HABITS.search("def _phantom_step(self, lr: float)")
    assert OP.search('if self._knobs.op == "sum":')
    assert not HABITS.search("low = rounded_by_autocast(model)")


def test_nothing_is_emulated_unless_somebody_asks() -> None:
    for strategy in (DDP(), FSDP(), DDP(zero1=True)):
        assert strategy.emulation is NONE
        assert strategy.gradient_scale == 1.0
    assert Precision(params="bf16", compute="bf16").emulation is NONE
    assert LossScaling().growth is knobs.TORCHS_GROWTH
    assert combine(NONE, NONE) is NONE
    assert combine(NONE, ZeroUnused()) == ZeroUnused()
    assert combine(RoundedProducts(), ZeroUnused()) is not NONE


@pytest.mark.parametrize(("part", "owner"), PARTS.items(), ids=lambda kind: kind.__name__)
def test_a_knob_of_an_emulation_is_a_knob_of_what_the_configuration_names(part, owner) -> None:
    assert issubclass(owner, part)
    own = {field.name: field.default for field in fields(owner)}
    assert {field.name: field.default for field in fields(part)}.items() <= own.items()
