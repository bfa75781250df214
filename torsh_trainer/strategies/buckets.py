"""The order of DDP's gradient buckets, kept so that a restarted run sums as the first one did.

Where more than two ranks sum, the order in which their values are added depends on a value's place
in its bucket (gloo's ring and NCCL's). DDP begins with one bucket, and after its first backward it
lays out new ones in the order in which gradients became ready. A fresh DDP in a run that goes on
would thus sum its first step otherwise than the run that was interrupted. ``ready_order`` reads
the order, ``take_order`` makes a fresh DDP begin with it.

torch has no public names for either. Its own are used as torch uses them itself, when a DDP comes
out of a pickle and when a rank has joined; where one is missing, the order is not kept, a log line
says so, and a resumed run agrees within the rounding of one sum instead of bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

log = logging.getLogger(__name__)

_OF_DDP = (
    "_build_debug_param_to_name_mapping",
    "_build_params_for_reducer",
    "_comm_hooks",
    "_ddp_init_helper",
    "_has_rebuilt_buckets",
)
_OF_REDUCER = ("_get_zeros_like_grad_buckets", "_push_all_rebuilt_params", "_rebuild_buckets")
_OF_DIST = ("_register_comm_hook",)
_DIST: Any = dist


def ready_order(ddp: DistributedDataParallel, names: Mapping[int, str]) -> list[str] | None:
    """The parameters in the order of the buckets; None while DDP has its first layout.

    ``names`` maps ``id(parameter)`` to its name. Collective: it lays out the new buckets now if
    the next forward would. Needs the memory of one gradient while it lasts. With
    ``find_unused_parameters`` the first layout is the only one.
    """
    if not _knows(ddp):
        return None
    reducer: Any = ddp.reducer
    if reducer._rebuild_buckets():
        ddp._has_rebuilt_buckets = True
    if not ddp._has_rebuilt_buckets:
        return None
    buckets = reducer._get_zeros_like_grad_buckets()
    return [names[id(parameter)] for bucket in buckets for parameter in bucket.parameters()]


def take_order(
    ddp: DistributedDataParallel, order: Sequence[str], names: Mapping[int, str]
) -> None:
    """Lays out buckets in the order that ``ready_order`` gave, once and for all.

    Collective. An order of other parameters than this run's is left alone: DDP then finds its own.
    """
    if not _knows(ddp):
        return
    private: Any = ddp
    parameters, sparse = private._build_params_for_reducer()
    place = {name: i for i, name in enumerate(order)}
    if {names[id(parameter)] for parameter in parameters} != set(place):
        return
    pairs = sorted(zip(parameters, sparse, strict=True), key=lambda pair: place[names[id(pair[0])]])
    _lay_out(ddp, [p for p, _ in pairs], [s for _, s in pairs])
    # As if gradients had become ready in this order; the sizes of buckets follow from it.
    private.reducer._push_all_rebuilt_params()
    private._has_rebuilt_buckets = private.reducer._rebuild_buckets()


def lay_out_anew(ddp: DistributedDataParallel) -> bool:
    """Buckets for the parameters that train now, as a fresh DDP would have them.

    Collective. False, and nothing is done, where this torch has other names.
    """
    if _missing(ddp):
        return False
    private: Any = ddp
    _lay_out(ddp, *private._build_params_for_reducer())
    private._has_rebuilt_buckets = False
    return True


def _lay_out(
    ddp: DistributedDataParallel, parameters: Sequence[Any], sparse: Sequence[bool]
) -> None:
    private: Any = ddp
    by_index = private._build_debug_param_to_name_mapping(parameters)
    private._ddp_init_helper(parameters, sparse, by_index, ddp.static_graph)
    if ddp.static_graph:
        private.reducer._set_static_graph()
        private.logger._set_static_graph()
    for hook, state in private._comm_hooks:
        _DIST._register_comm_hook(private.reducer, state, hook)


def _missing(ddp: DistributedDataParallel) -> list[str]:
    """The names that this torch does not have."""
    missing = [name for name in _OF_DDP if not hasattr(ddp, name)]
    missing += [name for name in _OF_REDUCER if not hasattr(ddp.reducer, name)]
    return missing + [name for name in _OF_DIST if not hasattr(dist, name)]


def _knows(ddp: DistributedDataParallel) -> bool:
    """Whether these buckets are ever laid out anew, and this torch has the names."""
    if ddp.find_unused_parameters and not ddp.static_graph:
        return False
    missing = _missing(ddp)
    if missing:
        _say_once(f"torch {torch.__version__} has no {', '.join(missing)}")
        return False
    private: Any = ddp
    if any(private._build_params_for_reducer()[1]):
        _say_once("torch does not tell the order of buckets beside sparse gradients")
        return False
    return True


@cache
def _say_once(reason: str) -> None:
    log.warning(
        "%s: a run that resumes from this one's checkpoints sums its first gradients in another "
        "order, and agrees with this one within rounding instead of bit for bit",
        reason,
    )
