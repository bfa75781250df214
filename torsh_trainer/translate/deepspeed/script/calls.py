"""A training script for DeepSpeed: what of its calls is DeepSpeed's."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from torsh_trainer.translate.python.calls import by_name
from torsh_trainer.translate.python.events import place_of
from torsh_trainer.translate.python.objects import NOT_SET
from torsh_trainer.translate.python.torch_calls import TorchWalk
from torsh_trainer.translate.python.values import (
    Kind,
    ScriptDict,
    Thing,
    Unknown,
    callable_is_known,
    division_of,
)
from torsh_trainer.translate.python.walk import FindFile, FindModule

DEEPSPEED = "deepspeed"
_INITIALIZE = (
    "args",
    "model",
    "optimizer",
    "model_parameters",
    "training_data",
    "lr_scheduler",
    "distributed_port",
    "mpu",
    "dist_init_required",
    "collate_fn",
    "config",
)
_SIZES = ("torch.distributed.get_world_size", "deepspeed.comm.get_world_size")
_OPTIMIZERS = ("FusedAdam", "DeepSpeedCPUAdam", "FusedLamb", "FusedLion", "DeepSpeedCPULion")
_SCHEDULERS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
_OF_SCHEDULERS = "runtime.lr_schedules."


class DeepSpeedWalk(TorchWalk):
    """Makes events of ``deepspeed.*`` and of an engine's methods."""

    def __init__(
        self,
        size: int | None,
        arguments: Mapping[str, Any],
        known: Mapping[str, Any],
        find_module: FindModule | None,
        find_file: FindFile,
    ) -> None:
        super().__init__(arguments, known, find_module, find_file)
        self.size = size
        if size is not None:  # DeepSpeed's launcher and torchrun set it
            self.environment.given = {"WORLD_SIZE": str(size), **self.environment.given}

    def call_name(self, dotted: str, args: list[Any], named: dict[str, Any], node: ast.Call) -> Any:
        last = dotted.rpartition(".")[2]
        if dotted in _SIZES:
            return self.unknown(node) if self.size is None else self.size
        if last in _OPTIMIZERS:
            return self.optimizer(last, args, named, node)
        if last.endswith("Trainer") and dotted.startswith(("transformers.", "trl.")):
            self.event("hf.trainer", node, {"class": last})
        if last == "HfDeepSpeedConfig" or last == "HfTrainerDeepSpeedConfig":
            return Thing("hf config", place_of(node))
        if dotted == DEEPSPEED or not dotted.startswith(DEEPSPEED + "."):
            return super().call_name(dotted, args, named, node)
        return self.deepspeed(dotted.removeprefix(DEEPSPEED + "."), args, named, node)

    def read_configuration_of(self, arguments: Any, node: ast.Call) -> Any:
        """What ``args.deepspeed_config`` is, whatever ``args`` is."""
        if not isinstance(arguments, Thing | Kind | ScriptDict):
            return arguments if isinstance(arguments, Unknown) else None
        found = self.look_up(arguments, "deepspeed_config", node)
        return None if found is NOT_SET else found

    def make_given(self, given: Any, node: ast.Call) -> Any:
        """An optimizer or a scheduler, also where a function is given that makes it."""
        is_lambda = isinstance(given, Unknown) and isinstance(given.of, ast.Lambda)
        if not is_lambda and not callable_is_known(given):
            return given
        made = self.call_value(given, [Unknown("parameters", place_of(node))], {}, node)
        return made if isinstance(made, Thing) and "class" in made.facts else given

    def deepspeed(self, name: str, args: list[Any], named: dict[str, Any], node: ast.Call) -> Any:
        """A call of DeepSpeed's own."""
        if name == "initialize":
            facts = by_name(_INITIALIZE, args, named)
            if "config_params" in facts:
                facts.setdefault("config", facts.pop("config_params"))
            facts["args_config"] = self.read_configuration_of(facts.get("args"), node)
            for name in ("optimizer", "lr_scheduler"):
                facts[name] = self.make_given(facts.get(name), node)
            self.event("initialize", node, {**facts, "written": dict(self.written)})
            optimizer = facts.get("optimizer")
            if not isinstance(optimizer, Thing):
                optimizer = Thing("optimizer", place_of(node), {"engine": True})
            scheduler = facts.get("lr_scheduler")
            if not isinstance(scheduler, Thing):
                scheduler = Thing("scheduler", place_of(node), {"engine": True})
            loader = Thing("loader", place_of(node), {"engine": True})
            return (Thing("engine", place_of(node)), optimizer, loader, scheduler)
        if name == "add_config_arguments" and (args or "parser" in named):
            parser = args[0] if args else named["parser"]
            if isinstance(parser, Thing) and parser.kind == "parser":
                for option, default in (("deepspeed", False), ("deepspeed_config", None)):
                    said = self.arguments.get(f"--{option}", default)
                    parser.facts["defaults"].setdefault(option, said)
                    self.used.add(f"--{option}")
            return parser
        kind = name.rpartition(".")[2]
        if name.startswith(_OF_SCHEDULERS) and kind in _SCHEDULERS and len(args) < 2:
            return Thing("scheduler", place_of(node), {"class": kind, "named": named})
        if name.endswith("get_accelerator"):
            return self.unknown(node)
        self.event(f"deepspeed.{name}", node, {"args": args, **named})
        return self.unknown(node)

    def call_method(
        self, owner: Any, name: str, args: list[Any], named: dict[str, Any], node: ast.Call
    ) -> Any:
        if not isinstance(owner, Thing) or owner.kind != "engine":
            return super().call_method(owner, name, args, named, node)
        facts: dict[str, Any] = {"args": args, **named}
        if name == "backward" and args:
            facts["divided"] = division_of(args[0])
        self.event(f"engine.{name}", node, facts)
        return self.unknown(node)
