"""Averaging gradients outside an engine: by hand, or as part of an optimizer's step."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import Optimizer

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.failures import CollectiveArgumentError
from torsh_trainer.comm.reducer import BucketReducer, cut, reducer_of
from torsh_trainer.distributed import process_group
from torsh_trainer.distributed.batch import flatten_tensors
from torsh_trainer.distributed.process_group import Group

_MARK = "_torsh_averaged"
"""On a parameter: whether its gradient is the mean over ranks; kept where somebody asks for it."""


def average_gradients(
    parameters: nn.Module | Iterable[nn.Parameter],
    group: Group = None,
    *,
    bucket_cap_mb: float = 25.0,
) -> None:
    """Every gradient becomes its mean over the members, in flat buckets.

    ``parameters`` are a model's, or the model itself; the same on every member. A gradient that
    this rank has not and another has counts as zero; one that nobody has stays None.

    Raises:
        BackendNotInitialized: there is no process group.
    """
    members = process_group.resolve(group)
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    chosen = [p for p in parameters if p.requires_grad]
    comm = members.communicator()
    used = _find_used(chosen, comm)
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in cut(used, cap_bytes=int(bucket_cap_mb * 2**20)):
        gradients = [_gradient(parameter) for parameter in bucket]
        flat, write_back = flatten_tensors(gradients)
        comm.all_reduce(flat, op="mean")
        write_back()
    for parameter in used:
        setattr(parameter, _MARK, True)


class DistributedOptimizer(Optimizer):
    """A local optimizer whose ``step`` applies the mean of the gradients over all ranks.

    Nothing is averaged twice: what an engine, a DistributedDataParallel (torch's or ours) or FSDP
    has reduced, and what ``average_gradients`` has averaged since the last backward, is taken as it
    is. ``overlap`` averages from hooks while backward goes on; the step then only applies. The
    constructor then makes buckets, which over mpi lie in memory that the ranks share: all of them
    make their optimizers together, in the same order. Wrap a model before making its optimizer.

    Everything but ``step`` is the local optimizer's: groups, state, ``state_dict``.

    Raises:
        BackendNotInitialized: there is no process group.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group: Group = None,
        *,
        overlap: bool = False,
        bucket_cap_mb: float = 25.0,
    ) -> None:
        self.optimizer = optimizer
        self._group = process_group.resolve(group)
        self._bucket_cap_mb = bucket_cap_mb
        self._looked = False
        self._mine = _find_unreduced(self._parameters())
        self._reducer: BucketReducer | None = None
        self._hooks: list[Any] = []
        if overlap and self._mine:
            comm = self._group.communicator()
            self._reducer = BucketReducer(
                self._mine,
                comm,
                bucket_cap_mb=bucket_cap_mb,
                finishes=True,
                find_unused=True,
                factor=1.0 / comm.size,
            )
        else:
            self._hooks = [p.register_post_accumulate_grad_hook(_forget) for p in self._mine]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the local optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the local optimizer."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the local optimizer."""
        return self.optimizer.defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Averages what nobody has averaged yet, and applies it.

        Raises:
            CollectiveArgumentError: a closure was given (it would change gradients after they are
                averaged), or a model was wrapped after this optimizer was made.
        """
        if closure is not None:
            raise CollectiveArgumentError(
                "DistributedOptimizer.step cannot take a closure",
                fix="call loss.backward() before step()",
            )
        self._look_again()
        if self._reducer is None:
            pending = [p for p in self._mine if not getattr(p, _MARK, False)]
            if pending:
                average_gradients(pending, self._group, bucket_cap_mb=self._bucket_cap_mb)
        return self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: hooks and buckets were made for the parameters at hand.

        Raises:
            CollectiveArgumentError: always.
        """
        raise CollectiveArgumentError(
            "a DistributedOptimizer takes no further parameters", fix="make it after adding them"
        )

    def state_dict(self) -> dict[str, Any]:
        """That of the local optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the local optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def close(self) -> None:
        """Takes the hooks off."""
        if self._reducer is not None:
            self._reducer.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def _parameters(self) -> list[nn.Parameter]:
        groups_ = self.optimizer.param_groups
        return [p for group in groups_ for p in group["params"] if p.requires_grad]

    def _look_again(self) -> None:
        """In the first step: has somebody else begun to reduce these gradients meanwhile?"""
        if self._looked:
            return
        self._looked = True
        mine = set(self._mine)
        left = set(_find_unreduced(self._mine, but=self._reducer))
        if mine != left:
            raise CollectiveArgumentError(
                f"{len(mine - left)} parameters were wrapped for data parallel training after this "
                "DistributedOptimizer was made, so their gradients would be averaged twice",
                fix="wrap the model first, and make the optimizer of its parameters then",
            )


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "whoever has none was given zeros"
    return parameter.grad


def _forget(parameter: nn.Parameter) -> None:
    setattr(parameter, _MARK, False)


def _find_used(parameters: list[nn.Parameter], comm: Communicator) -> list[nn.Parameter]:
    flags = comm.to_device(torch.tensor([float(p.grad is not None) for p in parameters]))
    comm.all_reduce(flags, op="max")
    return [p for p, flag in zip(parameters, flags.tolist(), strict=True) if flag]


def _find_unreduced(
    parameters: Iterable[nn.Parameter], but: BucketReducer | None = None
) -> list[nn.Parameter]:
    """The parameters whose gradients nobody but ``but`` reduces."""
    in_ddp = _in_torch_ddp()
    return [
        p
        for p in parameters
        if id(p) not in in_ddp and reducer_of(p) in (None, but) and not _is_shard(p)
    ]


def _in_torch_ddp() -> set[int]:
    """Ids of the parameters in any of torch's DistributedDataParallel modules.

    Neither a parameter nor torch keeps a list of them, so they are looked for among all objects.
    """
    found: set[int] = set()
    for candidate in gc.get_objects():
        if issubclass(type(candidate), TorchDDP):
            found.update(id(p) for p in candidate.parameters())
    return found


def _is_shard(parameter: nn.Parameter) -> bool:
    """FSDP reduces into shards: DTensors in its second version, flat parameters in its first."""
    module = sys.modules.get("torch.distributed.tensor")  # not loaded: then there is none
    is_dtensor = module is not None and isinstance(parameter, module.DTensor)
    return is_dtensor or bool(getattr(parameter, "_is_flat_param", False))
