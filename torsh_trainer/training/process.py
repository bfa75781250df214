"""One process of a run: from a specification to a run at work, and what it leaves behind."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from torsh_trainer.checkpoint.store.lock import check_free
from torsh_trainer.comm import devices, watchdog
from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.failures import CommunicationError
from torsh_trainer.comm.membership import Membership
from torsh_trainer.comm.watching import watch_group
from torsh_trainer.environments.world import World
from torsh_trainer.errors import Interrupted, TorshError, Unsupported
from torsh_trainer.launchers.giving_up import give_up, give_up_unless
from torsh_trainer.launchers.inside import report_failure, report_ready
from torsh_trainer.rundir import RunDir, wait_for_provenance
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.dividing import divide
from torsh_trainer.training.attention import allow_kernels
from torsh_trainer.training.attention import check_device as check_attention
from torsh_trainer.training.numerics import set_switches
from torsh_trainer.training.rank_run import RankRun
from torsh_trainer.training.run_parts import RunParts
from torsh_trainer.training.run_spec import RunSpec, rehearse
from torsh_trainer.utils import registry

log = logging.getLogger(__name__)

T = TypeVar("T")
ON_ERROR_S = 15.0
"""How long the callbacks of a rank that failed may take while others may wait for it."""


def run_rank(spec: RunSpec, world: World) -> tuple[dict[str, Any], nn.Module]:
    """Runs every stage as this process of the job: (content of result.json, trained module).

    Raises:
        TorshError: after result.json has been left with the error.
    """
    began = time.perf_counter()
    strategy = spec.strategy
    if isinstance(strategy, str):
        strategy = registry.strategy_class(strategy)()
    if world.elastic:
        _check_elastic(spec)
    membership = strategy.membership(world, spec.comm)
    attempt = partial(_run_rank, spec, strategy, membership, began)
    if spec.deterministic:
        # cuBLAS reads this when its handle is made, so it has to be in the environment itself.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    switches = set_switches(deterministic=spec.deterministic, matmul=spec.precision.matmul)
    with switches, allow_kernels(spec.attention):
        return membership.run(attempt, world)


def _run_rank(
    spec: RunSpec, strategy: Strategy, membership: Membership, began: float, world: World
) -> tuple[dict[str, Any], nn.Module]:
    device = devices.choose_device(spec.device, world)
    devices.check_room(device)
    check_attention(spec.attention, device)
    strategy, mesh = divide(world, strategy, spec.mesh)
    options = strategy.comm_options(spec.comm)
    needed = strategy.needs_process_group(world)
    comm = membership.meet(world, options, device, process_group=needed)
    report_ready()
    run, failed = None, False
    try:
        home = RunDir(membership.home(lambda: _home(spec, comm, device)))
        with home.logging(world, spec.log_level):
            devices.warn_of_unused(spec.device, device, os.environ)
            plan = rehearse(spec)
            parts = RunParts(plan, world, comm, mesh, strategy, home.path, membership)
            run = RankRun(parts, began=began)
            patience = f"more than comm.timeout_s={options.timeout_s:g}"
            group = None if world.elastic else comm.process_group

            def end_lost(error: CommunicationError) -> None:
                if world.is_rank_zero:
                    home.write_error(error)
                give_up(error, rank=world.rank)

            watch = watch_group(group, timeout_s=options.timeout_s, give_up=end_lost)
            with (
                _report_failures(run, home),
                watchdog.explain_failures(group, longer=patience),
                watch,
            ):
                run.run()
                content = run.result()
                if world.is_rank_zero:
                    home.write_result(content)
            return content, parts.engine.model
    except BaseException as error:
        failed = not (isinstance(error, Interrupted) or world.elastic)
        # The others may wait in a collective, and tearing down may wait for them.
        if failed:
            report_failure(error, rank=world.rank)
            comm.abort()
        raise
    finally:
        if run is not None:
            with _log_errors() if failed else contextlib.nullcontext():
                run.close()
        comm.close()
        # A refused run as well: who reads its directory next, or leaves it, finds it whole.
        wait_for_provenance()


def _home(spec: RunSpec, comm: Communicator, device: torch.device) -> Path:
    """The run directory, made and named by rank 0."""

    def make() -> Path:
        if spec.run_dir is not None:  # before what a run at work there keeps is set aside
            check_free(RunDir(Path(spec.run_dir)).checkpoints)
        home = RunDir.create(None if spec.run_dir is None else Path(spec.run_dir))
        home.write_config(spec.config)
        home.start_provenance(
            command=spec.command,
            threads=torch.get_num_threads(),
            devices=[torch.cuda.get_device_name(device)] if device.type == "cuda" else [],
        )
        return home.path

    return _from_main(comm, make)


def _from_main(comm: Communicator, make: Callable[[], T]) -> T:
    """What ``make`` gives on rank 0, on every rank; its TorshError is raised on every rank."""
    made: Any = None
    if comm.world.is_rank_zero:
        try:
            made = make()
        except TorshError as error:
            made = error
    made = comm.broadcast_object(made)
    if isinstance(made, TorshError):
        raise made
    result: T = made
    return result


@contextlib.contextmanager
def _report_failures(run: RankRun, home: Any) -> Iterator[None]:
    """A failure leaves result.json and tells the callbacks before it goes on its way."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        world = run.parts.world
        if world.is_rank_zero and not run.parts.membership.survives(error):
            home.write_error(error)
        alone = world.size == 1 or world.elastic or isinstance(error, Interrupted)
        # A callback may wait for the device, and the device for a rank that waits for this one.
        limit_s = None if alone else ON_ERROR_S
        with give_up_unless(error, rank=world.rank, done_within_s=limit_s):
            run.tell_failure(error)
        raise


@contextlib.contextmanager
def _log_errors() -> Iterator[None]:
    """An engine that closes without its process group may raise: the failure is the one before."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        log.debug("a part could not be closed: %s", error)


def _check_elastic(spec: RunSpec) -> None:
    """Refuses what cannot be honoured where processes come and go."""
    loading = spec.loading
    options: dict[str, tuple[bool, str, str]] = {
        f"data.micro_batch_size={loading.micro_batch_size} without data.batch_size": (
            loading.batch_size is None and loading.micro_batch_size is not None,
            "the global batch would follow the number of processes",
            "give data.batch_size",
        ),
        f"mesh={dict(spec.mesh.data_sizes)}": (
            any(size not in (None, -1) for size in spec.mesh.data_sizes.values()),
            "its sizes would no longer multiply to the number of processes",
            "leave mesh out",
        ),
        f"optimizer.lr_scaling={spec.task.optimizer.lr_scaling}": (
            spec.task.optimizer.lr_scaling != "none",
            "the learning rate would follow the number of processes",
            "set optimizer.lr_scaling=none",
        ),
        f"checkpoint.mode={spec.checkpoint.mode}": (
            spec.checkpoint.mode == "async",
            "a save under way is lost with the processes",
            "set checkpoint.mode=sync",
        ),
        f"trainer.stages={list(spec.stages)}": (
            any(stage.startswith("find_") for stage in spec.stages),
            "what is found belongs to one number of processes",
            "look for it in a run of its own",
        ),
    }
    for option, (asked, why, fix) in options.items():
        if asked:
            raise Unsupported(f"{option}, and processes come and go here: {why}", fix=fix)
