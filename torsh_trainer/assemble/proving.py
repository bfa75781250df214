"""``verify --source``: the original under its engine beside its translation, to the verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from torsh_trainer.assemble import import_from, launch, own_loop
from torsh_trainer.assemble.plan import plan
from torsh_trainer.assemble.verifying import (
    InWords,
    WatchedRequest,
    batch_of,
    check_alone,
    home_of,
    pin_precision,
    run_watched,
    settle_config,
)
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.translate.base import TranslationRequest, Translator
from torsh_trainer.translate.engines import EngineSource, work_of
from torsh_trainer.translate.plan import EXIT_REFUSED
from torsh_trainer.translate.plan import Plan as Translation
from torsh_trainer.verify import page, proof, running, written
from torsh_trainer.verify.options import Entry, VerifyOptions
from torsh_trainer.verify.running import Config, Verdict, on_rung

Compose = Callable[[Mapping[str, str], Mapping[str, Any]], Config]
"""The resolved configuration with these options of groups and these values in it."""

_RANKS = 2
"""Processes of a trial where nothing says how many."""
_SUBJECT = {"_target_": "torsh_trainer.verify.subject.Subject"}
_MICRO_BATCH = 4  # of the built-in model
_STEPS_PER_EPOCH = 2
"""Of the built-in model, where the script's scheduler steps once an epoch: so that it does."""
_EXACT_RANKS = 2
"""Up to so many, the sum of gradients is the same in either order."""


def prove(
    source: Path,
    asked: TranslationRequest,
    compose: Compose,
    *,
    recipe: str | None,
    env: Mapping[str, str],
    import_paths: Sequence[str],
    in_words: InWords,
) -> int:
    """Trains the file ``source`` under its own engine and natively; returns the exit code.

    ``recipe`` names what is trained; None is the built-in model.

    Raises:
        ConfigError: the file is invalid, or its translation does not compose.
        ResourceError: the plugin of the engine is not installed.
        TorshError: the original could not be trained.
    """
    work = work_of(source, asked)
    _check_installed(work.translator)
    work = replace(work, asked=work.translator.adapt_to_trial(asked, processes=_RANKS))
    translation = work.translate()
    if translation.world_size is None:
        work = replace(work, asked=replace(asked, world_size=_RANKS))
        translation = work.translate()
    if translation.facts:
        names = [fact.name for fact in translation.facts]
        raise ConfigError(
            f"{translation.source}: missing, and only you know it: {', '.join(names)}",
            fix=" ".join(f"--set {name}=VALUE" for name in names),
        )
    refused = [f"{f.key}: {f.why}" for f in translation.findings if f.verdict == "refused"]
    if refused:
        print("not tried, since this has no translation:", *refused, sep="\n  ")
        return EXIT_REFUSED
    check_alone(env)
    import_from(import_paths)
    trial = _Trial(work, translation, compose, builtin=recipe is None)
    home = home_of(trial.options)

    def run(config: Config, run_dir: Path, rung: str) -> None:
        laid = on_rung(config, rung, trial.options)
        try:
            order = WatchedRequest(laid, run_dir, (), tuple(import_paths))
            _apart(order, env, trial.ranks)
        except Exception as error:  # its failure is a row of the table
            raise in_words(error) from error

    verdict = Verdict(
        recipe=recipe or "the built-in model",
        options=trial.options,
        batch=trial.batch,
        precision={},
        outcomes=running.verify(trial.options, trial.plan_run, home, run=run),
    )
    told = proof.Trial(translation, verdict)
    print(proof.text_of(told))
    beside = {"translation": told.content}
    for path in (written.write(verdict, home, beside), page.write(verdict, home)):
        print(path)
    return verdict.exit_code


def _check_installed(translator: Translator) -> None:
    """Raises ResourceError where what trains under the engine itself is not installed."""
    package = translator.original.partition(".")[0]
    if package and find_spec(package) is None:
        distribution = package.replace("_", "-")
        raise ResourceError(
            f"verify --source trains the original under {translator.engine}, and its plugin "
            f"{distribution} is not installed",
            fix=f"pip install {distribution}",
        )


