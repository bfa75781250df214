"""``task=lightning``: an unmodified LightningModule in a run of ours."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import lightning
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelSummary, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.compile import from_compiled
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from torch import nn
from torch._dynamo import OptimizedModule
from torch.optim import Optimizer

from torsh_trainer.data.loading import Loading
from torsh_trainer.errors import ConfigError, Unsupported, nearest
from torsh_trainer.optim.optimizers import OptimizerSpec
from torsh_trainer.optim.schedule.base import Schedule
from torsh_trainer.strategies.base import Clip
from torsh_trainer.tasks.base import DataSource
from torsh_trainer.training.program import ComparisonMode, ProgramContext, ProgramTask
from torsh_trainer_lightning.checks import check
from torsh_trainer_lightning.loop.facade import WORDS, Facade
from torsh_trainer_lightning.loop.factory import LightningProgramFactory
from torsh_trainer_lightning.loop.order import GlobalOrder, LightningOrder
from torsh_trainer_lightning.loop.shares import Shares
from torsh_trainer_lightning.loop.stages import Stages
from torsh_trainer_lightning.other import adopt


class LightningTask(ProgramTask):
    """A LightningModule and its data module, trained as Lightning means it by an engine of ours.

    ``module`` and ``datamodule`` are objects, or callables that make them: those are called under
    ``trainer.seed``, the data module first, as a script would. ``callbacks`` and ``loggers`` are
    Lightning's, by any name. ``ckpt_path`` is a ``.ckpt`` of Lightning to go on from (or to
    evaluate), or ``last`` for the newest that a ModelCheckpoint has left; ``ckpt_path_after_fit``
    gives the stages after training the ``last`` or the ``best`` weights. ``trust_ckpt`` lets a
    checkpoint run code. ``order`` is ``lightning``, or ``ours``: samples, weights and random
    numbers as in the trainer's other tasks, whatever the number of processes.
    The other knobs are flags of ``lightning.Trainer`` under its own names; null leaves what the
    ``trainer`` group says.

    Raises:
        ConfigError: something is not of its kind, or a flag is out of range.
    """

    data = DataSource()
    unit = "samples"
    instead_of: ClassVar[Mapping[str, str]] = {
        "find_lr": "add +task.callbacks.find_lr._target_="
        "lightning.pytorch.callbacks.LearningRateFinder",
        "find_batch_size": "add +task.callbacks.find_batch_size._target_="
        "lightning.pytorch.callbacks.BatchSizeFinder",
    }

    def __init__(
        self,
        module: Callable[[], LightningModule] | LightningModule,
        datamodule: Callable[[], LightningDataModule] | LightningDataModule | None = None,
        *,
        callbacks: Mapping[str, Any] | Sequence[Any] = (),
        loggers: Mapping[str, Any] | Sequence[Any] = (),
        order: str = "lightning",
        ckpt_path: str | None = None,
        ckpt_path_after_fit: str | None = None,
        trust_ckpt: bool = False,
        seed_workers: bool = False,
        min_epochs: int | None = None,
        min_steps: int | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        val_check_interval: int | float | str | None = None,
        num_sanity_val_steps: int = 2,
        reload_dataloaders_every_n_epochs: int = 0,
        use_distributed_sampler: bool = True,
        inference_mode: bool = True,
        detect_anomaly: bool = False,
        profiler: Any = None,
        enable_autolog_hparams: bool = True,
    ) -> None:
        self.optimizer = OptimizerSpec()
        self.callbacks: list[Callback] = _list_enabled(callbacks)
        self.loggers: list[Logger] = _list_enabled(loggers)
        if order not in _ORDERS:
            raise ConfigError(f"task.order={order} is unknown", fix=nearest(order, _ORDERS))
        self.order = order
        if ckpt_path == "best":
            raise ConfigError(
                "task.ckpt_path=best: before training nothing is the best",
                fix="set task.ckpt_path_after_fit=best for the stages after it, or give a file",
            )
        if ckpt_path_after_fit not in (None, *WORDS):
            raise ConfigError(
                f"task.ckpt_path_after_fit={ckpt_path_after_fit} is unknown",
                fix="set last, best or null; a file stands in task.ckpt_path",
            )
        self.ckpt_path = ckpt_path
        self.ckpt_path_after_fit = ckpt_path_after_fit
        self.trust_ckpt = trust_ckpt
        self.seed_workers = seed_workers
        self._module = module
        self._datamodule = datamodule
        self._limits = {
            "train": limit_train_batches,
            "val": limit_val_batches,
            "test": limit_test_batches,
            "predict": limit_predict_batches,
        }
        self._least = {"min_epochs": min_epochs, "min_steps": min_steps}
        self._val_check_interval = val_check_interval
        self._flags = {
            "num_sanity_val_steps": num_sanity_val_steps,
            "reload_dataloaders_every_n_epochs": reload_dataloaders_every_n_epochs,
            "use_distributed_sampler": use_distributed_sampler,
            "inference_mode": inference_mode,
            "detect_anomaly": detect_anomaly,
            "profiler": profiler,
            "enable_autolog_hparams": enable_autolog_hparams,
        }
        self._comparison: ComparisonMode | None = None
        self._factory: LightningProgramFactory | None = None

    # -- the contract of a task -----------------------------------------------------------------

    @property
    def own_order(self) -> bool:  # type: ignore[override]
        return self.order == "lightning"

    def compare_as(self, mode: ComparisonMode) -> LightningTask:
        task = copy.copy(self)
        task._comparison = mode
        # As under fast_dev_run; a logger stays, for callbacks that ask for one.
        task.callbacks = [c for c in self.callbacks if not isinstance(c, _NOT_TRAINING)]
        task.loggers = [DummyLogger()] if self.loggers else []
        task.ckpt_path = task.ckpt_path_after_fit = None
        task._limits = {**self._limits, "val": 0}
        task._least = dict.fromkeys(self._least)
        task._val_check_interval = None
        return task

    def plan_program(self, context: ProgramContext) -> LightningProgramFactory:
        trainer = context.spec
        self._refuse(trainer)
        for speaks in (rank_zero_only, utilities_rank_zero_only):
            setattr(speaks, "rank", context.comm.world.rank)  # noqa: B010 - of a function
        lightning.seed_everything(trainer.seed, workers=self.seed_workers, verbose=False)
        datamodule = adopt(_make_given(self._datamodule, LightningDataModule))
        module = adopt(_make_given(self._module, LightningModule))
        check(module, datamodule, self.callbacks, self.loggers, trainer.stages)
        order = self._make_order(context)
        order.check(module, self.callbacks, self._flags)
        with _quiet():
            facade = Facade(
                order=order,
                strategy=order.bind_strategy(context.comm, trainer.precision),
                callbacks=list(self.callbacks),
                logger=list(self.loggers) or False,
                default_root_dir=str(context.run_dir / "lightning"),
                taken=None if trainer.checkpoint.dir else context.run_dir.resolve() / "checkpoints",
                shares=self._shares(context, manual=not module.automatic_optimization),
                **self._facade_flags(trainer, manual=not module.automatic_optimization),
            )
        resume = trainer.checkpoint.resume
        stages = Stages(
            facade,
            module,
            datamodule,
            context.comm.device,
            stages=trainer.stages,
            ckpt_path=resume if resume.endswith(".ckpt") else self.ckpt_path,
            trust_ckpt=self.trust_ckpt,
            after_fit=self._after_fit(trainer),
        )
        self._factory = LightningProgramFactory(
            context,
            stages,
            clip=Clip(trainer.max_grad_norm, trainer.max_grad_value),
            manual=not module.automatic_optimization,
            own_order=self.own_order,
            sgd_lr=None if self._comparison is None else self._comparison.sgd_lr,
        )
        return self._factory

    def _after_fit(self, trainer: Any) -> str | None:
        word = self.ckpt_path_after_fit
        if word is not None and "fit" not in trainer.stages:
            raise ConfigError(
                f"task.ckpt_path_after_fit={word}, and trainer.stages has no fit",
                fix="give the file: task.ckpt_path=FILE.ckpt",
            )
        return None if trainer.fast_dev_run else word

    def _shares(self, context: ProgramContext, *, manual: bool) -> Shares | None:
        """The shares of several processes, where this one stands for them."""
        mesh = context.mesh
        if self._comparison is None or not self.own_order or self._comparison.processes == mesh.dp:
            return None
        if manual:
            raise Unsupported(
                "under manual optimization one process cannot take the batches of "
                f"{self._comparison.processes} in turn: the module steps after each",
                fix="compare strategies of as many processes: leave single out, say",
            )
        each = self._comparison.processes // mesh.dp
        first = mesh.dp_rank * each
        return Shares(
            range(first, first + each), self._comparison.processes, device=context.comm.device
        )

    def build_model(self) -> nn.Module:
        assert self._factory is not None
        return self._factory.stages.model()

    def build_optimizers(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> Mapping[str, Optimizer]:
        assert self._factory is not None
        return self._factory.configure(self._factory.stages.module).by_name

    # -- knobs ----------------------------------------------------------------------------------

    def _make_order(self, context: ProgramContext) -> LightningOrder:
        if self.order == GlobalOrder.name:
            return GlobalOrder(context.mesh, seed=context.spec.seed)
        return LightningOrder()

    def _facade_flags(self, trainer: Any, *, manual: bool) -> dict[str, Any]:
        """The flags of lightning.Trainer that the knobs of the run come to."""
        limits = dict(self._limits)
        if limits["val"] is None:
            limits["val"] = trainer.eval_batches
        interval = self._val_check_interval
        if trainer.eval_every_epochs is None and interval is None:
            limits["val"] = 0
        every = trainer.eval_every_epochs
        if every is None and interval is None:
            every = 1
        norm, value = trainer.max_grad_norm, trainer.max_grad_value
        return {
            "max_epochs": self._max_epochs(trainer),
            "max_steps": -1 if trainer.max_steps is None else trainer.max_steps,
            **self._least,
            **{f"limit_{split}_batches": limit for split, limit in limits.items()},
            "val_check_interval": interval,
            "check_val_every_n_epoch": every,
            "accumulate_grad_batches": trainer.accumulate or 1,
            "gradient_clip_val": norm if value is None else value,
            "gradient_clip_algorithm": None if value is None else "value",
            "log_every_n_steps": trainer.log_every,
            "fast_dev_run": trainer.fast_dev_run,
            "overfit_batches": trainer.overfit_batches or 0.0,
            "enable_checkpointing": _any(self.callbacks, Checkpoint),
            "enable_progress_bar": _any(self.callbacks, ProgressBar),
            "enable_model_summary": _any(self.callbacks, ModelSummary),
            **self._flags,
        }

    def _max_epochs(self, trainer: Any) -> int | None:
        if trainer.max_epochs is None and trainer.max_steps is None:
            return -1  # the time says when
        epochs: int | None = trainer.max_epochs
        return epochs

    def _refuse(self, trainer: Any) -> None:
        """Refuses knobs that mean nothing to a LightningModule.

        Raises:
            Unsupported: names the knob, and where Lightning's users say it.
        """
        schedule = trainer.schedule
        paced = schedule is not None and not (isinstance(schedule, Schedule) and schedule.constant)
        loading = [
            f"data.{field.name}={getattr(trainer.loading, field.name)}"
            for field in dataclasses.fields(Loading)
            if getattr(trainer.loading, field.name) != field.default
        ]
        one = "give one of trainer.max_grad_norm and trainer.max_grad_value"
        asked = {
            "the group optimizer": (
                not _is_default(self.optimizer) or _is_named("optimizer", trainer.command),
                "the module's configure_optimizers says it: leave the group as it is",
            ),
            f"schedule={getattr(schedule, 'name', '')}": (
                paced,
                "the module's configure_optimizers says it: write schedule=constant",
            ),
            ", ".join(loading): (bool(loading), _LOADERS),
            "the group data": (
                type(self.data) is not DataSource or _is_named("data", trainer.command),
                _LOADERS,
            ),
            f"trainer.ema_decay={trainer.ema_decay}": (
                trainer.ema_decay is not None,
                "use task.callbacks with lightning.pytorch.callbacks.EMAWeightAveraging, under ddp",
            ),
            "trainer.compile=true": (
                trainer.compile is True,
                "call self.compile() or torch.compile in the module's configure_model",
            ),
            f"trainer.eval_every={trainer.eval_every}": (
                trainer.eval_every is not None,
                "set task.val_check_interval, which counts batches",
            ),
            "trainer.max_grad_norm together with trainer.max_grad_value": (
                trainer.max_grad_norm is not None and trainer.max_grad_value is not None,
                one,
            ),
        }
        for option, (wanted, fix) in asked.items():
            if wanted:
                raise Unsupported(f"task=lightning cannot honour {option}", fix=fix)


_ORDERS = (LightningOrder.name, GlobalOrder.name)
_LOADERS = "the module's loaders say it: set it there, by task.datamodule"
_NOT_TRAINING = (Checkpoint, EarlyStopping, ModelSummary, ProgressBar)
"""Callbacks of no use, or in the way, where runs are compared."""


def _is_named(group: str, command: Sequence[str]) -> bool:
    """Whether our command line sets ``group``, be it to what it is anyway."""
    ours = "torsh_trainer" in command[:3]  # not a script of the user's, with words of its own
    keys = (word.lstrip("+~").partition("=")[0] for word in command if ours)
    return any(key.partition(".")[0].partition("@")[0] == group for key in keys)


def _is_default(spec: OptimizerSpec) -> bool:
    """Whether the group ``optimizer`` says what it says where nobody touches it."""
    if spec.target not in ("AdamW", "torch.optim.AdamW", torch.optim.AdamW):
        return False
    usual = inspect.signature(torch.optim.AdamW).parameters
    options = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in spec.options.items()
    }
    same = all(name in usual and usual[name].default == v for name, v in options.items())
    return same and dataclasses.replace(spec, target="AdamW", options={}) == OptimizerSpec()


def _any(things: Sequence[Any], kind: type) -> bool:
    return any(isinstance(thing, kind) for thing in things)


def _list_enabled(things: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
    """Without what is switched off by null."""
    values = things.values() if isinstance(things, Mapping) else things
    return [adopt(thing) for thing in values if thing is not None]


def _make_given(given: Any, kind: type) -> Any:
    """The object itself, or what a callable makes; a compiled module with its steps compiled."""
    is_made = given is None or isinstance(given, kind | nn.Module) or not callable(given)
    made = given if is_made else given()
    if not _is_compiled(made, kind):
        return made
    module = from_compiled(made)
    for name in ("log", "log_dict"):  # which dynamo cannot trace
        setattr(module, name, torch.compiler.disable(getattr(module, name)))
    return module


def _is_compiled(made: Any, kind: type) -> bool:
    return isinstance(made, OptimizedModule) and isinstance(made._orig_mod, kind)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what Lightning says about devices that it did not choose."""
    loggers = [logging.getLogger("lightning.pytorch.utilities.rank_zero")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
