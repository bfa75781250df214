"""Give any two of batch size, micro-batch size and accumulation; the third follows."""

from __future__ import annotations

import pytest

from torsh_trainer.data.arithmetic import batch_numbers, batch_numbers_on_resume
from torsh_trainer.data.loading import Loading
from torsh_trainer.errors import ConfigError
from torsh_trainer.utils.duration import seconds


@pytest.mark.parametrize(
    ("batch", "micro", "accumulate", "ranks"),
    [(64, 16, None, 2), (64, None, 2, 2), (None, 16, 2, 2), (64, 16, 2, 2)],
)
def test_any_two_give_the_third(batch, micro, accumulate, ranks) -> None:
    loading = Loading(batch_size=batch, micro_batch_size=micro)
    assert batch_numbers(loading, accumulate=accumulate, dp_size=ranks) == (64, 16, 2)


def test_a_batch_size_alone_is_cut_over_the_processes_without_accumulation() -> None:
    assert batch_numbers(Loading(batch_size=64), accumulate=None, dp_size=4) == (64, 16, 1)


def test_three_numbers_that_contradict_are_refused() -> None:
    loading = Loading(batch_size=64, micro_batch_size=16)
    with pytest.raises(ConfigError, match="two of the three"):
        batch_numbers(loading, accumulate=4, dp_size=2)


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_does() -> None:
    with pytest.raises(ConfigError, match="63 or 66"):
        batch_numbers(Loading(batch_size=64), accumulate=None, dp_size=3)
    with pytest.raises(ConfigError, match=r"data\.batch_size=4 would"):
        batch_numbers(Loading(batch_size=2), accumulate=None, dp_size=4)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 2), (4, 1), (2, 1)])
def test_a_global_batch_keeps_its_micro_batch_on_another_number_of_ranks(before, after) -> None:
    loading = Loading(batch_size=64)
    saved = batch_numbers(
        Loading(batch_size=64, micro_batch_size=8), accumulate=None, dp_size=before
    )
    batch, micro, accumulate = batch_numbers_on_resume(
        loading, accumulate=None, dp_size=after, saved_micro_batch_size=saved[1]
    )
    assert (batch, micro) == saved[:2]
    assert batch == micro * accumulate * after


def test_a_micro_batch_that_no_longer_divides_becomes_the_largest_that_does() -> None:
    alone = batch_numbers(Loading(batch_size=48), accumulate=None, dp_size=1)
    two = batch_numbers_on_resume(
        Loading(batch_size=48), accumulate=None, dp_size=2, saved_micro_batch_size=alone[1]
    )
    assert two == (48, 24, 1)
    odd = batch_numbers_on_resume(
        Loading(batch_size=48), accumulate=None, dp_size=2, saved_micro_batch_size=16
    )
    assert odd == (48, 12, 2)


@pytest.mark.parametrize(
    ("loading", "accumulate"),
    [
        (Loading(batch_size=64, micro_batch_size=16), None),
        (Loading(batch_size=64), 1),
        (Loading(micro_batch_size=16), 2),
    ],
)
def test_numbers_that_the_knobs_fix_stand_on_a_resume(loading, accumulate) -> None:
    for ranks in (1, 2, 4):
        told = batch_numbers(loading, accumulate=accumulate, dp_size=ranks)
        resumed = batch_numbers_on_resume(
            loading, accumulate=accumulate, dp_size=ranks, saved_micro_batch_size=4
        )
        assert resumed == told


def test_a_global_batch_that_does_not_divide_over_the_new_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="63 or 66"):
        batch_numbers_on_resume(
            Loading(batch_size=64), accumulate=None, dp_size=3, saved_micro_batch_size=8
        )


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (90, 90.0),
        ("90", 90.0),
        ("90m", 5400.0),
        ("1h30m", 5400.0),
        ("1h 30m 5s", 5405.0),
        ("00:30:00", 1800.0),
        ("30:00", 1800.0),
        ("2-12:00:00", 216000.0),
        (None, None),
    ],
)
def test_durations_are_read_as_users_write_them(written, expected) -> None:
    assert seconds(written, option="trainer.max_time") == expected


@pytest.mark.parametrize("written", ["soon", "1x", "-5", 0, "1:2:3:4", "a:b", "h"])
def test_what_is_no_duration_is_refused_by_name(written) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.max_time"):
        seconds(written, option="trainer.max_time")
