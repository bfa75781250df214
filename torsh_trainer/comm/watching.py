"""A watch beside collectives whose calls return before they have ended, as NCCL's do.

A rank that nobody comes to waits inside the device: no exception reaches Python, and when the time
is over the backend ends the process without a name. So a thread looks, twice a second, how many
collectives this process has begun, which the group counts by itself: a step pays nothing. A process
that has begun none for long writes that number, and where it is, into the job's store. One that
stands at a higher number than another waits for it. A rank that fails leaves its words there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import DistNetworkError, DistStoreError

from torsh_trainer.comm import watchdog
from torsh_trainer.comm.failures import CommunicationError
from torsh_trainer.errors import Interrupted
from torsh_trainer.utils.user_code import place_of_thread, words_of

log = logging.getLogger(__name__)

BACKENDS = ("nccl",)
"""Those whose calls return at once; of others a call fails by itself."""
_POLL_S = 0.5
_GRACE_POLLS = 4
"""So many looks more has a rank that has said nothing by half of the limit: it may come to it."""
_RANKS_A_POLL = 512
"""So many ranks ask one store in half a second; more of them ask less often."""
_MARGIN_S = 60.0
"""So long before the backend's limit the watch ends the process, or a fifth of the limit."""
_COMES_BACK_S = 2.0
"""So long a process may take to notice by itself that another has failed."""

GiveUp = Callable[[CommunicationError], None]
"""Ends this process, whose main thread does not answer, with the words of an error."""


class Still(NamedTuple):
    """A rank that has begun no collective for long: how many it has begun, and where it is."""

    begun: int
    where: str


