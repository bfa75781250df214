"""Who took no part in a collective that has failed: notes that members leave in the job's store.

The store is a connection of its own (each process's to rank 0), so it answers when a collective
does not. Nothing is written there while all goes well.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    DistNetworkError,
    DistStoreError,
    PrefixStore,
)

from torsh_trainer.comm.failures import CommunicationError
from torsh_trainer.comm.symptoms import is_communication
from torsh_trainer.errors import TorshError

log = logging.getLogger(__name__)

GRACE_S = 3.0
"""How long a rank whose collective took too long waits for others to say that theirs did, too."""
_BROKEN_S = 1.0
"""The same after a connection broke, which all see at once; a launcher then ends the job."""
_ANSWER_S = 5.0
"""How long the store may take to answer; one whose process has stopped never does."""
_TIMED_OUT = re.compile("timed? ?out", re.IGNORECASE)  # gloo and NCCL have either form
_POLL_S = 0.05

_failures: collections.Counter[str] = collections.Counter()

Answer = TypeVar("Answer")


def explained(
    process_group: Any, operation: str, error: Exception, *, longer: str
) -> CommunicationError:
    """The error for a collective that failed, with the ranks that did not take part.

    Every rank whose collective fails leaves a note; who leaves none within a few seconds is
    missing: it never came to this call, or its process has ended. Where the store is out of reach
    nobody is named. ``longer`` names the knob that gives more time.
    """
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    late = _TIMED_OUT.search(first) is not None
    fix = "what it was given does not suit it; debug=true shows the traceback"
    if late or is_communication(error):  # else nobody has been asked for anything yet
        try:
            missing = absent(process_group, grace_s=GRACE_S if late else _BROKEN_S)
        except (DistNetworkError, DistStoreError):
            first += f"; the process that holds the job's store ({_keeper()}) cannot be reached"
            fix = "see whether it has ended, and its log: only there is known who did not take part"
        else:
            if missing:
                did = "did not take part" if late else "gave no sign afterwards"
                return missed(process_group, operation, missing, f"{did} ({first})", longer=longer)
            fix = (
                "another process did something else, or gave up waiting: "
                "TORCH_DISTRIBUTED_DEBUG=DETAIL compares calls before they are made"
            )
    size = dist.get_world_size(process_group)
    return CommunicationError(
        f"{operation} failed on rank {dist.get_rank()} of {size} ({_backend(process_group)}): "
        f"{first}",
        fix=fix,
        rank=dist.get_rank(),
        operation=operation,
        missing=[],
    )


def missed(
    process_group: Any, operation: str, members: Sequence[int], did: str, *, longer: str
) -> CommunicationError:
    """The error for an operation that ``members`` (by their numbers in the group) did not join."""
    everyone = dist.get_process_group_ranks(process_group)
    ranks = [everyone[member] for member in members]
    return CommunicationError(
        f"{operation} failed on rank {dist.get_rank()} ({_backend(process_group)}): "
        f"{ranks_words(ranks)} of {len(everyone)} {did}",
        fix=f"see what they do instead, or whether they ended; {longer} waits longer",
        rank=dist.get_rank(),
        operation=operation,
        missing=ranks,
    )


def absent(process_group: Any, *, grace_s: float) -> list[int]:
    """The members that say nothing of a failure; this process says that it has met one.

    Takes up to ``grace_s`` where all is well with the store. Empty where torch has none to ask.

    Raises:
        DistNetworkError: the connection to the store broke.
        DistStoreError: the store does not answer.
    """
    name = process_group.group_name
    turn = _failures[name]
    _failures[name] += 1
    keys = [f"failed/{turn}/{member}" for member in range(dist.get_world_size(process_group))]
    mine = keys[dist.get_rank(process_group)]
    store = connected(name)
    if store is None:
        return []

    def noted() -> list[int]:
        store.set(mine, "")
        return _silent(store, keys, grace_s)

    return _answered(noted, within_s=grace_s + _ANSWER_S)


def _keeper() -> str:
    """Who holds the store, as far as can be told without asking it."""
    return "rank 0 or torchrun's agent" if dist.is_torchelastic_launched() else "rank 0"


def _answered(ask: Callable[[], Answer], *, within_s: float) -> Answer:
    """What ``ask`` finds, on a thread: torch's calls to a store have no limit, or a very long one.

    Raises:
        DistStoreError: there is no answer yet.
    """
    future: concurrent.futures.Future[Answer] = concurrent.futures.Future()

    def answer() -> None:
        try:
            future.set_result(ask())
        except Exception as error:  # noqa: BLE001 - raised again where the answer is awaited
            future.set_exception(error)

    threading.Thread(target=answer, name="torsh-store", daemon=True).start()
    try:
        return future.result(within_s)
    except concurrent.futures.TimeoutError:
        raise DistStoreError(f"the store did not answer within {within_s:g} s") from None


def _silent(store: Any, keys: Sequence[str], grace_s: float) -> list[int]:
    end_s = time.monotonic() + grace_s
    silent = list(range(len(keys)))
    while True:
        silent = [member for member in silent if not store.check([keys[member]])]
        if not silent or time.monotonic() > end_s:
            return silent
        time.sleep(_POLL_S)


def connected(name: str) -> Any:
    """A connection to the part of the job's store that belongs to the group ``name``, or None.

    Raises:
        DistNetworkError: the store is gone.
        DistStoreError: the store does not answer.
    """
    # torch's own name; a release without it, and a group that was made without a store (MPI built
    # into torch), do without checks and without names in a timeout.
    find = getattr(dist.distributed_c10d, "_get_default_store", None)
    store = None if find is None else find()
    try:
        own = _answered(lambda: _own(store), within_s=_ANSWER_S)
    except (AttributeError, NotImplementedError):
        log.warning("this group has no store: calls are not compared, and nobody is named")
        return None
    return PrefixStore(f"torsh/{name}", own)


def _own(store: Any) -> Any:
    """Another connection, where this kind of store has any: a wait holds the one it is made on."""
    with contextlib.suppress(AttributeError, NotImplementedError):
        store = store.clone()
    store.check(["torsh"])
    return store


@contextlib.contextmanager
def named(process_group: Any, *, longer: str) -> Iterator[None]:
    """Around work that communicates by itself: its failures become ``CommunicationError``.

    Those that have words of ours already, and what is no failure to communicate, pass as they are.
    """
    try:
        yield
    except (TorshError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        if process_group is None or not dist.is_initialized() or not is_communication(error):
            raise
        raise explained(process_group, "a collective", error, longer=longer) from error


def _backend(process_group: Any) -> str:
    return str(dist.get_backend(process_group)).lower()


def ranks_words(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 1, 2``."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
