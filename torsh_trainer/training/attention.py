"""Which kernels ``scaled_dot_product_attention`` may take, and which one it takes."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn
from torch.backends.cuda import SDPAParams
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from torsh_trainer.errors import ConfigError, nearest

log = logging.getLogger(__name__)

Kernel = Literal["flash", "efficient", "cudnn", "math"]
Attention = Literal["auto", "flash", "efficient", "cudnn", "math"] | tuple[Kernel, ...]
"""``auto`` leaves torch its choice; a name, or several, are all that it may take."""

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
_NAMES = {backend: name for name, backend in _BACKENDS.items()}
_ON_CPU = ("flash", "math")
_REFUSALS = ("No available kernel", "No viable backend for scaled_dot_product_attention")
"""What torch says where none of the kernels that it may take computes the call at hand."""

_ASKS = {
    "flash": torch.backends.cuda.can_use_flash_attention,
    "efficient": torch.backends.cuda.can_use_efficient_attention,
    "cudnn": torch.backends.cuda.can_use_cudnn_attention,
}


def kernels_of(asked: Attention) -> tuple[Kernel, ...]:
    """The kernels that ``trainer.attention`` names; none for auto.

    Raises:
        ConfigError: it names none, or one that there is not.
    """
    names: Sequence[Any] = (asked,) if isinstance(asked, str) else tuple(asked)
    if names == ("auto",):
        return ()
    for name in names:
        if name not in get_args(Kernel):
            fix = nearest(str(name), ("auto", *get_args(Kernel)))
            raise ConfigError(f"trainer.attention={as_typed(asked)}: {name} is no kernel", fix=fix)
    if not names:
        raise ConfigError(
            "trainer.attention=[] leaves attention no kernel",
            fix=f"name one of {', '.join(get_args(Kernel))}, or auto",
        )
    return tuple(dict.fromkeys(names))


def as_typed(asked: Attention) -> str:
    """``asked`` as the command line has it."""
    return asked if isinstance(asked, str) else f"[{','.join(map(str, asked))}]"


def check_device(asked: Attention, device: torch.device) -> None:
    """Makes sure that ``device`` has one of the kernels that may be taken.

    Raises:
        ConfigError: it has none of them.
    """
    kernels = kernels_of(asked)
    if device.type == "cpu" and kernels and not {*kernels} & {*_ON_CPU}:
        raise ConfigError(
            f"trainer.attention={as_typed(asked)}: a CPU has the kernels "
            f"{' and '.join(_ON_CPU)} alone",
            fix="set trainer.attention=auto, or train on a GPU",
        )


@contextlib.contextmanager
def allow_kernels(asked: Attention) -> Iterator[None]:
    """Lets ``scaled_dot_product_attention`` take no other kernels within the block.

    torch's switches belong to the whole process, so they hold in the backward's threads and where a
    forward is computed again; afterwards they are as they were.
    """
    kernels = kernels_of(asked)
    with (
        sdpa_kernel([_BACKENDS[name] for name in kernels]) if kernels else contextlib.nullcontext()
    ):
        yield


@contextlib.contextmanager
def explain_refusals(asked: Attention) -> Iterator[None]:
    """Tells an attention that none of the allowed kernels computes in words of the configuration.

    Raises:
        ConfigError: there was one in the block.
    """
    try:
        yield
    except RuntimeError as error:
        kernels = kernels_of(asked)
        if not kernels or not any(words in str(error) for words in _REFUSALS):
            raise
        raise ConfigError(
            f"trainer.attention={as_typed(asked)}: torch can compute an attention of this model "
            "with none of these; its warnings above say why",
            fix=f"let math stand beside them, trainer.attention=[{','.join((*kernels, 'math'))}], "
            "or leave torch the choice: auto",
        ) from error


def in_words(asked: Attention) -> str:
    """What the summary has to say of ``asked``; nothing of auto."""
    kernels = kernels_of(asked)
    return f"attention by {' or '.join(kernels)}" if kernels else ""


class KernelWatch(TorchFunctionMode):
    """Notes which kernel torch takes for each attention within the block, and why not a fused one.

    ``kernels`` counts the calls by kernel. Asking takes microseconds a call, and does not wait for
    the device. A mode sees every call but those within functions of torch that it has seen itself,
    such as that of ``nn.MultiheadAttention``: these find the name replaced.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.reasons: list[str] = []
        self._attend = F.scaled_dot_product_attention
        self._noted = False

    def __enter__(self) -> KernelWatch:
        F.scaled_dot_product_attention = self._replace
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        F.scaled_dot_product_attention = self._attend

    def _replace(self, *args: Any, **kwargs: Any) -> Any:
        self._note(*args, **kwargs)
        self._noted = True
        try:
            return self._attend(*args, **kwargs)
        finally:
            self._noted = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is self._attend and not self._noted:
            self._note(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _note(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        options: Any = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        chosen = SDPBackend(
            torch._fused_sdp_choice(query, key, value, attn_mask, dropout_p, **options)
        )
        name = _NAMES.get(chosen, chosen.name.lower())
        self.kernels[name] += 1
        if name == "math" and query.device.type == "cuda" and not self.reasons:
            params = SDPAParams(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
            self.reasons = [
                f"{kernel}: {why}" for kernel in _ASKS for why in _why_not(kernel, params)
            ]

    def tell(self) -> None:
        """Says once what was seen: as a warning where a GPU computes attention without a kernel
        of its own."""
        if self.reasons:
            log.warning(
                "attention is computed by math, which holds a score for each pair of tokens: %s",
                "; ".join(self.reasons),
            )
        elif self.kernels:
            log.info("attention: %s", ", ".join(sorted(self.kernels)))


def _why_not(kernel: str, params: Any) -> list[str]:
    """torch's reasons not to take ``kernel``, without where they were triggered."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _ASKS[kernel](params, debug=True)
    lines = [str(one.message).split(" (Triggered", 1)[0].strip() for one in caught]
    return [line for line in lines if not line.endswith("because:")]


def watch_first_forward(model: nn.Module, done: Callable[[KernelWatch], object]) -> None:
    """Calls ``done`` with what the next forward of ``model`` in training took; no other is seen."""
    watch = KernelWatch()
    watching = False

    def begin(module: nn.Module, _: Any) -> None:
        nonlocal watching
        # DataParallel's copies have these hooks too, and a training step may call its own module.
        if module is model and module.training and not watching:
            watch.__enter__()
            watching = True

    def end(*_: Any) -> None:
        nonlocal watching
        if not watching:
            return
        watching = False
        watch.__exit__(None, None, None)
        before.remove()
        after.remove()
        done(watch)

    before = model.register_forward_pre_hook(begin)
    after = model.register_forward_hook(end, always_call=True)
