"""Training, batch by batch: what Lightning's fit loop means, with a short way through a step.

The frame is Lightning's own (its progress, its restarts, its order of hooks); a batch goes the
short way unless something about it asks for Lightning's closures, profiler or iterators.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.loops import _EvaluationLoop
from lightning.pytorch.loops.fetchers import (
    _DataFetcher,
    _PrefetchDataFetcher,
)
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from torsh_trainer.optim.precision import Precision
from torsh_trainer.strategies.base import Clip, Engine
from torsh_trainer_lightning.adapter import through
from torsh_trainer_lightning.loop.connector import Connector, QuickLog
from torsh_trainer_lightning.loop.kept import count_batch
from torsh_trainer_lightning.loop.table import Table
from torsh_trainer_lightning.precision import StepWatcher


class SilentListener(StepWatcher):
    """Whom the loops tell of what they have done; this one does not listen."""

    engine: Engine
    clip: Clip

    def of_a_trial(self) -> SilentListener:
        """Whom the loops tell while a callback trains on trial, and takes it back: nobody."""
        deaf = SilentListener()
        deaf.engine, deaf.clip = self.engine, self.clip
        return deaf

    def before_epochs(self) -> None:
        """The first epoch of this run is next."""

    def before_iterator(self) -> None:
        """The iterator over the batches of an epoch is about to be made anew."""

    def before_first_batch(self, fetcher: _DataFetcher) -> None:
        """The first batch of this part of an epoch is next."""

    def count(self, batch: Any) -> None:
        """A batch has been trained on."""

    def after_batch(self, loss: Tensor | None) -> None:
        """A batch is done, with the validation that was due after it. May raise to stop the run."""

    def after_epoch(self) -> None:
        """An epoch is done, with all that was due after it. May raise to stop the run."""

    def before_evaluation(self) -> None:
        """Validation is next."""

    def after_evaluation(self, outputs: list[dict[str, Any]]) -> None:
        """Validation has run, and logged ``outputs``."""

    def before_fetch(self) -> None:
        """The next batch is about to be asked for."""

    def after_fetch(self) -> None:
        """It has come."""


class EvaluationLoop(_EvaluationLoop):
    """Lightning's, over loaders in the order of the run."""

    trainer: Any  # a Facade
    _max_batches: list[int | float]

    def setup_data(self) -> None:
        super().setup_data()
        if self._combined_loader is not None:
            self._max_batches = self.trainer.order.limits(self._combined_loader, self._max_batches)

    def _evaluation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any
    ) -> None:
        assert self._combined_loader is not None
        trainer, loader = self.trainer, self._combined_loader.flattened[dataloader_idx]
        with count_batch(trainer, self._results, trainer.order.counts(loader, batch_idx)):
            super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)


class ValidationLoop(EvaluationLoop):
    """One that tells the run what it came to."""

    host: SilentListener

    def on_run_start(self) -> None:
        self.host.before_evaluation()
        super().on_run_start()

    def on_run_end(self) -> list[Any]:
        outputs: list[Any] = super().on_run_end()
        if not self.trainer.sanity_checking:
            self.host.after_evaluation(outputs)
        return outputs


class FitLoop(_FitLoop):
    """Lightning's, which tells the run of epochs, and can go on exactly where another stopped."""

    host: SilentListener
    trainer: Any  # a Facade
    goes_on = False
    """The state is that after a batch in the middle of an epoch: nothing of it is begun anew."""

    asked = False
    """The run itself asks for what comes now; else it is a callback, such as a finder's trial."""

    def run(self) -> None:
        asked, self.asked = self.asked, False
        facade: Any = self.trainer
        with contextlib.nullcontext() if asked else facade.trial():
            self._run()

    def _run(self) -> None:
        self.setup_data()
        if self.skip:
            return
        self.reset()
        self.on_run_start()
        self.host.before_epochs()
        while not self.done:
            try:
                self.on_advance_start()
                self.advance()
                self.on_advance_end()
            except StopIteration:
                break
            finally:
                self.on_iteration_done()
            self.host.after_epoch()
        self._restarting = False
        self.on_run_end()

    def setup_data(self) -> None:
        super().setup_data()
        if self._combined_loader is not None:
            self.trainer.order.check_training(self._combined_loader)

    def on_advance_start(self) -> None:
        if not self.goes_on:
            super().on_advance_start()
            return
        current: Any = self.epoch_progress.current
        assert self._combined_loader is not None
        for loader in self._combined_loader.flattened:
            _set_sampler_epoch(loader, current.processed)


