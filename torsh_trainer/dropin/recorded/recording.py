"""What a training script does at each step, written down from outside, under any engine.

Needs torch and the standard library alone: processes that the user's own line starts load it by its
file. It looks at what every engine shares (the step of a torch optimizer, the backward of a loss)
and, for DeepSpeed, whose optimizers are its own, at the engine that ``deepspeed.initialize`` gives.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = "TORSH_RECORD"
"""The variable that names the folder; rank N writes ``rank-N.jsonl`` there."""
STEPS = "TORSH_RECORD_STEPS"
"""How many steps are recorded; the process ends after them, as the others do."""
SEED = "TORSH_RECORD_SEED"

_RANKS = ("HOROVOD_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_SIZES = ("HOROVOD_SIZE", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
_SPREAD = 16
"""Elements of a parameter that are written down, spread evenly over it."""
_PATIENCE_S = 120.0


class Recorder:
    """Writes a line for every step, and one for the parameters before the first."""

    def __init__(
        self, folder: Path, *, rank: int, size: int, steps: int, leave: Callable[[int], Any]
    ) -> None:
        self._file = (folder / f"rank-{rank}.jsonl").open("w")
        self._folder, self._rank, self._size, self._steps = folder, rank, size, steps
        self._leave = leave
        self._losses: list[float] = []
        self._pending: dict[str, Any] | None = None
        self._step = 0
        self._watched = False

    # -- torch's optimizers ----------------------------------------------------------------------

    def attach_to_torch(self, torch: Any) -> None:
        """Looks at every optimizer of torch, and at every loss."""
        hooks = importlib.import_module("torch.optim.optimizer")
        hooks.register_optimizer_step_pre_hook(self.before_step)
        hooks.register_optimizer_step_post_hook(self.after_step)
        for kind in vars(torch.optim).values():  # a wrapper calls the step of a class by its name
            is_optimizer = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
            if is_optimizer and not hasattr(kind.step, "hooked"):
                kind.step = kind.profile_hook_step(kind.step)
                kind.step.hooked = True
        original = torch.Tensor.backward

        def backward(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._watched and tensor.numel() == 1:
                self._losses.append(float(tensor.detach()))
            return original(tensor, *args, **kwargs)

        torch.Tensor.backward = backward

    def before_step(self, optimizer: Any, *_: Any) -> None:
        """Before an update. A wrapper's comes first: the one that stays is the inner one, which
        sees reduced gradients."""
        if self._watched:
            return
        parameters = _parameters_of(optimizer)
        if self._step == 0 and self._pending is None:
            self._write({"step": 0, "parameters": _describe_all(parameters)})
        self._pending = {
            "grad_norm": _norm([p.grad for p in parameters if p.grad is not None]),
            "lr": [float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
        }

    def after_step(self, optimizer: Any, *_: Any) -> None:
        """After the inner update; the wrapper's own end follows, and says nothing new."""
        if self._watched or self._pending is None:
            return
        pending, self._pending = self._pending, None
        self._end_step(**pending, parameters=_describe_all(_parameters_of(optimizer)))

    # -- DeepSpeed's engine ----------------------------------------------------------------------

    def attach_to_deepspeed(self, module: Any) -> None:
        """Looks at the engines that ``deepspeed.initialize`` makes."""
        original = module.initialize

        def initialize(*args: Any, **kwargs: Any) -> Any:
            # Its optimizer may take a step while it is made, which is none of the script's.
            first, self._watched = not self._watched, True
            made = original(*args, **kwargs)
            if first:
                self._watch_engine(made[0], module)
            return made

        module.initialize = initialize

    def _watch_engine(self, engine: Any, module: Any) -> None:
        backward, step = engine.backward, engine.step

        whole = getattr(module.utils, "safe_get_full_fp32_param", lambda parameter: None)
        low = engine.get_data_types()[0]

        def look() -> dict[str, Any]:
            """The parameters; where there are none in fp32 to see, as the engine holds them.

            ``rounded`` are they in the dtype of the engine: what both can show.
            """
            values = []
            for parameter in engine.module.parameters():
                value = whole(parameter) if parameter.requires_grad else None
                values.append(parameter if value is None else value)
            found: dict[str, Any] = {"parameters": _describe_all(values)}
            if low.itemsize < 4:
                found["rounded"] = _describe_all([value.detach().to(low) for value in values])
                found["held"] = sorted({str(value.dtype) for value in values})
            return found

        def record_backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
            if self._step == 0 and not self._losses:
                self._write({"step": 0, **look()})
            self._losses.append(float(loss.detach()))
            return backward(loss, *args, **kwargs)

        def record_step(*args: Any, **kwargs: Any) -> Any:
            is_update = engine.is_gradient_accumulation_boundary()
            rates = [float(rate) for rate in engine.get_lr()]
            result = step(*args, **kwargs)
            if is_update:
                norm = engine.get_global_grad_norm()
                norm = None if norm is None else float(norm)
                self._end_step(grad_norm=norm, lr=rates, **look())
            return result

        engine.backward, engine.step = record_backward, record_step

    # -- lines -----------------------------------------------------------------------------------

    def _end_step(self, **row: Any) -> None:
        self._step += 1
        losses, self._losses = self._losses, []
        self._write({"step": self._step, "losses": losses, **row})
        if self._step == self._steps:
            self._end_process()

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def _end_process(self) -> None:
        """Ends with the others: a rank that goes first would be taken for dead."""
        (self._folder / f"done-{self._rank}").touch()
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until and len(list(self._folder.glob("done-*"))) < self._size:
            time.sleep(0.05)
        sys.stdout.flush()
        sys.stderr.flush()
        self._leave(0)


