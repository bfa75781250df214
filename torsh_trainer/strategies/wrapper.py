"""torch's DistributedDataParallel as an engine uses it: made, readied, and its errors in words."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError


def wrap(module: nn.Module, comm: Communicator, **options: Any) -> DistributedDataParallel:
    """``module`` over the ranks of ``comm``; buffers are the engine's, once a step."""
    on_gpu = comm.device.type == "cuda"
    options[_BUFFERS] = False
    return DistributedDataParallel(
        module,
        device_ids=[comm.device.index] if on_gpu else None,
        process_group=comm.process_group,
        **options,
    )


_BUFFERS = (  # torch 2.13 renamed the option
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


def ready_for(ddp: DistributedDataParallel, reached: Sequence[Tensor]) -> None:
    """What the wrapper does around a forward, for a backward that finds what is unused from
    ``reached``."""
    ddp.reducer.prepare_for_forward()
    ddp.reducer._rebuild_buckets()
    ddp.reducer.prepare_for_backward(list(reached))


def explain_left_out(
    ddp: DistributedDataParallel, names: Mapping[int, str], error: RuntimeError
) -> ConfigError | None:
    """The error for parameters that have gradients, and none from the last micro-batch.

    ``names`` maps ``id(parameter)`` to its name. None where ``error`` says something else.
    """
    found = _LEFT_OUT.search(str(error))
    if found is None:
        return None
    trained = [p for p in ddp.parameters() if p.requires_grad]
    left = [names[id(trained[int(place)])] for place in found.group(1).split()]
    return ConfigError(
        f"{len(left)} parameters got no gradient from the last micro-batch of a step, while "
        f"others of the step used them: {', '.join(left[:8])}" + (", ..." if len(left) > 8 else ""),
        fix="set strategy.find_unused_parameters=true or strategy.overlap=false",
        unused=left,
    )


_LEFT_OUT = re.compile(r"indices which did not receive grad for rank \d+: ([\d ]+)")
"""In torch's error: the places of parameters among those that the wrapper reduces."""
