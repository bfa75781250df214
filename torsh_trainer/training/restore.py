"""What a run goes on from, put back into its parts: a checkpoint, or what was kept in memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torsh_trainer.checkpoint.fit import Fit
from torsh_trainer.checkpoint.memory import copy_like
from torsh_trainer.checkpoint.plain import Path as Key
from torsh_trainer.checkpoint.setup import WORDS, SetupComparison, compare
from torsh_trainer.errors import ConfigError
from torsh_trainer.training import resume
from torsh_trainer.training.resume import Resumption
from torsh_trainer.training.run_parts import Origin, RunParts
from torsh_trainer.training.trust import Trust

log = logging.getLogger(__name__)


def restore(parts: RunParts) -> None:
    """Brings engine and program to where the run goes on from, if anywhere; collective.

    Raises:
        ConfigError: the run is not one that can go on from there.
        ResourceError: a file of the checkpoint is damaged.
    """
    if parts.origin is None:
        return
    if parts.membership.kept is not None:
        _restore_kept(parts, parts.origin)
    else:
        _restore_checkpoint(parts, parts.origin)


def _restore_checkpoint(parts: RunParts, origin: Origin) -> None:
    program, path = parts.program, origin.path
    parts.engine.expect(origin.plain.get("engine", {}))
    template = program.state(template=parts.trains)
    fit = parts.checkpointer.compare(template, path)
    if parts.trains and fit.below(resume.OPTIMIZER).unexpected:  # on all ranks alike
        grown = resume.grow_template(template, fit, parts.engine, origin.setup, parts.setup)
        template = grown or template
        fit = parts.checkpointer.compare(template, path)
    resumption = _compare(parts, origin, fit)
    trust = _make_trust(parts, origin, template, resumption.leave)
    loaded = parts.checkpointer.load(template, path=path, leave=resumption.leave)
    loaded = resumption.complete(loaded, parts.engine.optimizers)
    if trust is None:
        program.load(loaded)
    else:
        trust.note(loaded)
        program.load(loaded, has_loaded=trust.check)
        if parts.factory.changes_loaded:
            trust.tell_changes(parts.factory.changes_loaded)
    if any(one.word == "data" for one in resumption.comparison.allowed):
        program.feed_state = None  # it is of other data, or of another order of them
    log.info("resumed from %s at step %d", path, program.position.step)
    if parts.trains:
        resume.apply_settings(parts.engine, origin.setup, parts.setup)
        _tell(resumption.comparison)


def _compare(parts: RunParts, origin: Origin, fit: Fit) -> Resumption:
    """What to load; a refusal on any rank is raised on every rank."""
    if parts.trains:
        found = resume.for_training(
            origin.plain,
            parts.setup,
            fit,
            allow=parts.spec.checkpoint.allow,
            others=parts.factory.find_other_samples(parts.setup),
        )
    else:
        averaged = parts.spec.ema_decay is not None
        found = resume.for_evaluation(fit, averaged=averaged)
    for comparison in parts.comm.all_gather_object(found.comparison):
        comparison.check(str(origin.path))
    return found


def _make_trust(
    parts: RunParts, origin: Origin, template: Mapping[str, Any], leave: Iterable[Key]
) -> Trust | None:
    if not parts.spec.checkpoint.check_loaded:
        return None
    return Trust(parts.checkpointer, origin.path, parts.comm, parts.engine, template, leave=leave)


def _restore_kept(parts: RunParts, origin: Origin) -> None:
    """From what the processes of an earlier attempt have kept in memory.

    Raises:
        ConfigError: these processes cannot; what was kept is on disk then, where saving is on.
    """
    before = {name: fact for name, fact in origin.setup.items() if name != "world_size"}
    try:
        comparison = compare(before, parts.setup, allow=parts.spec.checkpoint.allow)
        comparison.check(f"kept in memory for {origin.path}")
        template = parts.program.state(template=True)
    except ConfigError as error:  # on all ranks alike: they have the same configuration
        if not (parts.trains and parts.spec.checkpoint.saves):
            raise
        raise _save_kept(parts, origin, error) from error
    parts.program.load(copy_like(origin.plain, like={"engine": template["engine"]}))
    _tell(comparison)


def _save_kept(parts: RunParts, origin: Origin, error: ConfigError) -> ConfigError:
    """``error``, once what was kept in memory for this attempt is on disk."""
    state = dict(origin.plain)
    saves, step, loop = state.pop("saves"), origin.position.step, state["loop"]
    path = saves["path"]
    if saves["at"] < step:
        parts.facts.setdefault("strategy", parts.chosen.name)
        measured = loop["metrics"] if loop["evaluated_at"] == step else {}
        path = str(parts.checkpointer.save(step, state, measured))
        parts.checkpointer.close()
    return type(error)(
        error.sentence,
        fix=f"{error.fix}; step {step} is in {path}, from which checkpoint.resume=auto goes on "
        "in the same run directory",
        **error.facts,
    )


def _tell(comparison: SetupComparison) -> None:
    """What differs from the run that was saved, for the user to read once."""
    for one in comparison.allowed:
        log.warning("%s: allowed, and %s", one.text, WORDS[one.word])
    for text in (*comparison.applied, *comparison.inexact):
        log.info("%s", text)
