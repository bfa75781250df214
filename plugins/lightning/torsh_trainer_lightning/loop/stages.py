"""What comes around a stage: seeds, the module's hooks, the engine in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule

from torsh_trainer.checkpoint.rng import rng_state, set_rng_state
from torsh_trainer.strategies.base import Engine
from torsh_trainer_lightning.adapter import Configured, Thaw, join_groups
from torsh_trainer_lightning.loop.ckpt import read_ckpt
from torsh_trainer_lightning.loop.facade import Facade


class Stages:
    """Begins, starts and finishes the stages of a run over one module.

    One stream of random numbers goes through the first stage, as it does in a script: it is put
    aside where the run does something else in between.
    """

    def __init__(
        self,
        facade: Facade,
        module: LightningModule,
        datamodule: LightningDataModule | None,
        device: Any,
        *,
        stages: Sequence[str],
        ckpt_path: str | None,
        trust_ckpt: bool,
        after_fit: str | None = None,
    ) -> None:
        self.facade = facade
        self.module = module
        self.trains = "fit" in stages
        self._datamodule = datamodule
        self._device = device
        self._first = stages[0]
        self._ckpt_path = ckpt_path
        self.after_fit = after_fit
        """Whose weights the stages after training have, ``last`` or ``best``; None: the trained."""

        self.trust_ckpt = trust_ckpt
        self.thaw = Thaw(module)
        self.left_out: frozenset[str] = frozenset()
        """Weights that the checkpoint of ours, which the run goes on from, does without."""
        self._freed: frozenset[str] = frozenset()

        self._begun: str | None = None
        self._modes: list[tuple[Any, bool]] = []
        self._draws: Mapping[str, Any] = rng_state(device)

    def without_ckpt(self, left_out: frozenset[str], freed: frozenset[str]) -> None:
        """The run goes on from a checkpoint of its own, which is without the weights ``left_out``;
        ``freed`` are those that train by then of a module that began with none."""
        self._ckpt_path = None
        self.left_out = left_out
        self._freed = freed

    def take_ckpt(self, word: str) -> None:
        """The next stage begins with the ``last`` or ``best`` of Lightning's checkpoints."""
        self._ckpt_path = word

    def _read(self, path: str) -> dict[str, Any]:
        return read_ckpt(path, trusted=self.trust_ckpt)

    def model(self) -> LightningModule:
        """The module, set up and configured for the first stage."""
        self._begin(self._first)
        self._modes = [(each, each.training) for each in self.module.modules()]
        self.thaw = Thaw(self.module)
        if self.trains:
            self.thaw.begin()
        return self.module

    def after_configuration(self) -> None:
        """``configure_optimizers`` has been called: what it drew counts."""
        self._draws = rng_state(self._device)

    def attach(self, engine: Engine, configured: Configured) -> None:
        """Puts the engine under the facade; the module keeps its modes."""
        for each, training in self._modes:
            each.training = training
        if self.trains:
            self.thaw.end(self._freed)
        join_groups(configured, engine)
        strategy: Any = self.facade.strategy
        strategy.attach(engine, configured)

    def start(self, stage: str, restore: Callable[[], None] | None) -> None:
        """Everything up to the first batch of ``stage``."""
        if self._begun != stage:
            self._begin(stage)
        set_rng_state(self._draws, self._device)
        self.facade.start(restore)

    def finish(self) -> None:
        """Everything after the last batch."""
        self.facade.finish()
        self._begun = None
        self._draws = rng_state(self._device)

    def _begin(self, stage: str) -> None:
        set_rng_state(self._draws, self._device)
        path, self._ckpt_path = self._ckpt_path, None
        with self.facade.guard():
            self.facade.begin(stage, self.module, self._datamodule, ckpt=path, read=self._read)
        self._begun = stage
        self._draws = rng_state(self._device)
