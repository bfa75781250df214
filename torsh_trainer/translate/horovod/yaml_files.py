"""Horovod's YAML as leaves: what horovodrun --config-file takes, and arguments of the optimizer."""

from __future__ import annotations

from functools import cache
from typing import Any

from torsh_trainer.translate.horovod import settings
from torsh_trainer.translate.horovod.job import Leaf, Problem, near
from torsh_trainer.translate.horovod.settings import Mismatch
from torsh_trainer.translate.nodes import MappingEntry, Node, leaves

WRAPPER = "DistributedOptimizer"
ARGUMENTS = {
    "named_parameters": "wrapper.names",
    "compression": "compression",
    "backward_passes_per_step": "passes",
    "op": "op",
    "gradient_predivide_factor": "predivide",
    "num_groups": "groups",
    "groups": "groups",
    "sparse_as_dense": "sparse",
    "process_set": "process-sets",
}
"""Arguments of ``hvd.DistributedOptimizer`` for torch -> their rules."""

FOREIGN = (
    "average_aggregated_gradients",
    "scale_local_gradients",
    "device_dense",
    "device_sparse",
    "name",
    "use_locking",
)
"""Arguments that Horovod has for TensorFlow and Keras alone."""


@cache
def _blocks() -> frozenset[str]:
    """Keys on the outermost level of a ``--config-file``."""
    return frozenset(key.partition(".")[0] for key in settings.by_key())


def is_config(root: Node) -> bool:
    """It looks like what ``--config-file`` takes."""
    return bool(_blocks() & set(root.value))


def is_wrapper(root: Node) -> bool:
    """It looks like arguments of the optimizer."""
    shared = {"gradient_predivide_factor"}  # a key of DeepSpeed, too
    return bool(({WRAPPER, *ARGUMENTS} - shared) & set(root.value))


def config(root: Node, *, file: str = "") -> tuple[list[Leaf], list[Problem]]:
    """The leaves of a ``--config-file``."""
    found: list[Leaf] = []
    problems: list[Problem] = []
    for path, entry in leaves(root):
        key = ".".join(path)
        value, place = entry.node.plain(), entry.place
        setting = settings.by_key().get(key)
        if key in settings.OLDER:
            found.append(Leaf(key, key, value, place, "older", file))
        elif setting is None:
            if key in _blocks() and value in ({}, None):
                found.append(Leaf(key, key, value, place, "block.empty", file))
                continue
            found.append(Leaf(key, key, value, place, "unknown", file))
            what = f"Horovod knows no key {key!r}"
            advice = _advice(key)
            problems.append(Problem(file, place, what, advice, overlooked=key not in _blocks()))
        elif value is None:
            found.append(Leaf(key, key, value, place, "block.empty", file))
        else:
            try:
                value = setting.value(value)
            except Mismatch as wanted:
                what = f"{key} should be {wanted}, not {value!r}"
                problems.append(Problem(file, entry.node.place, what, "correct the value"))
                continue
            found.append(Leaf(key, setting.name, value, place, setting.rule, file))
    return found, problems


def _advice(key: str) -> str:
    last = key.rpartition(".")[2]
    homes = [known for known in settings.by_key() if known.rpartition(".")[2] == last]
    if homes and homes[0] != key:
        return f"did you mean {homes[0]!r}?"
    return near(key, {*settings.by_key(), *_blocks()})


def wrapper(root: Node, *, file: str = "") -> tuple[list[Leaf], list[Problem]]:
    """The leaves of the arguments of ``DistributedOptimizer``, alone or under that name."""
    found: list[Leaf] = []
    problems: list[Problem] = []
    entries: dict[str, MappingEntry] = dict(root.value)
    if WRAPPER in entries and entries[WRAPPER].node.is_mapping:
        entries |= entries.pop(WRAPPER).node.value
    for key, entry in entries.items():
        value, place = entry.node.plain(), entry.place
        if key not in ARGUMENTS:
            what = f"{WRAPPER} for torch takes no {key!r}"
            advice = "remove it: it is TensorFlow's" if key in FOREIGN else near(key, ARGUMENTS)
            problems.append(Problem(file, place, what, advice))
            continue
        wrong = argument_problem(key, value)
        if wrong:
            problems.append(Problem(file, entry.node.place, wrong, "correct the value"))
            continue
        found.append(argument(key, value, entry, file))
    return found, problems


def argument(key: str, value: Any, entry: MappingEntry, file: str) -> Leaf:
    """A leaf of the optimizer's arguments; op and compression by their last names."""
    return Leaf(key, key, plain_name(key, value), entry.place, ARGUMENTS[key], file)


def plain_name(key: str, value: Any) -> Any:
    """``hvd.Average`` as ``average``, ``hvd.Compression.fp16`` as ``fp16``."""
    if key in ("op", "compression") and isinstance(value, str):
        return value.rpartition(".")[2].lower()
    return value


def argument_problem(key: str, value: Any) -> str:
    """What Horovod would not take; empty where it takes ``value``."""
    name = plain_name(key, value)
    if value is None:
        return ""
    known = {
        "op": ("average", "sum", "adasum", "min", "max", "product"),
        "compression": ("none", "fp16"),
    }.get(key)
    if known is not None and name not in known:
        return f"{key} should be one of {', '.join(known)}, not {value!r}"
    whole = isinstance(value, int) and not isinstance(value, bool)
    if key == "backward_passes_per_step" and not (whole and value > 0):
        return f"{key} should be a whole number, 1 or more, not {value!r}"
    if key == "num_groups" and not (whole and value >= 0):
        return f"{key} should be a whole number, 0 or more, not {value!r}"
    if key == "groups" and not (isinstance(value, list) or (whole and value > 0)):
        return f"{key} should be a number of groups or a list of lists, not {value!r}"
    if key == "gradient_predivide_factor":
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and 0 < value < float("inf")):
            return f"{key} should be a positive number, not {value!r}"
    if key == "sparse_as_dense" and not isinstance(value, bool):
        return f"{key} should be true or false, not {value!r}"
    return ""
