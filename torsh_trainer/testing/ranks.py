"""Real ranks for tests: processes that join one process group and run many cases.

They are forked from a warm process that has imported torch and nothing else has happened to, so
that four of them cost a fraction of a second where four fresh interpreters take many.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import cloudpickle
import torch

from torsh_trainer.comm import create
from torsh_trainer.comm.base import CommOptions, Communicator
from torsh_trainer.environments.world import Rendezvous, World

PRELOADED = (
    "torch",
    "torch._dynamo",  # the first step of any optimizer imports it
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.checkpoint",
    "torsh_trainer.checkpoint.saving",
    "torsh_trainer.testing.ranks",
    "torsh_trainer.training.trainer",
)
"""What the warm process imports, once for all ranks; none of it starts a thread."""

OPTIONS = CommOptions(timeout_s=240.0, startup_timeout_s=240.0)
_GRACE_S = 2.0
"""How long the other ranks have to report, once one has failed."""


class RankFailure(AssertionError):
    """A case failed on some rank; the text has every rank's traceback, stack or last output."""


class RankPool:
    """``world_size`` processes in one process group.

    ``device`` is cpu or cuda (one GPU for each rank). With ``join=False`` the processes make no
    group, and a case is given its ``World``, with a place to meet, instead of a communicator. The
    processes start at the first case and are killed and replaced after one that failed; ``grace_s``
    is how long the others then have to say something. Use it as a context manager, or ``close`` it.
    """

    def __init__(
        self,
        world_size: int,
        *,
        device: str = "cpu",
        options: CommOptions = OPTIONS,
        join: bool = True,
        grace_s: float = _GRACE_S,
    ) -> None:
        self.world_size = world_size
        self._grace_s = grace_s
        self._join = join
        self._device = device
        self._options = options
        self._ranks: list[_Rank] = []
        self._output = tempfile.TemporaryDirectory(prefix="ranks-")

    def run(self, case: Callable[..., Any], *args: Any, timeout_s: float = 480.0) -> list[Any]:
        """``case(comm, *args)`` on every rank; the answers by rank.

        ``case``, ``args`` and the answers must pickle (cloudpickle: closures do).

        Raises:
            RankFailure: a rank raised, died, or did not finish in time.
        """
        if not self._ranks:
            self._start()
        payload = _pickle((case, args))
        try:
            for rank in self._ranks:
                rank.connection.send_bytes(payload)
        except OSError:  # died since the last case: what is collected says so
            pass
        answers = self._collect(timeout_s)
        if len(answers) == self.world_size and all(a.error is None for a in answers.values()):
            if max(answer.groups for answer in answers.values()) > _MOST_GROUPS:
                self._kill()
            return [answers[rank].value for rank in range(self.world_size)]
        text = self._report(answers, timeout_s)
        self._kill()
        raise RankFailure(text)

    def close(self) -> None:
        """Ends the processes; a later ``run`` starts new ones."""
        self._kill()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        self._output.cleanup()

    @property
    def pids(self) -> list[int]:
        """The processes, by rank; empty before the first case."""
        return [rank.process.pid or 0 for rank in self._ranks]

    # -- processes ------------------------------------------------------------------------------

    def _start(self) -> None:
        context = _context()
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        with listener:
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                world = World(
                    rank=rank,
                    size=self.world_size,
                    local_rank=rank,
                    local_size=self.world_size,
                    rendezvous=Rendezvous("127.0.0.1", port),
                    source="test",
                )
                output = Path(self._output.name, f"rank-{rank}.log")
                process = context.Process(
                    target=_live,
                    args=(
                        theirs,
                        world,
                        listener if rank == 0 else None,
                        self._device if self._join else None,
                        self._options,
                        output,
                    ),
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._ranks.append(_Rank(process, ours, output))

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.connection.close()
        self._ranks = []

    # -- answers --------------------------------------------------------------------------------

    def _collect(self, timeout_s: float) -> dict[int, _Answer]:
        deadline = time.monotonic() + timeout_s
        waiting = {rank.connection: number for number, rank in enumerate(self._ranks)}
        answers: dict[int, _Answer] = {}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                number = waiting.pop(connection)
                answers[number] = self._answer(number)
                if answers[number].error is not None:
                    deadline = min(deadline, time.monotonic() + self._grace_s)
        return answers

    def _answer(self, number: int) -> _Answer:
        rank = self._ranks[number]
        try:
            answer: _Answer = cloudpickle.loads(rank.connection.recv_bytes())
        except (EOFError, OSError):
            rank.process.join(_GRACE_S)
            return _Answer(None, f"died with exit code {rank.process.exitcode}\n{rank.last_words}")
        return answer

    def _report(self, answers: dict[int, _Answer], timeout_s: float) -> str:
        silent = [rank for number, rank in enumerate(self._ranks) if number not in answers]
        for rank in silent:
            os.kill(rank.process.pid or 0, signal.SIGUSR1)  # faulthandler writes its stack
        if silent:
            time.sleep(0.2)
        late = "was still busy" if answers else f"did not finish in {timeout_s:g} s"
        parts = []
        for number, rank in enumerate(self._ranks):
            answer = answers.get(number)
            if answer is None:
                parts.append(f"rank {number} {late}\n{rank.last_words}")
            elif answer.error is not None:
                parts.append(f"rank {number} {answer.error}")
        return "\n\n".join(parts)


@cache
def shared_pool(world_size: int, device: str = "cpu", options: CommOptions = OPTIONS) -> RankPool:
    """The pool of that kind that all tests of this process share; it ends with the process.

    Its ranks rest while others are at work, and start anew when it is used again.
    """
    pool = _SharedPool(world_size, device=device, options=options)
    atexit.register(pool.close)
    return pool


class _SharedPool(RankPool):
    """One of the pools of this process, of which not too many ranks live at a time."""

    _used: ClassVar[list[_SharedPool]] = []
    """Those with ranks, the last used last."""

    def run(self, case: Callable[..., Any], *args: Any, timeout_s: float = 480.0) -> list[Any]:
        used = _SharedPool._used
        used[:] = [pool for pool in used if pool is not self and pool.pids]
        while used and self.world_size + sum(pool.world_size for pool in used) > _MOST_RANKS:
            used.pop(0).close()
        used.append(self)
        return super().run(case, *args, timeout_s=timeout_s)


def torchrun_variables(world: World, store_port: int) -> dict[str, str]:
    """What torchrun would have started this rank with; its store listens on this host."""
    return {
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store_port),
    }


