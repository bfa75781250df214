"""``verify``, from configurations to a verdict: the runs are made here, and watched."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torsh_trainer import environments
from torsh_trainer.assemble import (
    RunRequest,
    import_from,
    launch,
    own_loop,
    plan_data,
    plan_run,
)
from torsh_trainer.assemble.plan import plan
from torsh_trainer.data.arithmetic import batch_numbers
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, TorshError
from torsh_trainer.launchers.hardware import accelerators
from torsh_trainer.mesh import MeshOptions
from torsh_trainer.rundir import fresh_name
from torsh_trainer.training.program import ComparisonMode, ProgramTask
from torsh_trainer.utils import registry
from torsh_trainer.utils.importing import load_for_good
from torsh_trainer.verify import page, running, table, written
from torsh_trainer.verify.options import Entry, VerifyOptions
from torsh_trainer.verify.running import Config, RungOutcome, Verdict, on_rung
from torsh_trainer.verify.table import processes_words

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
    launch: Launch = launch,
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
    composed = where_all_fit(composed, max(sizes.values()), env)
    reference = composed[options.reference.label]
    most = max(sizes.values())
    own = own_loop(reference)
    if own is not None and own.own_order:
        check_shares(sizes, most)
    samples = {label: count_data_ranks(c, sizes[label]) for label, c in composed.items()}
    batch = {} if own is not None else batch_of(reference, ranks=max(samples.values()))
    home = home_of(options)

    def run(config: Config, run_dir: Path, rung: str) -> None:
        comparison = None
        if own is not None:
            comparison = ComparisonMode(most, options.sgd_lr if rung == "sgd" else None)
        laid = on_rung(config, rung, options, own_optimizer=own is not None)
        order = WatchedRequest(laid, run_dir, (), tuple(import_paths), comparison=comparison)
        try:
            launch(run_watched, order, env)
        except Exception as error:  # one strategy's failure is a row among others
            raise in_words(error) from error

    def plan_entry(entry: Entry) -> tuple[Config, int]:
        size = sizes[entry.label]
        shares = None
        if own is not None:
            shares = most // size if own.own_order else 1
        return settle_config(composed[entry.label], options, batch, size, shares=shares), size

    outcomes = running.verify(options, plan_entry, home, run=run)
    verdict = Verdict(
        recipe=recipe,
        options=options,
        batch=batch or batch_seen(outcomes),
        precision=pin_precision(reference.get("precision") or {}),
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
class WatchedRequest(RunRequest):
    """An order whose run a witness writes down; ``comparison`` is for a task with its own loop."""

    comparison: ComparisonMode | None = None


def run_watched(world: World, order: WatchedRequest) -> dict[str, Any]:
    """One process of a run that a witness writes down, step by step."""
    # torch loads here, in the processes that train; the first optimizer imports torch._dynamo.
    load_for_good("torsh_trainer.training.trainer", "torch._dynamo")
    from torsh_trainer.training.trainer import run_in
    from torsh_trainer.verify.witness import WatchedStrategy, Witness

    import_from(order.import_paths)
    spec, witness = plan_run(order), Witness()
    if order.comparison is not None and isinstance(spec.task, ProgramTask):
        spec = replace(spec, task=spec.task.compare_as(order.comparison))
    strategy = spec.strategy
    if isinstance(strategy, str):
        strategy = registry.strategy_class(strategy)()
    callbacks = [*spec.callbacks, witness]
    spec = replace(spec, strategy=WatchedStrategy(strategy, witness), callbacks=callbacks)
    with _deterministic_where_it_can_be():
        return dict(run_in(world, spec).content)


@contextlib.contextmanager
def _deterministic_where_it_can_be() -> Iterator[None]:
    """torch's deterministic algorithms; for an operation that has none it warns, and runs on."""
    import torch

    # cuBLAS reads this when its handle is made, so it has to be in the environment itself.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def processes_of(config: Config, env: Mapping[str, str]) -> int:
    """On how many processes a strategy is trained: one where it is no more than one, else all.

    All are ``launcher.num_processes``; ``auto`` is one for each accelerator, but two at least, and
    as many as its mesh takes.
    """
    launcher = config.get("launcher") or {}
    asked = launcher.get("num_processes", 1)
    most = max(2, accelerators(env)) if asked == "auto" else int(asked)
    taken = count_taken(config)
    if asked == "auto" and most % taken:
        most = taken
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


def count_taken(config: Config) -> int:
    """How many processes the sizes that the mesh states multiply to."""
    options = mesh_of(config)
    sizes = [*options.data_sizes.values(), *options.model_sizes.values()]
    return math.prod(size for size in sizes if size is not None and size > 0)


