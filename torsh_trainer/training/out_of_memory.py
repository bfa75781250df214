"""Out of memory, in words: what held it, and what to turn first."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torsh_trainer.callbacks.formatting import size
from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import TrainingError
from torsh_trainer.strategies.base import Engine, Job
from torsh_trainer.strategies.state import local_optimizer

_WORDS = (
    "out of memory",  # of a driver, beside torch's allocator: CUDA's, NCCL's
    "can't allocate memory",  # of torch's allocator on a CPU
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")
_OTHERS = re.compile(r"Process (\d+) has ([\d.]+ \w+) memory in use")
"""What torch says in its own error: how much was asked for, and who else has memory there."""
_SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
_FRAGMENTED = 0.1  # of what is reserved; less than that is usual
_SHARED = 0.1  # of the device; the driver itself takes less


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


def release(device: torch.device) -> None:
    """Gives back what nobody holds any more; an error that is still handled holds its frames."""
    gc.collect()  # engines and their hooks hold each other
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one device: what torch counts, and what is known of the tensors in it.

    ``allocated`` is 0 where nobody counts, as on a CPU; ``elsewhere`` is held by others.
    """

    parameters: int = 0
    gradients: int = 0
    state: int = 0
    allocated: int = 0
    reserved: int = 0
    elsewhere: int = 0
    total: int = 0

    @property
    def model(self) -> int:
        """What stays from step to step."""
        return self.parameters + self.gradients + self.state

    @property
    def rest(self) -> int:
        """Activations, batches, buckets of an engine."""
        return max(0, self.allocated - self.model)

    @property
    def unused(self) -> int:
        """What the allocator keeps in pieces that nothing has fitted into."""
        return max(0, self.reserved - self.allocated)


def measure_held(device: torch.device, engine: Engine | None) -> MemoryUse:
    """What is held on ``device`` now, by an engine if there is one."""
    tensors: dict[str, int] = {}
    if engine is not None:
        parameters = list(engine.model.parameters())
        optimizers = [local_optimizer(one) for one in engine.optimizers.values()]
        slots = [slot for one in optimizers for state in one.state.values() for slot in _in(state)]
        tensors = {
            "parameters": _bytes(parameters, device),
            "gradients": _bytes((p.grad for p in parameters if p.grad is not None), device),
            "state": _bytes(slots, device),
        }
    if device.type == "cpu":
        return MemoryUse(**tensors)
    module = torch.get_device_module(device)
    stats: Mapping[str, int] = module.memory_stats(device)
    free, total = module.mem_get_info(device)
    reserved = stats.get("reserved_bytes.all.current", 0)
    return MemoryUse(
        **tensors,
        allocated=stats.get("allocated_bytes.all.current", 0),
        reserved=reserved,
        elsewhere=max(0, total - free - reserved),
        total=total,
    )


def _in(state: Any) -> list[Tensor]:
    values = state.values() if isinstance(state, Mapping) else ()
    return [value for value in values if isinstance(value, Tensor)]


def _bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Of the storages on ``device``, each counted once; of a sharded tensor this rank's part."""
    found = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        if local.device.type == device.type:
            storage = local.untyped_storage()
            found[storage.data_ptr(), id(local) if not storage.data_ptr() else 0] = storage.nbytes()
    return sum(found.values())


@contextlib.contextmanager
def explain_out_of_memory(comm: Communicator, made: Mapping[str, Any]) -> Iterator[None]:
    """Within the block, out of memory is raised in words.

    ``made`` are the parts of a run by name, as far as they are made: no part is made for an error's
    sake.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        strategy = made["strategy"].name if "strategy" in made else ""
        engine, job = made.get("engine"), made.get("job")
        raise in_words(error, comm, engine=engine, job=job, strategy=strategy) from error


def in_words(
    error: BaseException,
    comm: Communicator,
    *,
    engine: Engine | None,
    job: Job | None,
    strategy: str,
) -> TrainingError:
    """``error`` as one sentence and the next move; ``engine`` and ``job`` as far as they are made.

    To be asked while ``error`` is handled: activations are held until then.
    """
    device, world = comm.device, comm.world
    held = measure_held(device, engine)
    who = f"rank {world.rank} is out of memory" if world.is_distributed else "out of memory"
    asked = _ASKED.search(str(error))
    more = f", for {asked[1]} more" if asked else ""
    others = ", ".join(f"process {pid} has {count}" for pid, count in _OTHERS.findall(str(error)))
    fix = _fixes(held, job, sharded=strategy == "fsdp", processes=world.size)
    return TrainingError(
        f"{who} on {device}{more}{''.join(_describe_held(held, others))}",
        fix=f"{'by what it would save, ' if held.allocated else ''}take {fix or 'a larger device'}",
        parameters=held.parameters,
        gradients=held.gradients,
        optimizer_state=held.state,
        allocated=held.allocated,
        reserved=held.reserved,
    )


def _describe_held(held: MemoryUse, others: str) -> Iterable[str]:
    parts = {
        "parameters": held.parameters,
        "gradients": held.gradients,
        "optimizer state": held.state,
        "activations and all else": held.rest,
    }
    known = [f"{name} {size(count)}" for name, count in parts.items() if count]
    if held.allocated:
        yield f": of {size(held.total)}, {size(held.allocated)} were held ({', '.join(known)})"
    elif known:
        yield f": the model held {', '.join(known)}"
    if held.unused > _FRAGMENTED * held.reserved:
        yield f", {size(held.unused)} were reserved in pieces that did not fit"
    if held.elsewhere > _SHARED * held.total:
        who = others or "nvidia-smi names them"
        yield f", {size(held.elsewhere)} are the driver's and other programs' ({who})"


def _fixes(held: MemoryUse, job: Job | None, *, sharded: bool, processes: int) -> str:
    """The three knobs that would save most, by rough shares of what is held."""
    saves: dict[str, float] = {}
    if job is not None:
        batch = job.batch
        rest = held.rest if held.allocated else 3 * held.model + 1  # where nobody counts
        if batch.micro_batch_size > 1:
            half = batch.micro_batch_size // 2
            saves[f"data.micro_batch_size={half} (was {batch.micro_batch_size})"] = rest / 2
        if not job.activation_checkpointing:
            saves["trainer.activation_checkpointing=true"] = rest * 0.6
        if held.allocated and job.precision.compute == "fp32":
            saves["precision=bf16_mixed"] = rest * 0.4
        if sharded:
            saves["strategy.cpu_offload=true"] = held.model * 0.9
        elif processes > 1:
            saves["strategy=fsdp"] = held.model * (1 - 1 / processes)
        else:
            saves["strategy=fsdp on several devices"] = held.model / 2
        if job.ema_decay is not None:
            saves["trainer.ema_decay=null"] = held.parameters
    if held.unused > _FRAGMENTED * held.reserved:
        saves[f"{_SEGMENTS} in the environment"] = held.unused
    best = sorted(saves, key=lambda knob: -saves[knob])[:3]
    return ", ".join(best)
