"""Parameters to which one backward adds several times."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn


class Repeats:
    """Counts how often a backward adds to each of ``parameters``, as long as that may differ.

    A backward within the backward (``torch.utils.checkpoint`` with ``use_reentrant=True``) adds by
    itself to what a layer that is used several times has got already. Where the first backward has
    none within it, a parameter is watched until it was counted once, and later steps cost nothing;
    else all of them are watched for good. ``began`` says that backwards within backwards have come
    since, of which nobody has counted all.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._counts: dict[nn.Parameter, int] = {}
        self._counting = False
        self._hooks: dict[nn.Parameter, Any] = {}
        self._nests: bool | None = None  # whether the first backward has had others within it
        self._seen = False
        self.watch(parameters)

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Counts these too."""
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._hooks:
                hook = parameter.register_post_accumulate_grad_hook(self._count)
                self._hooks[parameter] = hook

    def begin(self) -> None:
        """The backward that communicates is next."""
        self._counting, self._seen = True, False

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Around a backward: notes one within it."""
        run = getattr(torch.autograd, _RUN, None)
        if run is None:
            yield
            return

        def note(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("accumulate_grad") and torch._C._current_graph_task_id() != -1:
                self._seen = True
            return run(*args, **kwargs)

        setattr(torch.autograd, _RUN, note)
        try:
            yield
        finally:
            setattr(torch.autograd, _RUN, run)

    @property
    def began(self) -> bool:
        """Whether this backward has had others within it, and the first one had none."""
        return self._nests is False and self._seen

    def end(self) -> list[nn.Parameter]:
        """Those that the backward since ``begin`` has added to several times."""
        if not self._counting:
            return []
        self._counting = False
        if self._nests is None:
            self._nests = self._seen
        counts, self._counts = self._counts, {}
        for parameter in counts if not self._nests else ():
            self._hooks.pop(parameter).remove()
        return [parameter for parameter, times in counts.items() if times > 1]

    def close(self) -> None:
        """Takes the hooks off."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}

    def _count(self, parameter: nn.Parameter) -> None:
        if self._counting:
            self._counts[parameter] = self._counts.get(parameter, 0) + 1


_RUN = "_engine_run_backward"
"""torch's own name for what ``torch.autograd.backward`` ends in; without it nothing is noted."""
