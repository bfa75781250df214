"""Looking whether a sweep's objective is among the metrics, as soon as there are any."""

from __future__ import annotations

from torsh_trainer.callbacks.base import Callback, EvaluationReport
from torsh_trainer.errors import ConfigError, nearest

_OF_TEST = "test_"


class ObjectiveIsKnown(Callback):
    """Refuses an ``objective`` that the first evaluation does not have; with ``tests`` a later
    stage adds the metrics of the test split under their names with ``test_`` before them."""

    def __init__(self, objective: str, *, tests: bool):
        self.objective, self.tests = objective, tests

    def on_evaluate(self, report: EvaluationReport) -> bool | None:
        if report.split != "eval":
            return None
        known = [*report.metrics, *(_OF_TEST + name for name in report.metrics if self.tests)]
        may_come = self.tests and self.objective.startswith(_OF_TEST)
        if self.objective not in known and not may_come:
            raise ConfigError(
                f"trainer.objective={self.objective}: the run has no such metric",
                fix=nearest(self.objective, known) + " (null is the training loss)",
            )
        return None
