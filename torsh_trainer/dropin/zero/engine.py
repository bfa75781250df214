"""What ``deepspeed.initialize`` gives: DeepSpeed's engine as scripts call it, over one of ours."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torsh_trainer.comm.base import Communicator
from torsh_trainer.dropin.zero import plain_backward, saving
from torsh_trainer.dropin.zero.loader import EngineLoader
from torsh_trainer.dropin.zero.optimizer import EngineOptimizer
from torsh_trainer.dropin.zero.settings import Settings
from torsh_trainer.dropin.zero.specification import Specification
from torsh_trainer.errors import ConfigError, Unsupported
from torsh_trainer.optim.precision import DTYPES
from torsh_trainer.strategies.base import Engine, StepOutcome


class DeepSpeedEngine(Settings, nn.Module):
    """Counts micro-batches as DeepSpeed does, and has ``native`` do the work.

    Attributes that it lacks are the model's.
    """

    def __init__(
        self,
        native: Engine,
        specification: Specification,
        comm: Communicator,
        *,
        model: nn.Module,
        optimizer: Any,
        lr_scheduler: Any,
        collate_fn: Callable[[Any], Any] | None = None,
        client_optimizer: Any = None,
    ) -> None:
        super().__init__()
        self.module = model
        self._native, self._specification, self._comm = native, specification, comm
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.collate_fn, self.client_optimizer = collate_fn, client_optimizer
        self.training_dataloader: Any = None
        self.device, self.dist_backend = comm.device, "torch"
        self.local_rank = comm.world.local_rank
        self.global_rank, self.world_size = comm.rank, comm.size
        self.dp_world_size = comm.size
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self.loaded_checkpoint_tag: str | None = None
        self._boundary: bool | None = None
        self._within_no_sync = False
        self._divides: bool | None = None  # while a backward runs: whether it divides gradients
        self._has_run = False  # a backward, since the last step
        self._has_ended = False  # so has one that ends it
        self._has_told = False
        self._norm: Tensor | float | None = None
        self._applied = False

    # -- one step -------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's outputs; with gradients it is a training forward of the engine."""
        native = self._native
        if self.training and torch.is_grad_enabled():
            with native.training_forward() as module:
                outputs = module(*inputs, **kwargs)
            plain_backward.watch(outputs, self)
            return outputs
        if native.evaluates_together:
            with native.evaluation_forward() as module:
                return module(*inputs, **kwargs)
        # Processes may evaluate apart from one another: nothing is communicated.
        evaluates: Any = getattr(native, "eval_module", self.module)
        return evaluates(*inputs, **kwargs)

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Adds the gradients of ``loss``, divided by the number of micro-batches; gives that.

        Raises:
            ConfigError: ``loss`` is no scalar.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ConfigError(
                "engine.backward is given something else than a loss of one number",
                fix="reduce it: loss.mean()",
            )
        if scale_wrt_gas:
            loss = loss / self.gradient_accumulation_steps()
        torchs = plain_backward.TORCHS
        run = partial(torchs, retain_graph=True) if retain_graph else torchs
        wide = loss.float()  # a scale of fp16 is more than it holds
        self._run_backward(wide, run, divides=False)
        return loss

    def backward_plainly(self, tensor: Tensor, run: Callable[[Tensor], object]) -> None:
        """The script calls ``tensor.backward()`` on what follows from the engine's outputs.

        Raises:
            ConfigError: DeepSpeed refuses it, too: at stage 0, and in fp16.
        """
        if self.zero_optimization_stage() == 0:
            raise plain_backward.refusal("loss.backward() at ZeRO stage 0")
        if self._native.loss_scaler is not None:
            raise plain_backward.refusal("loss.backward() in fp16, whose loss is scaled")
        self._run_backward(tensor, run, divides=True)

    def enter_backward(self, gradient: Tensor) -> Tensor | None:
        """A backward has come to the engine's outputs; None leaves ``gradient`` as it is."""
        if self._divides is None:
            plain_backward.refuse_gradients(list(self.module.parameters()))
        elif self._divides and self.gradient_accumulation_steps() > 1:
            return gradient / self.gradient_accumulation_steps()
        return None

    def _run_backward(
        self, loss: Tensor, run: Callable[[Tensor], object], *, divides: bool
    ) -> None:
        ends = self.is_gradient_accumulation_boundary()
        if ends and self._has_ended:
            self._tell_of_sums()
        self._has_ended = ends
        syncs = ends or self._specification.reduces_each
        adds = self._specification.adds_reduced and self.gradient_accumulation_steps() > 1
        self._divides = divides
        try:
            with self._summing_reduced() if adds else contextlib.nullcontext():
                self._native.backward(loss, sync=syncs and not self._within_no_sync, run=run)
        finally:
            self._divides = None
        self._has_run = True

    def _tell_of_sums(self) -> None:
        if 0 < self.zero_optimization_stage() < 3 and self.global_rank == 0 and not self._has_told:
            print(
                "drop-in: engine.backward is called again before engine.step, which steps with the "
                "sum of both; DeepSpeed steps with the last one's gradients alone at ZeRO stages 1 "
                "and 2: add the losses, and call it once",
                flush=True,
            )
        self._has_told = True

    @contextlib.contextmanager
    def _summing_reduced(self) -> Iterator[None]:
        """Around a backward: what it reduces is rounded before it is added to what there is."""
        before = [(p, p.grad.clone()) for p in self.module.parameters() if p.grad is not None]
        for parameter, _ in before:
            parameter.grad = None
        yield
        held = DTYPES[self._specification.precision.gradients]
        for parameter, earlier in before:
            if parameter.grad is None:
                parameter.grad = earlier
            else:
                parameter.grad.copy_(earlier.add_(parameter.grad).to(held))

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Ends a micro-batch: at the boundary the optimizer steps, and the scheduler after it.

        Raises:
            ConfigError: within ``no_sync``, or after a backward that the engine has not run.
        """
        if self._within_no_sync:
            raise ConfigError(
                "engine.step() within engine.no_sync()", fix="step after the last backward"
            )
        self._applied = self._has_ended = False
        if self.is_gradient_accumulation_boundary():
            self._take_step(dict(lr_kwargs or {}))
        self.micro_steps += 1

    def _take_step(self, lr_kwargs: Mapping[str, Any]) -> None:
        if not self._has_run and any(p.grad is not None for p in self.module.parameters()):
            raise plain_backward.refusal("engine.step() with gradients of another backward")
        self._has_run = False
        shown = self.optimizer if isinstance(self.optimizer, EngineOptimizer) else None
        scale = self.cur_scale
        outcome = self._native.step(self._specification.clip, measure_norm=shown is not None)
        self._native.zero_grad()
        self._applied = not outcome.skipped
        if shown is not None:
            shown.overflow = outcome.skipped
            self._norm = self._report_norm(outcome, scale)
        if outcome.skipped:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self.global_steps += 1
        self.global_samples += self.train_batch_size()

    def _report_norm(self, outcome: StepOutcome, scale: float) -> Tensor | float | None:
        """As DeepSpeed reports it of a step that began with a loss scale of ``scale``.

        Infinite for one that is skipped; its stage 3 divides by the scale that there is afterwards.
        """
        if outcome.skipped:
            return math.inf
        if outcome.grad_norm is None or self.zero_optimization_stage() < 3:
            return outcome.grad_norm
        return outcome.grad_norm * (scale / self.cur_scale)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients."""
        self._native.zero_grad()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the optimizer steps at the end of this micro-batch."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Says it from now on in the place of the count."""
        self._boundary = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, backward communicates nothing.

        Raises:
            ConfigError: ZeRO cuts gradients from stage 2 on.
        """
        if self.zero_optimization_stage() >= 2:
            raise ConfigError(
                "engine.no_sync() from ZeRO stage 2 on, where gradients are cut",
                fix="leave it out, or use stage 0 or 1",
            )
        self._within_no_sync = True
        try:
            yield
        finally:
            self._within_no_sync = False

    def was_step_applied(self) -> bool:
        """Whether the last ``step`` changed parameters."""
        return self._applied

    def get_global_grad_norm(self) -> float | None:
        """The norm before clipping of the last step; None at stage 0 in fp32, as in DeepSpeed."""
        return None if self._norm is None else float(self._norm)

    # -- data and files -------------------------------------------------------------------------

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> EngineLoader:
        """A loader of this process's share of ``dataset``."""
        return EngineLoader(
            dataset,
            batch_size or self.train_micro_batch_size_per_gpu(),
            self._comm,
            shuffles=route == "train",
            drops_last=bool(self._specification.content.get("dataloader_drop_last", False)),
            pin_memory=pin_memory,
            sampler=data_sampler,
            collate_fn=collate_fn or self.collate_fn,
            workers=num_local_io_workers,
        )

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves model, optimizer, scheduler and counts under ``save_dir/tag``. Collective."""
        if exclude_frozen_parameters:
            raise Unsupported("save_checkpoint(exclude_frozen_parameters=True)", fix="leave it out")
        name = str(tag or f"global_step{self.global_steps}")
        counts = {key: getattr(self, key) for key in saving.COUNTS}
        saving.save(
            save_dir,
            name,
            self._native,
            self._comm,
            beside={
                "counts": counts,
                "client_state": dict(client_state or {}),
                "lr_scheduler": saving.state_of(self.lr_scheduler),
            },
            latest=save_latest,
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, Any]:
        """Goes on where ``save_checkpoint`` saved: its path and ``client_state``. Collective.

        (None, None) where there is none, as in DeepSpeed.

        Raises:
            Unsupported: an argument that would load otherwise, or a file of DeepSpeed's own.
        """
        if custom_load_fn is not None or not load_module_strict:
            raise Unsupported(
                "load_checkpoint with load_module_strict=False or custom_load_fn", fix="drop it"
            )
        found = saving.find(load_dir, tag)
        if found is None:
            return None, None
        only = load_module_only or not load_optimizer_states
        beside = saving.load(found, self._native, self._comm, model_alone=only)
        if load_lr_scheduler_states and not load_module_only and self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(beside["lr_scheduler"])
        if not load_module_only:
            for key, value in beside["counts"].items():
                setattr(self, key, value)
        self.loaded_checkpoint_tag = found.name
        return str(found), beside["client_state"]

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        """The whole model in the dtype that it computes in, on rank 0; None elsewhere. Collective.

        Raises:
            ValueError: below stage 3, as DeepSpeed does.
        """
        if not self.zero_optimization_partition_weights():
            raise ValueError("this function requires ZeRO-3 mode")
        return self._consolidate(leads=self.global_rank == 0, trained=exclude_frozen_parameters)

    def module_state_dict(
        self, destination: Any = None, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any]:
        """The model in the dtype that it computes in.

        Raises:
            Unsupported: stage 3 has cut it, or ``destination`` is given.
        """
        if destination is not None or self.zero_optimization_partition_weights():
            raise Unsupported(
                "module_state_dict of what stage 3 has cut, or with a destination",
                fix="call engine.save_16bit_model(folder), or gather by GatheredParameters",
            )
        state = self._consolidate(leads=True, trained=exclude_frozen_parameters)
        assert state is not None
        return state

    def _consolidate(self, *, leads: bool, trained: bool) -> dict[str, Any] | None:
        return saving.consolidate(self.module, self._dtype(), leads=leads, trained_alone=trained)

    def save_16bit_model(
        self,
        save_dir: str,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """The whole model in the dtype that it computes in, as one file of rank 0's. Collective.

        False where stage 3 keeps DeepSpeed from it, since the configuration does not say
        stage3_gather_16bit_weights_on_model_save.
        """
        cuts = self.zero_optimization_partition_weights()
        if cuts and not self.zero_gather_16bit_weights_on_model_save():
            if self.global_rank == 0:
                print(
                    f"drop-in: {save_dir}/{save_filename} is not saved, as DeepSpeed does not: "
                    "zero_optimization.stage3_gather_16bit_weights_on_model_save is false",
                    flush=True,
                )
            return False
        leads = self.global_rank == 0
        state = self._consolidate(leads=leads, trained=exclude_frozen_parameters)
        saving.save_model(Path(save_dir) / save_filename, state, self._comm)
        return True

    save_fp16_model = save_16bit_model

    def destroy(self) -> None:
        """Lets go of hooks and buffers."""
        self._native.close()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(
            f"engine.{name} is neither the model's nor there under drop-in; see "
            "docs/migrate/drop-in.md for what is"
        )
