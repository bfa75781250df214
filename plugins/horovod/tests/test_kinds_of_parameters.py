"""Parameters that Horovod cannot send are refused by name, before the first step."""

from __future__ import annotations

from dataclasses import replace

from torsh_trainer.testing.fuzzing.drawing import EngineChoice, draw
from torsh_trainer.testing.fuzzing.trial import Fuzzer

ODD = next(d for d in map(draw, range(1000)) if "complex" in d.pieces)


def test_a_complex_parameter_is_refused_by_name():
    drawn = replace(
        ODD, engines=[EngineChoice("horovod", 2)], stops=[1], optimizer="SGD", micro_batch=2
    )
    with Fuzzer() as fuzzer:
        outcome = fuzzer.try_one(drawn)
    assert outcome.verdict == "refused"
    assert "cannot honour the parameter" in outcome.why
    assert "complex" in outcome.why
