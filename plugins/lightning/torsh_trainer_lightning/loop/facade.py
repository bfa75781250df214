"""``self.trainer`` of a module under our loop: Lightning's own Trainer, in parts.

Its properties, callbacks, loggers and checkpoints are Lightning's; what it trains with is an engine
that the run has made. ``Trainer._run`` is taken apart where the engine comes in between: ``begin``
ends with the module as its author has configured it, ``start`` begins with the engine around it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.utilities import _parse_loop_limits
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.configuration_validator import _verify_loop_configurations
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning.pytorch.trainer.trainer import _log_hyperparams
from lightning.pytorch.utilities import parsing

from torsh_trainer_lightning.loop.connector import Connector
from torsh_trainer_lightning.loop.fit import EpochLoop, EvaluationLoop, FitLoop, SilentListener
from torsh_trainer_lightning.loop.order import LightningOrder
from torsh_trainer_lightning.loop.shares import Shares
from torsh_trainer_lightning.loop.wording import reword_errors
from torsh_trainer_lightning.other import adopt

log = logging.getLogger(__name__)

WORDS = ("last", "best")
"""What may stand in the place of a path, as in ``Trainer.test(ckpt_path="best")``."""

STAGES = {
    "fit": (TrainerFn.FITTING, RunningStage.TRAINING),
    "evaluate": (TrainerFn.VALIDATING, RunningStage.VALIDATING),
    "test": (TrainerFn.TESTING, RunningStage.TESTING),
    "predict": (TrainerFn.PREDICTING, RunningStage.PREDICTING),
}


class Facade(Trainer):
    """Lightning's Trainer around an engine of ours; its verbs belong to the run.

    ``taken`` is the folder of the run's own checkpoints, where no callback saves.
    """

    fit_loop: FitLoop
    _logger_connector: Connector
    datamodule: LightningDataModule | None

    def __init__(
        self,
        *,
        max_epochs: int | None,
        min_epochs: int | None,
        max_steps: int,
        min_steps: int | None,
        order: LightningOrder,
        inference_mode: bool,
        shares: Shares | None = None,
        taken: Path | None = None,
        **flags: Any,
    ) -> None:
        super().__init__(
            max_epochs=max_epochs,
            min_epochs=min_epochs,
            max_steps=max_steps,
            min_steps=min_steps,
            inference_mode=inference_mode,
            **flags,
        )
        self.order = order
        self._taken = taken
        self._data_connector = order.connector(self)
        self._shares = shares
        if shares is not None:
            shares.put_into(self)
        self._logger_connector = Connector(self)
        frame = FitLoop(self, min_epochs=self.min_epochs, max_epochs=self.max_epochs)
        frame.epoch_loop = EpochLoop(self, min_steps=self.min_steps, max_steps=self.max_steps)
        self.fit_loop = frame
        self.validate_loop, self.test_loop = (
            EvaluationLoop(self, *STAGES[name], verbose=False, inference_mode=inference_mode)
            for name in ("evaluate", "test")
        )  # the run tells the numbers

    def tell(self, host: SilentListener) -> None:
        """Has the loops tell ``host`` of what they have done."""
        epochs: Any = self.fit_loop.epoch_loop
        self.fit_loop.host = epochs.host = epochs.val_loop.host = host
        strategy: Any = self.strategy
        strategy.watcher = host

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Within, the loops tell nobody: what is trained is taken back."""
        host = self.fit_loop.host
        self.tell(host.of_a_trial())
        try:
            yield
        finally:
            self.tell(host)

    def begin(
        self,
        stage: str,
        module: LightningModule,
        datamodule: LightningDataModule | None,
        *,
        ckpt: str | None,
        read: Callable[[str], dict[str, Any]],
    ) -> None:
        """``Trainer._run`` up to the engine: data prepared, module set up and configured.

        ``ckpt`` is the path of a checkpoint of Lightning to go on from, or ``last`` or ``best`` of
        those of the callbacks; ``read`` gives its content.
        """
        self.strategy._lightning_module = module
        self.state.fn, self.state.stage = STAGES[stage]
        self.state.status = TrainerStatus.RUNNING
        if stage == "fit":
            self.should_stop = False
        if stage == "predict":
            self.predict_loop.return_predictions = True
        self._data_connector.attach_data(module, datamodule=datamodule)
        if stage == "fit":
            frame = self.fit_loop
            frame.min_epochs, frame.max_epochs = _parse_loop_limits(
                self.min_steps, self.max_steps, self.min_epochs, self.max_epochs, self
            )
        if hasattr(module, "hparams"):
            parsing.clean_namespace(module.hparams)
        self.strategy.connect(module)
        self._callback_connector._attach_model_callbacks()
        for callback in self.callbacks:
            self._separate(adopt(callback))
        if ckpt in WORDS:
            ckpt = self.strategy.broadcast(self._path_of(ckpt))
        self._callback_connector._attach_model_logging_functions()
        _verify_loop_configurations(self)
        self.strategy.setup_environment()
        if self.world_size > 1 or self._shares is not None:
            reset_seed()  # as Lightning's strategies for several processes do
        self._Trainer__setup_profiler()
        self._data_connector.prepare_data()
        call._call_setup_hook(self)
        call._call_configure_model(self)
        if ckpt is not None:
            connector = self._checkpoint_connector
            connector._ckpt_path, connector._loaded_checkpoint = ckpt, read(ckpt)
            connector.restore_model()
            connector.restore_datamodule()
            connector.restore_callbacks()
        self._logger_connector.reset_results()
        self._logger_connector.reset_metrics()

    def _path_of(self, word: str) -> str | None:
        """The file that ``last`` or ``best`` means now; None: there is no last one."""
        find = self._checkpoint_connector._parse_ckpt_path
        path = find(self.state.fn, word, model_provided=True, model_connected=True)
        return None if path is None else str(path)

    def _separate(self, callback: Any) -> None:
        """Has a ModelCheckpoint save beside the folder that is the run's own, not in it."""
        held = getattr(callback, "dirpath", None)
        if isinstance(callback, ModelCheckpoint) and held and Path(held) == self._taken:
            callback.dirpath = str(Path(self.default_root_dir) / "checkpoints")
            log.info(
                "%s holds the run's own checkpoints: ModelCheckpoint saves in %s",
                held,
                callback.dirpath,
            )

    def start(self, restore: Callable[[], None] | None) -> None:
        """``Trainer._run`` from the engine up to the first batch; ``restore`` loads what is left of
        a checkpoint of the run's own."""
        if self.state.fn == TrainerFn.FITTING:
            call._call_callback_hooks(self, "on_fit_start")
            call._call_lightning_module_hook(self, "on_fit_start")
        if self.enable_autolog_hparams:
            _log_hyperparams(self)
        self._checkpoint_connector.restore_training_state()
        self._checkpoint_connector.resume_end()
        if restore is not None:
            restore()

    def drive(self) -> Any:
        """The stage itself."""
        self.fit_loop.asked = True
        return self._run_stage()

    def finish(self) -> None:
        """``Trainer._run`` after the stage."""
        self._teardown()
        if self.state.fn == TrainerFn.FITTING:
            call._call_callback_hooks(self, "on_fit_end")
            call._call_lightning_module_hook(self, "on_fit_end")
        call._call_teardown_hook(self)
        self.state.status = TrainerStatus.FINISHED
        self.state.stage = None
        self.training = False

    def _teardown(self) -> None:
        """Lightning's, but that engine and processes are the run's."""
        loop = self._active_loop
        if loop is not None:
            loop.teardown()
        self._logger_connector.teardown()
        self._signal_connector.teardown()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """An error within is told to callbacks and loggers, as Lightning tells it.

        Raises:
            ConfigError: Lightning itself has refused something.
        """
        try:
            with reword_errors():
                yield
        except BaseException as error:
            call._interrupt(self, error)
            self._teardown()
            self.state.stage = None
            raise
