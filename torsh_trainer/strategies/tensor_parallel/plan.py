"""What is cut over ``tp``: patterns of module names, and the style of each.

A pattern is a module's name, in which ``*`` and the other signs of ``fnmatch`` stand within one
name between dots. The styles are torch's: see ``STYLES``.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from torsh_trainer.errors import ConfigError, Unsupported, nearest
from torsh_trainer.mesh import Mesh
from torsh_trainer.tasks.base import Task

STYLES = {
    "colwise": "each process computes its columns of the output, which stay where they are",
    "colwise_gather": "as colwise, and every process has all of the output",
    "rowwise": "each process takes its part of the input, and outputs are summed; of an embedding: "
    "each process has its part of the vocabulary",
    "replicate": "whole on every process; under strategy.sequence_parallel it sees all tokens",
    "replicate_sum": "whole on every process and used on parts: gradients are summed",
    "replicate_split": "as replicate_sum, and each process takes its tokens of what it gives",
}

_ALIASES = {
    "colwise_gather_output": "colwise_gather",
    "colwise_rep": "colwise_gather",
    "embedding_rowwise": "rowwise",
    "replicated_with_grad_allreduce": "replicate_sum",
}
"""As the models of transformers say it."""

_FUSED = ("qkv", "c_attn", "query_key_value", "in_proj", "wqkv", "gate_up", "kv_proj", "w12")
"""In names of layers whose outputs are several projections, one after the other."""


@dataclass(frozen=True)
class Style:
    """How a module is cut. ``parts`` says that its outputs are so many projections of one size, one
    after the other, each cut by itself (a fused query, key and value: 3). ``heads`` is in how many
    its outputs divide, None where nobody asks. ``splits_tokens`` says that outside of pairs of
    layers each process has some of the tokens, as ``strategy.sequence_parallel`` asks."""

    kind: str
    parts: int | None = None
    heads: int | None = None
    splits_tokens: bool = False

    @classmethod
    def read(cls, given: Any, pattern: str) -> Style:
        """From a name of ``STYLES``, or ``{style: ..., parts: ..., heads: ...}``.

        Raises:
            ConfigError: it is neither.
        """
        if isinstance(given, Style):
            return given
        if isinstance(given, Mapping):
            more = {key: given[key] for key in given if key != "style"}
            kind = given.get("style")
        else:
            kind, more = given, {}
        for key, value in more.items():
            if key not in ("parts", "heads") or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"the plan says {key}={value!r} of {pattern!r}",
                    fix="give style, and parts or heads as a positive number",
                )
        kind = _ALIASES.get(str(kind), str(kind))
        if kind not in STYLES:
            raise ConfigError(
                f"the plan says {kind!r} of {pattern!r}, which is no style that layers are cut by",
                fix=nearest(kind, STYLES),
            )
        return cls(kind, **more)

    @property
    def cuts(self) -> bool:
        """Whether a process has a part of the weight."""
        return not self.kind.startswith("replicate")


@dataclass(frozen=True)
class ParallelPlan:
    """Styles by module name; ``source`` says whose plan it is."""

    styles: Mapping[str, Style]
    source: str

    @property
    def summary(self) -> str:
        """In one line: how many modules are cut in which way."""
        counts: dict[str, int] = {}
        for style in self.styles.values():
            counts[style.kind] = counts.get(style.kind, 0) + 1
        said = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        return f"{said} ({self.source})"


def find_plan(model: nn.Module, task: Task, table: Mapping[str, Any], mesh: Mesh) -> ParallelPlan:
    """The plan of the task, of ``table`` (``strategy.plan``), or of the model: the first there is.

    Raises:
        ConfigError: there is none, or one of its patterns finds no module.
    """
    given, source = _first_given(model, task, table, mesh)
    if not given:
        raise ConfigError(
            f"mesh.tp={mesh.tp} needs a plan of which layers are cut, and neither the task nor the "
            f"model ({type(model).__name__}) has one",
            fix="give 'strategy.plan={blocks.*.up: colwise, blocks.*.down: rowwise}': names of "
            "modules, and colwise, colwise_gather or rowwise",
        )
    names = [name for name, _ in model.named_modules() if name]
    styles: dict[str, Style] = {}
    for pattern, value in given.items():
        style = Style.read(value, pattern)
        found = [name for name in names if matches(pattern, name)]
        if not found:
            raise ConfigError(
                f"the plan ({source}) names {pattern!r}, and the model has no such module",
                fix=nearest(pattern, names),
            )
        styles.update(dict.fromkeys(found, style))
    if not any(style.cuts for style in styles.values()):
        raise ConfigError(
            f"the plan ({source}) cuts nothing, and mesh.tp={mesh.tp} processes would do the same",
            fix="name layers as colwise and rowwise, or set mesh.tp=1",
        )
    return ParallelPlan(styles, source)


def split_outside(model: nn.Module, plan: ParallelPlan) -> ParallelPlan:
    """``plan``, with tokens cut between pairs of layers.

    Modules that it does not name see some of the tokens: their gradients are summed. Styles of the
    model's ``sequence_plan()`` come before those of its own plan.
    """
    own_plan = getattr(model, "sequence_plan", None)
    first = own_plan() if callable(own_plan) and plan.source == "the model's own" else {}
    styles = dict(plan.styles)
    for name, module in model.named_modules():
        own = any(True for _ in module.parameters(recurse=False))
        said = [value for pattern, value in first.items() if matches(pattern, name)]
        if own and (said or name not in styles):
            styles[name] = Style.read(said[-1] if said else "replicate_sum", name)
    return replace(plan, styles={n: replace(s, splits_tokens=True) for n, s in styles.items()})


def matches(pattern: str, name: str) -> bool:
    """Whether a module of that name is meant; a sign never stands for a dot."""
    atoms, parts = pattern.split("."), name.split(".")
    return len(atoms) == len(parts) and all(
        fnmatch.fnmatchcase(part, atom) for part, atom in zip(parts, atoms, strict=True)
    )


def _first_given(
    model: nn.Module, task: Task, table: Mapping[str, Any], mesh: Mesh
) -> tuple[Mapping[str, Any], str]:
    of_task = task.parallel_plan(mesh)
    if of_task:
        return of_task, "of the task"
    if table:
        return table, "strategy.plan"
    of_transformers = _plan_of_transformers(model)
    if of_transformers:
        return of_transformers, "the model's tp_plan"
    own = getattr(model, "parallel_plan", None)
    return (own() if callable(own) else {}), "the model's own"


def _plan_of_transformers(model: nn.Module) -> dict[str, Any]:
    """What a model of transformers says, with the heads that its attention has.

    Raises:
        Unsupported: it has a style that nothing here implements.
    """
    found = getattr(model, "_tp_plan", None)
    if not isinstance(found, Mapping) or not found:
        return {}
    config: Any = getattr(model, "config", None)
    heads = {
        "q_proj": getattr(config, "num_attention_heads", None),
        "k_proj": getattr(config, "num_key_value_heads", None),
        "v_proj": getattr(config, "num_key_value_heads", None),
    }
    names = [name for name, _ in model.named_modules() if name]
    plan: dict[str, Any] = {}
    for pattern, kind in found.items():
        if not any(matches(pattern, name) for name in names):
            continue  # a base class speaks for heads that this model does not have
        kind = _ALIASES.get(kind, kind)
        if kind not in STYLES:
            raise Unsupported(
                f"mesh.tp: the plan of {type(model).__name__} says {kind!r} of {pattern!r}, which "
                "is not there yet",
                fix="give strategy.plan with colwise and rowwise layers, or set mesh.tp=1",
            )
        count = heads.get(pattern.rpartition(".")[2]) if kind == "colwise" else None
        plan[pattern] = Style(kind, heads=count)
    return plan


def check_sizes(model: nn.Module, plan: ParallelPlan, *, tp: int, dp_shard: int) -> None:
    """Makes sure that every layer of ``plan`` can be cut so.

    Raises:
        Unsupported: a module is of a kind that cannot be cut, or two of one weight disagree.
        ConfigError: a size does not divide, or a layer looks like several in one.
    """
    for name, style in plan.styles.items():
        module = model.get_submodule(name)
        if isinstance(module, nn.Linear) and style.kind.startswith("colwise"):
            _check_fused(name, module, style)
            parts = style.parts or 1
            _check_divides(name, "outputs", module.out_features, tp, times=parts)
            if style.heads is not None:
                _check_divides(name, "heads", style.heads, tp)
            if parts > 1:
                _check_divides(name, "inputs", module.in_features, dp_shard, axis="dp_shard")
        elif isinstance(module, nn.Linear) and style.kind == "rowwise":
            _check_divides(name, "inputs", module.in_features, tp)
        elif isinstance(module, nn.Embedding) and style.kind == "rowwise":
            _check_divides(name, "words", module.num_embeddings, tp)
        elif isinstance(module, nn.Embedding) and style.cuts:
            _check_divides(name, "columns", module.embedding_dim, tp)


def _check_fused(name: str, module: nn.Linear, style: Style) -> None:
    last = name.rpartition(".")[2].lower()
    known = any(word in last for word in _FUSED) or module.out_features == 3 * module.in_features
    if style.parts is None and known:
        raise ConfigError(
            f"the plan cuts {name!r} ({module.in_features} inputs, {module.out_features} outputs) "
            "colwise, and it looks like several projections in one, of which each process would "
            "get the wrong columns",
            fix="write {style: colwise, parts: 3} for query, key and value of one size, or "
            "parts: 1 where it is one projection",
        )


def _check_divides(
    name: str, what: str, size: int, by: int, *, times: int = 1, axis: str = "tp"
) -> None:
    if size % (by * times):
        step = by * times
        below = size // step * step
        near = " or ".join(str(n) for n in (below, below + step) if n)
        of_parts = f" in {times} parts" if times > 1 else ""
        verb = "are" if " or " in near else "is"
        raise ConfigError(
            f"mesh.{axis}={by} does not divide the {size} {what} of {name!r}{of_parts}",
            fix=f"the nearest that it divides {verb} {near}; or give mesh.{axis} another size, or "
            "cut other layers by strategy.plan",
            size=size,
        )


def list_whole(model: nn.Module, plan: ParallelPlan) -> Iterable[str]:
    """Names of the modules whose own parameters stay whole."""
    for name, module in model.named_modules():
        own = any(True for _ in module.parameters(recurse=False))
        if own and not (name in plan.styles and plan.styles[name].cuts):
            yield name or type(module).__name__
