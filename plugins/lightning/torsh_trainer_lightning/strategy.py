"""Our engines in Lightning's Trainer: ``Trainer(strategy=TorshStrategy("fsdp"))``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision as LightningPrecision
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.optim import Optimizer

from torsh_trainer.comm.base import Communicator
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, Unsupported
from torsh_trainer.optim.loss_scaling import LossScaler
from torsh_trainer.optim.precision import Precision
from torsh_trainer.strategies import modules
from torsh_trainer.strategies.base import BatchPlan, Clip, Engine, Job
from torsh_trainer.strategies.sync_batchnorm import separate, synchronise
from torsh_trainer_lightning import cut, whole
from torsh_trainer_lightning.adapter import (
    Configured,
    ModuleTask,
    configure,
    prepare_engine,
    rejoin_groups,
    through,
)
from torsh_trainer_lightning.checkpoint_io import SafeCheckpointIO
from torsh_trainer_lightning.environment import WorldEnvironment
from torsh_trainer_lightning.given_back import GivenBack, fits
from torsh_trainer_lightning.precision import (
    EnginePrecision,
    StepWatcher,
    precision_of,
    wants_closure,
)
from torsh_trainer_lightning.processes import Chosen, Processes, no_grad
from torsh_trainer_lightning.starting import TrainerLauncher
from torsh_trainer_lightning.state import ModuleState, is_apart
from torsh_trainer_lightning.together import Together, undo
from torsh_trainer_lightning.translated import Translation, of_deepspeed, of_horovod
from torsh_trainer_lightning.words import reword


class EngineStrategy(Processes, ParallelStrategy):
    """What Lightning asks of a strategy, by an engine and a communicator that somebody gives.

    ``bind`` makes one around a communicator, ``attach`` gives it the engine once there is one;
    until then, and for evaluation without training, the module itself is called.
    """

    _checkpoint_io: CheckpointIO | None

    def __init__(
        self,
        *,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: LightningPrecision | None = None,
        precision: Precision | None = None,
    ) -> None:
        self._knobs = precision
        self.configured = Configured()
        self.syncs = True
        """Whether a backward communicates."""
        self.watcher = StepWatcher()
        """Who is told of the steps of optimizers."""
        self._engine: Engine | None = None
        self._together: Together | None = None
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    @classmethod
    def bind(cls, *, comm: Communicator, precision: Precision = Precision()) -> EngineStrategy:
        """One whose processes have met already; ``precision`` is what its engine is told."""
        strategy = cls(
            parallel_devices=[comm.device] * comm.world.local_size,
            cluster_environment=WorldEnvironment(comm.world),
            precision=precision,
        )
        strategy._comm = comm
        return strategy

    def attach(self, engine: Engine, configured: Configured) -> None:
        """Takes an engine, and what ``configure_optimizers`` has given for it.

        Raises:
            Unsupported: an optimizer that the engine cannot step, or something that does not go
                with a module which it has cut.
        """
        cut.refuse(self._module.trainer, self._module)
        self._engine = engine
        self._together = self._agreement(engine)
        self.configured = configured
        self.model = engine.module
        self.optimizers = list(configured.optimizers)
        self.lr_scheduler_configs = list(configured.schedulers)
        for optimizer in configured.optimizers:
            if wants_closure(optimizer):
                self.check_steps_itself(optimizer)

    def _agreement(self, engine: Engine) -> Together | None:
        if not engine.evaluates_together or self.comm.world.size == 1:
            return None
        data: Any = self._module.trainer
        for holder in (self._module, getattr(data, "datamodule", None)):
            if getattr(holder, "allow_zero_length_dataloader_with_multiple_devices", False):
                raise Unsupported(
                    "a model that is cut over the ranks cannot honour "
                    "allow_zero_length_dataloader_with_multiple_devices: all of them take part in "
                    "every forward",
                    fix="leave it out, or use strategy=ddp",
                )
        return Together(self.comm)

    @property
    def engine(self) -> Engine:
        """The engine; there is one while training."""
        assert self._engine is not None
        return self._engine

    @property
    def trains(self) -> bool:
        """Whether there is an engine."""
        return self._engine is not None

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning gives each process a share of the samples."""
        return self.world_size > 1

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    # -- precision and files ---------------------------------------------------------------------

    @property
    def precision_plugin(self) -> LightningPrecision:
        """Lightning's plugin, with the engine's backward and step."""
        return self._engine_precision

    @precision_plugin.setter
    def precision_plugin(self, plugin: LightningPrecision | None) -> None:
        self._precision_plugin = plugin  # as it was given: Lightning looks whether it was
        inner = plugin or LightningPrecision()
        asked = precision_of(inner)
        if self._knobs is not None and (asked != Precision() or inner.precision != "32-true"):
            raise ConfigError(
                f"the Trainer has precision={inner.precision}, and the strategy has "
                f"precision={self._knobs.name}",
                fix="drop one of them",
            )
        knobs = asked if self._knobs is None else self._knobs
        self._engine_precision = EnginePrecision(self, knobs, inner)

    def compute_in(self, precision: Precision) -> None:
        """Tells what the engine is told, where that was not known when this was made."""
        self._knobs = precision
        self.precision_plugin = self._precision_plugin

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What reads and writes ``.ckpt`` files."""
        io = self._checkpoint_io
        if io is None:
            io = self._checkpoint_io = SafeCheckpointIO()
        elif isinstance(io, _WrappingCheckpointIO):
            io.checkpoint_io = SafeCheckpointIO()
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    def loss_scaler(self) -> LossScaler | None:
        """What scales the loss, if anything does."""
        return None if self._engine is None else self._engine.loss_scaler

    # -- steps -----------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's training step, as a forward of the engine's."""
        module = self._module
        with (
            self.precision_plugin.train_step_context(),
            self.engine.training_forward(manual=not module.automatic_optimization) as wrapper,
        ):
            return through(wrapper, module, "training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's validation step."""
        with self.precision_plugin.val_step_context():
            return self._evaluate_through("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's test step."""
        with self.precision_plugin.test_step_context():
            return self._evaluate_through("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's predict step."""
        with self.precision_plugin.predict_step_context():
            return self._evaluate_through("predict_step", *args, **kwargs)

    def _evaluate_through(self, method: str, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        if self._engine is None:
            return getattr(module, method)(*args, **kwargs)
        result = self._forward_through(self._engine, method, *args, **kwargs)
        if self._together is not None:
            trainer = module.trainer
            loop: Any = trainer._active_loop
            for _ in self._together.rest(last=loop.batch_progress.is_last_batch):
                with undo(module, trainer._results, self.root_device):
                    self._forward_through(self._engine, method, *args, **kwargs)
        return result

    def _forward_through(self, engine: Engine, method: str, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        apart = no_grad() if torch.is_inference_mode_enabled() and is_apart(module) else _AS_IT_IS
        with apart, engine.evaluation_forward() as wrapper:
            return through(wrapper, module, method, *args, **kwargs)

    def on_validation_start(self) -> None:
        """Ranks agree on the forwards that they make together, where they do."""
        if self._together is not None:
            loop: Any = self._module.trainer._active_loop
            self._together.begin(loop._data_fetcher)

    on_test_start = on_validation_start
    on_predict_start = on_validation_start

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Forwards and backwards within add to this rank's gradients alone."""
        before, self.syncs = self.syncs, False
        try:
            with self.engine.without_sync():
                yield
        finally:
            self.syncs = before

    def weigh(self, loss: Tensor) -> Tensor:
        """``loss`` as it enters backward: by what its batch weighs."""
        return loss

    def check_steps_itself(self, optimizer: Optimizer) -> None:
        """Makes sure that the engine steps this very object, which holds all that it needs.

        Raises:
            Unsupported: it steps another, or a part of it.
        """
        name = self.configured.name_of(optimizer)
        if not self.held.plainly(name):
            raise Unsupported(
                "this strategy steps optimizers its own way, without a closure or arguments, and "
                f"{type(self.configured.by_name[name]).__name__} is given one",
                fix="set strategy=ddp or strategy=single",
            )

    def on_exception(self, exception: BaseException) -> None:
        """Has an error of ours speak of a module's methods, before it is raised again."""
        reword(exception)

    def on_train_start(self) -> None:
        """Callbacks have been told that a fit starts, and may have changed the optimizers."""
        rejoin_groups(self.configured, self.engine)

    # -- checkpoints: whole, on rank 0 -----------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Writes it, on rank 0.

        Raises:
            Unsupported: it holds a part of a module that is cut.
        """
        cut.refuse_parameters(self._module)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @property
    def held(self) -> ModuleState:
        """What the engine holds."""
        return ModuleState(self.engine, self.comm, self._module, self.configured.by_name)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state with whole tensors; under a sharding engine on rank 0 alone."""
        if self._engine is None:
            return super().lightning_module_state_dict()
        return self.held.module_state()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state as torch writes it; where it is cut over ranks, on rank 0 alone."""
        if self._engine is None:
            return super().optimizer_state(optimizer)
        return self.held.optimizer_state(self.configured.name_of(optimizer))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads whole tensors, each rank its part."""
        if self._engine is None:
            super().load_model_state_dict(checkpoint, strict=strict)
        else:
            self.held.load_module(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads torch's form of the states, each rank its part.

        Raises:
            ConfigError: they are of other optimizers.
        """
        rejoin_groups(self.configured, self.engine)  # callbacks may have been restored before
        ours, states = list(self.configured.by_name), checkpoint["optimizer_states"]
        if len(ours) != len(states):
            raise ConfigError(
                f"the checkpoint has {len(states)} optimizers, and this run {len(ours)}",
                fix="resume with the optimizers that were saved",
            )
        self.held.load_optimizers(dict(zip(ours, states, strict=True)))

    def model_to_device(self) -> None:
        """Moves the module itself."""
        self._module.to(self.root_device)


_AS_IT_IS = contextlib.nullcontext()


class TorshStrategy(Chosen, EngineStrategy):
    """A strategy of the trainer's in ``lightning.pytorch.Trainer``; see ``Chosen``.

    Raises:
        ConfigError: an unknown name or knob, or one that is out of range.
    """

    _launcher_class = TrainerLauncher

    def _begin(
        self, precision: Precision | None, plugin: LightningPrecision | None, **lightnings: Any
    ) -> None:
        self.translation: Translation | None = None
        self._given_back: GivenBack | None = None
        EngineStrategy.__init__(self, precision=precision, precision_plugin=plugin, **lightnings)

    @classmethod
    def from_deepspeed(cls, path: str | Path, **reading: Any) -> TorshStrategy:
        """What a ``ds_config.json`` says, trained natively; prints a verdict for every key.

        ``reading`` are options of ``DeepSpeedConfig.from_file``. Flags of the Trainer's that the
        file speaks of (``gradient_clip_val``) must be given to it, and are checked.

        Raises:
            TorshError: it is invalid, or something of it has no translation.
        """
        return cls._from_translation(of_deepspeed(path, **reading))

    @classmethod
    def from_horovod(cls, path: str | Path, **reading: Any) -> TorshStrategy:
        """What a Horovod job says (a script, a command, a file of settings), trained natively.

        ``reading`` are ``command``, ``world_size``, ``settings`` and ``lenient`` of the verb
        ``translate``. Prints a verdict for every key.

        Raises:
            TorshError: it is invalid, or something of it has no translation.
        """
        return cls._from_translation(of_horovod(path, **reading))

    @classmethod
    def _from_translation(cls, translation: Translation) -> TorshStrategy:
        translation.show()
        made = cls(translation.strategy, precision=translation.precision)
        made.translation = translation
        return made

    @property
    def is_distributed(self) -> bool:
        """As Lightning's own: with a strategy for several processes, also for one of them."""
        return self.chosen.needs_process_group(World())

    def setup_environment(self) -> None:
        """Meets the other processes.

        Raises:
            TorshError: they did not come, or have no such backend.
        """
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        if self.is_distributed:
            reset_seed()  # as Lightning's strategies for several processes do
        self.set_world_ranks()
        self._meet(self.chosen, self._comm_options)

    # -- the module ------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        """The module in its engine, with its optimizers; for evaluation the module alone.

        Raises:
            TorshError: something that the Trainer or the module asks for cannot be honoured.
        """
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        fits = trainer.state.fn == TrainerFn.FITTING
        module = self._module
        if self._engine is not None:
            here, given_back = self._engine.model, self._given_back
            self._given_back = None
            if given_back is not None and here is module:
                given_back.take()
            if here is not module or not is_apart(here):
                self._let_go()
        if self._engine is None and any(hasattr(part, "unshard") for part in module.modules()):
            raise self.chosen.refuse(
                "a module that is cut over the processes already, by a fit that was broken off or "
                "by another program",
                use="make the module anew, and load a checkpoint into it",
            )
        if self._engine is not None:
            self._go_on(self._engine, module, fits=fits)
            return
        if fits:
            self._sync_batchnorm(module)
        self.precision_plugin.convert_module(module)
        if fits:
            self._train(trainer, module)
        else:
            self.model_to_device()
            modules.share([*module.parameters(), *module.buffers()], self.comm)

    def _sync_batchnorm(self, module: pl.LightningModule) -> None:
        if isinstance(self._layer_sync, TorchSyncBatchNorm):
            synchronise(module, self.comm)
        elif self._layer_sync is not None:
            self._layer_sync.apply(module)

    def _train(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        task = ModuleTask(module)
        job = self._job(trainer, module, task)
        strategy = self._resolve(job)
        self.attach(prepare_engine(strategy, job, self.comm, task), task.configured)

    def _go_on(self, engine: Engine, module: pl.LightningModule, *, fits: bool) -> None:
        """With a module that an engine still has cut over the processes (see ``teardown``)."""
        self.model = engine.module
        if not fits:
            return
        if not any(whole.is_cut(p) for p in module.parameters()):
            raise self.chosen.refuse(
                "another fit of a module that it has cut over the processes",
                use="make the module anew, and load a checkpoint into it",
            )
        self._sync_batchnorm(module)
        made = configure(module)
        engine.optimizers = made.by_name
        self.attach(engine, made)

    def _job(self, trainer: pl.Trainer, module: pl.LightningModule, task: ModuleTask) -> Job:
        brought = self.chosen.brings(schedule=None)
        accumulate = trainer.accumulate_grad_batches
        if brought.get("accumulate", accumulate) != accumulate:
            raise ConfigError(
                f"the strategy's own configuration accumulates over {brought['accumulate']} "
                f"batches, and the Trainer over {accumulate}",
                fix=f"give Trainer(accumulate_grad_batches={brought['accumulate']})",
            )
        if "schedule" in brought:
            raise ConfigError(
                "the strategy's own configuration brings a schedule",
                fix="return it from configure_optimizers, and take it out there",
            )
        if self.chosen.gradient_scale_on(self.comm.world) != 1.0:
            raise self.chosen.refuse(
                "gradients that are summed, over processes or backward passes, in a loop that "
                "takes means",
                use="leave op and backward_passes_per_step at their defaults, and multiply the "
                "loss",
            )
        more: Mapping[str, Any] = {}
        if self.translation is not None:
            self.translation.check(vars_of(trainer))
            more = self.translation.job
        size = self.chosen.mesh(self.comm.world).dp
        micro = brought.get("micro_batch_size", 1)
        return Job(
            task=task,
            build_model=task.build_model,
            batch=BatchPlan(micro * accumulate * size, micro, accumulate, size),
            precision=self._engine_precision.knobs,
            compression=self.compression,
            clip=_clip_of(trainer, module),
            manual=not module.automatic_optimization,
            **more,
        )

    def on_exception(self, exception: BaseException) -> None:
        """Has an error of ours speak as the script does, before it is raised again."""
        reword(exception, kind=type(self).__name__, name=self.chosen.name)

    def teardown(self) -> None:
        """Gives the module back whole, and on the CPU.

        Where it was cut over the processes its engine stays, for a test or a checkpoint later.
        """
        if self._engine is not None and not self._has_all():
            self._give_back(self._module)
            separate(self._module)
            assert self.accelerator is not None
            self.precision_plugin.teardown()
            self.accelerator.teardown()
            self.checkpoint_io.teardown()
            return
        self._let_go()
        super().teardown()

    def _give_back(self, module: pl.LightningModule) -> None:
        # Where one process has failed, the others do not come to put the module together.
        cut = any(map(whole.is_cut, module.parameters()))
        if not cut or module.trainer.interrupted:
            return
        if fits(module, self.comm):
            self._given_back = GivenBack(module, self.comm)
        else:
            rank_zero_warn(
                f"The module stays cut over the processes: this host has no memory for "
                f"{self.comm.world.local_size} whole copies of it. trainer.save_checkpoint(path) "
                "writes it whole."
            )

    def _has_all(self) -> bool:
        """Whether module and optimizers are whole without the engine."""
        held = self.held
        return not is_apart(held.module) and all(map(held.whole_state, held.optimizers))

    def _let_go(self) -> None:
        engine, self._engine, self._together = self._engine, None, None
        if engine is not None:
            engine.close()
            self.model = self.lightning_module
            if self.model is not None:
                separate(self.model)


def vars_of(trainer: pl.Trainer) -> dict[str, Any]:
    """The flags of a Trainer's that a translated configuration speaks of."""
    return {
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
    }


def _clip_of(trainer: pl.Trainer, module: pl.LightningModule) -> Clip:
    """What the Trainer's flags ask for, so that an engine which cannot says so at once."""
    bound = trainer.gradient_clip_val
    if not bound or not module.automatic_optimization:
        return Clip()
    if trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
        return Clip(value=float(bound))
    return Clip(norm=float(bound))
