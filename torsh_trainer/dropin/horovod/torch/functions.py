"""Parameters, optimizers and objects of one rank on all others."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from torsh_trainer.dropin.horovod.common.process_sets import ProcessSet, global_process_set
from torsh_trainer.dropin.horovod.torch.mpi_ops import (
    allgather,
    broadcast_,
    broadcast_async_,
    rank,
    size,
    synchronize,
)
from torsh_trainer.dropin.missing import refuse_unknown

__getattr__ = refuse_unknown(__name__)


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Every rank's parameters become the root's: a ``state_dict``, or a list of (named) ones.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(params, dict):
        named: list[Any] = sorted(params.items())
    elif isinstance(params, list):
        named = [p if isinstance(p, tuple) else (None, p) for p in params]
    elif isinstance(params, Iterable):
        raise ValueError(f"invalid params of type: {type(params)}")
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    for handle in [broadcast_async_(_whole(p), root_rank, name) for name, p in named]:
        synchronize(handle)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.data if isinstance(tensor, nn.Parameter) else tensor


def broadcast_optimizer_state(optimizer: Any, root_rank: int, model: Any = None) -> None:
    """Every rank's optimizer gets the root's state and options.

    As Horovod does, an optimizer without state takes a step over gradients of zero to get one.

    Raises:
        ValueError: it is LBFGS, whose state is of another kind.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    state = optimizer.state_dict()
    if not state["state"]:
        _step_over_zeros(optimizer, _find_sparse(model))
        state = optimizer.state_dict()
    if not state["state"]:
        return
    tensors: list[tuple[str, Tensor]] = []
    plain: list[Any] = [[], []]
    places: list[tuple[dict[str, Any], str]] = []
    for index, group in enumerate(state["param_groups"]):
        plain[0].append({key: value for key, value in group.items() if key != "params"})
        for number in group["params"]:
            for name, value in state["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    tensors.append((f"{name}.{index}.{number}", value))
                else:
                    plain[1].append(value)
                    places.append((state["state"][number], name))
    broadcast_parameters(tensors, root_rank)
    options, values = broadcast_object(plain, root_rank, name="optimizer")
    for group, said in zip(optimizer.param_groups, options, strict=True):
        group.update(said)
    for (held, name), value in zip(places, values, strict=True):
        held[name] = value


def _find_sparse(model: Any) -> set[int]:
    if model is None:
        return set()
    return {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.sparse
        for p in module.parameters()
    }


def _step_over_zeros(optimizer: Any, sparse: set[int]) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.requires_grad:
                p.grad = torch.zeros_like(p.data)
                if isinstance(optimizer, torch.optim.SparseAdam) or (
                    isinstance(optimizer, torch.optim.SGD) and id(p) in sparse
                ):
                    p.grad = p.grad.to_sparse()
    # One that reduces gradients would wait for ranks that have a state already.
    plain_step = getattr(optimizer, "step_without_reducing", optimizer.step)
    plain_step()


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's object, which must pickle (cloudpickle), on every rank."""
    name = type(obj).__name__ if name is None else name
    if rank() == root_rank:
        data = torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)
        length = torch.tensor([data.numel()], dtype=torch.int64)
        broadcast_(length, root_rank, f"{name}.sz", process_set)
        broadcast_(data, root_rank, f"{name}.t", process_set)
        return obj
    length = torch.tensor([0], dtype=torch.int64)
    broadcast_(length, root_rank, f"{name}.sz", process_set)
    data = torch.empty(int(length.item()), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name}.t", process_set)
    return cloudpickle.load(io.BytesIO(data.numpy().tobytes()))


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """The objects of all ranks, which must pickle (cloudpickle), by rank."""
    name = type(obj).__name__ if name is None else name
    data = torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)
    lengths = allgather(torch.tensor([data.numel()]), name=f"{name}.sz").tolist()
    parts = allgather(data, name=f"{name}.t").split(lengths)
    assert len(parts) == size()
    return [cloudpickle.load(io.BytesIO(part.numpy().tobytes())) for part in parts]
