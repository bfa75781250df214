"""What torch's own names mean in a training script: optimizers, loaders, clipping, precision."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torsh_trainer.translate.python.calls import by_name
from torsh_trainer.translate.python.events import Scope, place_of
from torsh_trainer.translate.python.files import FileWalk
from torsh_trainer.translate.python.values import Thing, Unknown, division_of, write_expression

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
    "get_linear_schedule_with_warmup": ("num_warmup_steps", "num_training_steps"),
    "get_cosine_schedule_with_warmup": ("num_warmup_steps", "num_training_steps", "num_cycles"),
    "get_constant_schedule_with_warmup": ("num_warmup_steps",),
    "get_constant_schedule": (),
}
"""Names of the arguments that stand without one."""


def name_positional(kind: str, args: Sequence[Any]) -> dict[str, Any]:
    """Arguments of an optimizer or scheduler of torch that stand without a name, by name."""
    return dict(zip(POSITIONAL.get(kind, ("lr",)), args, strict=False))


PLAIN_SCHEDULES: Mapping[str, str] = {
    "get_linear_schedule_with_warmup": "linear",
    "get_cosine_schedule_with_warmup": "cosine",
    "get_constant_schedule_with_warmup": "constant",
    "get_constant_schedule": "constant",
}
"""A function of transformers that makes a scheduler -> the schedule here that has its curve."""

_SCHEDULES = ("transformers.get_", "transformers.optimization.get_", "diffusers.optimization.get_")
_OTHER_ADAMS = ("transformers.AdamW", "transformers.optimization.AdamW")
"""An AdamW with other defaults, and almost torch's formula."""

OTHER_ADAM = (
    "transformers adds eps before it corrects the bias, and decays weights after the step; here as "
    "torch's AdamW does"
)

_RATES = re.compile(r"sched|cosine|warm|learning_rate|_lr$|LR$|^lr_", re.IGNORECASE)
"""What a function is called that makes or sets a rate, where it is handed an optimizer."""

_HARMLESS_STEPS = re.compile(
    r"sched|optim|^opt$|engine|model|scaler|prof|timer|bar$|env|meter|log|track|writer|agent|clock|"
    r"progress|accelerator|monitor|wandb|watch",
    re.IGNORECASE,
)
"""What is called so, and steps in a loop, is judged elsewhere or trains nothing."""

_STEPS = ("step", "first_step", "second_step")
_GRADIENT = re.compile(r"\.grad(\.data)?$")
_CASTS = ("double", "half", "bfloat16")
_MODELS = re.compile(r"(^|[._])(\w*model|\w*net|network|encoder|decoder)\b|\b[A-Z]\w*\(", re.ASCII)
"""What a model is called, or made by, where its parameters are cast."""

_KEEP_GRADIENT = ("zero_", "detach_", "requires_grad_", "record_stream_", "share_memory_")

STEPS_BESIDE = (
    "it steps beside the optimizer, and a preconditioner or its like changes gradients: write what "
    "it does as an optimizer of your own (docs/optimization.md), or see that it changes nothing"
)
"""What is said of an object with a step of which reading knows nothing else."""

RUNS_TEXT = (
    "it runs text that is not read: what that sets may be another value than those here; state in "
    "the recipe what differs"
)
"""What is said of ``exec``."""

CHANGES_OPTION = (
    "the script changes it while it trains: write it as an optimizer or callback of your own "
    "(docs/optimization.md), or leave it out"
)
"""What is said of an option of the optimizer that is set in a loop."""

CHANGES_GRADIENT = (
    "gradients are changed by hand before the optimizer steps: write it as an optimizer of your "
    "own (docs/optimization.md), or leave it out"
)
"""What is said where a script writes into gradients."""

_NOT_OF_TORCH = ("correct_bias", "no_deprecation_warning")


