"""The user's optimizer, which reduces gradients before it steps."""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torsh_trainer.dropin.horovod.common.process_sets import ProcessSet, global_process_set
from torsh_trainer.dropin.horovod.torch.buckets import Reducer
from torsh_trainer.dropin.horovod.torch.compression import Compression
from torsh_trainer.dropin.horovod.torch.mpi_ops import (
    Adasum,
    Average,
    grouped_allreduce_,
    size,
)
from torsh_trainer.dropin.missing import refuse_unknown

__getattr__ = refuse_unknown(__name__)

_RACE = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
    "optimizer.synchronize(). This is prohibited as it can cause a race condition."
)
_TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally."
)
_wrapped = itertools.count(1)


class _DistributedOptimizer(torch.optim.Optimizer):
    """What the class of a user's optimizer becomes: its methods are put over that class's."""

    def __init__(
        self,
        params: Any,
        named_parameters: Any,
        compression: Any,
        backward_passes_per_step: int,
        op: int,
        gradient_predivide_factor: float,
        groups: Any,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        theirs: Any = super(self.__class__, self)
        theirs.__init__(params)
        names = name_parameters(self.param_groups, named_parameters)
        _check_groups(groups)
        self.backward_passes_per_step = backward_passes_per_step
        self.op = op
        self.gradient_predivide_factor = gradient_predivide_factor
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self._compression = compression
        self._parameter_names = names
        self._allreduce_delay = dict.fromkeys(names, backward_passes_per_step)
        self._handles: dict[Tensor, bool] = {}
        self._requires_update: list[Tensor] = []
        self._synchronized = False
        self._should_synchronize = True
        self._reducer = Reducer(
            f"DistributedOptimizer.{next(_wrapped)}",
            names,
            compression=compression,
            op=op,
            predivide=1.0 if op != Average or groups else gradient_predivide_factor,
            groups=groups,
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
        )
        alone = size() == 1 and os.environ.get("HOROVOD_ELASTIC") != "1"
        if process_set.included() and not alone:
            self._register_hooks()

    def _register_hooks(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    self._requires_update.append(p)
                    p.register_post_accumulate_grad_hook(self._hear_gradient)
        self._reducer.start(self._requires_update)

    def _hear_gradient(self, p: Tensor) -> None:
        """``p`` has its gradient; what has them all of its bucket is sent on its way."""
        if self._handles.get(p) and self._allreduce_delay[p] <= 0:
            raise AssertionError(_TOO_MANY)
        assert p.grad is not None
        assert not p.grad.requires_grad
        assert self._allreduce_delay[p] > 0
        self._allreduce_delay[p] -= 1
        self._handles[p] = self._allreduce_delay[p] == 0
        if self._handles[p]:
            self._reducer.add(p)

    def synchronize(self) -> None:
        """Gradients are reduced when it returns."""
        if self.process_set.included():
            for p in self._requires_update:
                if not self._handles.get(p):
                    self._reducer.add(p)
                self._allreduce_delay[p] = self.backward_passes_per_step
            self._handles.clear()
            self._reducer.finish()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it ``step`` takes gradients as they are."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The optimizer's step over gradients that are reduced.

        What a ``closure`` computes is reduced after every call of it.
        """
        if closure is not None:
            return self._step_by_closure(closure)
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to "
                    "consider using optimizer.skip_synchronize() context if you use "
                    "optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super(self.__class__, self).step()

    def _step_by_closure(self, closure: Callable[[], Any]) -> Any:
        def compute() -> Any:
            loss = closure()
            if self._should_synchronize:
                self.synchronize()
            return loss

        if self._handles and self._should_synchronize:
            self.synchronize()
        self._synchronized = False
        answer = super(self.__class__, self).step(compute)
        self._synchronized = False
        return answer

    def step_without_reducing(self) -> None:
        """The step of the user's own class."""
        super(self.__class__, self).step()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer's own; refused while gradients are on their way.

        Raises:
            AssertionError: they are.
        """
        if self._handles:
            raise AssertionError(_RACE)
        super(self.__class__, self).zero_grad(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer's own; counts backward passes anew."""
        self._handles = {}
        self._synchronized = False
        self._should_synchronize = True
        self._reducer.forget()
        self.set_backward_passes_per_step(self.backward_passes_per_step)
        super(self.__class__, self).load_state_dict(*args, **kwargs)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """After how many backward passes gradients are reduced."""
        self.backward_passes_per_step = passes
        for p in self._allreduce_delay:
            self._allreduce_delay[p] = passes


class _DistributedAdasumOptimizer(torch.optim.Optimizer):
    """Every rank steps alone, and what it changed is combined by Adasum."""

    def __init__(
        self,
        params: Any,
        named_parameters: Any,
        compression: Any,
        backward_passes_per_step: int,
    ) -> None:
        theirs: Any = super(self.__class__, self)
        theirs.__init__(params)
        self._parameter_names = name_parameters(self.param_groups, named_parameters)
        self._compression = compression
        self.backward_passes_per_step = backward_passes_per_step
        self._name = f"DistributedAdasumOptimizer.{next(_wrapped)}"
        self._passes: dict[Tensor, int] = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    p.grad = torch.zeros_like(p.data)
                    p.register_post_accumulate_grad_hook(self._hear_gradient)

    def _hear_gradient(self, p: Tensor) -> None:
        passes = self._passes.get(p, 0) + 1
        if passes > self.backward_passes_per_step:
            raise AssertionError(_TOO_MANY)
        self._passes[p] = passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """After how many backward passes ``step`` is called."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Does nothing: gradients are not reduced."""

    def skip_synchronize(self) -> Any:
        """Refused.

        Raises:
            AssertionError: always.
        """
        raise AssertionError(
            "Skipping synchronization is not supported when using Adasum optimizer."
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step alone, whose change is combined with that of the others."""
        loss = None if closure is None else closure()
        parameters = [p for g in self.param_groups for p in g["params"] if p.requires_grad]
        with torch.no_grad():
            starts = [p.detach().clone() for p in parameters]
            super(self.__class__, self).step()
            deltas = [p.detach() - start for p, start in zip(parameters, starts, strict=True)]
            sent = [self._compression.compress(delta) for delta in deltas]
            reduced = grouped_allreduce_(
                [tensor.contiguous() for tensor, _ in sent], name=self._name, op=Adasum
            )
            for p, start, delta, (_, context) in zip(
                parameters, starts, reduced, sent, strict=True
            ):
                p.copy_(start.add_(self._compression.decompress(delta, context)))
        self._passes.clear()
        return loss

    def step_without_reducing(self) -> None:
        """The step of the user's own class."""
        super(self.__class__, self).step()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer's own; refused between a backward pass and ``step``.

        Raises:
            AssertionError: it is between them.
        """
        if self._passes:
            raise AssertionError(_RACE)
        super(self.__class__, self).zero_grad(*args, **kwargs)


def name_parameters(groups: Sequence[dict[str, Any]], named: Any) -> dict[Tensor, str]:
    """The parameters of ``groups`` with their names, those that ``named`` gives where it does.

    Raises:
        ValueError: ``named`` is no sequence of pairs, repeats a name, or leaves one out.
    """
    pairs: list[Any]
    if named is None:
        pairs = [
            (f"allreduce.noname.{i}.{j}", p)
            for i, group in enumerate(groups)
            for j, p in enumerate(group["params"])
        ]
    else:
        pairs = list(named)
    if not all(isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced "
            "by model.named_parameters()."
        )
    names = [name for name, _ in pairs]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: "
            f"{', '.join(repeated)}"
        )
    found = {id(p) for _, p in pairs}
    lacking = [id(p) for group in groups for p in group["params"] if id(p) not in found]
    if lacking:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. "
            f"Python object ids: {', '.join(map(str, lacking))}"
        )
    return {p: name for name, p in sorted(pairs, key=lambda pair: pair[0])}


def _check_groups(groups: Any) -> None:
    if groups is None:
        return
    if not isinstance(groups, list):
        if groups <= 0:
            raise ValueError(
                "groups should be a non-negative integer or a list of list of torch.Tensor."
            )
        return
    seen: set[int] = set()
    for p in itertools.chain.from_iterable(groups):
        if not isinstance(p, Tensor):
            raise ValueError("groups must consist of torch.Tensor.")
        if id(p) in seen:
            raise ValueError("A parameter can only appear once in groups.")
        seen.add(id(p))


def DistributedOptimizer(  # noqa: N802  # Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """An optimizer of a class derived from that of ``optimizer``, over its groups of parameters.

    It reduces gradients while backward runs, and steps once they are. As Horovod's it begins
    without state: what ``optimizer`` holds is not taken over.

    Raises:
        ValueError: arguments that contradict each other.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.",
            DeprecationWarning,
            stacklevel=2,
        )
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    theirs = optimizer.__class__
    if op != Adasum or size() == 1:
        methods = dict(_DistributedOptimizer.__dict__)
        return type(theirs.__name__, (theirs,), methods)(
            optimizer.param_groups,
            named_parameters,
            compression,
            backward_passes_per_step,
            op,
            gradient_predivide_factor,
            groups,
            sparse_as_dense,
            process_set,
        )
    if process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    methods = dict(_DistributedAdasumOptimizer.__dict__)
    return type(theirs.__name__, (theirs,), methods)(
        optimizer.param_groups,
        named_parameters,
        compression,
        backward_passes_per_step,
    )
