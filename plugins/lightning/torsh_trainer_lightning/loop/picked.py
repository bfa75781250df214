"""The run's own checkpoint that is the last one, or the best, where no ModelCheckpoint saves."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torsh_trainer.checkpoint.store.retention import complete, newest_first
from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError
from torsh_trainer.strategies.base import Engine
from torsh_trainer.training import resume
from torsh_trainer_lightning.loop.loaded import lightning_state
from torsh_trainer_lightning.loop.stages import Stages

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Own:
    """By which metric of an evaluation the best of the run's own checkpoints is found."""

    monitor: str
    mode: str

    def path(self, checkpointer: Any, word: str, comm: Communicator) -> Any:
        """Where the ``last`` or ``best`` lies, the same on every rank.

        Raises:
            ConfigError: there is none, or none has the metric.
        """
        found: Any = None
        if comm.world.is_rank_zero:
            found = self._find_checkpoint(checkpointer, word)
        found = comm.broadcast_object(found)
        if found is None:
            raise ConfigError(
                f"task.ckpt_path_after_fit={word}: no checkpoint of this run "
                + (f"has the metric {self.monitor}" if word == "best" else "is there"),
                fix="set checkpoint.monitor to a metric of validation and "
                "checkpoint.every_epochs to where it runs, or add a ModelCheckpoint to "
                "task.callbacks",
            )
        return found

    def _find_checkpoint(self, checkpointer: Any, word: str) -> Any:
        there = newest_first(complete(checkpointer.folder))
        if word == "last":
            return there[0].path if there else None
        sign = -1 if self.mode == "max" else 1
        measured = [
            (sign * value, one.path)
            for one in there
            for value in [one.manifest.metrics.get(self.monitor, math.nan)]
            if math.isfinite(value)
        ]
        return min(measured, key=lambda pair: pair[0])[1] if measured else None


class StageWeights:
    """The weights of the first stage after training, where the task names the last or the best."""

    def __init__(self, stages: Stages, checkpointer: Any, own: Own, comm: Communicator) -> None:
        self._stages = stages
        self._facade = stages.facade
        self._checkpointer = checkpointer
        self._own = own
        self._comm = comm
        self._word = stages.after_fit

    def check(self, *, saves: bool) -> None:
        """Makes sure that there will be checkpoints to take weights from.

        Raises:
            ConfigError: nothing is saved.
        """
        if self._word and not saves and not self._facade.checkpoint_callbacks:
            raise ConfigError(
                f"task.ckpt_path_after_fit={self._word}, and this run saves nothing",
                fix="set checkpoint.at_end=true or checkpoint.every_epochs, or add a "
                "ModelCheckpoint to task.callbacks",
            )

    def take(self, engine: Engine, make_template: Callable[[], Mapping[str, Any]]) -> None:
        """Puts them into ``engine``, once; ``make_template`` gives a state to fill."""
        word, self._word = self._word, None
        if word is None:
            return
        if self._facade.checkpoint_callbacks:
            self._stages.take_ckpt(word)
            return
        checkpointer = self._checkpointer
        path = self._own.path(checkpointer, word, self._comm)
        check_weights(lightning_state(checkpointer.plain(path)), str(path))
        loaded = weights_at(checkpointer, path, make_template())
        state = engine.state_template()
        engine.load_state_dict({**state, "model": loaded["engine"]["model"]})
        log.info("the %s checkpoint of this run is %s", word, path)


def weights_at(checkpointer: Any, path: Any, template: Mapping[str, Any]) -> dict[str, Any]:
    """What an engine is given of the checkpoint at ``path``: weights alone.

    Raises:
        ConfigError: they do not fit.
    """
    found = resume.for_evaluation(checkpointer.compare(template, path), averaged=False)
    found.comparison.check(str(path))
    loaded: dict[str, Any] = checkpointer.load(template, path=path, leave=found.leave)
    return loaded


def check_weights(held: Mapping[str, Any], path: str) -> None:
    """Makes sure that hooks have left the weights as they were.

    Raises:
        ConfigError: they have not.
    """
    if held["torsh_trainer"].get("changed_weights"):
        raise ConfigError(
            f"task.ckpt_path_after_fit: on_save_checkpoint has changed the weights in {path}",
            fix="add a ModelCheckpoint to task.callbacks, whose file a load hook is given",
        )