def _apart(order: WatchedRequest, env: Mapping[str, str], ranks: int) -> None:
    """Runs in processes of its own: an engine may keep its group while the process lives."""
    if ranks > 1:
        launch(run_watched, order, env)
        return
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        alone.submit(launch, run_watched, order, dict(env)).result()


class _Trial:
    """The two configurations of a trial, and what they have in common."""

    def __init__(
        self,
        work: EngineSource,
        translation: Translation,
        compose: Compose,
        *,
        builtin: bool,
    ) -> None:
        self.ranks = translation.world_size or 1
        self._original = work.translator.original
        self._content = {
            name: value for name, value in work.content().items() if name not in proof.BLOCKS_BESIDE
        }
        choices, values = proof.overrides_of(translation)
        if builtin:
            values = {k: v for k, v in values.items() if not k.startswith("data.")}
            values.pop("trainer.accumulate", None)
        elif own_loop(compose({}, {})) is not None:
            raise ConfigError(
                "verify --source trains both sides in the trainer's loop, and this task brings its "
                "own",
                fix="leave the task out, to try the translation on the built-in model",
            )
        config = compose(choices, values)
        self.options = self._options(config.pop("verify"), translation, choices)
        if builtin:
            config = self._with_subject(config, translation, choices)
        self._native = config
        self.batch = batch_of(config, ranks=self.ranks)

    def _options(
        self, node: Mapping[str, Any], translation: Translation, choices: Mapping[str, str]
    ) -> VerifyOptions:
        named = [{proof.ORIGINAL: None}, {proof.TRANSLATION: None}]
        options: VerifyOptions = plan({**node, "strategies": named}, key="verify").build()
        low = choices.get("precision", "fp32").partition("_")[0]
        sent = translation.values.get("precision.reduce", "fp32")
        if options.bound is None and {low, sent} != {"fp32"} and self.ranks > _EXACT_RANKS:
            precision = {"compute": low, "reduce": sent}
            options = replace(options, bound=running.default_bound(precision))
        return options

    def _with_subject(
        self, config: Config, translation: Translation, choices: Mapping[str, str]
    ) -> Config:
        low = choices.get("precision", "fp32").endswith("_true")
        steps = _accumulation(translation, self.ranks)
        batch = {
            "micro_batch_size": _MICRO_BATCH,
            "batch_size": _MICRO_BATCH * steps * self.ranks,
        }
        task: Config = {**_SUBJECT, "batch_norm": not low}
        if translation.values.get("schedule.interval") == "epoch":
            task["samples"] = _STEPS_PER_EPOCH * batch["batch_size"]
        return {**config, "task": task, "model": None, "data": {**batch, "drop_last": True}}

    def plan_run(self, entry: Entry) -> tuple[Config, int]:
        """The configuration of one of the two, and on how many processes it is trained."""
        config = settle_config(self._native, self.options, self.batch, self.ranks)
        if entry.strategy == proof.TRANSLATION:
            return config, self.ranks
        trainer = {**config["trainer"], "on_nonfinite": "continue", "phantom_lr": None}
        trainer |= {"max_grad_norm": None, "max_grad_value": None, "ema_decay": None}
        strategy = {
            "_target_": f"{self._original}.Original",
            "config": self._content,
            "sgd_lr": None,
        }
        # A script that steps its scheduler after its loop has to be told that this has ended.
        by_epoch = self._content.get("interval") == "epoch"
        schedule = {"_target_": f"{self._original}.Epochs"} if by_epoch else None
        bare = {"strategy": strategy, "compression": None, "schedule": schedule}
        bare["precision"] = pin_precision({})
        return {**config, **bare, "trainer": trainer}, self.ranks


def _accumulation(translation: Translation, world: int) -> int:
    values = translation.values
    if "trainer.accumulate" in values:
        return int(values["trainer.accumulate"])
    total, micro = values.get("data.batch_size"), values.get("data.micro_batch_size")
    return 1 if not total or not micro else max(1, int(total) // int(micro) // world)
