"""Optimizers from specs do what torch's own do; every option is honoured or refused by name."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from torsh_trainer.errors import ConfigError, Unsupported
from torsh_trainer.optim.optimizers import (
    _FUSED,
    _FUSED_DEVICES,
    RESERVED,
    OptimizerSpec,
    arguments,
    short_names,
)

CONF = Path(__file__).resolve().parents[2] / "conf" / "optimizer"
USABLE = sorted(set(short_names()) - {"lbfgs"})
DENSE = sorted(set(USABLE) - {"muon", "sparseadam"})


class Mine(torch.optim.SGD):
    """An optimizer as a user writes one: required and keyword arguments of its own."""

    def __init__(self, params: Any, lr: float, *, power: float = 1.0) -> None:
        self.power = power
        super().__init__(params, lr=lr * power)


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


def small_model(*, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [nn.Linear(6, 8, bias=bias), nn.Tanh(), nn.Linear(8, 3, bias=bias)]
    if bias:
        parts.insert(1, nn.LayerNorm(8))
    return nn.Sequential(*parts)


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 5) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(4, 6, generator=generator)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, name=name: f"{name}: {m}")


def plain(name: str) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))


def names_in(optimizer: torch.optim.Optimizer) -> list[list[str]]:
    return [group["param_names"] for group in optimizer.param_groups]


# -- configuration -------------------------------------------------------------------------------


def test_every_usable_optimizer_of_torch_has_its_yaml() -> None:
    assert sorted(p.stem for p in CONF.glob("*.yaml")) == sorted([*USABLE, "custom"])


@pytest.mark.parametrize("name", USABLE)
def test_the_yaml_holds_the_defaults_of_the_class_and_ours(name: str) -> None:
    node = plain(name)
    assert node.pop("_target_") == f"torch.optim.{short_names()[name].__name__}"
    ours = {key: node.pop(key) for key in RESERVED}
    theirs = {
        key: list(default) if isinstance(default, tuple) else default
        for key, default in arguments(short_names()[name]).items()
        if key != "fused"
    }
    assert node == theirs
    defaults = {key: inspect.signature(OptimizerSpec).parameters[key].default for key in ours}
    if name == "muon":  # without a second optimizer it could train hardly any model
        assert OptimizerSpec.from_config(ours.pop("others")).target == "torch.optim.AdamW"
        del defaults["others"]
    listed = {k: list(v) if isinstance(v, tuple) else v for k, v in defaults.items()}
    assert ours == listed


@pytest.mark.parametrize("name", USABLE)
def test_the_yaml_builds_what_torch_builds_by_default(name: str) -> None:
    spec = OptimizerSpec.from_config({**plain(name), "others": None, "no_decay": False})
    model = small_model(bias=name != "muon")
    built = spec.build(model.named_parameters())
    reference = short_names()[name](model.parameters())
    assert type(built) is type(reference)
    ignored = ("params", "param_names", "fused")
    kept = {k: v for k, v in built.param_groups[0].items() if k not in ignored}
    assert kept == {k: v for k, v in reference.param_groups[0].items() if k not in ignored}


def test_a_config_without_lr_takes_the_class_default() -> None:
    reference = torch.optim.Adadelta([nn.Parameter(torch.zeros(1))]).defaults["lr"]
    assert OptimizerSpec.from_config({"_target_": "torch.optim.Adadelta"}).lr == reference


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"weigth_decay": 0.1}, "did you mean 'weight_decay'"),
        ({"lr": "fast"}, "optimizer.lr='fast' is not a number"),
        ({"lr": True}, "is not a number"),
        ({"lr": -1.0}, "optimizer.lr=-1.0"),
        ({"lr": math.nan}, "optimizer.lr=nan"),
        ({"eps": "small"}, "optimizer.eps='small' is not a number"),
        ({"amsgrad": 1}, "optimizer.amsgrad=1 is not true or false"),
        ({"betas": 0.9}, "a list of 2 numbers"),
        ({"betas": [0.9]}, "a list of 2 numbers"),
        ({"no_decay": "yes"}, "optimizer.no_decay='yes'"),
        ({"fused": "auto"}, "optimizer.fused='auto'"),
        ({"lr_scaling": "linaer"}, "did you mean 'linear'"),
        ({"groups": ["head.*"]}, r"optimizer.groups\[0\]"),
        ({"groups": [{"match": "head.*"}]}, r"optimizer.groups\[0\]"),
        ({"groups": [{"match": "*", "lr": "x"}]}, r"optimizer.groups\[0\].lr='x'"),
        ({"groups": [{"match": "*", "momentun": 1}]}, r"groups\[0\]: AdamW has no option"),
        ({"others_match": ["x"]}, "optimizer.others is not"),
        ({"others": {"_target_": "torch.optim.SGD", "lr_scaling": "sqrt"}}, "lr_scaling or others"),
        ({"_target_": "torch.optim.AdmaW"}, "AdamW"),
        ({"_target_": "no_such_package.Thing"}, "there is no module 'no_such_package'"),
        ({"_target_": "torch.nn.Linear"}, "not a class derived from"),
    ],
)
def test_a_bad_node_is_refused_in_words(node: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        OptimizerSpec.from_config({"_target_": "torch.optim.AdamW", "lr": 1e-3, **node})


# -- classes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("fused", [None, False])
def test_every_class_trains_as_torch_does(name: str, fused: bool | None) -> None:
    ours, theirs = small_model(), small_model()
    spec = OptimizerSpec(name, lr=0.01, no_decay=False, fused=fused)
    train(ours, spec.build(ours.named_parameters()))
    train(theirs, short_names()[name](theirs.parameters(), lr=0.01))
    assert_same(ours, theirs)


def test_sparse_adam_trains_sparse_gradients_as_torch_does() -> None:
    def step(make: Any) -> nn.Embedding:
        torch.manual_seed(0)
        table = nn.Embedding(10, 4, sparse=True)
        optimizer = make(table)
        table(torch.tensor([1, 3, 3])).sum().backward()
        optimizer.step()
        return table

    ours = step(lambda t: OptimizerSpec("SparseAdam", lr=0.1).build(t.named_parameters()))
    assert_same(ours, step(lambda t: torch.optim.SparseAdam(t.parameters(), lr=0.1)))


@pytest.mark.parametrize(
    "target", ["adamw", "ADAMW", "AdamW", "torch.optim.AdamW", "torch.optim:AdamW"]
)
def test_a_class_has_many_names(target: str) -> None:
    assert type(OptimizerSpec(target).build(small_model().named_parameters())) is torch.optim.AdamW


def test_a_class_of_the_users_own_is_built_with_its_own_options() -> None:
    ours, theirs = small_model(), small_model()
    spec = OptimizerSpec(Mine, lr=0.1, options={"power": 2.0})
    built = spec.build(ours.named_parameters())
    assert type(built) is Mine
    train(ours, built)
    train(theirs, Mine(theirs.parameters(), 0.1, power=2.0))
    assert_same(ours, theirs)


@pytest.mark.parametrize("target", ["LBFGS", "torch.optim.LBFGS", NeedsClosure])
def test_an_optimizer_that_needs_a_closure_is_refused_by_name(target: Any) -> None:
    with pytest.raises(Unsupported, match=r"(LBFGS|NeedsClosure) needs a closure"):
        OptimizerSpec(target).build(small_model().named_parameters())


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'rmsprop'"):
        OptimizerSpec("rmspropp").build(small_model().named_parameters())


def test_a_value_that_torch_refuses_is_told_in_its_words() -> None:
    with pytest.raises(ConfigError, match="AdamW refuses its options: Invalid beta"):
        OptimizerSpec(options={"betas": (2.0, 0.9)}).build(small_model().named_parameters())


def test_no_parameters_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no parameters"):
        OptimizerSpec().build([])


@pytest.mark.parametrize("option", ["differentiable", "capturable"])
def test_modes_that_a_run_cannot_have_are_refused(option: str) -> None:
    with pytest.raises(Unsupported, match=f"optimizer.{option}=true"):
        OptimizerSpec(options={option: True}).build(small_model().named_parameters())


# -- groups --------------------------------------------------------------------------------------


def test_norms_and_biases_do_not_decay() -> None:
    ours, theirs = small_model(), small_model()
    built = OptimizerSpec(lr=0.01, options={"weight_decay": 0.5}).build(ours.named_parameters())
    named = dict(theirs.named_parameters())
    matrices = [p for p in named.values() if p.ndim >= 2]
    rest = [p for p in named.values() if p.ndim < 2]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}], lr=0.01
    )
    train(ours, built)
    train(theirs, reference)
    assert_same(ours, theirs)
    assert names_in(built) == [
        [n for n, p in named.items() if p.ndim >= 2],
        [n for n, p in named.items() if p.ndim < 2],
    ]


@pytest.mark.parametrize(
    "spec",
    [
        OptimizerSpec("SGD"),
        OptimizerSpec("SGD", options={"weight_decay": 0.0}),
        OptimizerSpec("AdamW", no_decay=False),
        OptimizerSpec("SparseAdam"),
    ],
    ids=["no decay by default", "no decay", "switched off", "no such option"],
)
def test_one_group_in_the_models_order_where_there_is_nothing_to_split(spec: Any) -> None:
    model = small_model()
    assert names_in(spec.build(model.named_parameters())) == [list(dict(model.named_parameters()))]


def test_the_class_default_of_weight_decay_counts() -> None:
    assert torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).defaults["weight_decay"] > 0
    groups = OptimizerSpec("AdamW").build(small_model().named_parameters()).param_groups
    assert [group["weight_decay"] > 0 for group in groups] == [True, False]


def test_groups_override_settings_by_pattern_and_the_first_match_wins() -> None:
    ours, theirs = small_model(), small_model()
    spec = OptimizerSpec(
        "SGD",
        lr=0.1,
        groups=({"match": "3.weight", "lr": 0.5}, {"match": ["3.*", "0.bias"], "momentum": 0.9}),
    )
    built = spec.build(ours.named_parameters())
    named = dict(theirs.named_parameters())
    reference = torch.optim.SGD(
        [
            {"params": [named[n] for n in ("0.weight", "1.weight", "1.bias")]},
            {"params": [named["3.weight"]], "lr": 0.5},
            {"params": [named["0.bias"], named["3.bias"]], "momentum": 0.9},
        ],
        lr=0.1,
    )
    train(ours, built)
    train(theirs, reference)
    assert_same(ours, theirs)
    assert names_in(built)[2] == ["0.bias", "3.bias"]


def test_a_group_splits_for_decay_unless_it_sets_the_decay_itself() -> None:
    named = small_model().named_parameters()
    spec = OptimizerSpec(
        options={"weight_decay": 0.1},
        groups=({"match": "3.*", "lr": 0.5}, {"match": "0.*", "weight_decay": 0.3}),
    )
    table = {
        name: (group["lr"], group["weight_decay"])
        for group in spec.build(named).param_groups
        for name in group["param_names"]
    }
    assert table == {
        "0.weight": (spec.lr, 0.3),
        "0.bias": (spec.lr, 0.3),
        "1.weight": (spec.lr, 0.0),
        "1.bias": (spec.lr, 0.0),
        "3.weight": (0.5, 0.1),
        "3.bias": (0.5, 0.0),
    }


def test_a_pattern_that_matches_nothing_offers_names() -> None:
    model = nn.ModuleDict({"encoder": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    spec = OptimizerSpec(groups=({"match": "haed.*", "lr": 0.1},))
    with pytest.raises(ConfigError, match=r"groups\[0\]: the pattern 'haed.\*'.*'head'"):
        spec.build(model.named_parameters())
    spec = OptimizerSpec(groups=({"match": "qqqqqq", "lr": 0.1},))
    with pytest.raises(ConfigError, match=r"the parameters are encoder\.weight, encoder\.bias"):
        spec.build(model.named_parameters())


def test_a_group_whose_parameters_all_went_to_an_earlier_one_is_an_error() -> None:
    spec = OptimizerSpec(groups=({"match": "*", "lr": 0.1}, {"match": "3.*", "lr": 0.2}))
    with pytest.raises(ConfigError, match=r"groups\[1\]: earlier groups took all"):
        spec.build(small_model().named_parameters())


def test_the_optimizers_own_state_knows_parameters_by_name() -> None:
    model = small_model()
    state = OptimizerSpec().build(model.named_parameters()).state_dict()
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    assert sorted(names) == sorted(dict(model.named_parameters()))


# -- fused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DENSE)
def test_the_default_takes_the_fused_step_where_the_class_has_one(name: str) -> None:
    group = OptimizerSpec(name).build(small_model().named_parameters()).param_groups[0]
    assert group.get("fused") == ("fused" in arguments(short_names()[name]) or None)


def test_false_and_foreach_and_other_dtypes_do_without_it() -> None:
    named = list(small_model().named_parameters())
    assert not OptimizerSpec(fused=False).build(named).param_groups[0]["fused"]
    by_foreach = OptimizerSpec(options={"foreach": True}).build(named).param_groups[0]
    assert by_foreach["foreach"]
    assert not by_foreach["fused"]
    complex_model = nn.Linear(2, 2, dtype=torch.complex64)
    built = OptimizerSpec().build(complex_model.named_parameters())
    assert not built.param_groups[0]["fused"]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (OptimizerSpec("RMSprop", fused=True), "the class has none"),
        (OptimizerSpec(fused=True, options={"foreach": True}), "with foreach=true"),
    ],
)
def test_true_is_refused_where_there_is_no_fused_step(spec: Any, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        spec.build(small_model().named_parameters())


def test_the_fused_steps_that_are_taken_are_torchs() -> None:
    have = {chosen for chosen in short_names().values() if "fused" in arguments(chosen)}
    assert set(_FUSED) == have
    assert set(_FUSED_DEVICES) <= set(_get_fused_kernels_supported_devices())
    assert "cuda" in _FUSED_DEVICES


def test_true_is_refused_for_parameters_that_no_kernel_takes() -> None:
    with pytest.raises(Unsupported, match="none on meta"):
        OptimizerSpec(fused=True).build(nn.Linear(2, 2, device="meta").named_parameters())


# -- scaling -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)])
def test_lr_scaling_multiplies_every_learning_rate_once(rule: Any, factor: float) -> None:
    spec = OptimizerSpec(
        "SGD",
        lr=0.1,
        groups=({"match": "0.*", "lr": 0.2}, {"match": "3.*", "momentum": 0.5}),
        lr_scaling=rule,
        others=OptimizerSpec("Adam", lr=0.3),
        others_match=("1.*",),
    )
    scaled = spec.scale_rates(4)
    assert scaled.scale_rates(4) == scaled
    assert scaled.unscaled_lr == (None if rule == "none" else spec.lr)
    built = scaled.build_all(small_model().named_parameters())
    rates = [group["lr"] for group in built["main"].param_groups]
    assert rates == pytest.approx([0.2 * factor, 0.1 * factor])
    assert built["others"].param_groups[0]["lr"] == pytest.approx(0.3 * factor)


# -- two optimizers ------------------------------------------------------------------------------


def test_muon_alone_names_the_parameters_that_it_cannot_take() -> None:
    with pytest.raises(ConfigError, match=r"matrices only, and 4 parameters .* 0.bias, 1.weight"):
        OptimizerSpec("muon").build(small_model().named_parameters())


def test_muons_yaml_trains_matrices_by_muon_and_the_rest_by_adamw() -> None:
    ours, theirs = small_model(), small_model()
    node = {**plain("muon"), "others_match": ["3.weight"]}
    built = OptimizerSpec.from_config(node).build_all(ours.named_parameters())
    assert names_in(built["main"]) == [["0.weight"]]
    named = dict(theirs.named_parameters())
    rest = [p for n, p in named.items() if n not in ("0.weight", "3.weight")]
    muon = torch.optim.Muon([named["0.weight"]])
    adamw = torch.optim.AdamW(
        [{"params": [named["3.weight"]]}, {"params": rest, "weight_decay": 0.0}]
    )
    train(ours, *built.values())
    train(theirs, muon, adamw)
    assert_same(ours, theirs)


def test_a_second_optimizer_must_have_something_to_train_and_leave_something() -> None:
    named = list(small_model().named_parameters())
    sgd = OptimizerSpec("SGD")
    with pytest.raises(ConfigError, match="would train nothing"):
        OptimizerSpec(others=sgd).build_all(named)
    with pytest.raises(ConfigError, match="leaves AdamW none"):
        OptimizerSpec(others=sgd, others_match=("*",)).build_all(named)
    with pytest.raises(ConfigError, match="others_match: the pattern 'haed'"):
        OptimizerSpec(others=sgd, others_match=("haed",)).build_all(named)
    with pytest.raises(ConfigError, match="build_all"):
        OptimizerSpec(others=sgd, others_match=("0.*",)).build(named)


def test_a_spec_is_a_value() -> None:
    spec = OptimizerSpec.from_config(plain("adamw"))
    assert copy.deepcopy(spec) == spec


def test_options_are_keywords_as_in_torch_or_a_mapping() -> None:
    spec = OptimizerSpec("SGD", lr=0.1, momentum=0.9, weight_decay=0.5)
    assert spec == OptimizerSpec("SGD", lr=0.1, options={"momentum": 0.9, "weight_decay": 0.5})
    assert dataclasses.replace(spec, lr=0.2).options == spec.options
    ours = spec.build(small_model().named_parameters()).param_groups[0]
    theirs = torch.optim.SGD(small_model().parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)
    assert {key: ours[key] for key in ("lr", "momentum", "weight_decay", "nesterov")} == {
        key: theirs.param_groups[0][key] for key in ("lr", "momentum", "weight_decay", "nesterov")
    }
    mine = OptimizerSpec(Mine, lr=0.1, power=2.0).build(small_model().named_parameters())
    assert mine.param_groups[0]["lr"] == 0.2


def test_a_keyword_that_the_optimizer_does_not_have_is_refused_where_it_is_written() -> None:
    with pytest.raises(ConfigError, match=r"SGD has no option 'momentun'; did you mean 'momentum'"):
        OptimizerSpec("SGD", lr=0.1, momentun=0.9)
    with pytest.raises(ConfigError, match="'no_decai'; did you mean 'no_decay'"):
        OptimizerSpec(no_decai=False)
    with pytest.raises(ConfigError, match="momentum is given twice"):
        OptimizerSpec("SGD", options={"momentum": 0.9}, momentum=0.5)
