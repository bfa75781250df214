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
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from torsh_trainer.utils.user_code import place_here, place_of

log = logging.getLogger(__name__)

GRACE_S = 3.0
"""How long a rank whose collective took too long waits for others to say that theirs did, too."""
_BROKEN_S = 1.0
"""The same after a connection broke, which all see at once; a launcher then ends the job."""
_ANSWER_S = 5.0
"""How long the store may take to answer; one whose process has stopped never does."""
_TIMED_OUT = re.compile("timed? ?out", re.IGNORECASE)  # gloo and NCCL have either form
_POLL_S = 0.05
_MOST_PLACES = 4

_failures: collections.Counter[str] = collections.Counter()

Answer = TypeVar("Answer")


def explain_failure(
    process_group: Any, operation: str, error: Exception, *, longer: str
) -> CommunicationError:
    """The error for a collective that failed, with the ranks that did not take part.

    Every rank whose collective fails leaves a note of where it waited; who leaves none for this
    group within a few seconds is missing: it never came to this call, or its process has ended.
    Where the store is out of reach nobody is named. ``longer`` names the knob that gives more time.
    """
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    late = _TIMED_OUT.search(first) is not None
    fix = "what it was given does not suit it; debug=true shows the traceback"
    if late or is_communication(error):  # else nobody has been asked for anything yet
        try:
            missing, waited = absent(
                process_group,
                grace_s=GRACE_S if late else _BROKEN_S,
                waits=_waits(operation, error),
            )
        except (DistNetworkError, DistStoreError):
            first += f"; the process that holds the job's store ({_keeper()}) cannot be reached"
            fix = "see whether it has ended, and its log: only there is known who did not take part"
        else:
            if missing:
                did = "did not take part" if late else "gave no sign afterwards"
                return absence_error(
                    process_group,
                    operation,
                    missing,
                    f"{did} ({first})",
                    longer=longer,
                    where=_where_words(waited),
                )
            fix = (
                f"another process did something else, or gave up waiting: {_where_words(waited)}; "
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


def absence_error(
    process_group: Any,
    operation: str,
    members: Sequence[int],
    did: str,
    *,
    longer: str,
    where: str = "",
) -> CommunicationError:
    """The error for an operation that ``members`` (by their numbers in the group) did not join.

    ``where`` says what is known of where ranks wait.
    """
    everyone = dist.get_process_group_ranks(process_group)
    ranks = [everyone[member] for member in members]
    return CommunicationError(
        f"{operation} failed on rank {dist.get_rank()} ({_backend(process_group)}): "
        f"{ranks_words(ranks)} of {len(everyone)} {did}",
        fix=f"{where and f'{where}; '}see what they do instead, or whether they ended; "
        f"{longer} waits longer",
        rank=dist.get_rank(),
        operation=operation,
        missing=ranks,
    )


def absent(process_group: Any, *, grace_s: float, waits: str) -> tuple[list[int], dict[int, str]]:
    """The members that say nothing of a failure here; and by rank, where those waited who say so.

    This process says that it has met one, and ``waits``: where. A rank that failed in another group
    is missing in this one, and its place is known all the same. Takes up to ``grace_s`` where all
    is well with the store. Nobody is named where torch has none to ask.

    Raises:
        DistNetworkError: the connection to the store broke.
        DistStoreError: the store does not answer.
    """
    name = process_group.group_name
    turn = _failures[name]
    _failures[name] += 1
    keys = [f"failed/{turn}/{member}" for member in range(dist.get_world_size(process_group))]
    mine = keys[dist.get_rank(process_group)]
    store, everybodys = connect_store(name), connect_store("waits")
    if store is None or everybodys is None:
        return [], {}
    ranks = dist.get_process_group_ranks(process_group)

    def leave_note() -> tuple[list[int], dict[int, str]]:
        everybodys.set(str(dist.get_rank()), waits)
        store.set(mine, "")
        silent = _silent(store, keys, grace_s)
        said = [rank for rank in ranks if everybodys.check([str(rank)])]
        return silent, {rank: everybodys.get(str(rank)).decode() for rank in said}

    return ask_within(leave_note, within_s=grace_s + _ANSWER_S)


def _waits(operation: str, error: Exception) -> str:
    """Where this process waited: the call, and the user's line or that it was the run's own."""
    place = place_of(error) or place_here()
    return f"{operation} at {place}" if place else f"{operation} of the run itself"


def _where_words(waited: dict[int, str]) -> str:
    """``rank 0 waited in barrier at task.py:7; ranks 1, 2 waited in ...``."""
    by_words: dict[str, list[int]] = {}
    for rank, words in sorted(waited.items()):
        by_words.setdefault(f"waited in {words}", []).append(rank)
    return describe_by_ranks(by_words)


def describe_by_ranks(by_words: Mapping[str, Sequence[int]]) -> str:
    """What ranks did, in words, with the ranks that did it; the first few of them."""
    told = [f"{ranks_words(ranks)} {words}" for words, ranks in by_words.items()]
    return "; ".join(told[:_MOST_PLACES])


def _keeper() -> str:
    """Who holds the store, as far as can be told without asking it."""
    return "rank 0 or torchrun's agent" if dist.is_torchelastic_launched() else "rank 0"


def ask_within(ask: Callable[[], Answer], *, within_s: float) -> Answer:
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


def connect_store(name: str) -> Any:
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
        own = ask_within(lambda: _own(store), within_s=_ANSWER_S)
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
def explain_failures(process_group: Any, *, longer: str) -> Iterator[None]:
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
        raise explain_failure(
            process_group, _name_of_function(error), error, longer=longer
        ) from error


def _name_of_function(error: Exception) -> str:
    """The function of torch.distributed that raised ``error``; a collective of C++ has no name."""
    frames = traceback.extract_tb(error.__traceback__)
    names = (f.name for f in frames if f.filename == dist.distributed_c10d.__file__)
    return next(names, "a collective")


def _backend(process_group: Any) -> str:
    return str(dist.get_backend(process_group)).lower()


def ranks_words(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 1, 2``."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