class TorchWalk(FileWalk):
    """A walk that makes events of what torch's classes and functions do."""

    def call_name(self, dotted: str, args: list[Any], named: dict[str, Any], node: ast.Call) -> Any:
        last = dotted.rpartition(".")[2]
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
        of_transformers = dotted.startswith(_SCHEDULES) and "schedule" in last
        if of_transformers or dotted.startswith("torch.optim.lr_scheduler."):
            return self.schedule(last, args, named, node)
        if dotted == "torch.optim.swa_utils.SWALR":
            return self.schedule(last, args, named, node)
        if dotted.startswith("torch.optim.") and not dotted.startswith("torch.optim.swa_utils."):
            return self.optimizer(last, args, named, node)
        if dotted in _OTHER_ADAMS and named.get("correct_bias", True) is True and len(args) < 6:
            named = {"eps": 1e-6, "weight_decay": 0.0} | named
            named = {k: v for k, v in named.items() if k not in _NOT_OF_TORCH}
            for given in ("eps", "weight_decay")[: max(0, len(args) - 3)]:
                named.pop(given, None)
            return self.optimizer("AdamW", args, named, node, of=dotted)
        if last.endswith("_") and last not in _KEEP_GRADIENT:
            self.mark_gradient(dotted.rpartition(".")[0], node)
        if last in _STEPS and self.around.loops:
            self.mark_step(dotted, dotted, node)
        if _RATES.search(last) and any(map(is_optimizer, (*args, *named.values()))):
            text = write_expression(node)
            self.event("scheduler.unknown", node, {"written": last, "made": text})
        return super().call_name(dotted, args, named, node)

    def method(self, owner: Any, name: str, node: ast.Call, scope: Scope) -> Any:
        if name in _CASTS and not node.args and not self.around.loops:
            written = (
                write_expression(node.func.value) if isinstance(node.func, ast.Attribute) else ""
            )
            if _MODELS.search(written):
                self.event("model.cast", node, {"written": f"{written}.{name}()"[:60], "to": name})
        if isinstance(owner, Unknown) and name.endswith("_") and name not in _KEEP_GRADIENT:
            self.mark_gradient(owner.text, node)
        return super().method(owner, name, node, scope)

    def assign(self, target: ast.expr, value: Any, scope: Scope) -> None:
        if isinstance(target, ast.Attribute) and value is not None:
            self.mark_gradient(write_expression(target), target)
        super().assign(target, value, scope)

    def hand_over(self, node: ast.Call, given: list[Any]) -> None:
        if any(isinstance(one, Thing) and one.kind == "scheduler" for one in given):
            self.event("scheduler.handed", node, {"to": write_expression(node.func)})

    def mark_gradient(self, written: str, node: ast.expr) -> None:
        """Enters that a gradient is written to, where a loop does that."""
        if self.around.loops and _GRADIENT.search(written):
            self.event("gradient.changed", node, {"written": written})

    def step_stranger(self, owner: Unknown, node: ast.Call) -> None:
        """What steps, and is made where reading does not get to: a scheduler, by what it is called,
        or something else beside the optimizer."""
        written = write_expression(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        if "sched" in written.lower():
            self.event(
                "scheduler.unknown", node, {"written": f"{written}.step", "made": owner.text}
            )
        else:
            self.mark_step(write_expression(node.func), owner.text, node)

    def mark_step(self, written: str, made: str, node: ast.Call) -> None:
        """Enters a step of something beside the optimizer, unless it is called a harmless name."""
        owner = re.sub(r"\(.*", "", written.rpartition(".")[0]).rpartition(".")[2]
        if owner and not _HARMLESS_STEPS.search(owner):
            self.event("step.unknown", node, {"written": written, "made": made})

    def schedule(self, kind: str, args: list[Any], named: dict[str, Any], node: ast.Call) -> Thing:
        """A scheduler that the script makes."""
        facts = {"class": kind, "args": args, "named": named}
        self.event("scheduler", node, facts)
        return Thing("scheduler", place_of(node), facts)

    def optimizer(
        self, kind: str, args: list[Any], named: dict[str, Any], node: ast.Call, of: str = ""
    ) -> Thing:
        """An optimizer that the script makes; ``of``: its full name, where it is not torch's."""
        if "lr" in named and named["lr"] is None:  # an argument that nobody has given
            given = next((word.value for word in node.keywords if word.arg == "lr"), node)
            named = named | {"lr": self.unknown(given)}
        facts = {"class": kind, "args": args, "named": named, "of": of}
        self.event("optimizer", node, facts)
        return Thing("optimizer", place_of(node), facts)

    def call_method(
        self, owner: Any, name: str, args: list[Any], named: dict[str, Any], node: ast.Call
    ) -> Any:
        otherwise = self.unknown(node)
        if not isinstance(owner, Thing):
            if name == "backward":
                self.event("backward", node, {"divided": division_of(owner)})
            if name in _STEPS and self.around.loops and isinstance(owner, Unknown):
                self.step_stranger(owner, node)
            return super().call_method(owner, name, args, named, node)
        if owner.kind == "scaler" and name == "scale" and args:
            return replace(otherwise, divided=division_of(args[0]))
        if owner.kind == "scheduler" and name == "step":
            self.event("scheduler.step", node, {"scheduler": owner, "args": args})
        steps = owner.kind == "scaler" and name == "step"
        if steps or (owner.kind == "optimizer" and name in _OF_OPTIMIZER):
            self.event(f"optimizer.{name}", node, {"args": args})
        return super().call_method(owner, name, args, named, node)


def is_optimizer(value: Any) -> bool:
    """Whether a value of a script is an optimizer, or is called one."""
    if isinstance(value, Unknown):
        return re.search(r"\boptim", value.text) is not None
    return isinstance(value, Thing) and value.kind == "optimizer"
