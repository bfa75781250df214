"""Optimizers as values: any torch.optim class, with parameter groups."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from torsh_trainer.errors import ConfigError, Unsupported, nearest
from torsh_trainer.utils.lookup import (
    NO_OPTIONS,
    import_object,
    list_first,
    matching,
    no_match,
    with_keywords,
)

NamedParameters = Iterable[tuple[str, nn.Parameter]]

RESERVED = ("no_decay", "groups", "fused", "lr_scaling", "others", "others_match")
"""Keys of the optimizer node that are ours; the rest are the class's own options."""

_HYDRA = ("_target_", "_convert_", "_recursive_", "_partial_")
_FUSED_DEVICES = ("cuda", "cpu", "xpu", "mps")
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
# With torch 2.13 over FSDP2's shards: of the fused kernels only Adam's know DTensors, and these
# two optimizers fail in their first step.
_FUSED_SHARDED = (torch.optim.Adam, torch.optim.AdamW)
_NOT_SHARDED = (torch.optim.Adafactor, torch.optim.Rprop)


@dataclass(frozen=True, init=False)
class OptimizerSpec:
    """An optimizer and its parameter groups, before there are parameters.

    ``OptimizerSpec("SGD", lr=0.1, momentum=0.9)``: ``target`` is a short name of a torch.optim
    class (``AdamW``, any case), the import path of any optimizer class, or the class. Its other
    keyword arguments are given beside ours, or as the mapping ``options``.

    ``no_decay`` excludes norms and biases (parameters with fewer than two dimensions) from weight
    decay. ``groups`` are settings for parameters whose name matches a pattern (fnmatch), or one of
    several: ``[{"match": "head.*", "lr": 1e-4}]``; the first group that matches takes a parameter,
    and a ``weight_decay`` set there holds for all that it matches.

    ``fused`` None takes the fused step where class, device and dtype have it (torch chooses
    between foreach and a loop elsewhere); True insists; False never does. ``foreach`` is an option
    of the class, as in torch.

    ``lr_scaling`` multiplies learning rates by (linear) or by the root of (sqrt) the data-parallel
    size; it belongs to a fixed micro-batch. ``scale_rates`` does it, and keeps ``unscaled_lr``.

    ``others`` is a second optimizer, for parameters whose names match ``others_match`` and for
    those that ``target`` cannot take (Muon: all that are not matrices).

    Raises:
        ConfigError: a value is of the wrong type or out of its range, or the class has no such
            option (for a class that is still to be imported, ``build`` says so).
    """

    target: str | type[Optimizer] = "AdamW"
    lr: float = 1e-3
    options: Mapping[str, Any] = field(default_factory=dict)
    no_decay: bool = True
    groups: tuple[Mapping[str, Any], ...] = ()
    fused: bool | None = None
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    others: OptimizerSpec | None = None
    others_match: tuple[str, ...] = ()
    unscaled_lr: float | None = None

    def __init__(
        self,
        target: str | type[Optimizer] = "AdamW",
        lr: float = 1e-3,
        options: Mapping[str, Any] = NO_OPTIONS,
        no_decay: bool = True,
        groups: Sequence[Mapping[str, Any]] = (),
        fused: bool | None = None,
        lr_scaling: Literal["none", "linear", "sqrt"] = "none",
        others: OptimizerSpec | None = None,
        others_match: str | Sequence[str] = (),
        unscaled_lr: float | None = None,
        **keywords: Any,
    ) -> None:
        given = {
            "target": target,
            "lr": lr,
            "options": with_keywords(options, keywords, owner="OptimizerSpec"),
            "no_decay": no_decay,
            "groups": tuple(groups),
            "fused": fused,
            "lr_scaling": lr_scaling,
            "others": others,
            "others_match": _patterns(others_match),
            "unscaled_lr": unscaled_lr,
        }
        for name, value in given.items():
            object.__setattr__(self, name, value)
        if keywords and (not isinstance(target, str) or target.lower() in short_names()):
            _options(_resolve(target), keywords, ("params", "lr", *RESERVED))
        self._check()

    def _check(self) -> None:
        _check_number("optimizer.lr", self.lr)
        if self.lr < 0 or not math.isfinite(self.lr):
            raise ConfigError(f"optimizer.lr={self.lr} is not 0 or more", fix="the usual is 1e-3")
        for option in ("no_decay", "fused"):
            value = getattr(self, option)
            if not isinstance(value, bool) and not (option == "fused" and value is None):
                raise ConfigError(
                    f"optimizer.{option}={value!r} is not true or false",
                    fix="write true or false"
                    + (", or null to choose" if option == "fused" else ""),
                )
        if self.lr_scaling not in ("none", "linear", "sqrt"):
            raise ConfigError(
                f"optimizer.lr_scaling={self.lr_scaling!r} is unknown",
                fix=nearest(str(self.lr_scaling), ("none", "linear", "sqrt")),
            )
        for number, group in enumerate(self.groups):
            _check_group(number, group)
        self._check_others()

    @classmethod
    def from_config(cls, node: Mapping[str, Any]) -> OptimizerSpec:
        """The spec that an ``optimizer`` node of the configuration (plain values) describes.

        Raises:
            ConfigError: an unknown option, or one of the wrong type; the nearest names are offered.
        """
        target = node.get("_target_", cls.target)
        chosen = _resolve(target)
        known = arguments(chosen)
        keys = {key: value for key, value in node.items() if key not in _HYDRA}
        if "lr" not in keys:
            default = known.get("lr", inspect.Parameter.empty)
            if default is inspect.Parameter.empty:
                raise ConfigError(
                    f"optimizer.lr is missing, and {chosen.__name__} has no default for it",
                    fix="set optimizer.lr",
                )
            keys["lr"] = default
        ours = {key: keys.pop(key) for key in RESERVED if key in keys}
        if ours.get("others") is not None:
            ours["others"] = cls.from_config(ours["others"])
        for key in ("groups", "others_match"):
            if ours.get(key, ()) is None:
                ours[key] = ()
        lr = keys.pop("lr")
        _check_number("optimizer.lr", lr)
        hint = " (~optimizer.{} drops one that a recipe set for another optimizer)"
        options = _options(chosen, keys, RESERVED, hint=hint)
        spec = cls(target=target, lr=float(lr), options=options, **ours)
        spec._check_groups(chosen)
        return spec

    def scale_rates(self, dp_size: int) -> OptimizerSpec:
        """This spec with every learning rate scaled for ``dp_size`` data-parallel processes.

        The rule is ``lr_scaling``: linear (Goyal et al. 2017, arXiv:1706.02677) or sqrt
        (Krizhevsky 2014, arXiv:1404.5997). The result scales no further, and its ``unscaled_lr``
        is the rate before; a spec without a rule is returned as it is.
        """
        if self.lr_scaling == "none":
            return self
        return self._times(dp_size if self.lr_scaling == "linear" else math.sqrt(dp_size))

    def build(self, named_parameters: NamedParameters) -> Optimizer:
        """One optimizer over all of ``named_parameters``; its groups hold ``param_names``.

        Raises:
            ConfigError: there is no such class, it does not know an option, a pattern matches
                nothing, there are no parameters, or the class cannot take one of them.
        """
        named = list(named_parameters)
        if self.others is not None:
            raise ConfigError(
                "optimizer.others makes two optimizers where the task builds one",
                fix="return optimizer.build_all(named_parameters) from task.build_optimizers",
            )
        return self._build(named)

    def build_all(self, named_parameters: NamedParameters) -> dict[str, Optimizer]:
        """The optimizer as ``main``, and ``others`` where the spec has it and it has parameters.

        Raises:
            ConfigError: as ``build``.
        """
        named = list(named_parameters)
        if self.others is None:
            return {"main": self._build(named)}
        names = [name for name, _ in named]
        taken: set[str] = set()
        for pattern in self.others_match:
            found = matching(pattern, names)
            if not found:
                raise no_match(pattern, names, option="optimizer.others_match")
            taken.update(found)
        chosen = _resolve(self.target)
        taken.update(name for name, p in named if not _fits(chosen, p))
        if not taken and not issubclass(chosen, torch.optim.Muon):
            raise ConfigError(
                f"optimizer.others would train nothing: {chosen.__name__} takes every parameter",
                fix="name its parameters in optimizer.others_match",
            )
        if taken == set(names):
            raise ConfigError(
                f"optimizer.others takes every parameter and leaves {chosen.__name__} none",
                fix="make it the optimizer itself, or narrow optimizer.others_match",
            )
        built = {"main": self._build([(n, p) for n, p in named if n not in taken])}
        if taken:
            built["others"] = self.others._build([(n, p) for n, p in named if n in taken])
        return built

    def parameter_groups(self, named_parameters: NamedParameters) -> list[dict[str, Any]]:
        """torch's parameter groups: the rest first, then ``groups`` in order, each in named order.

        A group that weight decay must leave out follows the one that it was split from.

        Raises:
            ConfigError: a pattern matches no parameter, or only ones that an earlier group took.
        """
        named = list(named_parameters)
        owner = self._owners([name for name, _ in named])
        decays = bool(self._setting("weight_decay"))
        split: dict[tuple[int, bool], dict[str, Any]] = {}
        for name, parameter in named:
            index = owner.get(name, -1)
            given = self.groups[index] if index >= 0 else {}
            settings = {k: v for k, v in given.items() if k != "match"}
            exempt = decays and self.no_decay and parameter.ndim < 2
            exempt = exempt and "weight_decay" not in settings
            if exempt:
                settings["weight_decay"] = 0.0
            group = split.setdefault((index, exempt), {"params": [], "param_names": [], **settings})
            group["params"].append(parameter)
            group["param_names"].append(name)
        return [split[key] for key in sorted(split)]

    def _build(self, named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
        chosen: Any = _resolve(self.target)
        if not named:
            raise ConfigError(
                f"the optimizer {chosen.__name__} has no parameters",
                fix="unfreeze something (trainer.frozen), or check task.build_model",
            )
        options = _options(chosen, self.options, ("params", "lr", *RESERVED))
        self._check_groups(chosen)
        _check_parameters(chosen, named)
        _check_modes(options, [p for _, p in named])
        fused = self._choose_fused(chosen, [p for _, p in named])
        try:
            return chosen(self.parameter_groups(named), lr=self.lr, **options, **fused)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"optimizer {chosen.__name__} refuses its options: {error}",
                fix="correct the values under optimizer",
            ) from error

    def _owners(self, names: Sequence[str]) -> dict[str, int]:
        owner: dict[str, int] = {}
        for index, group in enumerate(self.groups):
            won = 0
            for pattern in _patterns(group["match"]):
                found = matching(pattern, names)
                if not found:
                    raise no_match(pattern, names, option=f"optimizer.groups[{index}]")
                won += sum(owner.setdefault(name, index) == index for name in found)
            if not won:
                raise ConfigError(
                    f"optimizer.groups[{index}]: earlier groups took all that "
                    f"{group['match']!r} matches",
                    fix="put the narrower pattern first",
                )
        return owner

    def _choose_fused(
        self, chosen: type[Optimizer], parameters: list[nn.Parameter]
    ) -> dict[str, bool]:
        """The ``fused`` argument for the class, or none."""
        if "fused" not in arguments(chosen):
            reason = "the class has none"
        elif self.fused is None and not issubclass(chosen, _FUSED):
            return {}  # a class of the user's own knows best what its default is
        else:
            by_foreach = "with foreach=true" if self._setting("foreach") else ""
            reason = by_foreach or _why_not_fused(chosen, parameters)
        if self.fused and reason:
            raise Unsupported(
                f"optimizer.fused=true: {chosen.__name__} cannot take a fused step, {reason}",
                fix="set optimizer.fused=null to take what there is",
            )
        if self.fused is False and "fused" in arguments(chosen):
            return {"fused": False}
        return {} if reason or self.fused is False else {"fused": True}

    def _setting(self, option: str) -> Any:
        """An option's value: given, or the class's default."""
        default = arguments(_resolve(self.target)).get(option)
        value = self.options.get(option, default)
        return None if value is inspect.Parameter.empty else value

    def _times(self, factor: float) -> OptimizerSpec:
        groups = tuple(
            {**group, "lr": group["lr"] * factor} if "lr" in group else group
            for group in self.groups
        )
        return replace(
            self,
            lr=self.lr * factor,
            groups=groups,
            others=None if self.others is None else self.others._times(factor),
            lr_scaling="none",
            unscaled_lr=self.lr,
        )

    def _check_groups(self, chosen: type[Optimizer]) -> None:
        known = arguments(chosen)
        if _OPEN in known:
            return
        for index, group in enumerate(self.groups):
            for key, value in group.items():
                if key != "match" and key not in known:
                    raise ConfigError(
                        f"optimizer.groups[{index}]: {chosen.__name__} has no option {key!r}",
                        fix=nearest(key, known),
                    )
                if key != "match":
                    _check_option(f"optimizer.groups[{index}].{key}", value, known[key])

    def _check_others(self) -> None:
        if self.others is None:
            if self.others_match:
                raise ConfigError(
                    "optimizer.others_match is given, and optimizer.others is not",
                    fix="set optimizer.others to the second optimizer: {_target_: ..., lr: ...}",
                )
            return
        if self.others.lr_scaling != "none" or self.others.others is not None:
            raise ConfigError(
                "optimizer.others has lr_scaling or others of its own",
                fix="set optimizer.lr_scaling: it scales both; there are two optimizers at most",
            )


