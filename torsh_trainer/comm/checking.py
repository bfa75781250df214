"""Who is missing, and who does something else: what ranks tell one another through the store.

The store is a connection of its own (each process's to rank 0), so it answers when a collective
does not. Nothing is written there while all goes well, unless checks are on.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    DebugLevel,
    PrefixStore,
    get_debug_level,
)

from torsh_trainer.comm.failures import CommunicationError, MismatchError
from torsh_trainer.comm.groups import ProcessGroup, on_leaving

log = logging.getLogger(__name__)

GRACE_S = 3.0
"""How long a rank whose collective has failed waits for others to say that theirs has, too."""
_POLL_S = 0.05

_wanted: bool | None = None
_turns: collections.Counter[str] = collections.Counter()
_failures: collections.Counter[str] = collections.Counter()
_store_of: dict[str, Any] = {}
on_leaving(_store_of.clear)


def set_check(check: bool | None) -> None:
    """Has ranks compare what they call before every collective; on all of them, or on none.

    None is what torch's TORCH_DISTRIBUTED_DEBUG=DETAIL says.
    """
    global _wanted  # noqa: PLW0603 - one switch for the process, as torch's is
    _wanted = check


def is_checked() -> bool:
    """Whether ranks compare what they call."""
    if _wanted is None:
        return bool(get_debug_level() == DebugLevel.DETAIL)
    return _wanted


@dataclass(frozen=True)
class Call:
    """What one rank is about to do, as far as the others must do the same.

    ``shapes`` are those that must be equal; ``sends`` and ``takes`` hold, for an exchange of parts
    of any size, how many elements go to and come from each member.
    """

    operation: str
    dtype: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    op: str = ""
    root: int = -1
    sends: tuple[int, ...] = ()
    takes: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        operation: str,
        tensors: Sequence[Tensor],
        *,
        op: Any = None,
        root: int = -1,
        sends: Sequence[int] = (),
        takes: Sequence[int] = (),
    ) -> Call:
        """The call of ``operation`` with ``tensors``, of which all ranks have equal shapes."""
        return cls(
            operation,
            str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            tuple(tuple(tensor.shape) for tensor in tensors),
            "" if op is None else str(op).rpartition(".")[2],
            root,
            tuple(sends),
            tuple(takes),
        )

    def words(self) -> str:
        """Such as ``all_reduce of float32 [2, 3], SUM``."""
        shapes = ", ".join(str(list(shape)) for shape in self.shapes[:3])
        more = f" and {len(self.shapes) - 3} more" if len(self.shapes) > 3 else ""
        of = f" of {self.dtype} {shapes}{more}".rstrip() if self.dtype or shapes else ""
        op = f", {self.op}" if self.op else ""
        root = f", root {self.root}" if self.root >= 0 else ""
        return f"{self.operation}{of}{op}{root}"


def compare(group: ProcessGroup, call: Call) -> None:
    """Returns when every member is about to do the same.

    Raises:
        MismatchError: they are not; names the ranks and what each does.
        CommunicationError: some did not come within the group's timeout; names them.
    """
    store = _store(group)
    if store is None:
        return
    turn = _turns[group.process_group.group_name]
    _turns[group.process_group.group_name] += 1
    keys = [f"call/{turn}/{member}" for member in range(group.world_size())]
    mine = group.rank()
    store.set(keys[mine], json.dumps(asdict(call)))
    try:
        store.wait(keys, timedelta(seconds=group.timeout_s))
    except RuntimeError as error:
        late = [member for member, key in enumerate(keys) if not store.check([key])]
        raise _missing(group, call.operation, late) from error
    calls = {member: json.loads(store.get(key)) for member, key in enumerate(keys)}
    if turn:  # whoever has come to this turn has read the one before it
        store.delete_key(f"call/{turn - 1}/{mine}")
    _judge(group, {member: _call(values) for member, values in calls.items()})


def _call(values: Mapping[str, Any]) -> Call:
    shapes = tuple(tuple(shape) for shape in values["shapes"])
    parts = {name: tuple(values[name]) for name in ("sends", "takes")}
    return Call(**{**values, "shapes": shapes, **parts})


def _judge(group: ProcessGroup, calls: Mapping[int, Call]) -> None:
    by_words: dict[str, list[int]] = {}
    for member, call in calls.items():
        by_words.setdefault(call.words(), []).append(group.ranks[member])
    if len(by_words) > 1:
        said = "; ".join(f"{ranks_words(ranks)}: {words}" for words, ranks in by_words.items())
        raise MismatchError(
            f"the processes do not call the same: {said}",
            fix="every process must make the same collective calls in the same order",
            calls=by_words,
        )
    for a, giver in calls.items():
        for b, taker in calls.items():
            if giver.sends and taker.takes and giver.sends[b] != taker.takes[a]:
                raise MismatchError(
                    f"{giver.operation}: rank {group.ranks[a]} sends {giver.sends[b]} elements to "
                    f"rank {group.ranks[b]}, which expects {taker.takes[a]}",
                    fix="give both the same sizes",
                )


# -- after a failure -------------------------------------------------------------------------------


def explained(group: ProcessGroup, operation: str, error: Exception) -> CommunicationError:
    """The error for a collective that failed, with the ranks that did not take part.

    Every rank whose collective fails leaves a note; who leaves none within a few seconds is
    missing: it never came to this call, or its process has ended.
    """
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    try:
        missing = _roll_call(group)
    except RuntimeError:  # the store is gone, and with it the process that keeps it
        missing = [0]
    if missing:
        return _missing(group, operation, missing, first)
    return CommunicationError(
        f"{operation} failed on rank {dist.get_rank()} of {group.world_size()} "
        f"({group.backend}): {first}",
        fix="another process did something else, or gave up waiting: "
        "TORCH_DISTRIBUTED_DEBUG=DETAIL compares calls before they are made",
        rank=dist.get_rank(),
        operation=operation,
        missing=[],
    )


def _missing(
    group: ProcessGroup, operation: str, members: Sequence[int], words: str = ""
) -> CommunicationError:
    ranks = [group.ranks[member] for member in members]
    timed_out = not words or "tim" in words.lower()  # timed out, timeout: gloo and NCCL say either
    did = "did not take part" if timed_out else "gave no sign afterwards"
    did += f" ({words})" if words else f" within {group.timeout_s:g} s"
    return CommunicationError(
        f"{operation} failed on rank {dist.get_rank()} ({group.backend}): {ranks_words(ranks)} of "
        f"{group.world_size()} {did}",
        fix="see what they do instead, or whether they ended; timeout in init_process_group "
        "waits longer",
        rank=dist.get_rank(),
        operation=operation,
        missing=ranks,
    )


def _roll_call(group: ProcessGroup) -> list[int]:
    store = _store(group)
    if store is None:
        return []
    turn = _failures[group.process_group.group_name]
    _failures[group.process_group.group_name] += 1
    keys = [f"failed/{turn}/{member}" for member in range(group.world_size())]
    store.set(keys[group.rank()], "")
    end_s = time.monotonic() + GRACE_S
    missing = list(range(len(keys)))
    while True:
        missing = [member for member in missing if not store.check([keys[member]])]
        if not missing or time.monotonic() > end_s:
            return missing
        time.sleep(_POLL_S)


def _store(group: ProcessGroup) -> Any:
    """The part of the job's store that belongs to ``group``; None where torch has none."""
    name = group.process_group.group_name
    whole = dist.group.WORLD
    kept = _store_of.get(name)
    if kept is None or kept[0] is not whole:
        _store_of[name] = (whole, _connected(name))
    return _store_of[name][1]


def _connected(name: str) -> Any:
    # torch's own name; a release without it, and a group that was made without a store (MPI built
    # into torch), do without checks and without names in a timeout.
    find = getattr(dist.distributed_c10d, "_get_default_store", None)
    if find is None:
        return None
    store = find()
    with contextlib.suppress(RuntimeError, AttributeError, NotImplementedError):
        store = store.clone()  # a wait holds a connection: this one is nobody else's
    try:
        store.check(["torsh"])
    except (RuntimeError, NotImplementedError):
        log.warning("this group has no store: calls are not compared, and nobody is named")
        return None
    return PrefixStore(f"torsh/{name}", store)


def ranks_words(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 1, 2``."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
