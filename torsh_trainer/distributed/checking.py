"""Who is missing, and who does something else: what ranks tell one another through the store.

The store is a connection of its own (each process's to rank 0), so it answers when a collective
does not. Nothing is written there while all goes well, unless checks are on.
"""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import DebugLevel, get_debug_level  # type: ignore[attr-defined]

from torsh_trainer.comm import watchdog
from torsh_trainer.comm.failures import CommunicationError, MismatchError
from torsh_trainer.comm.watchdog import ranks_words
from torsh_trainer.distributed.process_group import ProcessGroup, on_leaving

FIRST = 64
"""How many calls of a group are looked at without being asked for."""
_FEW = 64
"""Members of a group for which that is done: each of them asks rank 0's store."""
_PATIENCE_S = 10.0
_LONGER = "timeout in init_process_group"

_wanted: bool | None = None
_turns: collections.Counter[str] = collections.Counter()
_glances: collections.Counter[str] = collections.Counter()
_store_of: dict[str, Any] = {}
on_leaving(_store_of.clear)
on_leaving(_glances.clear)


def set_check(check: bool | None) -> None:
    """Has ranks compare what they call before every collective; on all of them, or on none.

    None is what torch's TORCH_DISTRIBUTED_DEBUG=DETAIL says; without it only the first calls are
    looked at (see ``glance``), and with False none.
    """
    global _wanted  # noqa: PLW0603 - one switch for the process, as torch's is
    _wanted = check


def is_checked() -> bool:
    """Whether ranks compare what they call."""
    if _wanted is None:
        return bool(get_debug_level() == DebugLevel.DETAIL)
    return _wanted


@dataclass(frozen=True)
class CollectiveCall:
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
    ) -> CollectiveCall:
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

    def kind(self) -> str:
        """What must be equal for a backend; a shape may differ where the number of elements fits.

        One word without blanks, for a key.
        """
        counts = ",".join(str(math.prod(shape)) for shape in self.shapes)
        return f"{self.operation}/{self.dtype}/{counts}/{self.op}/{self.root}"


def before(group: ProcessGroup, call: CollectiveCall, *, waits: bool) -> None:
    """What is to be done before ``call``, which this rank ``waits`` for or not.

    Raises:
        MismatchError: members are about to do different things.
        CommunicationError: checks are on, and some did not come within the group's timeout.
    """
    if is_checked():
        compare(group, call)
    elif _wanted is None and group.backend != "mpi":  # which looks at its first calls by itself
        glance(group, call, waits=waits)


def glance(group: ProcessGroup, call: CollectiveCall, *, waits: bool) -> None:
    """Tells the others what this rank is about to do and, where it ``waits``, hears what they do.

    Only for the first calls of a group, in which a program shows what it will go on doing. What
    does not wait for others goes on at once, and what waits does so for a moment: then the call is
    made anyway, and the backend's timeout holds.

    Raises:
        MismatchError: members are about to do different things.
    """
    name, size = group.process_group.group_name, group.world_size()
    turn = _glances[name]
    if turn >= FIRST or not 1 < size <= _FEW:
        return
    _glances[name] += 1
    here = f"first/{turn}"
    try:
        store = _store(group)
        if store is None or _is_alike(store, here, group, call, waits=waits):
            return
        words = [store.get(f"{here}/{member}").decode() for member in range(size)]
    except RuntimeError:  # somebody is late, or the store is gone: the backend will tell
        _glances[name] = FIRST
        return
    _refuse(group, words)


def _is_alike(
    store: Any, here: str, group: ProcessGroup, call: CollectiveCall, *, waits: bool
) -> bool:
    """Whether all members do the same, as the last one to come has found; true unless it waits.

    Raises:
        RuntimeError: not all have come, or the store is gone.
    """
    size = group.world_size()
    store.set(f"{here}/{group.rank()}", call.words())
    same = f"{here}/same/{call.kind()}"
    store.add(same, 1)
    if store.add(f"{here}/all", 1) == size:
        store.set(f"{here}/verdict", "alike" if store.add(same, 0) == size else "different")
    if not waits:
        return True
    patience_s = min(_PATIENCE_S, group.timeout_s / 4)
    store.wait([f"{here}/verdict"], timedelta(seconds=patience_s))
    return bool(store.get(f"{here}/verdict") == b"alike")


def compare(group: ProcessGroup, call: CollectiveCall) -> None:
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
        did = f"did not take part within {group.timeout_s:g} s"
        raise watchdog.absence_error(
            group.process_group, call.operation, late, did, longer=_LONGER
        ) from error
    calls = {member: json.loads(store.get(key)) for member, key in enumerate(keys)}
    if turn:  # whoever has come to this turn has read the one before it
        store.delete_key(f"call/{turn - 1}/{mine}")
    _judge(group, {member: _call(values) for member, values in calls.items()})


def _call(values: Mapping[str, Any]) -> CollectiveCall:
    shapes = tuple(tuple(shape) for shape in values["shapes"])
    parts = {name: tuple(values[name]) for name in ("sends", "takes")}
    return CollectiveCall(**{**values, "shapes": shapes, **parts})


def _refuse(group: ProcessGroup, words: Sequence[str]) -> None:
    """Raises MismatchError where the members' ``words`` are not all the same."""
    by_words: dict[str, list[int]] = {}
    for member, text in enumerate(words):
        by_words.setdefault(text, []).append(group.ranks[member])
    if len(by_words) > 1:
        said = "; ".join(f"{ranks_words(ranks)}: {text}" for text, ranks in by_words.items())
        raise MismatchError(
            f"the processes do not call the same: {said}",
            fix="every process must make the same collective calls in the same order",
            calls=by_words,
        )


def _judge(group: ProcessGroup, calls: Mapping[int, CollectiveCall]) -> None:
    _refuse(group, [calls[member].words() for member in sorted(calls)])
    for a, giver in calls.items():
        for b, taker in calls.items():
            if giver.sends and taker.takes and giver.sends[b] != taker.takes[a]:
                raise MismatchError(
                    f"{giver.operation}: rank {group.ranks[a]} sends {giver.sends[b]} elements to "
                    f"rank {group.ranks[b]}, which expects {taker.takes[a]}",
                    fix="give both the same sizes",
                )


# -- after a failure -------------------------------------------------------------------------------


def explain_failure(group: ProcessGroup, operation: str, error: Exception) -> CommunicationError:
    """The error for a collective that failed, with the ranks that did not take part."""
    return watchdog.explain_failure(group.process_group, operation, error, longer=_LONGER)


def _store(group: ProcessGroup) -> Any:
    """The part of the job's store that belongs to ``group``; None where torch has none."""
    name = group.process_group.group_name
    whole = dist.group.WORLD
    kept = _store_of.get(name)
    if kept is None or kept[0] is not whole:
        _store_of[name] = (whole, watchdog.connect_store(name))
    return _store_of[name][1]
