"""A training script for Horovod: what of its calls is Horovod's."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.python import parsing
from torsh_trainer.translate.python.calls import by_name
from torsh_trainer.translate.python.events import Event, ScriptReading, place_of
from torsh_trainer.translate.python.torch_calls import TorchWalk
from torsh_trainer.translate.python.values import Thing
from torsh_trainer.translate.python.walk import FindFile, FindModule

__all__ = ["Event", "ScriptReading", "parse", "read"]

HOROVOD = "horovod.torch"
_OTHERS = ("horovod.tensorflow", "horovod.keras", "horovod.mxnet", "horovod._keras")
_RUN = ("horovod.run", "horovod.runner.run", "horovod.spark.run")
_RUNNER = "sparkdl.HorovodRunner"
_SIZES = ("mpi4py.MPI.COMM_WORLD.Get_size", "torch.distributed.get_world_size")
_QUESTIONS = ("is_initialized", "mpi_threads_supported", "is_homogeneous")
_PLACES = ("rank", "local_rank", "local_size", "cross_rank", "cross_size")


def parse(text: str, *, name: str) -> ast.Module:
    """The syntax tree.

    Raises:
        ConfigError: it is not Python, or not Horovod for torch.
    """
    tree = parsing.parse(text, name=name)
    imported = set(parsing.find_imports(tree))
    if not any(module.startswith(HOROVOD) for module in imported):
        other = next((m for m in sorted(imported) if m.startswith(_OTHERS)), None)
        what = f"imports {other}" if other else f"does not import {HOROVOD}"
        raise ConfigError(
            f"{name} {what}", fix="only scripts with horovod.torch are translated: they train torch"
        )
    return tree


def read(
    tree: ast.Module,
    *,
    size: int,
    arguments: Mapping[str, Any],
    known: Mapping[str, Any],
    name: str,
    find_module: FindModule | None = None,
    find_file: FindFile | None = None,
    path: Path | None = None,
) -> ScriptReading:
    """What the script does on ``size`` processes.

    ``arguments`` are those of its command line, by destination or option; ``known`` are values of
    expressions, by their text; ``path`` is where it lies.

    Raises:
        ConfigError: it is nested too deep.
    """
    return _HorovodWalk(size, arguments, known, find_module, find_file).read(
        tree, name=name, script=path
    )


class _HorovodWalk(TorchWalk):
    def __init__(
        self,
        size: int,
        arguments: Mapping[str, Any],
        known: Mapping[str, Any],
        find_module: FindModule | None,
        find_file: FindFile | None,
    ) -> None:
        super().__init__(arguments, known, find_module, find_file)
        self.size = size

    def decorate(self, dotted: str, node: ast.expr) -> None:
        if dotted.startswith(HOROVOD):
            self.event(dotted.removeprefix(HOROVOD + "."), node, {})

    def call_name(self, dotted: str, args: list[Any], named: dict[str, Any], node: ast.Call) -> Any:
        if dotted in _RUN:
            facts = by_name(("function", "args", "kwargs", "np"), args, named)
            self.event("horovod.run", node, facts)
            return self.start(facts.get("function"), facts.get("args"), facts.get("kwargs"), node)
        if dotted.endswith(_RUNNER):
            return Thing("runner", place_of(node), by_name(("np",), args, named))
        if dotted in _SIZES:
            return self.size
        if dotted.startswith(HOROVOD + "."):
            return self.horovod(dotted.removeprefix(HOROVOD + "."), args, named, node)
        return super().call_name(dotted, args, named, node)

    def start(self, function: Any, args: Any, named: Any, node: ast.Call) -> Any:
        """The function that such a call starts in every process."""
        given = list(args) if isinstance(args, list | tuple) else []
        return self.call_value(
            function, given, dict(named) if isinstance(named, dict) else {}, node
        )

    def call_method(
        self, owner: Any, name: str, args: list[Any], named: dict[str, Any], node: ast.Call
    ) -> Any:
        if isinstance(owner, Thing) and owner.kind == "runner" and name == "run" and args:
            self.event("horovod.run", node, {"np": owner.facts.get("np", 1)})
            return self.start(args[0], args[1:], named, node)
        return super().call_method(owner, name, args, named, node)

    def horovod(self, name: str, args: list[Any], named: dict[str, Any], node: ast.Call) -> Any:
        if name == "size":
            return self.size
        if name in _PLACES:
            return self.unknown(node)
        if name in _QUESTIONS or name.endswith(("_built", "_enabled")):
            return self.unknown(node)
        if name == "DistributedOptimizer":
            order = (
                "optimizer",
                "named_parameters",
                "compression",
                "backward_passes_per_step",
                "op",
                "gradient_predivide_factor",
                "num_groups",
                "groups",
                "sparse_as_dense",
                "process_set",
            )
            facts = by_name(order, args, named)
            self.event(name, node, facts)
            return Thing("optimizer", place_of(node), {"wrapped": True})
        written = any(".grad" in ast.unparse(argument) for argument in node.args)
        of_gradient = self.around.of_gradients or written
        self.event(name, node, {"args": args, **named, "of_gradient": of_gradient})
        return self.unknown(node)
