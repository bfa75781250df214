"""The fuzzer: random combinations equal plain PyTorch or are refused, and it sees what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from torsh_trainer.testing.fuzzing.drawing import draw
from torsh_trainer.testing.fuzzing.plain import TrainingTrace, train_plainly
from torsh_trainer.testing.fuzzing.record import read_record, write_range
from torsh_trainer.testing.fuzzing.trial import Fuzzer, compare

DRAWN = 40


@pytest.fixture(scope="module")
def fuzzer() -> Iterator[Fuzzer]:
    with Fuzzer() as made:
        yield made


@pytest.mark.matrix(2)
@pytest.mark.parametrize("first", range(0, DRAWN, 10))
def test_no_combination_is_wrong_without_a_word(fuzzer, first):
    drawn = [draw(number) for number in range(first, first + 10)]
    outcomes = [(fuzzer.try_one(one), one) for one in drawn]
    wrong = [f"{o.verdict}: {o.why} {one}" for o, one in outcomes if o.verdict.isupper()]
    assert wrong == []
    assert sum(outcome.verdict == "agrees" for outcome, _ in outcomes) >= 5


CUT = ("parallel", "parallel", "fsdp")


@pytest.mark.parametrize(
    "first",
    [
        901018,  # an fp64 layer in one stage alone: stages summed squares of two dtypes
        pytest.param(901030, marks=pytest.mark.exhaustive),
    ],
)
def test_no_mesh_is_wrong_without_a_word(fuzzer, first):
    drawn = [draw(number, strategies=CUT) for number in range(first, first + 6)]
    outcomes = [(fuzzer.try_one(one), one) for one in drawn]
    wrong = [f"{o.verdict}: {o.why} {one}" for o, one in outcomes if o.verdict.isupper()]
    assert wrong == []
    assert sum(outcome.verdict == "agrees" for outcome, _ in outcomes) >= 2


def test_statistics_of_other_replicas_fade_while_micro_batches_are_under_way(fuzzer):
    """BatchNorm in a stage that has several of them between forward and backward."""
    drawn = draw(905067, processes=(4,), strategies=("parallel",))
    drawn = replace(drawn, engines=drawn.engines[:1], stops=drawn.stops[:1])
    [engine] = drawn.engines
    assert engine.mesh == {"pp": 2, "dp_replicate": 2, "dp_shard": 1}
    assert "batch_norm" in drawn.pieces
    outcome = fuzzer.try_one(drawn)
    assert outcome.verdict == "agrees", outcome


PLAIN = next(
    d
    for d in map(draw, range(1000))
    if d.max_norm and len(d.engines) > 1 and d.double and "reads" not in d.pieces
)


@pytest.mark.parametrize(
    "other",
    [
        replace(PLAIN, max_norm=None),
        replace(PLAIN, drop_last=True, samples=PLAIN.batch_size + 1),
        replace(PLAIN, shuffle=not PLAIN.shuffle),
        replace(PLAIN, ema=0.5),
    ],
    ids=["no clipping", "other samples", "another order", "another average"],
)
def test_it_sees_a_result_that_is_wrong(fuzzer, other):
    assert fuzzer.try_one(PLAIN).verdict == "agrees"
    assert fuzzer.try_one(PLAIN, right=train_plainly(other)).verdict == "DIFFERS"


def test_a_combination_is_a_function_of_its_number():
    assert [draw(n) for n in range(50)] == [draw(n) for n in range(50)]
    assert len({str(draw(n)) for n in range(50)}) == 50


def test_ranges_add_up_and_one_tried_again_replaces_its_own(tmp_path):
    file = tmp_path / "fuzzed.json"
    assert read_record(file) is None
    write_range(
        file, 0, 10, {"agrees": 7, "DIFFERS": 3}, ["DIFFERS: a", "DIFFERS: b", "DIFFERS: c"]
    )
    write_range(file, 10, 5, {"agrees": 5}, [])
    write_range(file, 0, 10, {"agrees": 9, "DIFFERS": 1}, ["DIFFERS: a"])
    record = read_record(file)
    assert record is not None
    assert record.verdicts == {"agrees": 14, "DIFFERS": 1}
    assert (record.combinations, record.wrong) == (15, ["DIFFERS: a"])
    with pytest.raises(ValueError, match="figures from 10 on"):
        write_range(file, 12, 4, {"agrees": 4}, [])


def test_only_steps_made_of_rounding_are_left_out_and_only_where_they_are_divided_by_it():
    right = TrainingTrace(norms={1: 1.0}, parameters={"bias": torch.zeros(4)})
    right.slopes["bias"] = torch.tensor([1e-9, 0.5, 0.0, 1e-9])
    noise = TrainingTrace(norms={1: 1.0}, parameters={"bias": torch.tensor([0.1, 0.0, 0.0, -0.1])})
    assert compare(noise, right, divides=True)[0] == 0.0
    assert compare(noise, right)[0] == pytest.approx(1.0)
    for place in (1, 2):  # a slope that says something, and one of nothing at all
        wrong = TrainingTrace(norms={1: 1.0}, parameters={"bias": torch.zeros(4)})
        wrong.parameters["bias"][place] = 0.1
        assert compare(wrong, right, divides=True)[0] == pytest.approx(1.0)
