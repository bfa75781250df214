"""The data of a script: which expression makes the data set, and how it is loaded."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torsh_trainer.translate.own_task.lookup import Lookup
from torsh_trainer.translate.own_task.loop import DataLoop, list_data_loops, resolve, value_of
from torsh_trainer.translate.own_task.meanings import ConstantValue, Model
from torsh_trainer.translate.own_task.own_file import Missing, OwnFile
from torsh_trainer.translate.python.frames import Frame
from torsh_trainer.translate.python.training import ENGINE, TrainingScript, WrittenExpression
from torsh_trainer.translate.python.values import Thing, is_number

_LOADERS = ("DataLoader", "StatefulDataLoader")
_POSITIONS = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers")
_ORDERS = {"RandomSampler": True, "SequentialSampler": False}


@dataclass
class FoundData:
    """What a loader was given. ``values`` are knobs of the recipe that follow from it."""

    train: WrittenExpression | None = None
    collate: WrittenExpression | None = None
    evaluates: WrittenExpression | None = None
    evaluates_collate: WrittenExpression | None = None
    values: dict[str, Any] = field(default_factory=dict)
    missing: list[Missing] = field(default_factory=list)


def find_data(
    script: TrainingScript, lookup: Lookup, loop: DataLoop | None, file: OwnFile
) -> FoundData:
    """The data that the loop trains on, and that of an evaluation; what cannot be told is entered
    as missing."""
    fix = "give the data set: self.train = YourDataset(...)"
    found = FoundData()
    if loop is None or loop.over is None:
        node = script.backwards[0].event.node if loop is None else loop.node
        what = "no loop over a DataLoader is around the backward pass"
        line = getattr(node, "lineno", 1)
        found.missing.append(file.miss(script.backwards[0].event.file, line, what, fix))
        return found
    over = resolve(lookup, loop.over)
    value = value_of(lookup, loop.over.node, loop.over.frame, loop.over.at)
    if isinstance(value, Thing) and value.facts.get(ENGINE) and script.data is not None:
        found.train, found.collate = script.data, script.collate
    elif (call := _loader_call(over)) is not None:
        read_loader(call, over, lookup, file, found)
    else:
        text = ast.unparse(loop.over.node)[:60]
        what = f"which data set {text} loads cannot be told by reading"
        found.missing.append(file.miss(loop.over.file, loop.over.place.line, what, fix))
        return found
    _find_evaluation(script, lookup, loop, found)
    return found


def _loader_call(written: WrittenExpression) -> ast.Call | None:
    node = written.node
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _LOADERS:
        return node
    return None


def _read_given(call: ast.Call, lookup: Lookup, at: WrittenExpression) -> Mapping[str, ast.expr]:
    """Arguments of a loader by name; ``**kwargs`` of a plain dictionary are laid out."""
    found = dict(zip(_POSITIONS, call.args, strict=False))
    for keyword in call.keywords:
        if keyword.arg is not None:
            found[keyword.arg] = keyword.value
            continue
        inner = resolve(lookup, WrittenExpression(keyword.value, at.frame, at.at))
        if isinstance(inner.node, ast.Dict):
            for key, value in zip(inner.node.keys, inner.node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    found.setdefault(key.value, value)
    return found


def tell_value(lookup: Lookup, node: ast.expr, at: WrittenExpression) -> Any:
    """The constant that an expression stands for; None where that cannot be told."""
    if isinstance(node, ast.Constant):
        return node.value
    meaning: Any = None
    if isinstance(node, ast.Name):
        meaning = lookup.find(node.id, at.frame, at.at)
    elif isinstance(node, ast.Attribute):
        meaning = lookup.find_attribute(node, at.frame, at.at)
    return meaning.value if isinstance(meaning, ConstantValue) else None


def read_loader(
    call: ast.Call, at: WrittenExpression, lookup: Lookup, file: OwnFile, found: FoundData
) -> None:
    """What a ``DataLoader`` is given."""
    given = _read_given(call, lookup, at)

    def write(name: str) -> WrittenExpression | None:
        node = given.get(name)
        empty = node is None or (isinstance(node, ast.Constant) and node.value is None)
        return None if node is None or empty else WrittenExpression(node, at.frame, at.at)

    def tell(name: str) -> Any:
        return tell_value(lookup, given[name], at) if name in given else None

    found.train, found.collate = write("dataset"), write("collate_fn")
    if is_number(tell("batch_size")):
        found.values["data.micro_batch_size"] = tell("batch_size")
    if isinstance(tell("drop_last"), bool):
        found.values["data.drop_last"] = tell("drop_last")
    elif "drop_last" in given:
        what = f"drop_last={ast.unparse(given['drop_last'])[:60]} cannot be told"
        fix = "set data.drop_last in the recipe, and delete this line"
        found.missing.append(file.miss(at.file, call.lineno, what, fix))
    if (batches := write("batch_sampler")) is not None:
        what = "batch_sampler= makes batches of its own"
        fix = "set data.batch_size in the recipe, and order the data set; then delete this line"
        found.missing.append(file.miss(at.file, batches.place.line, what, fix))
    elif (sampler := write("sampler")) is not None:
        _read_sampler(sampler, lookup, file, found)
    elif "shuffle" not in given or isinstance(tell("shuffle"), bool):
        found.values["data.shuffle"] = bool(tell("shuffle"))
    else:
        what = f"shuffle={ast.unparse(given['shuffle'])[:60]} cannot be told"
        fix = "set data.shuffle in the recipe, and delete this line"
        found.missing.append(file.miss(at.file, call.lineno, what, fix))


def _read_sampler(
    sampler: WrittenExpression, lookup: Lookup, file: OwnFile, found: FoundData
) -> None:
    """The order of samples; ``DistributedSampler(...) if ... else None`` counts as the first."""
    made = resolve(lookup, sampler).node
    if isinstance(made, ast.IfExp):
        made = made.body if isinstance(made.body, ast.Call) else made.orelse
    kind = ast.unparse(made.func).rpartition(".")[2] if isinstance(made, ast.Call) else ""
    if kind == "DistributedSampler" and isinstance(made, ast.Call):
        said = next((k.value for k in made.keywords if k.arg == "shuffle"), None)
        known = None if said is None else tell_value(lookup, said, sampler)
        if said is None or isinstance(known, bool):
            found.values["data.shuffle"] = said is None or bool(known)
        else:
            what = f"shuffle={ast.unparse(said)[:60]} cannot be told"
            fix = "set data.shuffle in the recipe, and delete this line"
            found.missing.append(file.miss(sampler.file, said.lineno, what, fix))
    elif kind in _ORDERS:
        found.values["data.shuffle"] = _ORDERS[kind]
    else:
        what = f"the order of {ast.unparse(sampler.node)[:60]} is the script's own"
        fix = "set data.shuffle, or data.weighted with sample_weights() here; then delete this line"
        found.missing.append(file.miss(sampler.file, sampler.place.line, what, fix))


def _find_evaluation(
    script: TrainingScript, lookup: Lookup, loop: DataLoop, found: FoundData
) -> None:
    """The data set of another loop in which the model is called, and nothing is trained."""
    for frame, node in list_data_loops(script.reading, loop):
        trains = any(
            isinstance(part, ast.Attribute) and part.attr in ("backward", "train_batch")
            for part in ast.walk(node)
        )
        head = next((i for i, step in enumerate(frame.steps) if step.node is node), None)
        if trains or head is None:
            continue
        over = resolve(lookup, WrittenExpression(_inner(node.iter), frame, head))
        call = _loader_call(over)
        if call is None or not _calls_model(lookup, node, frame, head):
            continue
        given = _read_given(call, lookup, over)
        if "dataset" in given:
            found.evaluates = WrittenExpression(given["dataset"], over.frame, over.at)
            if "collate_fn" in given:
                found.evaluates_collate = WrittenExpression(
                    given["collate_fn"], over.frame, over.at
                )
            return


def _inner(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Call) and node.args:
        if ast.unparse(node.func).rpartition(".")[2] in _LOADERS:
            break
        node = node.args[0]
    return node


def _calls_model(lookup: Lookup, node: ast.For, frame: Frame, head: int) -> bool:
    from_here = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
    return any(
        isinstance(lookup.find(part.func.id, frame, head), Model)
        for part in from_here
        if isinstance(part.func, ast.Name)
    )
