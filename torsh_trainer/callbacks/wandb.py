"""Weights & Biases."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from torsh_trainer.callbacks.base import RunInfo
from torsh_trainer.callbacks.logger import Logger, Row, Sink, require
from torsh_trainer.errors import ConfigError, ResourceError, nearest
from torsh_trainer.utils.files import disk_error

_MODES = ("online", "offline", "disabled")


class WandB(Logger):
    """Sends metrics (``split/name`` over ``step``) and the configuration to Weights & Biases.

    ``name`` None takes the run directory's. A resumed run goes on in the same Weights & Biases
    run. Local files lie in ``wandb/`` of the run directory.

    Raises:
        ConfigError: ``mode`` is unknown.
        ResourceError: wandb is not installed; at the start, that it refuses the run.
    """

    requires: ClassVar[str | None] = "wandb"

    def __init__(
        self,
        *,
        project: str = "torsh",
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: Literal["online", "offline", "disabled"] = "online",
    ) -> None:
        super().__init__()
        require("wandb", knob="logger.wandb")
        if mode not in _MODES:
            raise ConfigError(f"logger.wandb.mode={mode} is unknown", fix=nearest(mode, _MODES))
        self.project = project
        self.entity = entity
        self.name = name
        self.group = group
        self.tags = tuple(tags)
        self.mode = mode

    def open(self, info: RunInfo) -> Sink:
        return _WandBSink(self, info)


class _WandBSink(Sink):
    def __init__(self, knobs: WandB, info: RunInfo) -> None:
        import wandb  # optional and slow to import: only a run that wants it pays

        try:
            self._run = wandb.init(
                project=knobs.project,
                entity=knobs.entity,
                name=knobs.name or (info.run_dir.name if info.run_dir else None),
                group=knobs.group,
                tags=knobs.tags,
                mode=knobs.mode,
                config=dict(info.config),
                dir=info.run_dir,
                id=None if info.run_dir is None else read_or_make_id(info.run_dir, "wandb"),
                resume="allow",
                # The console is the launcher's; wandb would wrap stdout.
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.errors.Error as error:
            raise ResourceError(
                f"Weights & Biases refuses the run: {error}",
                fix="run `wandb login`, or set logger.wandb.mode=offline and `wandb sync` later",
            ) from error
        # By our own step: wandb's counter would drop the steps that a resumed run repeats.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Row) -> None:
        content: dict[str, Any] = {"step": row.step, "epoch": row.epoch, "samples": row.samples}
        self._run.log({**content, **row.prefixed_metrics()})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def read_or_make_id(run_dir: Path, tracker: str) -> str:
    """The name of this run at an experiment tracker, the same when the run resumes.

    Raises:
        ResourceError: the run directory cannot be written.
    """
    path = run_dir / tracker / "run_id"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise disk_error(error, "write", path) from error
