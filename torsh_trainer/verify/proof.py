"""A translation on trial: the original under its own engine, and what it became, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torsh_trainer.translate.plan import Plan
from torsh_trainer.verify.compare import QUANTITIES
from torsh_trainer.verify.running import RungOutcome, Verdict
from torsh_trainer.verify.table import WORDS, describe_bound, of_rung, processes_words, sentence_of

ORIGINAL, TRANSLATION = "original", "translation"
NOT_COMPARED = ("callbacks", "logger", "checkpoint", "launcher")
"""Groups of a translation that move no number."""
NOT_SET = ("trainer.log_every", "trainer.max_steps")

BLOCKS_BESIDE = (
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "flops_profiler",
    "comms_logger",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "steps_per_print",
    "checkpoint",
    "aio",
)
"""Keys of DeepSpeed that measure or report, and are left out of the original's trial."""

_SUSPECTS: Mapping[str, tuple[str, ...]] = {
    "initialisation": ("precision.bf16", "precision.fp16", "start."),
    "data": ("batch.", "zero.linear", "precision.inputs", "precision.", "start.", "data."),
    "averaging": (
        "precision.accumulation",
        "gradients.",
        "batch.accumulation",
        "zero.linear",
        "op",
        "passes",
        "compression",
        "loss.division",
    ),
    "schedule": ("schedule.",),
    "loss_scaling": ("scale.",),
    "optimizer": (
        "optimizer.",
        "gradients.clipping",
        "scale.window",
        "precision.",
        "start.optimizer",
        "start.unused",
        "clip",
    ),
    "rounding": ("optimizer.kernel", "gradients.", "precision.", "zero.linear", "compression"),
}
"""What parts first -> rules that may have let it; with a dot at its end, all of a group."""

_TITLES = {
    "loss": "loss",
    "grad_norm": "gradient norm, before clipping",
    "lr": "learning rate",
    "loss_scale": "loss scale",
    "parameters": "parameters",
}


@dataclass(frozen=True)
class Trial:
    """A translation and the verdict on it."""

    plan: Plan
    verdict: Verdict

    @property
    def content(self) -> dict[str, Any]:
        """What verify.json holds beside the verdict."""
        return {
            "source": self.plan.source,
            "engine": f"{self.plan.engine} {self.plan.version}",
            "mode": self.plan.mode,
            "context": self.plan.context,
            "exit_code": self.plan.exit_code,
            "suspected_rules": {
                outcome.rung: list(rules_of(self.plan, outcome))
                for outcome in self.verdict.outcomes
                if outcome.suspect is not None
            },
        }


def overrides_of(plan: Plan) -> tuple[dict[str, str], dict[str, Any]]:
    """Options of groups and values by key, as far as they are compared."""
    choices = {g: o for g, o in plan.choices.items() if g not in NOT_COMPARED}
    values = {
        key: value
        for key, value in plan.values.items()
        if key.partition(".")[0] not in NOT_COMPARED and key not in NOT_SET
    }
    return choices, values


def rules_of(plan: Plan, outcome: RungOutcome) -> tuple[str, ...]:
    """The rules of the translation under suspicion, those that are approximate first."""
    if outcome.suspect is None:
        return ()
    beginnings = _SUSPECTS.get(outcome.suspect.rule, ())
    found = [
        (finding.verdict != "approximate", place, finding.rule)
        for finding in plan.findings
        for place, beginning in enumerate(beginnings)
        if _is_one(finding.rule, beginning) and finding.verdict not in ("dead", "refused")
    ]
    return tuple(dict.fromkeys(rule for _, _, rule in sorted(found)))[:4]


def _is_one(rule: str, named: str) -> bool:
    return rule.startswith(named) if named.endswith(".") else rule == named


def text_of(trial: Trial) -> str:
    """A table for every rung: by quantity the largest difference, and where it began."""
    return "\n\n".join(
        "\n".join(_block(trial, outcome))
        for rung in trial.verdict.options.ladder
        for outcome in of_rung(trial.verdict, rung)
        if outcome.status != "reference"
    )


def _block(trial: Trial, outcome: RungOutcome) -> Iterator[str]:
    plan, verdict = trial.plan, trial.verdict
    yield (
        f"{outcome.rung}: {plan.source} under {plan.engine} {plan.version} and natively, "
        f"{verdict.options.steps} steps of {verdict.batch_words}, "
        f"{processes_words(outcome.processes)}: {WORDS[outcome.status]}"
    )
    if outcome.comparison is not None:
        heads = ("quantity", "largest difference", "relative", "first differs")
        yield "  {:<32}{:<20}{:<12}{}".format(*heads)
        for quantity in QUANTITIES:
            largest = outcome.comparison.largest(quantity)
            if largest is None:
                continue
            first = outcome.comparison.first_of(quantity)
            step = "-" if first is None else f"step {first}"
            absolute, relative = largest[1].absolute, largest[1].relative
            yield f"  {_TITLES[quantity]:<32}{absolute:<20.2g}{relative:<12.2g}{step}"
        yield f"  {describe_bound(verdict, outcome.rung)}"
    if sentence_of(outcome):
        yield f"  {sentence_of(outcome)}"
    rules = rules_of(plan, outcome)
    if rules:
        yield f"  rules under suspicion: {', '.join(rules)}"
