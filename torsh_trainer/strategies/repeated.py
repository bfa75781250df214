"""Parameters to which one backward adds several times."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


class Repeats:
    """Counts how often a backward adds to each of ``parameters``, the first time that it does.

    A backward within the backward (``torch.utils.checkpoint`` with ``use_reentrant=True``) adds by
    itself to what a layer that is used several times has got already. A parameter is watched until
    it was counted once: later steps cost nothing.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._counts: dict[nn.Parameter, int] = {}
        self._counting = False
        self._hooks: dict[nn.Parameter, Any] = {}
        self.watch(parameters)

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Counts these too."""
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._hooks:
                hook = parameter.register_post_accumulate_grad_hook(self._count)
                self._hooks[parameter] = hook

    def begin(self) -> None:
        """The backward that communicates is next."""
        self._counting = bool(self._hooks)

    def end(self) -> list[nn.Parameter]:
        """Those that the backward since ``begin`` has added to several times."""
        if not self._counting:
            return []
        self._counting = False
        counts, self._counts = self._counts, {}
        for parameter in counts:
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
