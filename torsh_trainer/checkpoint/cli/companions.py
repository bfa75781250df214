"""What lies beside the weights in a folder of format hf: config.json, the tokenizer's files.

A task says so in its state: ``{"export": {"files": {name: text or bytes}, "tied": [parameter]}}``,
where ``tied_names`` are names of parameters that whoever opens the folder makes of others. ``rows``
({parameter: number}) are those of a padded parameter that go into a file of any format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from torsh_trainer.checkpoint.cli.contents import Contents
from torsh_trainer.errors import ConfigError
from torsh_trainer.utils.files import strict_json

CONFIG = "config.json"


def files(contents: Contents, config: Path | None) -> dict[str, bytes]:
    """Name -> content; ``config`` is what the user names as the model's config.json, or null.

    Raises:
        ConfigError: it is not there, or is none.
    """
    kept = _export_facts(contents).get("files", {})
    found = {
        name: content.encode() if isinstance(content, str) else bytes(content)
        for name, content in kept.items()
        if Path(name).name == name  # a checkpoint of others may name any place
    }
    if config is not None:
        return {**found, CONFIG: _read_config(config)}
    own = None if CONFIG in found else _among_options(contents)
    return found if own is None else {**found, CONFIG: own}


def tied_names(contents: Contents) -> frozenset[str]:
    """Names of parameters that are others again."""
    return frozenset(_export_facts(contents).get("tied", ()))


def without_padding(contents: Contents, name: str, value: Tensor) -> Tensor:
    """What of the parameter ``name`` stands for something, and is not there to fill its shape."""
    rows = _export_facts(contents).get("rows", {}).get(name)
    return value[:rows].clone() if isinstance(rows, int) and rows < len(value) else value


def _export_facts(contents: Contents) -> Mapping[str, Any]:
    found = contents.plain.get("task", {}).get("export", {})
    return found if isinstance(found, Mapping) else {}


def _read_config(config: Path) -> bytes:
    path = config / CONFIG if config.is_dir() else config
    try:
        text = path.read_bytes()
        if not isinstance(json.loads(text), dict):
            raise ValueError
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}", fix="correct the path") from error
    except ValueError as error:
        raise ConfigError(
            f"--config {path} is no config.json", fix="save one with model.config.to_json_file"
        ) from error
    return text


def _among_options(contents: Contents) -> bytes | None:
    """A Hugging Face configuration (it has a ``model_type``) among the options of the model."""
    model = contents.plain.get("config", {})
    for key in ("model", "config"):
        model = model.get(key) if isinstance(model, Mapping) else None
        if isinstance(model, Mapping) and "model_type" in model:
            plain = {k: v for k, v in model.items() if not k.startswith("_")}
            return strict_json(plain).encode()
    return None
