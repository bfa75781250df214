"""``verify``, from configurations to a verdict: the runs are made here, and watched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torsh_trainer import environments, registry
from torsh_trainer.assemble import (
    Order,
    import_from,
    launched,
    own_loop,
    planned_data,
    trainer_of,
)
from torsh_trainer.assemble.plan import plan
from torsh_trainer.course import Likened
from torsh_trainer.data.arithmetic import batch_numbers
from torsh_trainer.errors import ConfigError, TorshError
from torsh_trainer.importing import load_for_good
from torsh_trainer.launchers.hardware import accelerators
from torsh_trainer.rundir import fresh_name
from torsh_trainer.verify import page, running, table, written
from torsh_trainer.verify.options import Entry, VerifyOptions
from torsh_trainer.verify.running import Config, Outcome, Verdict, on_rung
from torsh_trainer.verify.table import processes_words
from torsh_trainer.world import World

if TYPE_CHECKING:  # torch loads where a run is watched
    from torsh_trainer.task import Task

Compose = Callable[[str, Mapping[str, Any]], Config]
"""The resolved configuration under a strategy and its knobs."""
Launch = Callable[[Callable[[World, Any], dict[str, Any]], Any, Mapping[str, str]], object]
"""Calls an entry with an order in the processes of a run."""
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
    launch: Launch = launched,
) -> int:
    """Trains and compares what ``node``, the group ``verify``, names; returns the exit code.

    ``launch`` starts the processes of a run.

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
    most = max(sizes.values())
    own = own_loop(reference)
    if own is not None and own.own_order:
        check_shares(sizes, most)
    batch = {} if own is not None else batch_of(reference, ranks=most)
    home = home_of(options)

    def run(config: Config, run_dir: Path, rung: str) -> None:
        likened = None
        if own is not None:
            likened = Likened(most, options.sgd_lr if rung == "sgd" else None)
        laid = on_rung(config, rung, options, own_optimizer=own is not None)
        order = WatchedOrder(laid, run_dir, (), tuple(import_paths), likened=likened)
        try:
            launch(watched, order, env)
        except Exception as error:  # one strategy's failure is a row among others
            raise in_words(error) from error

    def planned(entry: Entry) -> tuple[Config, int]:
        size = sizes[entry.label]
        shares = None
        if own is not None:
            shares = most // size if own.own_order else 1
        return settled(composed[entry.label], options, batch, size, shares=shares), size

    outcomes = running.verify(options, planned, home, run=run)
    verdict = Verdict(
        recipe=recipe,
        options=options,
        batch=batch or batch_seen(outcomes),
        precision=reference.get("precision") or {},
        outcomes=outcomes,
        order="" if own is None else _order_words(own, sizes, most),
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


@dataclass(frozen=True)
class WatchedOrder(Order):
    """An order whose run a witness writes down; ``likened`` is for a task with its own loop."""

    likened: Likened | None = None


def watched(world: World, order: WatchedOrder) -> dict[str, Any]:
    """One process of a run that a witness writes down, step by step."""
    # torch loads here, in the processes that train; the first optimizer imports torch._dynamo.
    load_for_good("torsh_trainer.trainer", "torch._dynamo")
    from torsh_trainer.trainer import run_in
    from torsh_trainer.verify.witness import Watched, Witness

    import_from(order.import_paths)
    trainer, witness = trainer_of(order), Witness()
    if order.likened is not None:
        trainer = replace(trainer, task=trainer.task.likened(order.likened))
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


def check_shares(sizes: Mapping[str, int], most: int) -> None:
    """Makes sure that the batches of ``most`` processes can be dealt out to each of ``sizes``.

    Raises:
        ConfigError: they cannot.
    """
    for label, size in sizes.items():
        if most % size:
            raise ConfigError(
                f"{label} runs on {size} processes, which cannot share the batches of {most}: the "
                "order of samples is the task's own, and follows the number of processes",
                fix=f"give it launcher.num_processes={most}, or a divisor",
            )


def batch_seen(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """The batch of runs that say it themselves, as the reference saw it in its first step."""
    reference = next(one for one in outcomes if one.status == "reference")
    size = int(reference.rows[1]["samples"])
    cut = reference.facts["world_size"] * reference.facts["accumulate"]
    return {"batch_size": size, "micro_batch_size": size // cut}


def _order_words(own: Task, sizes: Mapping[str, int], most: int) -> str:
    if not own.own_order:
        return "samples in the task's own order, which is the same on any number of processes"
    words = f"samples in the task's own order, which is that of {processes_words(most)}"
    fewer = sorted({size for size in sizes.values() if size < most})
    if not fewer:
        return words
    return f"{words}; {' or '.join(map(str, fewer))} took the batches of all of them in turn"


def settled(
    config: Config,
    options: VerifyOptions,
    batch: Mapping[str, int],
    processes: int,
    *,
    shares: int | None = None,
) -> Config:
    """``config`` for a run that is compared: its length, its batch, nothing written or measured.

    ``shares`` is for a task with a loop of its own, which says its batch itself: of how many
    processes each takes the batches, one after another, within a step.
    """
    accumulate = (config.get("trainer") or {}).get("accumulate")
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
            "accumulate": None if shares is None else shares * (accumulate or 1),
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
