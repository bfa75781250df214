"""What torch's own names mean in a training script: optimizers, loaders, clipping, precision."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.translate.python.calls import by_name
from torsh_trainer.translate.python.events import place_of
from torsh_trainer.translate.python.project import read_record
from torsh_trainer.translate.python.values import Thing, Unknown, division_of
from torsh_trainer.translate.python.walk import Walk

_OF_OPTIMIZER = ("step", "synchronize", "set_backward_passes_per_step", "load_state_dict")


POSITIONAL: Mapping[str, tuple[str, ...]] = {
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
    "Adam": ("lr", "betas", "eps", "weight_decay", "amsgrad"),
    "AdamW": ("lr", "betas", "eps", "weight_decay", "amsgrad"),
    "RMSprop": ("lr", "alpha", "eps", "weight_decay", "momentum", "centered"),
    "Adagrad": ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"),
    "StepLR": ("step_size", "gamma"),
    "MultiStepLR": ("milestones", "gamma"),
    "ExponentialLR": ("gamma",),
    "CosineAnnealingLR": ("T_max", "eta_min"),
    "CosineAnnealingWarmRestarts": ("T_0", "T_mult", "eta_min"),
    "LinearLR": ("start_factor", "end_factor", "total_iters"),
    "ConstantLR": ("factor", "total_iters"),
    "PolynomialLR": ("total_iters", "power"),
    "OneCycleLR": ("max_lr", "total_steps"),
    "LambdaLR": ("lr_lambda",),
    "MultiplicativeLR": ("lr_lambda",),
    "ReduceLROnPlateau": ("mode", "factor", "patience"),
}
"""Names of the arguments that stand without one."""


def name_positional(kind: str, args: Sequence[Any]) -> dict[str, Any]:
    """Arguments of an optimizer or scheduler of torch that stand without a name, by name."""
    return dict(zip(POSITIONAL.get(kind, ("lr",)), args, strict=False))


_LOADS = ("json.load", "json.loads", "hjson.load", "yaml.safe_load", "yaml.load", "yaml.full_load")
"""What reads a configuration, of a file or of its text."""


class TorchWalk(Walk):
    """A walk that makes events of what torch's classes and functions do."""

    def call_name(self, dotted: str, args: list[Any], named: dict[str, Any], node: ast.Call) -> Any:
        last = dotted.rpartition(".")[2]
        if dotted in ("open", "io.open"):
            return Thing("file", place_of(node), {"path": args[0] if args else None})
        if dotted in _LOADS:
            return self.load(args, node)
        if last in ("DataLoader", "StatefulDataLoader"):
            facts = by_name(("dataset", "batch_size", "shuffle", "sampler"), args, named)
            return Thing("loader", place_of(node), facts)
        if last == "DistributedSampler":
            facts = by_name(
                ("dataset", "num_replicas", "rank", "shuffle", "seed", "drop_last"), args, named
            )
            self.event("sampler", node, facts)
            return Thing("sampler", place_of(node), facts)
        if last in ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_"):
            name = "clip_value" if "value" in last else "max_norm"
            facts = by_name(("parameters", name, "norm_type"), args, named)
            facts = {"max_norm" if k == "clip_value" else k: v for k, v in facts.items()}
            self.event(last.rstrip("_"), node, facts)
            return self.unknown(node)
        if last in ("autocast", "GradScaler"):
            self.event(last, node, {"dotted": dotted, "args": args, **named})
            return Thing("scaler", place_of(node)) if last == "GradScaler" else self.unknown(node)
        if dotted in ("torch.manual_seed", "torch.random.manual_seed"):
            self.event("seed", node, {"value": args[0] if args else None})
            return self.unknown(node)
        if dotted.startswith("torch.optim.lr_scheduler."):
            facts = {"class": last, "args": args, "named": named}
            self.event("scheduler", node, facts)
            return Thing("scheduler", place_of(node), facts)
        if dotted.startswith("torch.optim."):
            return self.optimizer(last, args, named, node)
        return super().call_name(dotted, args, named, node)

    def load(self, args: list[Any], node: ast.Call) -> Any:
        """What a file holds that the script reads as JSON or YAML."""
        opened = args[0] if args else None
        path = opened.facts.get("path") if isinstance(opened, Thing) else None
        if isinstance(path, str):
            found = None if self.find_file is None else self.find_file(path)
            try:
                record = None if found is None else read_record(found)
            except (ConfigError, ResourceError):
                record = None
            if record is not None:
                return record
        if isinstance(path, str | Unknown):
            text = path if isinstance(path, str) else path.text
            self.event("load.missing", node, {"path": text, "is_known": isinstance(path, str)})
        return self.unknown(node)

    def optimizer(self, kind: str, args: list[Any], named: dict[str, Any], node: ast.Call) -> Thing:
        """An optimizer that the script makes."""
        facts = {"class": kind, "args": args, "named": named}
        self.event("optimizer", node, facts)
        return Thing("optimizer", place_of(node), facts)

    def call_method(
        self, owner: Any, name: str, args: list[Any], named: dict[str, Any], node: ast.Call
    ) -> Any:
        otherwise = self.unknown(node)
        if isinstance(owner, Thing) and owner.kind == "file" and name == "read":
            return owner
        if not isinstance(owner, Thing):
            if name == "backward":
                self.event("backward", node, {"divided": division_of(owner)})
            return otherwise
        if owner.kind == "scaler" and name == "scale" and args:
            return replace(otherwise, divided=division_of(args[0]))
        if owner.kind == "scheduler" and name == "step":
            self.event("scheduler.step", node, {"scheduler": owner, "args": args})
        steps = owner.kind == "scaler" and name == "step"
        if steps or (owner.kind == "optimizer" and name in _OF_OPTIMIZER):
            self.event(f"optimizer.{name}", node, {"args": args})
        return otherwise
