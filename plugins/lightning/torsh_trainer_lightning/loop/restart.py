"""Going on from a checkpoint: Lightning's loops, what was logged, and the same batches to come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torsh_trainer.checkpoint.rng import rng_state, set_rng_state
from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError
from torsh_trainer.strategies.base import Engine
from torsh_trainer.strategies.state import load_groups
from torsh_trainer.training.program import select_shares
from torsh_trainer_lightning.adapter import rejoin_groups
from torsh_trainer_lightning.loop.hooked import OPTIMIZERS
from torsh_trainer_lightning.loop.kept import (
    Entries,
    check_merging,
    entries_of,
    merge_entries,
    restore_results,
)
from torsh_trainer_lightning.loop.loaded import check_processes, set_restored, tell_of_load
from torsh_trainer_lightning.loop.order import check_data
from torsh_trainer_lightning.loop.stages import Stages


class Restart:
    """Where a run goes on within Lightning's loops, and what it draws there.

    ``expect`` takes it from a checkpoint, ``restore`` puts it in place after ``on_fit_start``, as
    Lightning does with a ``.ckpt``; the rest is called as the loops come to it. ``draws`` are the
    random numbers that this part of an epoch began with, for a save in the middle of it.
    """

    def __init__(
        self, stages: Stages, engine: Engine, comm: Communicator, *, allow: Sequence[str]
    ) -> None:
        self.draws: dict[str, Any] = {}
        self._stages = stages
        self._facade = stages.facade
        self._order = stages.facade.order
        self._engine = engine
        self._comm = comm
        self._allow = allow
        self._pending: dict[str, Any] | None = None  # what ``expect`` took
        self._go_from: Mapping[str, Any] | None = None
        self._replay: dict[str, Any] | None = None
        self._kept: Entries = []

    def expect(self, state: Mapping[str, Any]) -> None:
        """Takes Lightning's part of a checkpoint, once the hooks of the load have had it."""
        if "lightning" not in state["task"]:
            return
        stages, rank = self._stages, f"rank_{self._comm.world.rank}"
        found = tell_of_load(
            stages.facade, self._comm, state, trusted=stages.trust_ckpt, trains=stages.trains
        )
        self._pending = {
            "state": found,
            "draws": state["feed"].get(rank),
            "rng": state["rng"].get(rank),
            "logged": state["loop"].get("logged", {}),
            "optimizers": state["engine"]["optimizer"],
        }

    def restore(self) -> bool:
        """The progress of Lightning's loops, after ``on_fit_start``; false where there is none."""
        pending, self._pending = self._pending, None
        if pending is None:
            return False
        facade, found = self._facade, pending["state"]
        self._regroup(pending["optimizers"])
        if OPTIMIZERS in found:  # a hook has changed them
            facade.strategy.load_optimizer_state_dict(found)
        own, frame = found["torsh_trainer"], facade.fit_loop
        for config, state in zip(facade.lr_scheduler_configs, found["lr_schedulers"], strict=True):
            config.scheduler.load_state_dict(state)
        frame.load_state_dict(found["loops"]["fit_loop"])
        set_restored(frame)
        if own["batches"] is not None:
            self._go_on(own, pending)
        self._go_from = {"own": own, "rng": pending["rng"]}
        return True

    def _regroup(self, saved: Mapping[str, Any]) -> None:
        """Settings of the optimizers' groups once more: callbacks may have put back older ones."""
        engine, configured = self._engine, self._facade.strategy.configured
        rejoin_groups(configured, engine)
        names = {id(p): name for name, p in engine.model.named_parameters()}
        for name, optimizer in engine.optimizers.items():
            load_groups(optimizer, saved[name]["groups"], names)

    def _go_on(self, own: Mapping[str, Any], pending: Mapping[str, Any]) -> None:
        """In the middle of an epoch, after as many batches, with the same ones to come."""
        frame = self._facade.fit_loop
        order = own.get("order", "lightning")
        if order != self._order.name:
            raise ConfigError(
                f"the checkpoint lies in the middle of an epoch in task.order={order}, and this "
                f"run has task.order={self._order.name}",
                fix=f"set task.order={order}, or go on from the end of an epoch",
            )
        if not self._order.portable:
            check_processes(own, self._comm.world.size)
        frame.goes_on = True
        self._take_over(pending["logged"])
        if not self._order.portable:
            self._replay = {**pending["draws"], "batches": own["batches"], "now": pending["rng"]}

    def _take_over(self, logged: Mapping[str, bytes]) -> None:
        """What was logged so far in the epoch, by rank."""
        if not logged:
            return
        module, first, world = self._stages.module, entries_of(logged["rank_0"]), self._comm.world
        if len(logged) > world.size:
            check_merging(first, module)
        parts = [entries_of(data) for data in select_shares(logged, world)]
        self._kept = merge_entries(parts, first, module)

    def before_epochs(self, step: int) -> None:
        """The first epoch of this run is next, after ``step``."""
        # What came so far is drawn as at the very start: loaders may make their data at random.
        if self._go_from is None:
            return
        state, self._go_from = self._go_from, None
        own, facade, middle = state["own"], self._facade, state["own"]["batches"] is not None
        data = self._order.facts(facade.accumulate_grad_batches)
        check_data(own.get("data", {}), data, middle=middle, step=step, allow=self._allow)
        self._order.go_on(own.get("data", {}))
        connector = facade._logger_connector
        connector._callback_metrics.update(own["callback_metrics"])
        connector._logged_metrics.update(own["logged_metrics"])
        if middle:
            results, reduce = facade.fit_loop.epoch_loop._results, facade.strategy.reduce
            restore_results(results, self._kept, self._stages.module, reduce)
            connector._first_loop_iter, connector._current_fx = False, "training_step"
        if state["rng"] is not None and (self._order.portable or not middle):
            set_rng_state(state["rng"], self._comm.device)

    def before_iterator(self) -> None:
        """The iterator over the batches of an epoch is about to be made anew."""
        if self._order.portable:
            return
        if self._replay is not None:
            set_rng_state(self._replay["at_iterator"], self._comm.device)
        else:
            self.draws["at_iterator"] = rng_state(self._comm.device)

    def before_first_batch(self, fetcher: Any) -> None:
        """The first batch of this part of an epoch is next: passes over those that were taken."""
        if self._order.portable:
            return
        replay, self._replay = self._replay, None
        if replay is None:
            self.draws["at_first"] = rng_state(self._comm.device)
            return
        self.draws = {k: v for k, v in replay.items() if k in ("at_iterator", "at_first")}
        set_rng_state(replay["at_first"], self._comm.device)
        # What has a length counts what it gave; the count is that of the whole epoch already.
        source = fetcher if fetcher.length is None else fetcher.iterator
        for _ in range(replay["batches"]):
            next(source)
        set_rng_state(replay["now"], self._comm.device)
