"""A configuration as it is written: values of environment variables stay references."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torsh_trainer.utils.masking import mask_tree

_ASKS_THE_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:")
_TELLING = 4  # characters, from which on a value found in another one is taken to come from there


def as_written(config: DictConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """``settings``, which ``config`` came to, without what environment variables gave it.

    There stands what asks for it, ``${oc.env:NAME}``, or what refers to such a value. Secrets under
    names of their own are masked.
    """
    raw = OmegaConf.to_container(config, resolve=False)
    content: dict[str, Any] = mask_tree(_Unresolved(raw, settings).tree(raw, settings))
    return content


def _asks(raw: Any) -> bool:
    return isinstance(raw, str) and _ASKS_THE_ENVIRONMENT.search(raw) is not None


class _Unresolved:
    def __init__(self, raw: Any, settings: Any) -> None:
        self._told: dict[str, str] = {}
        self._gather(raw, settings)

    def _gather(self, raw: Any, value: Any) -> None:
        if isinstance(raw, dict) and isinstance(value, Mapping):
            for key, item in value.items():
                self._gather(raw.get(key), item)
        elif isinstance(raw, list) and isinstance(value, list):
            for part, item in zip(raw, value, strict=True):
                self._gather(part, item)
        elif isinstance(value, str) and len(value) >= _TELLING and _asks(raw):
            self._told[value] = raw

    def tree(self, raw: Any, value: Any) -> Any:
        if _asks(raw):
            return raw
        if isinstance(value, Mapping):
            below = raw if isinstance(raw, dict) else {}
            return {key: self.tree(below.get(key), item) for key, item in value.items()}
        if isinstance(value, list):
            parts = raw if isinstance(raw, list) else [None] * len(value)
            return [self.tree(part, item) for part, item in zip(parts, value, strict=True)]
        if isinstance(value, str) and raw != value:
            if isinstance(raw, str):
                return raw if any(told in value for told in self._told) else value
            return self._told.get(value, value)  # a node that refers to another as a whole
        return value