class GroupWatch:
    """Looks after this process's part in ``process_group`` within a block; see the module.

    ``timeout_s`` is the group's own limit. ``give_up`` is called, on a thread, with the error that
    names the ranks which have not come, or the one that has failed.
    """

    def __init__(self, process_group: Any, *, timeout_s: float, give_up: GiveUp) -> None:
        self._group = process_group
        self._give_up = give_up
        self._timeout_s = timeout_s
        self._limit_s = timeout_s - min(_MARGIN_S, timeout_s / 5)
        self._main = threading.get_ident()
        self._rank = dist.get_rank(process_group)
        self._ranks = dist.get_process_group_ranks(process_group)
        self._keys = [f"still/{member}" for member in range(len(self._ranks))]
        self._poll_s = _POLL_S * max(1.0, len(self._keys) / _RANKS_A_POLL)
        self._store = watchdog.connect_store(f"watch/{process_group.group_name}")
        self._over = threading.Event()
        self._begun, self._since_s = -1, time.monotonic()
        self._told: Still | None = None
        self._warned = False
        self._late = 0  # looks in a row by which others had not come in time
        self._failed_s: float | None = None  # since when another rank is known to have failed

    def __enter__(self) -> GroupWatch:
        if self._store is not None:
            threading.Thread(target=self._watch, name="torsh-watch", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if error is None or isinstance(error, Interrupted) or self._store is None:
            return
        words = json.dumps([dist.get_rank(), words_of(error)])
        with contextlib.suppress(DistNetworkError, DistStoreError):
            watchdog.ask_within(lambda: self._store.set("failed", words), within_s=_COMES_BACK_S)
        if dist.get_rank() == 0 and not dist.is_torchelastic_launched():
            time.sleep(1.5 * self._poll_s)  # with this process ends the store, and others read it

    def _watch(self) -> None:
        try:
            while not self._over.wait(self._poll_s):
                self.look()
        except (DistNetworkError, DistStoreError) as error:
            log.debug("the watch over collectives ends: %s", error)  # as after the last rank 0

    def look(self) -> None:
        """Once: what others say, and whether this process moves."""
        if self._store.check(["failed"]):
            self._follow(*json.loads(self._store.get("failed")))
        begun, now_s = self._group._get_sequence_number_for_group(), time.monotonic()
        if begun != self._begun:
            self._begun, self._since_s = begun, now_s
            self._warned, self._late = False, 0
        still_s = now_s - self._since_s
        if still_s < self._limit_s / 2 and self._told is None:
            return
        self._tell()
        if still_s >= self._limit_s / 2:
            self._compare(still_s)

    def _follow(self, rank: int, words: str) -> None:
        """Another rank has failed: the main thread has a moment to notice it by itself."""
        now_s = time.monotonic()
        self._failed_s = self._failed_s or now_s
        if now_s - self._failed_s >= _COMES_BACK_S:
            self._end(
                CommunicationError(
                    f"rank {rank} has failed, and rank {dist.get_rank()} waits for it: {words}",
                    fix=f"see the log of rank {rank}",
                    rank=dist.get_rank(),
                    operation="",
                    missing=[rank],
                )
            )

    def _tell(self) -> None:
        """Writes where this process stands, if it stands elsewhere than it last said."""
        here = Still(self._begun, _place(self._main))
        if here != self._told:
            self._told = here
            self._store.set(self._keys[self._rank], json.dumps(here))

    def _compare(self, still_s: float) -> None:
        everyone = self._everyone()
        # One that has said nothing yet may have begun its last a moment later.
        silent_is_late = still_s >= self._limit_s / 2 + _GRACE_POLLS * self._poll_s
        behind = [
            member
            for member in range(len(self._keys))
            if (everyone[member].begun < self._begun if member in everyone else silent_is_late)
        ]
        self._late = self._late + 1 if behind and still_s >= self._limit_s else 0
        if not behind or (self._warned and self._late < 2):  # one of them may just have come
            return
        late = f"not come to collective {self._begun} of the run after {still_s:.0f} s"
        where = self._where(everyone, behind)
        if self._late < 2:
            self._warned = True
            ranks = watchdog.ranks_words([self._ranks[member] for member in behind])
            log.warning("%s: %s; %s; the run fails after %g s", ranks, late, where, self._limit_s)
            return
        self._end(
            watchdog.absence_error(
                self._group,
                "a collective",
                behind,
                f"had {late}",
                longer=f"more than comm.timeout_s={self._timeout_s:g}",
                where=where,
            )
        )

    def _everyone(self) -> Mapping[int, Still]:
        """What members have said, by their numbers in the group."""
        said = list(range(len(self._keys)))
        if not self._store.check(self._keys):
            said = [member for member in said if self._store.check([self._keys[member]])]
        values = self._store.multi_get([self._keys[member] for member in said])
        return {m: Still(*json.loads(value)) for m, value in zip(said, values, strict=True)}

    def _where(self, everyone: Mapping[int, Still], behind: list[int]) -> str:
        by_words: dict[str, list[int]] = {}
        if self._rank in everyone:
            by_words[f"waited {everyone[self._rank].where}"] = [self._ranks[self._rank]]
        for member in behind:
            one = everyone.get(member)
            words = "gave no sign" if one is None else f"was {one.where}"
            by_words.setdefault(words, []).append(self._ranks[member])
        return watchdog.describe_by_ranks(by_words)

    def _end(self, error: CommunicationError) -> None:
        if not self._over.is_set():
            self._over.set()
            self._give_up(error)


def _place(thread: int) -> str:
    place = place_of_thread(thread)
    return f"at {place}" if place else "in the run itself"


def watch_group(
    process_group: Any, *, timeout_s: float, give_up: GiveUp
) -> contextlib.AbstractContextManager[Any]:
    """A ``GroupWatch`` over a block, where the backend's calls do not fail by themselves."""
    if process_group is None or dist.get_world_size(process_group) == 1:
        return contextlib.nullcontext()
    backend = str(dist.get_backend(process_group)).lower()
    if not any(name in backend for name in BACKENDS):
        return contextlib.nullcontext()
    return GroupWatch(process_group, timeout_s=timeout_s, give_up=give_up)