_MOST_GROUPS = 12
"""A group that a case made keeps a thread that looks for work a hundred times a second, also one
that an engine's library has destroyed and holds: ranks with 103 of them take a tenth of a core
while they wait. With more than so many, others follow."""

_MOST_RANKS = 8
"""Of all shared pools of a process, for the same reason: 115 waiting ranks took a third of two
cores from those at work."""


class _Answer(NamedTuple):
    value: Any
    error: str | None = None
    groups: int = 0


class _Rank(NamedTuple):
    process: BaseProcess
    connection: Connection
    output: Path

    @property
    def last_words(self) -> str:
        text = self.output.read_text(errors="replace") if self.output.exists() else ""
        return text[-8000:]


@cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def _live(
    connection: Connection,
    world: World,
    listener: socket.socket | None,
    device: str | None,
    options: CommOptions,
    output: Path,
) -> None:
    """The life of a rank: joins the group, then runs cases until the pool goes away."""
    _write_to(output)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    gc.freeze()  # what was inherited is never garbage; walking it would copy every page
    if listener is not None and world.rendezvous is not None:
        meeting = replace(world.rendezvous, listen_fd=listener.detach())
        world = replace(world, rendezvous=meeting)
    place: World | Communicator = world
    try:
        if device is not None:
            place = create(world, options, torch.device(device))
    except Exception:  # noqa: BLE001 - whatever it is, the test must see it
        _answer_next(connection, _Answer(None, f"could not join:\n{traceback.format_exc()}"))
        return
    loaded = len(sys.modules)
    while True:
        try:
            payload = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_outcome(place, payload))
        gc.collect()
        if len(sys.modules) > loaded:  # nor is what the case has imported: an engine's library
            gc.freeze()
            loaded = len(sys.modules)


def _answer_next(connection: Connection, answer: _Answer) -> None:
    connection.recv_bytes()
    connection.send_bytes(cloudpickle.dumps(answer))


def _outcome(place: World | Communicator, payload: bytes) -> bytes:
    """The case run, as a pickled answer; what it raises belongs to the test, whatever it is."""
    try:
        case, args = cloudpickle.loads(payload)
        return cloudpickle.dumps(_Answer(case(place, *args), groups=_count_groups()))
    except BaseException:  # noqa: BLE001 - SystemExit and the like included
        return cloudpickle.dumps(_Answer(None, f"raised\n{traceback.format_exc()}"))


def _count_groups() -> int:
    """How many process groups of gloo have a thread here, known to torch or not."""
    return sum(
        _read_task(task) == "gloo_tcp_loop\n" for task in Path("/proc/self/task").glob("*/comm")
    )


def _read_task(task: Path) -> str:
    try:
        return task.read_text()
    except OSError:  # the thread has ended
        return ""


def _write_to(output: Path) -> None:
    """Output of this process and of the libraries in it goes to a file.

    So do stacks: on demand, and that of the thread in which the process dies.
    """
    file = output.open("w", buffering=1)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = file
    faulthandler.enable(file=file, all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)


def _pickle(value: Any) -> bytes:
    """Pickles; what stands in a test module, which ranks cannot import, goes by value."""
    foreign = [module for module in list(sys.modules.values()) if _only_here(module)]
    for module in foreign:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(value)
    finally:
        for module in foreign:
            cloudpickle.unregister_pickle_by_value(module)


def _only_here(module: ModuleType) -> bool:
    """Whether the module was loaded from a file that its name does not lead to (a test's)."""
    file, name = getattr(module, "__file__", None), getattr(module, "__name__", "")
    if not isinstance(file, str):
        return False
    stem = file.rpartition("/")[2].removesuffix(".py")
    if not (stem.startswith("test_") or stem.endswith("_test") or stem == "conftest"):
        return False
    parts = name.split(".")
    return not any(
        Path(entry or ".", *parts).with_suffix(".py") == Path(file) for entry in sys.path
    )
