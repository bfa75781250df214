"""From what a user names to a DeepSpeed configuration with places: file, dict or base64.

The block may stand alone (JSON, leniently read), or within an Accelerate or a GPT-NeoX file.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.translate import lenient_json, yaml_places
from torsh_trainer.translate.nodes import MappingEntry, Node, node_of
from torsh_trainer.utils.files import check_plain

LARGEST_BYTES = 4_000_000
"""No configuration is so large; a checkpoint or a data set named by mistake is."""

_TEMPLATE = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.DOTALL)
_COMMENTED = re.compile(r"^\s*(#|//)")

ACCELERATE = {
    "zero_stage": ("zero_optimization", "stage"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("gradient_clipping",),
    "offload_optimizer_device": ("zero_optimization", "offload_optimizer", "device"),
    "offload_optimizer_nvme_path": ("zero_optimization", "offload_optimizer", "nvme_path"),
    "offload_param_device": ("zero_optimization", "offload_param", "device"),
    "offload_param_nvme_path": ("zero_optimization", "offload_param", "nvme_path"),
    "zero3_save_16bit_model": (
        "zero_optimization",
        "stage3_gather_16bit_weights_on_model_save",
    ),
}
"""Accelerate's names for keys of DeepSpeed: ``deepspeed_config`` of its YAML."""

NEOX_MARKS = {"num_layers", "hidden_size", "num_attention_heads", "pipe_parallel_size"}
"""Arguments of GPT-NeoX; two of them, with ``-`` or ``_``, tell its files."""


@dataclass(frozen=True)
class Document:
    """A configuration of DeepSpeed as it was found.

    ``dialect`` is ``deepspeed``, ``accelerate`` or ``gpt-neox``; ``facts`` are what the file
    around the block says: ``world_size``, ``mixed_precision``.
    """

    name: str
    root: Node
    dialect: str
    facts: Mapping[str, Any]


def read(source: str | Path | Mapping[str, Any]) -> Document:
    """The configuration in ``source``: a path, a dict, or base64 text as DeepSpeed takes it.

    Raises:
        ConfigError: there is no such file, it is no configuration, or it cannot be parsed.
        ResourceError: the file cannot be read.
    """
    if isinstance(source, Mapping):
        return document_of("the dict", _read_dict(source))
    path = Path(source)
    if not exists(path):
        text = _decode(str(source))
        return document_of("base64", lenient_json.parse(text, name="base64"))
    return read_text(text_of(path), name=str(path))


def read_text(text: str, *, name: str) -> Document:
    """The configuration in ``text``; ``name`` is that of its file, whose ending decides.

    Raises:
        ConfigError: it is no configuration, or it cannot be parsed.
    """
    return document_of(name, read_root(text, name=name))


def read_root(text: str, *, name: str) -> Node:
    """All of the mapping in ``text``, whatever it is about.

    Raises:
        ConfigError: it cannot be parsed.
    """
    _refuse_template(text, name)
    if name.lower().endswith((".yaml", ".yml")):
        return yaml_places.parse(text, name=name)
    return lenient_json.parse(text, name=name)


def exists(path: Path) -> bool:
    """There is something of that name."""
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long for a file, as base64 is
        return False


def is_folder(path: Path) -> bool:
    """There is a folder of that name."""
    return exists(path) and path.is_dir()


def _read_dict(source: Mapping[str, Any]) -> Node:
    try:
        return node_of(source)
    except RecursionError as error:
        raise ConfigError(
            "the dict is nested too deep, or holds itself", fix="pass plain dicts and lists"
        ) from error


def _decode(text: str) -> str:
    missing = ConfigError(
        f"{text[:80]!r} is neither a file nor a configuration in base64",
        fix="name the JSON or YAML file that holds the DeepSpeed configuration",
    )
    if len(text) > LARGEST_BYTES or len(text) < 4:
        raise missing
    try:
        decoded = base64.b64decode(text, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise missing from error
    if not decoded.lstrip().startswith("{"):
        raise missing
    return decoded


def text_of(path: Path) -> str:
    """The text of a file.

    Raises:
        ConfigError: it is a folder or a pipe, too large for a configuration, or no text.
        ResourceError: it cannot be read.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a folder", fix="name the configuration file in it")
    check_plain(path)
    try:
        size = path.stat().st_size
        if size > LARGEST_BYTES:
            raise ConfigError(
                f"{path} has {size / 1e6:.0f} MB: that is no configuration",
                fix="name the file that the engine is given",
            )
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not text in UTF-8 (byte {error.start})",
            fix="name the file that the engine is given",
        ) from error
    except OSError as error:
        raise ResourceError(f"cannot read {path}: {error.strerror}", fix="check it") from error


def _refuse_template(text: str, name: str) -> None:
    for match in _TEMPLATE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if _COMMENTED.match(text.splitlines()[line - 1]):
            continue
        raise ConfigError(
            f"{name}:{line}: {match.group()[:40]!r}: this is a Jinja template, not yet a file",
            fix="render it first, and translate the result",
            line=line,
        )


def document_of(name: str, root: Node) -> Document:
    """The configuration that ``root`` holds: DeepSpeed's own, or the block of another file.

    Raises:
        ConfigError: it is an Accelerate file that names another.
    """
    keys = root.value
    if "deepspeed_config" in keys and keys["deepspeed_config"].node.is_mapping:
        return _accelerate(name, root)
    if len({key.replace("-", "_") for key in keys} & NEOX_MARKS) >= 2:
        return Document(name, root, "gpt-neox", {})
    return Document(name, root, "deepspeed", {})


def _accelerate(name: str, root: Node) -> Document:
    """DeepSpeed's keys from the block of Accelerate's YAML, each at its own place."""
    block = root.value["deepspeed_config"].node
    elsewhere = block.value.get("deepspeed_config_file")
    if elsewhere is not None:
        raise ConfigError(
            f"{name}:{elsewhere.place}: this file names another, {elsewhere.node.plain()!r}",
            fix="translate that one, with --context accelerate",
        )
    entries: dict[str, MappingEntry] = {}
    for key, entry in block.value.items():
        _place(entries, ACCELERATE.get(key, (key,)), entry)
    facts = {}
    for key, fact in (("num_processes", "world_size"), ("mixed_precision", "mixed_precision")):
        if key in root.value:
            facts[fact] = root.value[key].node.plain()
    precision = root.value.get("mixed_precision")
    if precision is not None and precision.node.plain() in ("bf16", "fp16"):
        on = MappingEntry(precision.place, Node(True, precision.node.place))
        _place(entries, (str(precision.node.plain()), "enabled"), on)
    return Document(name, Node(entries, block.place), "accelerate", facts)


def _place(entries: dict[str, MappingEntry], path: tuple[str, ...], entry: MappingEntry) -> None:
    for key in path[:-1]:
        if key not in entries:
            entries[key] = MappingEntry(entry.place, Node({}, entry.place))
        entries = entries[key].node.value
    entries[path[-1]] = entry
