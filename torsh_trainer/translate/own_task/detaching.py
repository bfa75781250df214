"""What belongs to an engine, a device or a process, left out of the user's own expressions."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping

from torsh_trainer.translate.own_task.effects import is_dtype, name_of, root_of
from torsh_trainer.translate.own_task.lookup import WRAPPERS, Lookup
from torsh_trainer.translate.own_task.meanings import ImportBinding, Lost, Model, Variable
from torsh_trainer.translate.own_task.own_file import Names, OwnFile
from torsh_trainer.translate.python.frames import Frame

_HALVES = ("half", "bfloat16", "float16")
_OF_ENGINE = frozenset(
    [
        "device",
        "local_rank",
        "global_rank",
        "world_size",
        "global_steps",
        "bfloat16_enabled",
        "fp16_enabled",
        "gradient_accumulation_steps",
        "train_micro_batch_size_per_gpu",
        "train_batch_size",
        "get_data_types",
        "get_lr",
        "optimizer",
        "lr_scheduler",
    ]
)
"""Attributes of an engine of DeepSpeed's that a model does not have."""

_OF_PROCESS = re.compile(r"(^|\.)(rank|local_rank|size|local_size|get_rank|get_world_size)$")


class Detaching(ast.NodeTransformer):
    """Leaves out moves to a device, casts that the precision of the recipe makes, wrappers of the
    model and parts of a batch; names what only an engine or a process has."""

    def __init__(
        self,
        file: OwnFile,
        lookup: Lookup,
        names: Names,
        *,
        outer: Mapping[Variable, str],
        model: str = "",
        device: str = "",
        slices: frozenset[str] = frozenset(),
        lost: Callable[[Variable], Lost | None] = lambda variable: None,
    ) -> None:
        self.file, self.lookup, self.names = file, lookup, names
        self.outer, self.model, self.device, self.lost = outer, model, device, lost
        self.slices = slices
        self.frame: Frame
        self.at = 0
        self.own: list[set[str]] = []

    def write_of_engine(self, node: ast.Attribute) -> ast.expr | None:
        """``engine.device`` and the like, which a module does not have; None for others."""
        if node.attr not in _OF_ENGINE or not isinstance(node.value, ast.Name):
            return None
        if not isinstance(self.lookup.find(node.value.id, self.frame, self.at), Model):
            return None
        if node.attr == "device" and self.device:
            return ast.parse(self.device, mode="eval").body
        why = f"{ast.unparse(node)} is the engine's own"
        return self.file.fill_in(self.frame.module.file, node, why, "write what it is")

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        lower = node.slice.lower if isinstance(node.slice, ast.Slice) else None
        if isinstance(lower, ast.Name) and lower.id in self.slices:
            return self.visit(node.value)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = name_of(node)
        last = name.rpartition(".")[2]
        if isinstance(node.func, ast.Attribute):
            if last in ("cuda", "cpu") and not self.is_module(node.func.value):
                return self.move(node.func.value)
            if last in _HALVES and not node.args and self.file.low:
                return self.visit(node.func.value)
            if last in _HALVES and not node.args:
                why = f"{ast.unparse(node)[:60]}: half precision by hand, and the recipe has fp32"
                fix = "set precision= in the recipe, and leave it out here"
                return self.file.fill_in(self.frame.module.file, node, why, fix)
            if last == "to":
                moved = self.leave_out_move(node)
                if moved is not None:
                    return moved
        if last in WRAPPERS and node.args and last != "compile":
            return self.visit(node.args[0])
        if name == "torch.compile" and node.args:
            return self.visit(node.args[0])
        if _OF_PROCESS.search(name) and self.is_engine(node.func):
            why = f"{name}() is another number on each process"
            fix = "write what one process has: the trainer shares samples out itself"
            return self.file.fill_in(self.frame.module.file, node, why, fix)
        placed = any(k.arg == "device" for k in node.keywords)
        node.keywords = [k for k in node.keywords if k.arg != "device"]
        self.generic_visit(node)
        if placed and self.device:
            place = ast.parse(self.device, mode="eval").body
            node.keywords.append(ast.keyword("device", place))
        return node

    def is_module(self, node: ast.expr) -> bool:
        """Whether ``node.cuda`` is a part of a library (``torch.cuda``)."""
        return isinstance(node, ast.Name) and isinstance(
            self.lookup.find(node.id, self.frame, self.at), ImportBinding
        )

    def is_engine(self, func: ast.expr) -> bool:
        root = ast.unparse(func).partition(".")[0]
        meaning = self.lookup.find(root, self.frame, self.at)
        return isinstance(meaning, ImportBinding)

    def move(self, node: ast.expr) -> ast.AST:
        """What was moved to a device: as it is, or, where the step makes it, to the model's."""
        closed = self.visit(node)
        root = root_of(node)
        made = bool(self.device and root) and not any(root in own for own in self.own)
        if made and isinstance(self.lookup.find(root, self.frame, self.at), ImportBinding):
            moved = ast.Attribute(closed, "to", ast.Load())
            return ast.Call(moved, [ast.parse(self.device, mode="eval").body], [])
        return closed

    def leave_out_move(self, node: ast.Call) -> ast.AST | None:
        """``x.to(device)`` without the device; None where it is all about something else."""
        assert isinstance(node.func, ast.Attribute)
        given = [(None, arg) for arg in node.args] + [(k.arg, k.value) for k in node.keywords]
        dtypes = [arg for name, arg in given if _is_dtype(name, arg)]
        if not dtypes:
            return self.move(node.func.value)
        low = any(ast.unparse(arg).rpartition(".")[2] in _HALVES for arg in dtypes)
        known = all(ast.unparse(arg).startswith("torch.") for arg in dtypes)
        if self.file.low and (low or not known):
            return self.visit(node.func.value)
        if low or not known:
            why = f"{ast.unparse(node)[:60]}: a dtype of the engine, and the recipe has fp32"
            fix = "set precision= in the recipe, and leave it out here"
            return self.file.fill_in(self.frame.module.file, node, why, fix)
        kept = ast.Call(node.func, dtypes[:1], [])
        return self.generic_visit(ast.copy_location(kept, node))


def _is_dtype(name: str | None, node: ast.expr) -> bool:
    return name == "dtype" if name is not None else is_dtype(node)
