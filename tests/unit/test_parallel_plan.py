"""Plans of which layers are cut: patterns, styles, sizes."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from torsh_trainer.errors import ConfigError, Unsupported
from torsh_trainer.mesh import Mesh
from torsh_trainer.strategies.tensor_parallel.layers import find_cuts
from torsh_trainer.strategies.tensor_parallel.plan import (
    ParallelPlan,
    Style,
    check_sizes,
    find_plan,
    matches,
)
from torsh_trainer.tasks.base import Task
from torsh_trainer.tasks.models import GPT, MLP

TP = Mesh(tp=2)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("blocks.*.up", "blocks.0.up", True),
        ("blocks.*.up", "blocks.0.more.up", False),
        ("blocks.[01].up", "blocks.2.up", False),
        ("*.*.*_proj", "layers.1.q_proj", True),
        ("head", "model.head", False),
    ],
)
def test_a_sign_stands_within_one_name_between_dots(
    pattern: str, name: str, expected: bool
) -> None:
    assert matches(pattern, name) is expected


class Planned(Task):
    def parallel_plan(self, mesh: Any) -> dict[str, Any]:
        return {"0": "rowwise"} if mesh.tp == 2 else {}


def test_the_task_comes_first_then_the_table_then_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    assert find_plan(model, Planned(), {"0": "colwise"}, TP).source == "of the task"
    assert find_plan(model, Task(), {"0": "colwise"}, TP).source == "strategy.plan"
    made = find_plan(MLP(hidden=(8, 8), out_features=3), Task(), {}, TP)
    assert made.summary == "1 colwise, 1 rowwise (the model's own)"
    dropping = find_plan(MLP(hidden=(8,), dropout=0.1), Task(), {}, TP)
    assert dropping.styles["layers.1"].kind == "colwise_gather"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("column", "'column' of 'a', which is no style"),
        ({"style": "colwise", "part": 3}, "part=3 of 'a'"),
        ({"style": "colwise", "parts": 0}, "parts=0 of 'a'"),
        ({"parts": 3}, "'None' of 'a', which is no style"),
        ("sequence", "'sequence' of 'a', which is no style"),
    ],
)
def test_a_style_that_nobody_knows_is_one_sentence(given: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Style.read(given, "a")
    assert words in str(caught.value)


def test_a_fused_projection_wants_its_inputs_to_divide_over_shards() -> None:
    model = GPT(width=12, heads=2, layers=1)
    plan = find_plan(model, Task(), {}, TP)
    check_sizes(model, plan, tp=2, dp_shard=3)
    with pytest.raises(ConfigError) as caught:
        check_sizes(model, plan, tp=2, dp_shard=5)
    words = "mesh.dp_shard=5 does not divide the 12 inputs of 'blocks.0.qkv'; the nearest that it"
    assert words in str(caught.value)
    assert "are 10 or 15" in str(caught.value)


def test_tied_weights_that_are_cut_in_two_ways_are_refused_by_name() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embedding"].weight
    alike = {"embedding": Style("rowwise"), "head": Style("colwise_gather")}
    assert len(find_cuts(model, ParallelPlan(alike, "a test"))) == 1
    for other in ({"embedding": Style("rowwise")}, {**alike, "head": Style("rowwise")}):
        with pytest.raises(Unsupported, match=r"'embedding\.weight' and 'head\.weight' are one"):
            find_cuts(model, ParallelPlan(other, "a test"))