def count_data_ranks(config: Config, processes: int) -> int:
    """How many of ``processes`` see other samples.

    Raises:
        ConfigError: the sizes of the mesh do not multiply to them.
    """
    return mesh_of(config).data_of(processes)[0]


def mesh_of(config: Config) -> MeshOptions:
    """What the configuration says of the mesh."""
    node = config.get("mesh")
    if not node:
        return MeshOptions()
    options: MeshOptions = plan(node, key="mesh").build()
    return options


def where_all_fit(
    composed: Mapping[str, Config], most: int, env: Mapping[str, str]
) -> dict[str, Config]:
    """The configurations, by label, each on a device that has room for ``most`` processes.

    Where this host has GPUs, but fewer, all are trained on the CPU, the reference too: a comparison
    of engines is one on the same device. It is said.

    Raises:
        ConfigError: ``trainer.device=cuda`` insists on the GPUs.
    """
    devices = {
        label: (c.get("trainer") or {}).get("device", "auto") for label, c in composed.items()
    }
    if all(device == "cpu" for device in devices.values()):
        return dict(composed)
    found = accelerators(env)
    if not 0 < found < most:
        return dict(composed)
    few = f"{found} GPU{'s' if found > 1 else ''} for {processes_words(most)}"
    if "cuda" in devices.values():
        raise ConfigError(
            f"trainer.device=cuda, and this host has {few}",
            fix=f"leave it out, which verifies on the CPU, or set launcher.num_processes={found}",
        )
    print(f"verify: {few}, so all strategies are trained on the CPU", file=sys.stderr, flush=True)
    return {
        label: {**config, "trainer": {**(config.get("trainer") or {}), "device": "cpu"}}
        for label, config in composed.items()
    }


def batch_of(config: Config, *, ranks: int) -> dict[str, int]:
    """The batch of every run: ``batch_size``, and the ``micro_batch_size`` of ``ranks`` processes.

    A strategy on fewer processes accumulates more of the same micro-batches, so that dropout draws
    the same units in each.

    Raises:
        ConfigError: the batch does not divide.
    """
    loading = plan_data(config)[1].build()
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


def batch_seen(outcomes: Sequence[RungOutcome]) -> dict[str, int]:
    """The batch of runs that say it themselves, as the reference saw it in its first step."""
    reference = next(one for one in outcomes if one.status == "reference")
    size = int(reference.rows[1]["samples"])
    cut = reference.facts["world_size"] * reference.facts["accumulate"]
    return {"batch_size": size, "micro_batch_size": size // cut}


def _order_words(own: ProgramTask, sizes: Mapping[str, int], most: int) -> str:
    if not own.own_order:
        return "samples in the task's own order, which is the same on any number of processes"
    words = f"samples in the task's own order, which is that of {processes_words(most)}"
    fewer = sorted({size for size in sizes.values() if size < most})
    if not fewer:
        return words
    return f"{words}; {' or '.join(map(str, fewer))} took the batches of all of them in turn"


def settle_config(
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
    knobs = config.get("trainer") or {}
    accumulate = knobs.get("accumulate")
    logger = config.get("logger") or {}
    checkpoint = {"every_steps": None, "every_epochs": None, "at_end": False, "resume": "never"}
    launcher = dict(config.get("launcher") or {})
    if "num_processes" in launcher:
        launcher["num_processes"] = processes
    return {
        **config,
        "trainer": {
            **knobs,
            "stages": ["fit"],
            "max_steps": options.steps,
            "max_epochs": None,
            "max_time": None,
            "accumulate": None if shares is None else shares * (accumulate or 1),
            "log_every": 1,
            "eval_every": None,
            "eval_every_epochs": None,
            "fast_dev_run": False,
            "cudnn_benchmark": False,
            "compile": False if knobs.get("compile", "auto") == "auto" else knobs["compile"],
        },
        "precision": pin_precision(config.get("precision") or {}),
        "data": {**(config.get("data") or {}), **batch},
        "launcher": launcher or None,
        "checkpoint": {**(config.get("checkpoint") or {}), **checkpoint},
        "callbacks": {},
        "logger": {name: node for name, node in logger.items() if name == "jsonl"},
    }


def pin_precision(precision: Mapping[str, Any]) -> dict[str, Any]:
    """The group ``precision`` without what may be another on other devices: auto is fp32."""
    node = {"_target_": "torsh_trainer.optim.precision.Precision", **precision}
    node["matmul"] = node.get("matmul") or "highest"
    return {**node, "compute": "fp32"} if node.get("compute") == "auto" else node


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
