"""Plain values survive JSON unchanged, and a state is taken apart by name."""

from __future__ import annotations

import json
import math
import random
from fractions import Fraction

import pytest
import torch

from torsh_trainer.checkpoint.plain import decode, encode, merge, split
from torsh_trainer.checkpoint.shards import FlatShard
from torsh_trainer.errors import ConfigError


def through_json(value):
    return decode(json.loads(json.dumps(encode(value), allow_nan=False)))


@pytest.mark.parametrize(
    "value",
    [
        {"step": 3, "lr": 1e-3, "name": "é", "none": None, "yes": True, "big": 2**80},
        {"betas": (0.9, 0.999), "nested": [1, (2, [3.5])], "empty": {}, "list": [], "tuple": ()},
        {"bytes": b"\x00\xff", 3: "a key that is a number", ("a", 1): "a tuple"},
        {"$tuple": [1, 2], "$x": {"$float": "nan"}},
        {"infinite": math.inf, "below": -math.inf, "tiny": 5e-324, "third": 1 / 3},
        random.Random(7).getstate(),
    ],
)
def test_plain_values_come_back_as_they_were(value):
    again = through_json(value)
    assert again == value
    assert repr(again) == repr(value)


def test_nan_comes_back_as_nan():
    assert math.isnan(through_json({"loss": math.nan})["loss"])


def test_something_that_is_not_plain_is_refused_with_its_place():
    with pytest.raises(ConfigError, match=r"schedule\.ratio: it is a Fraction"):
        encode({"schedule": {"ratio": Fraction(1, 3)}})


def test_a_flat_shard_is_refused_by_name():
    shard = FlatShard("w", (4,), 0, torch.ones(2))
    with pytest.raises(ConfigError, match=r"model\.w: it is a FlatShard"):
        encode({"model": {"w": shard}})


def test_a_tensor_inside_a_list_is_refused_with_its_place():
    with pytest.raises(ConfigError, match=r"groups\.0\.lr: it is a Tensor"):
        encode({"groups": [{"lr": torch.tensor(1.0)}]})


def test_split_separates_tensors_by_path_from_the_nest_of_everything_else():
    weight = torch.ones(2)
    tensors, plain = split({"model": {"a.b": weight, "n": 1}, "step": 2})
    assert tensors == {("model", "a.b"): weight}
    assert plain == {"model": {"n": 1}, "step": 2}


def test_a_tensor_below_a_key_that_is_no_string_is_refused():
    with pytest.raises(ConfigError, match="the key 0 of the state"):
        split({"state": {0: {"exp_avg": torch.ones(1)}}})


def test_merge_joins_dicts_and_keeps_the_first_of_two_values():
    assert merge([{"a": {"x": 1}, "s": 1}, {"a": {"x": 5, "y": 2}, "s": 7, "t": 3}]) == {
        "a": {"x": 1, "y": 2},
        "s": 1,
        "t": 3,
    }
