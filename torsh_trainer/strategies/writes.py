"""Parameters that a training forward writes to, as a bound on the norm of weights does.

Where an engine hands a forward copies of the parameters (cut, or in a lower dtype), what is written
is lost with the copy. Where every process has its own, what depends on the batch is another one
everywhere, and the processes train apart. Neither would end in an error of its own.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import Unsupported

log = logging.getLogger(__name__)

DUE_FORWARDS = frozenset([1, 2, *(16 * 8**power for power in range(12))])
"""Forwards that are looked at: what is looked for may have no occasion for a while."""


def copy_words(who: str) -> tuple[str, str]:
    """What becomes of a write where ``who`` (``strategy=fsdp``) hands out copies."""
    return who, "it sees a copy, and what it writes there is lost"


class _Seen(NamedTuple):
    tensor: Tensor
    version: int
    elements: int
    bits: int


class Writes:
    """Looks for them in the first forward, the second, and then ever more rarely.

    ``loses`` says whose forwards see no parameters of their own, and what comes of it
    (``copy_words``), and is None where they do. ``hooks`` False looks at the whole model
    before and after a forward; copies that are only there meanwhile need True, or ``copies``, which
    gives them by name: of those torch's count of writes is read, not the values (a write through
    ``.data`` is not counted). ``is_gathered`` says whether a parameter has its values just now.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        *,
        loses: tuple[str, str] | None = None,
        hooks: bool = False,
        copies: Callable[[], Iterable[tuple[str, Tensor]]] | None = None,
        is_gathered: Callable[[Tensor], bool] = lambda parameter: True,
    ) -> None:
        self._model = model
        self._comm = comm
        self._loses = loses
        self._hooks = hooks
        self._copies = copies
        self._is_gathered = is_gathered
        self._forwards = 0
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._before: dict[int, dict[str, _Seen]] = {}
        self._found: dict[str, int] = {}
        self._told = False

    def watch_forward(self, *, alike: bool = True) -> contextlib.AbstractContextManager[None]:
        """Around one training forward, which it counts; see ``watch_due``."""
        self._forwards += 1
        if self._forwards not in DUE_FORWARDS:
            return contextlib.nullcontext()
        return self.watch_due(alike=alike)

    @contextlib.contextmanager
    def watch_due(self, *, alike: bool = True) -> Iterator[None]:
        """Around a forward of ``DUE_FORWARDS``. ``alike`` False: processes do not come together.

        Raises:
            Unsupported: names a parameter that was written to, where that is lost or differs.
        """
        if self._loses is None and self._comm.size == 1:
            yield
            return
        self._found.clear()
        handles = list(self._hook_modules()) if self._hooks else []
        if not self._hooks:
            self._note(self._model)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if not self._hooks:
            self._compare(self._model)
        self._before.clear()
        if self._loses is not None:
            self._refuse_lost(*self._loses)
        elif alike:
            self._refuse_different()
            self._tell_repeated()

    @contextlib.contextmanager
    def watch_evaluation(self) -> Iterator[None]:
        """One forward of an evaluation, where processes do not come together. Tells a write once.

        Raises:
            Unsupported: names a parameter that was written to, where that is lost.
        """
        with self.watch_forward(alike=False):
            yield
        self._tell(
            "a forward of an evaluation writes to the parameter %r: unless that follows from "
            "parameters alone, however often it runs, the processes train apart from here on; "
            "write while training alone (if self.training)"
        )

    def _tell_repeated(self) -> None:
        self._tell(
            "a training forward writes to the parameter %r: unless writing twice is as writing "
            "once, the result depends on the number of forwards that a process runs in a step, so "
            "on the number of processes and trainer.accumulate; write in the optimizer's step"
        )

    def _tell(self, words: str) -> None:
        """Names a parameter that was written to, once."""
        if self._found and not self._told:
            self._told = True
            log.warning(words, min(self._found))

    def _hook_modules(self) -> Iterator[Any]:
        for module in self._model.modules():
            if module is self._model or module._parameters:
                yield module.register_forward_pre_hook(self._note)
                yield module.register_forward_hook(self._compare, prepend=True)

    def _parameters_of(self, module: nn.Module) -> Iterable[tuple[str, Tensor]]:
        if self._copies is not None:
            return self._copies()
        everything = not self._hooks or module is self._model
        return module.named_parameters() if everything else module._parameters.items()  # type: ignore[return-value]

    def _note(self, module: nn.Module, _: Any = None) -> None:
        self._before[id(module)] = {
            name: _Seen(p, p._version, p.numel(), self._bits_of(p))
            for name, p in self._parameters_of(module)
            if p is not None and self._is_gathered(p)
        }

    def _compare(self, module: nn.Module, _: Any = None, __: Any = None) -> None:
        before = self._before.get(id(module), {})
        settles = isinstance(module, nn.RNNBase)  # flatten_parameters moves them, values stay
        for name, now in self._parameters_of(module):
            then = before.get(name)
            if then is None or then.tensor is not now or then.elements != now.numel():
                continue  # gathered or cut in between
            bits = self._bits_of(now)
            if bits != then.bits or (now._version != then.version and not settles):
                self._found[self._name_of(module, name, now)] = bits

    def _bits_of(self, parameter: Tensor) -> int:
        return 0 if self._copies is not None else _bits(parameter)

    def _name_of(self, module: nn.Module, name: str, parameter: Tensor) -> str:
        for path, one in self._model.named_modules():
            if one is module:
                return self._names.get(id(parameter)) or f"{path}.{name}".lstrip(".")
        return name

    def _refuse_lost(self, who: str, why: str) -> None:
        if self._found:
            raise Unsupported(
                f"{who} cannot honour a forward that writes to the parameter "
                f"{min(self._found)!r}: {why}",
                fix="use what is bounded or scaled in the place of the parameter "
                "(torch.nn.utils.parametrize), or strategy=ddp in fp32",
            )

    def _refuse_different(self) -> None:
        """Collective."""
        own = float(sum(self._found.values()) % 2**50)
        highest, lowest = self._comm.reduce_values([own, -own], op="max")
        if highest != -lowest:
            name = repr(min(self._found)) if self._found else "(here not)"
            raise Unsupported(
                f"a training forward writes to the parameter {name}, on every process otherwise, "
                "and they would train apart",
                fix="make it a buffer, of which all processes have rank 0's, write what follows "
                "from parameters alone, or use strategy=single",
            )


def refuse_bounded_rows(model: nn.Module) -> None:
    """Refuses what shortens rows of a table in a forward: those that a process's samples ask for.

    Raises:
        Unsupported: names the embedding that was built with ``max_norm``.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise Unsupported(
                f"the embedding {name!r} was built with max_norm={module.max_norm:g}: a forward "
                "shortens the rows that its samples ask for, which differ between processes",
                fix="bound what it gives (torch.renorm of its output), or use strategy=single",
            )


@torch.no_grad()
def _bits(parameter: Tensor) -> int:
    """A sum over what lies in memory: another one, all but surely, where a value is."""
    local = getattr(parameter, "_local_tensor", parameter)
    flat = local.detach().reshape(-1).contiguous()
    if not flat.numel() or flat.is_meta:
        return 0
    size = flat.element_size()
    words = torch.int32 if size % 4 == 0 else torch.int16 if size % 2 == 0 else torch.uint8
    return int(flat.view(words).sum(dtype=torch.int64)) % 2**50
