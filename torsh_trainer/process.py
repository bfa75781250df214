"""One process of a run: from a trainer to a rank at work, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from torsh_trainer import hardware, registry
from torsh_trainer.checkpoint.store.lock import check_free
from torsh_trainer.comm import attendance
from torsh_trainer.comm.base import Communicator
from torsh_trainer.coursed import rank_class
from torsh_trainer.errors import TorshError, Unsupported
from torsh_trainer.launchers.inside import report_ready
from torsh_trainer.membership import Membership
from torsh_trainer.rank import Rank, rehearsal
from torsh_trainer.rundir import RunDir
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.world import World

if TYPE_CHECKING:  # the trainer is what this module is called by
    from torsh_trainer.trainer import Trainer

T = TypeVar("T")


def run_rank(trainer: Trainer, world: World) -> tuple[dict[str, Any], nn.Module]:
    """Runs every stage as this process of the job: (content of result.json, trained module).

    Raises:
        TorshError: after result.json has been left with the error.
    """
    began = time.perf_counter()
    strategy = trainer.strategy
    if isinstance(strategy, str):
        strategy = registry.strategy_class(strategy)()
    if world.elastic:
        _check_elastic(trainer)
    membership = strategy.membership(world, trainer.comm)
    attempt = partial(_run_rank, trainer, strategy, membership, began)
    with _deterministic() if trainer.deterministic else contextlib.nullcontext():
        return membership.run(attempt, world)


def _run_rank(
    trainer: Trainer, strategy: Strategy, membership: Membership, began: float, world: World
) -> tuple[dict[str, Any], nn.Module]:
    device = hardware.choose_device(trainer.device, world)
    mesh = strategy.mesh(world)
    options = strategy.comm_options(trainer.comm)
    needed = strategy.needs_process_group(world)
    comm = membership.meet(world, options, device, process_group=needed)
    report_ready()
    rank = None
    try:
        home = RunDir(membership.home(lambda: _home(trainer, comm, device)))
        with home.logging(world, trainer.log_level):
            rank = rank_class(trainer.task)(
                rehearsal(trainer), world, comm, mesh, strategy, home.path, began, membership
            )
            patience = f"more than comm.timeout_s={options.timeout_s:g}"
            group = None if world.elastic else comm.process_group
            with _reported(rank, home), attendance.named(group, longer=patience):
                rank.run()
                content = rank.result()
                if world.is_main:
                    home.write_result(content)
            return content, rank.engine.model
    finally:
        if rank is not None:
            rank.close()
        comm.close()


def _home(trainer: Trainer, comm: Communicator, device: torch.device) -> Path:
    """The run directory, made and named by rank 0."""

    def make() -> Path:
        if trainer.run_dir is not None:  # before what a run at work there keeps is set aside
            check_free(RunDir(Path(trainer.run_dir)).checkpoints)
        home = RunDir.create(None if trainer.run_dir is None else Path(trainer.run_dir))
        home.write_config(trainer.config)
        home.start_provenance(
            command=trainer.command,
            threads=torch.get_num_threads(),
            devices=[torch.cuda.get_device_name(device)] if device.type == "cuda" else [],
        )
        return home.path

    return _from_main(comm, make)


def _from_main(comm: Communicator, make: Callable[[], T]) -> T:
    """What ``make`` gives on rank 0, on every rank; its TorshError is raised on every rank."""
    made: Any = None
    if comm.world.is_main:
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
def _reported(rank: Rank, home: Any) -> Iterator[None]:
    """A failure tells the callbacks and leaves result.json before it goes on its way."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        rank.failed(error)
        if rank.world.is_main and not rank.membership.survives(error):
            home.write_error(error)
        raise


def _check_elastic(trainer: Trainer) -> None:
    """Refuses what cannot be honoured where processes come and go."""
    loading = trainer.loading
    options: dict[str, tuple[bool, str, str]] = {
        f"data.micro_batch_size={loading.micro_batch_size} without data.batch_size": (
            loading.batch_size is None and loading.micro_batch_size is not None,
            "the global batch would follow the number of processes",
            "give data.batch_size",
        ),
        f"optimizer.lr_scaling={trainer.task.optimizer.lr_scaling}": (
            trainer.task.optimizer.lr_scaling != "none",
            "the learning rate would follow the number of processes",
            "set optimizer.lr_scaling=none",
        ),
        f"checkpoint.mode={trainer.checkpoint.mode}": (
            trainer.checkpoint.mode == "async",
            "a save under way is lost with the processes",
            "set checkpoint.mode=sync",
        ),
        f"trainer.stages={list(trainer.stages)}": (
            any(stage.startswith("find_") for stage in trainer.stages),
            "what is found belongs to one number of processes",
            "look for it in a run of its own",
        ),
    }
    for option, (asked, why, fix) in options.items():
        if asked:
            raise Unsupported(f"{option}, and processes come and go here: {why}", fix=fix)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Deterministic algorithms in torch within the block: a sweep's next job may not want them."""
    # cuBLAS reads this when its handle is made, so it has to be in the environment itself.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
