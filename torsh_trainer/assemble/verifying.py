"""``verify``, from configurations to a verdict: the runs are made here, and watched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torsh_trainer import environments, registry
from torsh_trainer.assemble import Order, import_from, launched, planned_data, trainer_of
from torsh_trainer.assemble.plan import plan
from torsh_trainer.data.arithmetic import batch_numbers
from torsh_trainer.errors import ConfigError, TorshError
from torsh_trainer.importing import load_for_good
from torsh_trainer.launchers.hardware import accelerators
from torsh_trainer.rundir import fresh_name
from torsh_trainer.verify import page, running, table, written
from torsh_trainer.verify.options import Entry, VerifyOptions
from torsh_trainer.verify.running import Config, Verdict
from torsh_trainer.world import World

Compose = Callable[[str, Mapping[str, Any]], Config]
"""The resolved configuration under a strategy and its knobs."""
InWords = Callable[[Exception], TorshError]
"""Any failure as one that speaks to the user."""


def verify(
    node: Mapping[str, Any],
    compose: Compose,
    *,
    recipe: str,
    env: Mapping[str, str],
    import_paths: Sequence[str],
    in_words: InWords,
) -> int:
    """Trains and compares what ``node``, the group ``verify``, names; returns the exit code.

    Raises:
        ConfigError: the configuration cannot be honoured, before anything has run.
        TorshError: the reference could not be trained.
    """
    options: VerifyOptions = plan(node, key="verify").build()
    check_alone(env)
    import_from(import_paths)
    composed = {entry.label: compose(entry.strategy, entry.knobs) for entry in options.entries}
    sizes = {label: processes_of(config, env) for label, config in composed.items()}
    reference = composed[options.reference.label]
    batch = batch_of(reference, ranks=max(sizes.values()))
    home = home_of(options)

    def run(config: Config, run_dir: Path) -> None:
        try:
            launched(watched, Order(config, run_dir, (), tuple(import_paths)), env)
        except Exception as error:  # one strategy's failure is a row among others
            raise in_words(error) from error

    def planned(entry: Entry) -> tuple[Config, int]:
        size = sizes[entry.label]
        return settled(composed[entry.label], options, batch, size), size

    verdict = Verdict(
        recipe=recipe,
        options=options,
        batch=batch,
        precision=reference.get("precision") or {},
        outcomes=running.verify(options, planned, home, run=run),
    )
    print(table.text_of(verdict))
    for path in (written.write(verdict, home), page.write(verdict, home)):
        print(path)
    return verdict.exit_code


def check_alone(env: Mapping[str, str]) -> None:
    """Refuses to start processes as one of several.

    Raises:
        ConfigError: a cluster's launcher has started this process.
    """
    found = environments.detect(env)
    if found is not None and found.size > 1:
        raise ConfigError(
            f"verify starts processes of its own, and {found.source} has started this one as one "
            f"of {found.size}",
            fix="start it from one process, with launcher.num_processes=N",
        )


def watched(world: World, order: Order) -> dict[str, Any]:
    """One process of a run that a witness writes down, step by step."""
    # torch loads here, in the processes that train; the first optimizer imports torch._dynamo.
    load_for_good("torsh_trainer.trainer", "torch._dynamo")
    from torsh_trainer.trainer import run_in
    from torsh_trainer.verify.witness import Watched, Witness

    import_from(order.import_paths)
    trainer, witness = trainer_of(order), Witness()
    strategy = trainer.strategy
    if isinstance(strategy, str):
        strategy = registry.strategy_class(strategy)()
    callbacks = [*trainer.callbacks, witness]
    trainer = replace(trainer, strategy=Watched(strategy, witness), callbacks=callbacks)
    return dict(run_in(world, trainer).content)


def processes_of(config: Config, env: Mapping[str, str]) -> int:
    """On how many processes a strategy is trained: one where it is no more than one, else all.

    All are ``launcher.num_processes``; ``auto`` is one for each accelerator, but two at least.
    """
    launcher = config.get("launcher") or {}
    asked = launcher.get("num_processes", 1)
    most = max(2, accelerators(env)) if asked == "auto" else int(asked)
    if not config.get("strategy"):
        return most
    strategy = plan(config["strategy"], key="strategy").build()

    def fits(size: int) -> bool:
        try:
            strategy.mesh(World(size=size, local_size=size))
        except ConfigError:
            return False
        return True

    return 1 if fits(1) and not fits(most) else most


def batch_of(config: Config, *, ranks: int) -> dict[str, int]:
    """The batch of every run: ``batch_size``, and the ``micro_batch_size`` of ``ranks`` processes.

    A strategy on fewer processes accumulates more of the same micro-batches, so that dropout draws
    the same units in each.

    Raises:
        ConfigError: the batch does not divide.
    """
    loading = planned_data(config)[1].build()
    accumulate = (config.get("trainer") or {}).get("accumulate")
    batch, micro, _ = batch_numbers(loading, accumulate=accumulate, dp_size=ranks)
    return {"batch_size": batch, "micro_batch_size": micro}


def settled(
    config: Config, options: VerifyOptions, batch: Mapping[str, int], processes: int
) -> Config:
    """``config`` for a run that is compared: its length, its batch, nothing written or measured."""
    logger = config.get("logger") or {}
    checkpoint = {"every_steps": None, "every_epochs": None, "at_end": False, "resume": "never"}
    launcher = dict(config.get("launcher") or {})
    if "num_processes" in launcher:
        launcher["num_processes"] = processes
    return {
        **config,
        "trainer": {
            **(config.get("trainer") or {}),
            "stages": ["fit"],
            "max_steps": options.steps,
            "max_epochs": None,
            "max_time": None,
            "accumulate": None,
            "log_every": 1,
            "eval_every": None,
            "eval_every_epochs": None,
            "fast_dev_run": False,
        },
        "data": {**(config.get("data") or {}), **batch},
        "launcher": launcher or None,
        "checkpoint": {**(config.get("checkpoint") or {}), **checkpoint},
        "callbacks": {},
        "logger": {name: node for name, node in logger.items() if name == "jsonl"},
    }


def home_of(options: VerifyOptions) -> Path:
    """The folder of this verification, which must be new or empty.

    Raises:
        ConfigError: there is something in it.
    """
    if options.dir is None:
        return fresh_name(Path("runs") / "verify")
    home = Path(options.dir)
    if home.exists() and (not home.is_dir() or any(home.iterdir())):
        raise ConfigError(f"verify.dir={home} is not empty", fix="name a new folder")
    return home