_OPEN = "**"


def arguments(optimizer: type[Optimizer]) -> dict[str, Any]:
    """The class's options and their defaults; a key ``**`` says that it takes any other."""
    parameters = list(inspect.signature(optimizer).parameters.values())[1:]
    known = {
        p.name: p.default for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        known[_OPEN] = inspect.Parameter.empty
    return known


def short_names() -> dict[str, type[Optimizer]]:
    """Lower-case name -> class, for every optimizer of torch.optim."""
    return {
        name.lower(): found
        for name, found in vars(torch.optim).items()
        if isinstance(found, type) and issubclass(found, Optimizer) and found is not Optimizer
    }


def _resolve(target: str | type[Optimizer]) -> type[Optimizer]:
    found: Any = target
    if isinstance(target, str) and ("." in target or ":" in target):
        found = import_object(target, option="optimizer._target_")
    elif isinstance(target, str):
        names = short_names()
        found = names.get(target.lower())
        if found is None:
            raise ConfigError(
                f"unknown optimizer {target!r}", fix=nearest(target.lower(), names), name=target
            )
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ConfigError(
            f"optimizer {target!r} is not a class derived from torch.optim.Optimizer",
            fix="name such a class; a task with other needs overrides build_optimizers",
        )
    refuse_closure(found)
    return found


def refuse_closure(kind: type[Optimizer]) -> None:
    """Refuses an optimizer that evaluates the loss by itself.

    Raises:
        Unsupported: names it.
    """
    closure = inspect.signature(kind.step).parameters.get("closure")
    if issubclass(kind, torch.optim.LBFGS) or (
        closure is not None and closure.default is inspect.Parameter.empty
    ):
        raise Unsupported(
            f"optimizer {kind.__name__} needs a closure that evaluates the loss again, "
            "and one step here is one forward and backward",
            fix="take another: adamw, sgd, ...",
        )


def _options(
    chosen: type[Optimizer], given: Mapping[str, Any], not_here: Sequence[str], *, hint: str = ""
) -> dict[str, Any]:
    """``given`` with lists as the tuples that the class has for defaults, all names checked.

    ``hint`` follows the names that are offered for an unknown one, which it may hold as ``{}``.
    """
    known = arguments(chosen)
    checked = {}
    for key, value in given.items():
        if key in not_here:
            raise ConfigError(
                f"optimizer option {key!r} is not among the class's own", fix="give it beside them"
            )
        if key not in known and _OPEN not in known:
            raise ConfigError(
                f"optimizer {chosen.__name__} has no option {key!r}",
                fix=nearest(key, {*known, *RESERVED} - {_OPEN, "params"}) + hint.format(key),
                option=key,
            )
        default = known.get(key)
        _check_option(f"optimizer.{key}", value, default)
        checked[key] = tuple(value) if isinstance(default, tuple) else value
    return checked


def _check_option(option: str, value: Any, default: Any) -> None:
    """Refuses a value of another type than the default's, where the default tells."""
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ConfigError(f"{option}={value!r} is not true or false", fix="write true or false")
    elif isinstance(default, int | float):
        _check_number(option, value)
    elif isinstance(default, tuple) and (
        not isinstance(value, list | tuple) or len(value) != len(default)
    ):
        raise ConfigError(
            f"{option}={value!r} is not a list of {len(default)} numbers",
            fix=f"the default is {list(default)}",
        )


def _check_number(option: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | torch.Tensor):
        raise ConfigError(f"{option}={value!r} is not a number", fix="write it as 1e-3 or 0.001")


def _check_group(number: int, group: Any) -> None:
    if not isinstance(group, Mapping) or "match" not in group or len(group) < 2:
        raise ConfigError(
            f"optimizer.groups[{number}]={group!r} is not a pattern with settings",
            fix='write it as {match: "head.*", lr: 1e-4}',
        )
    if "lr" in group:
        _check_number(f"optimizer.groups[{number}].lr", group["lr"])


def _patterns(match: Any) -> tuple[str, ...]:
    return (match,) if isinstance(match, str) else tuple(match)


def _fits(chosen: type[Optimizer], parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 or not issubclass(chosen, torch.optim.Muon)


def _is_sharded(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "placements")  # a DTensor


def _check_parameters(chosen: type[Optimizer], named: Sequence[tuple[str, nn.Parameter]]) -> None:
    unfit = [name for name, p in named if not _fits(chosen, p)]
    if unfit:
        raise ConfigError(
            f"optimizer {chosen.__name__} takes matrices only, and {len(unfit)} parameters "
            f"are none: {list_first(unfit)}",
            fix="set optimizer.others to an optimizer for them: {_target_: torch.optim.AdamW, "
            "lr: 1e-3}",
            parameters=unfit,
        )
    if issubclass(chosen, _NOT_SHARDED) and any(_is_sharded(p) for _, p in named):
        raise Unsupported(
            f"optimizer {chosen.__name__} cannot step parameters that are sharded",
            fix="take another optimizer, or strategy=ddp",
        )


def _check_modes(options: Mapping[str, Any], parameters: list[nn.Parameter]) -> None:
    if options.get("differentiable"):
        raise Unsupported(
            "optimizer.differentiable=true needs parameters that are computed, "
            "and those of a run are leaves",
            fix="set optimizer.differentiable=false",
        )
    if options.get("capturable") and any(p.device.type == "cpu" for p in parameters):
        raise Unsupported(
            "optimizer.capturable=true belongs to CUDA graphs, and parameters are on the CPU",
            fix="set optimizer.capturable=false",
        )


def _why_not_fused(chosen: type[Optimizer], parameters: list[nn.Parameter]) -> str:
    """Why these parameters have no fused step; empty when they have."""
    if not issubclass(chosen, _FUSED):
        return ""  # a class of the user's own: it will say so itself
    for parameter in parameters:
        if parameter.device.type not in _FUSED_DEVICES:
            return f"there is none on {parameter.device.type}"
        if not parameter.is_floating_point():
            return f"there is none for {parameter.dtype}"
        if not issubclass(chosen, _FUSED_SHARDED) and _is_sharded(parameter):
            return "there is none over sharded parameters"
    return ""
