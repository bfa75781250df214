"""``strategy.op=adasum``: each rank steps by itself, and Horovod combines these steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import SGD

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.strategies import modules
from torsh_trainer.strategies.base import Clip, Engine, Job, StepOutcome
from torsh_trainer.strategies.clipping import HeldGradients
from torsh_trainer_horovod.engine import NEVER, HorovodEngine

if TYPE_CHECKING:
    from torsh_trainer_horovod.strategy import Horovod


def adasum_engine(
    knobs: Horovod, job: Job, comm: Communicator, *, model: nn.Module, module: nn.Module
) -> Engine:
    """The engine of ``op=adasum``.

    Raises:
        ConfigError: the number of ranks is no power of two.
        ResourceError: Horovod is built without MPI.
        Unsupported: it does not run on MPI, or an option needs the gradient of all ranks.
    """
    _check(knobs, job, comm)
    gradients = OwnGradients(model, comm)
    engine = AdasumEngine(knobs, job, comm, model=model, module=module, gradients=gradients)
    for optimizer in engine.optimizers.values():
        if not isinstance(optimizer, SGD) or any(g["momentum"] for g in optimizer.param_groups):
            engine.close()
            raise knobs.refuse(
                f"op=adasum with {type(optimizer).__name__} that keeps state: each rank's would be "
                "another, and a checkpoint holds one",
                use="set optimizer=sgd optimizer.momentum=0, or strategy.op=average",
            )
    return engine


def _check(knobs: Horovod, job: Job, comm: Communicator) -> None:
    # Imported here: it loads Horovod's libraries.
    import horovod.torch as hvd

    size = comm.world.size
    if not hvd.mpi_built():
        raise ResourceError(
            "strategy.op=adasum is Horovod's on MPI, and this Horovod is built without MPI",
            fix="pip install torsh-trainer-mpi, then python -m torsh_trainer_horovod.build --mpi",
        )
    if comm.backend != "mpi" and size > 1:
        raise knobs.refuse(
            f"op=adasum over {comm.backend}: Horovod has it on MPI",
            use="add launcher=mpi comm=mpi",
        )
    if size & (size - 1):
        raise ConfigError(
            f"strategy.op=adasum combines ranks in pairs, and {size} processes are no power of two",
            fix=f"use {1 << (size.bit_length() - 1)} or {1 << size.bit_length()} processes",
        )
    if job.clip.norm is not None:
        raise knobs.refuse(
            "op=adasum with trainer.max_grad_norm: no rank has the gradient of all",
            use="set trainer.max_grad_norm=null",
        )


class OwnGradients(HeldGradients):
    """Each rank's own gradients, with the root mean square of the ranks' norms."""

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        super().__init__(model, comm.device)
        self._comm = comm

    def norm(self, storage: list[Tensor]) -> Tensor:
        square = super().norm(storage).square().reshape(1)
        self._comm.all_reduce(square)
        return (square / self._comm.size).sqrt().reshape(())


class AdasumEngine(HorovodEngine):
    """Horovod's own Adasum optimizer, which does its work in ``step``.

    The optimizer steps on this rank's gradient, and the parameters move by the Adasum of all ranks'
    movements, tensor by tensor.
    """

    def __init__(self, *parts: Any, **more: Any) -> None:
        super().__init__(*parts, **more)
        self._wait_for(NEVER)

    def backward(
        self, loss: Tensor, *, sync: bool = True, run: Callable[[Tensor], object] = Tensor.backward
    ) -> None:
        raise self._knobs.refuse(
            "op=adasum under manual optimization, where a gradient is averaged over ranks",
            use="set strategy.op=average",
        )

    def step(self, clip: Clip, *, measure_norm: bool = False) -> StepOutcome:
        if clip.norm is not None:
            raise self._knobs.refuse(
                "op=adasum with a clip of the norm: no rank has the gradient of all",
                use="set trainer.max_grad_norm=null",
            )
        return super().step(clip, measure_norm=measure_norm)

    def _finish(self) -> None:
        missing = [self._names[id(p)] for p in self._parameters if p.grad is None]
        if missing:
            raise modules.unused_parameters(missing)

    @contextlib.contextmanager
    def without_sync(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        yield