class EpochLoop(_TrainingEpochLoop):
    """One epoch."""

    host: SilentListener
    trainer: Any  # a Facade, which knows this module
    batch_progress: Any

    def __init__(self, trainer: Any, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps=min_steps, max_steps=max_steps)
        self.val_loop = ValidationLoop(
            trainer,
            TrainerFn.FITTING,
            RunningStage.VALIDATING,
            verbose=False,
            inference_mode=False,
        )
        self._quick: QuickLog | None = None

    def _broadcast_sigterm_tensor(self) -> None:
        """The run itself agrees on signals, about once a second."""

    def run(self, data_fetcher: _DataFetcher) -> None:
        # Never kept: a loop saves the loops among its attributes.
        frame: FitLoop = self.trainer.fit_loop
        going_on, frame.goes_on = frame.goes_on, False
        if not going_on:
            self.reset()
        self.on_run_start(data_fetcher)
        if going_on or not self.done:
            self.host.before_first_batch(data_fetcher)
        step = self._way(data_fetcher)
        host = self.host
        while not self.done:
            try:
                host.after_batch(step(data_fetcher))
            except StopIteration:
                break
            finally:
                self.on_iteration_done()

    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        if self.trainer.current_epoch > 0:
            self.host.before_iterator()
        super().on_run_start(data_fetcher)

    def _on_before_fetch(self) -> None:
        super()._on_before_fetch()
        self.host.before_fetch()

    def _on_after_fetch(self) -> None:
        self.host.after_fetch()
        super()._on_after_fetch()

    # -- the ways of a batch --------------------------------------------------------------------

    def _way(self, fetcher: _DataFetcher) -> Any:
        """How the batches of this epoch go: the short way, or Lightning's own."""
        trainer, module = self.trainer, self.trainer.lightning_module
        table = Table.of(
            module, trainer.datamodule, trainer.callbacks, trainer.optimizers, trainer.profiler
        )
        if table.direct:
            for optimizer in trainer.optimizers:
                optimizer._opt_called = True  # for schedulers, where an engine steps another object
        if table.profiles or type(fetcher) is not _PrefetchDataFetcher:
            return self._long_way
        fetcher._start_profiler = self.host.before_fetch
        fetcher._stop_profiler = self.host.after_fetch
        self._quick = QuickLog(module, trainer._logger_connector, self._results)
        self._takes_index = is_param_in_hook_signature(
            module.training_step, "batch_idx", min_args=2
        )
        self._validates = self._should_check_val_epoch()
        self._table = table
        self._in_fp32 = trainer.strategy.precision_plugin.knobs == Precision()
        return self._first_way if self.restarting else self._short_way

    def _first_way(self, fetcher: _DataFetcher) -> Tensor | None:
        """The first batch after a restart is Lightning's, which knows what was half done."""
        return (self._long_way if self.restarting else self._short_way)(fetcher)

    def _long_way(self, fetcher: _DataFetcher) -> Tensor | None:
        before = self.batch_progress.total.ready
        with self._count_batch():
            self.advance(fetcher)
        if self.batch_progress.total.ready > before:
            self.host.count(None)
        self.on_advance_end(fetcher)
        return None

    def _count_batch(self) -> contextlib.AbstractContextManager[None]:
        """Around the next batch, which may be run for the sake of other processes alone."""
        counts = self.trainer.order.trains_on(self.batch_progress.current.ready)
        return count_batch(self.trainer, self._results, counts)

    def _short_way(self, fetcher: _DataFetcher) -> Tensor | None:
        """``advance`` and ``on_advance_end`` of Lightning's epoch loop, for most batches."""
        trainer, progress = self.trainer, self.batch_progress
        module, connector = trainer.lightning_module, trainer._logger_connector
        batch, _, _ = next(fetcher)
        progress.is_last_batch = fetcher.done
        with self._count_batch():
            loss, accumulates = self._train_on(batch, progress.current.ready)
        module.__dict__["_current_fx_name"] = None
        connector.batch_is_over(self._results)
        progress.total.completed += 1
        progress.current.completed += 1
        steps = not (accumulates and module.automatic_optimization)
        if steps and self._updates_logs():
            connector.log_metrics(connector.metrics["log"])
        self.host.count(batch)
        self._end_batch(fetcher, accumulates=accumulates)
        return loss

    def _train_on(self, batch: Any, index: int) -> tuple[Tensor | None, bool]:
        """From the batch to what hears of its end: its loss, and whether a step is yet to come.

        Raises:
            StopIteration: the module wants no more of this epoch.
        """
        trainer, table, progress = self.trainer, self._table, self.batch_progress
        module, connector = trainer.lightning_module, trainer._logger_connector
        fields, current, total = module.__dict__, progress.current, progress.total
        batch = self._move_batch(batch)
        total.ready += 1
        current.ready += 1
        _begin_batch(connector, self._results, batch)
        loss, outputs, goes_on = None, None, True
        if batch is None:
            self._warning_cache.warn(
                "train_dataloader yielded None. If this was on purpose, ignore this warning..."
            )
        else:
            goes_on = self._tell_of_start(batch, index)
            if not goes_on:
                progress.increment_by(0, is_last_batch=True)
            else:
                total.started += 1
                current.started += 1
                loss, outputs = self._optimize(batch, index)
        total.processed += 1
        current.processed += 1
        accumulates = self._should_accumulate()
        if trainer.lr_scheduler_configs:
            self.update_lr_schedulers("step", update_plateau_schedulers=False)
            if self._num_ready_batches_reached():
                self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if not goes_on:
            raise StopIteration
        for hook in table.on_batch_end:
            fields["_current_fx_name"] = "on_train_batch_end"
            hook(trainer, module, outputs, batch, index)
        if table.module_batch_end is not None:
            fields["_current_fx_name"] = "on_train_batch_end"
            table.module_batch_end(outputs, batch, index)
        return loss, accumulates

    def _updates_logs(self) -> bool:
        """``should_update_logs`` of Lightning's connector, while training."""
        trainer, every = self.trainer, self.trainer.log_every_n_steps
        due = every != 0 and ((self._batches_that_stepped + 1) % every == 0 or trainer.should_stop)
        return bool(due or trainer.fast_dev_run)

    def _move_batch(self, batch: Any) -> Any:
        if self._table.transfers or not _is_here(batch, self.trainer.strategy.root_device):
            trainer = self.trainer
            batch = trainer.precision_plugin.convert_input(batch)
            batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
            return trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        return self.trainer.precision_plugin.convert_input(batch)

    def _tell_of_start(self, batch: Any, index: int) -> bool:
        """False where the module wants no more of this epoch."""
        trainer, table = self.trainer, self._table
        module = trainer.lightning_module
        fields = module.__dict__
        for hook in table.on_batch_start:
            fields["_current_fx_name"] = "on_train_batch_start"
            hook(trainer, module, batch, index)
        response = None
        if table.module_batch_start is not None:
            fields["_current_fx_name"] = "on_train_batch_start"
            response = table.module_batch_start(batch, index)
        fields["_current_fx_name"] = None
        return bool(response != -1)

    def _optimize(self, batch: Any, index: int) -> tuple[Tensor | None, Any]:
        """The loss, detached, and what ``on_train_batch_end`` is given."""
        trainer = self.trainer
        module = trainer.lightning_module
        fields, quick = module.__dict__, self._quick
        assert quick is not None
        if quick.usable:
            fields["log"] = quick
        try:
            if self._table.direct and not self.automatic_optimization._skip_backward:
                return self._directly(batch, index)
            inputs = {"batch": batch, "batch_idx": index} if self._takes_index else {"batch": batch}
            if module.automatic_optimization:
                run = self.automatic_optimization.run
                outputs = run(trainer.optimizers[0], index, inputs)
            else:
                outputs = self.manual_optimization.run(inputs)
            return outputs.get("loss"), outputs
        finally:
            if quick.usable:
                fields.pop("log", None)

    def _directly(self, batch: Any, index: int) -> tuple[Tensor | None, Any]:
        """What Lightning's closure comes to where no hook stands in it."""
        if self._should_accumulate():
            with self.host.engine.without_sync():
                return self._gradient(batch, index, sync=False)
        progress = self.automatic_optimization.optim_progress.optimizer.step
        progress.increment_ready()
        loss, outputs = self._gradient(batch, index, sync=True)
        host = self.host
        norm = host.before_step()
        host.after_step("main", host.engine.step_one("main", host.clip, measure_norm=norm))
        progress.increment_completed()
        return loss, outputs

    def _gradient(self, batch: Any, index: int, *, sync: bool) -> tuple[Tensor | None, Any]:
        trainer = self.trainer
        fields = trainer.lightning_module.__dict__
        fields["_current_fx_name"] = "training_step"
        given = (batch, index) if self._takes_index else (batch,)
        if self._in_fp32:
            with self.host.engine.training_forward() as wrapper:
                output = through(wrapper, trainer.lightning_module, "training_step", *given)
        else:
            output = trainer.strategy.training_step(*given)
        fields["_current_fx_name"] = None
        if output is None and trainer.world_size > 1:
            raise RuntimeError(
                "training_step returned None, which several processes cannot do together"
            )
        every = trainer.accumulate_grad_batches
        if every == 1 and type(output) is Tensor and not self._table.hears_of_end:
            self._zero_grad()
            self.host.engine.backward(trainer.strategy.weigh(output), sync=sync)
            return output.detach(), None
        result = ClosureResult.from_training_step_output(output, every)
        if index % every == 0:
            self._zero_grad()
        loss = result.closure_loss
        if loss is None:
            return None, {}
        self.host.engine.backward(trainer.strategy.weigh(loss), sync=sync)
        return result.loss, result.asdict()

    def _zero_grad(self) -> None:
        counts = self.automatic_optimization.optim_progress.optimizer.zero_grad
        counts.increment_ready()
        counts.increment_started()
        self.host.engine.zero_grad()
        for group in self.trainer.optimizers[0].param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        counts.increment_completed()

    def _end_batch(self, fetcher: _DataFetcher, *, accumulates: bool) -> None:
        trainer = self.trainer
        if self._validates and self._should_check_val_fx(fetcher):
            self._validate()
        if trainer.lr_scheduler_configs:
            self.update_lr_schedulers("step", update_plateau_schedulers=True)
        if not accumulates:
            self._batches_that_stepped += 1
        if trainer.should_stop:
            self._save_loggers_on_train_batch_end()

    def _validate(self) -> None:
        trainer = self.trainer
        trainer._logger_connector.settle()
        trainer.validating = True
        first = trainer._logger_connector._first_loop_iter
        if not self._should_accumulate():
            call._call_lightning_module_hook(trainer, "on_validation_model_zero_grad")
        self.val_loop.run()
        trainer.training = True
        trainer._logger_connector._first_loop_iter = first


def _begin_batch(connector: Connector, results: Any, batch: Any) -> None:
    """``_LoggerConnector.on_batch_start`` of the training loop."""
    if connector._first_loop_iter is None:
        connector._first_loop_iter = True
    elif connector._first_loop_iter is True:
        connector._first_loop_iter = False
    results.batch = batch
    results.batch_size = None
    results.dataloader_idx = None


def _is_here(batch: Any, device: torch.device) -> bool:
    """A tensor on the CPU, or a list, tuple or dict of such, where the CPU is where to be."""
    if device.type != "cpu":
        return False
    kind = type(batch)
    if kind is Tensor:
        return bool(batch.device.type == "cpu")
    if kind in (list, tuple):
        return all(type(part) is Tensor and part.device.type == "cpu" for part in batch)
    return False
