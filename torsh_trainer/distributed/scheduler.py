"""Communication in buckets, each by the route that was measured to be fastest for its size."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from torsh_trainer.comm.failures import CollectiveArgumentError
from torsh_trainer.distributed import collectives, measuring, process_group
from torsh_trainer.distributed.algorithms import ALGORITHMS
from torsh_trainer.distributed.batch import flatten_tensors
from torsh_trainer.distributed.bench import BenchPlan
from torsh_trainer.distributed.collective_run import Op, reduction
from torsh_trainer.distributed.process_group import Group, ReduceOp
from torsh_trainer.distributed.tuning import AlgorithmTable
from torsh_trainer.errors import TorshError


class Priority(enum.IntEnum):
    """What goes first in ``execute``; what is equal goes in the order in which it was scheduled."""

    LOW = 0
    NORMAL = 1
    HIGH = 2
    CRITICAL = 3


@dataclass(frozen=True)
class SchedulerStats:
    """What a scheduler has done: calls by algorithm, tensors packed, and bytes reduced."""

    calls: Mapping[str, int]
    fused_tensors: int = 0
    fused_buffers: int = 0
    bytes_reduced: int = 0


@dataclass(frozen=True)
class _Job:
    """What was scheduled; an operation of None is a broadcast from ``src``."""

    priority: int
    tensor: Tensor
    op: Any
    src: int = -1


class CommunicationScheduler:
    """All-reduces by the fastest route, and many small ones as few large ones.

    ``table`` is a file that ``comm bench --algorithms --json`` has written, or None: then the
    backend's own way is used until ``optimize_communication_patterns`` has measured others. Rank
    0's table is everybody's, so a file on its host is enough. ``bucket_size_mb`` bounds a packed
    buffer; a larger tensor travels on its own.

    Every method but ``stats`` is collective: all members call it, in the same order, and making a
    scheduler with a table is, too.

    Raises:
        ConfigError: ``table`` is no such file.
        ResourceError: it cannot be read.
    """

    def __init__(
        self,
        group: Group = None,
        *,
        table: str | Path | AlgorithmTable | None = None,
        bucket_size_mb: float = 25.0,
    ) -> None:
        if bucket_size_mb <= 0:
            raise CollectiveArgumentError(
                f"bucket_size_mb={bucket_size_mb} is not positive", fix="the default is 25"
            )
        self._group = process_group.resolve(group)
        self._cap_bytes = int(bucket_size_mb * 2**20)
        self._fuses = False
        self._jobs: list[_Job] = []
        self._stats = SchedulerStats(dict.fromkeys(ALGORITHMS, 0))
        self.table = AlgorithmTable(self._group.backend, self._group.world_size())
        if table is not None:
            self.table = self._agree_on_table(lambda: self._read(table))

    def enable_kernel_fusion(self, on: bool = True) -> None:
        """Whether ``execute`` packs tensors of one dtype and operation into flat buffers."""
        self._fuses = on

    def optimize_communication_patterns(
        self,
        sizes: Sequence[int] = (4096, 65536, 1 << 20, 8 << 20),
        *,
        iterations: int = 10,
        seconds: float = 0.2,
    ) -> AlgorithmTable:
        """Measures every route for tensors of ``sizes`` bytes, and chooses by that from now on."""
        plan = BenchPlan(
            collectives=("all_reduce",),
            sizes=tuple(sizes),
            iterations=iterations,
            warmup=2,
            seconds=seconds,
            by_algorithm=True,
        )
        records = measuring.sweep(self._group, plan)
        self.table = self._agree_on_table(lambda: self._of(records))
        return self.table

    def algorithm_for(self, tensor: Tensor) -> str:
        """The name of the route that ``all_reduce`` takes for a tensor of this size."""
        return self.table.choose(tensor.numel() * tensor.element_size())

    def all_reduce(self, tensor: Tensor, op: Op = ReduceOp.SUM) -> None:
        """Reduces ``tensor`` over all members, in place, now."""
        name = self.algorithm_for(tensor)
        ALGORITHMS[name](tensor, op, self._group)
        stats = self._stats
        self._stats = replace(
            stats,
            calls={**stats.calls, name: stats.calls[name] + 1},
            bytes_reduced=stats.bytes_reduced + tensor.numel() * tensor.element_size(),
        )

    def schedule_all_reduce(
        self, tensor: Tensor, op: Op = ReduceOp.SUM, priority: int = Priority.NORMAL
    ) -> None:
        """Notes a reduction for ``execute``."""
        self._jobs.append(_Job(int(priority), tensor, reduction(op, tensor)))

    def schedule_broadcast(self, tensor: Tensor, src: int, priority: int = Priority.NORMAL) -> None:
        """Notes a broadcast from rank ``src`` for ``execute``."""
        self._jobs.append(_Job(int(priority), tensor, None, src))

    def execute(self) -> None:
        """Does what was scheduled, by priority; the results are in the tensors afterwards."""
        jobs = sorted(self._jobs, key=lambda job: -job.priority)
        self._jobs = []
        for bundle in self._bundles(jobs):
            if bundle[0].op is None:
                for job in bundle:
                    collectives.broadcast(job.tensor, job.src, self._group)
            elif len(bundle) == 1:
                self.all_reduce(bundle[0].tensor, bundle[0].op)
            else:
                self._all_reduce_packed(bundle)

    def stats(self) -> SchedulerStats:
        """What was done so far, on this process."""
        return self._stats

    # -- details ---------------------------------------------------------------------------------

    def _all_reduce_packed(self, bundle: Sequence[_Job]) -> None:
        flat, write_back = flatten_tensors([job.tensor for job in bundle])
        self.all_reduce(flat, bundle[0].op)
        write_back()
        self._stats = replace(
            self._stats,
            fused_tensors=self._stats.fused_tensors + len(bundle),
            fused_buffers=self._stats.fused_buffers + 1,
        )

    def _bundles(self, jobs: Iterable[_Job]) -> Iterator[list[_Job]]:
        """Jobs that travel together: neighbours that fit into one flat buffer."""
        bundle: list[_Job] = []
        size = 0
        for job in jobs:
            nbytes = job.tensor.numel() * job.tensor.element_size()
            together = (
                bool(bundle)
                and self._fuses
                and job.op is not None
                and _kind(job) == _kind(bundle[0])
                and size + nbytes <= self._cap_bytes
            )
            if bundle and not together:
                yield bundle
                bundle, size = [], 0
            bundle.append(job)
            size += nbytes
        if bundle:
            yield bundle

    def _read(self, table: str | Path | AlgorithmTable) -> AlgorithmTable:
        if isinstance(table, AlgorithmTable):
            return table
        size = self._group.world_size()
        return AlgorithmTable.from_file(table, backend=self._group.backend, world_size=size)

    def _of(self, records: Iterable[Mapping[str, Any]]) -> AlgorithmTable:
        size = self._group.world_size()
        return AlgorithmTable.from_records(records, backend=self._group.backend, world_size=size)

    def _agree_on_table(self, make: Callable[[], AlgorithmTable]) -> AlgorithmTable:
        """Rank 0's answer or error on every rank: a choice that differs would hang."""
        comm = self._group.communicator()
        answer: AlgorithmTable | TorshError | None = None
        if comm.rank == 0:
            try:
                answer = make()
            except TorshError as error:
                answer = error
        answer = comm.broadcast_object(answer)
        if isinstance(answer, TorshError):
            raise answer
        assert answer is not None
        return answer


NcclScheduler = CommunicationScheduler
"""The guides' name."""


def _kind(job: _Job) -> tuple[Any, ...]:
    return (job.op, job.tensor.dtype, job.tensor.device)
