"""The optimizer that ``deepspeed.initialize`` gives, where DeepSpeed has one of its own."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.optim import Optimizer

from torsh_trainer.errors import Unsupported
from torsh_trainer.strategies.base import Engine


class EngineOptimizer:
    """Settings and loss scale of what an engine steps; ``engine.step()`` steps it."""

    def __init__(self, engine: Engine, optimizer: Optimizer) -> None:
        self._engine = engine
        self.optimizer = optimizer
        self.overflow = False
        """The last step was skipped: gradients were not finite."""
        self._global_grad_norm: float | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups, with their learning rates."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """The state by parameter, of those that this process steps."""
        return self.optimizer.state

    @property
    def cur_scale(self) -> float:
        """What the loss is multiplied by; 1 without fp16."""
        scaler = self._engine.loss_scaler
        return 1.0 if scaler is None else scaler.scale

    @property
    def loss_scale(self) -> float:
        """As ``cur_scale``."""
        return self.cur_scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients."""
        self._engine.zero_grad()

    def _refuse(self, name: str, use: str) -> NoReturn:
        raise Unsupported(f"optimizer.{name} of DeepSpeed is not there under drop-in", fix=use)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Raises Unsupported: the engine steps."""
        self._refuse("step()", "call engine.step()")

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Raises Unsupported: the engine runs the backward."""
        self._refuse("backward()", "call engine.backward(loss)")

    def state_dict(self) -> dict[str, Any]:
        """Raises Unsupported: the engine saves."""
        self._refuse("state_dict()", "call engine.save_checkpoint(folder)")

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Raises Unsupported: the engine loads."""
        self._refuse("load_state_dict()", "call engine.load_checkpoint(folder)")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"optimizer.{name} of DeepSpeed is not there under drop-in; see "
            "docs/migrate/drop-in.md for what is"
        )