def start(*, is_torch_here: bool = False, leave: Callable[[int], Any] = os._exit) -> None:
    """Begins to record in this process, if the variables ask for it and it is a rank of a job.

    ``leave`` ends the process after the last step: at once, unless the caller knows of a way that
    lets what stands around the script end as well.
    """
    folder, rank = os.environ.get(FOLDER), _first(_RANKS)
    if not folder or rank is None:
        return
    recorder = Recorder(
        Path(folder),
        rank=rank,
        size=_first(_SIZES) or 1,
        steps=int(os.environ.get(STEPS, "0")),
        leave=leave,
    )
    seed = int(os.environ.get(SEED, "0"))
    random.seed(seed)

    def attach(torch: Any) -> None:
        torch.manual_seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        recorder.attach_to_torch(torch)

    wanted: dict[str, Callable[[Any], None]] = {"deepspeed": recorder.attach_to_deepspeed}
    if is_torch_here:
        attach(sys.modules["torch"])
    else:
        wanted["torch"] = attach
    sys.meta_path.insert(0, _AfterImport(wanted))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module once that has been imported."""

    def __init__(self, wanted: dict[str, Callable[[Any], None]]) -> None:
        self._wanted = wanted

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that the other finders give, with a loader that calls the function."""
        then = self._wanted.pop(name, None)
        if then is None:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, then)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any, then: Callable[[Any], None]) -> None:
        self._inner, self._then = inner, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._inner.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        self._then(module)


def _first(names: Sequence[str]) -> int | None:
    found = next((os.environ[name] for name in names if os.environ.get(name, "").isdigit()), None)
    return None if found is None else int(found)


def _parameters_of(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _norm(tensors: Sequence[Any]) -> float:
    return math.sqrt(sum(float(t.detach().double().pow(2).sum()) for t in map(_dense, tensors)))


def _dense(tensor: Any) -> Any:
    return tensor.to_dense() if tensor.is_sparse else tensor


def _describe_all(parameters: Sequence[Any]) -> list[list[float]]:
    return [_describe(parameter) for parameter in parameters]


def _describe(tensor: Any) -> list[float]:
    """The norm of a tensor, its sum, and some of its elements."""
    flat = tensor.detach().double().flatten()
    if not flat.numel():
        return [0.0, 0.0]
    places = range(0, flat.numel(), max(1, flat.numel() // _SPREAD))
    spread = [float(flat[at]) for at in list(places)[:_SPREAD]]
    return [float(flat.norm()), float(flat.sum()), *spread]
