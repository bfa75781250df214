"""Parameters that DeepSpeed cannot hold are refused by name, before the first step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torsh_trainer.testing.fuzzing.drawing import Combination, EngineChoice, draw
from torsh_trainer.testing.fuzzing.trial import Fuzzer

DRAWN = [draw(number) for number in range(1000)]


def with_piece(name: str) -> Combination:
    return next(d for d in DRAWN if name in d.pieces and not d.double)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (with_piece("complex"), "complex"),
        (with_piece("scalar"), "without dimensions"),
        (with_piece("double"), "of float64"),
    ],
    ids=["complex", "scalar", "float64"],
)
def test_a_parameter_of_an_odd_kind_is_refused_by_name(odd: Combination, why: str, stage: int):
    engines = [EngineChoice("deepspeed", 2, {"stage": stage})]
    with Fuzzer() as fuzzer:
        outcome = fuzzer.try_one(replace(odd, engines=engines, stops=[1], sparse=False))
    assert outcome.verdict == "refused"
    assert "cannot honour the parameter" in outcome.why
    assert why in outcome.why
