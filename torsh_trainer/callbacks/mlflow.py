"""MLflow."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from torsh_trainer.callbacks.base import RunInfo
from torsh_trainer.callbacks.logger import Logger, Row, Sink, require
from torsh_trainer.errors import ResourceError
from torsh_trainer.utils.files import disk_error

log = logging.getLogger(__name__)
_PARAMS_A_CALL = 100  # MLflow's own limit
_PARAM_CHARACTERS = 500  # the limit of its older servers


class MLflow(Logger):
    """Sends metrics (``split/name``) and the configuration to an MLflow tracking server.

    ``tracking_uri`` None leaves the choice to MLflow (its MLFLOW_TRACKING_URI, else a local
    store). ``run_name`` None takes the run directory's. A resumed run goes on in the same MLflow
    run. A report that the server does not take is lost there, with a warning, and training goes on.

    Raises:
        ResourceError: mlflow is not installed; at the start, that the server refuses.
    """

    requires: ClassVar[str | None] = "mlflow"

    def __init__(
        self,
        *,
        tracking_uri: str | None = None,
        experiment: str = "torsh",
        run_name: str | None = None,
        tags: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        require("mlflow", knob="logger.mlflow")
        self.tracking_uri = tracking_uri
        self.experiment = experiment
        self.run_name = run_name
        self.tags = dict(tags)

    def open(self, info: RunInfo) -> Sink:
        return _MLflowSink(self, info)


class _MLflowSink(Sink):
    def __init__(self, knobs: MLflow, info: RunInfo) -> None:
        # Optional and slow to import: only a run that wants it pays.
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._metric, self._refusal = Metric, MlflowException
        try:
            self._client = MlflowClient(tracking_uri=knobs.tracking_uri)
            self._id = self._earlier(info.run_dir) or self._create(knobs, info, Param)
            self._client.update_run(self._id, status="RUNNING")
        except (MlflowException, ImportError) as error:
            raise ResourceError(
                f"MLflow refuses the run: {error}",
                fix="check logger.mlflow.tracking_uri, or set logger.mlflow.enabled=false",
            ) from error

    def _earlier(self, run_dir: Path | None) -> str | None:
        path = _id_file(run_dir)
        return path.read_text(encoding="utf-8") if path is not None and path.exists() else None

    def _create(self, knobs: MLflow, info: RunInfo, param: Any) -> str:
        experiment = self._client.get_experiment_by_name(knobs.experiment)
        run = self._client.create_run(
            experiment.experiment_id
            if experiment
            else self._client.create_experiment(knobs.experiment),
            run_name=knobs.run_name or (info.run_dir.name if info.run_dir else None),
            tags=knobs.tags,
        )
        run_id: str = run.info.run_id
        params = [param(k, str(v)[:_PARAM_CHARACTERS]) for k, v in _flat(info.config)]
        for start in range(0, len(params), _PARAMS_A_CALL):
            self._client.log_batch(run_id, params=params[start : start + _PARAMS_A_CALL])
        path = _id_file(info.run_dir)
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(run_id, encoding="utf-8")
            except OSError as error:
                raise disk_error(error, "write", path) from error
        return run_id

    def write(self, row: Row) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [
            self._metric(k, float(v), now_ms, row.step) for k, v in row.prefixed_metrics().items()
        ]
        try:
            self._client.log_batch(self._id, metrics=metrics)
        except self._refusal as error:
            log.warning("MLflow did not take the report of step %d: %s", row.step, error)

    def close(self, *, failed: bool) -> None:
        try:
            self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")
        except self._refusal as error:
            log.warning("MLflow did not take the end of the run: %s", error)


def _id_file(run_dir: Path | None) -> Path | None:
    return None if run_dir is None else run_dir / "mlflow" / "run_id"


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
