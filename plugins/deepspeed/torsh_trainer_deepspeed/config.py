"""A DeepSpeed configuration as its author wrote it: values, and the line of every key."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hjson

from torsh_trainer.errors import ConfigError, nearest

Key = tuple[str, ...]
"""The keys that lead to a value, outermost first."""

KNOWN_KEYS = frozenset(
    {
        "activation_checkpointing",
        "aio",
        "amp",
        "autotuning",
        "bf16",
        "bfloat16",
        "checkpoint",
        "comet",
        "comms_logger",
        "communication_data_type",
        "compile",
        "compression_training",
        "csv_monitor",
        "curriculum_learning",
        "data_efficiency",
        "data_parallel_size",
        "data_types",
        "dataloader_drop_last",
        "datastates_ckpt",
        "disable_allgather",
        "disable_python_gc",
        "dump_state",
        "eigenvalue",
        "elasticity",
        "expert_parallel",
        "flops_profiler",
        "fp16",
        "gradient_accumulation_steps",
        "gradient_allreduce_op",
        "gradient_clipping",
        "gradient_predivide_factor",
        "graph_harvesting",
        "hybrid_engine",
        "log_level",
        "managed_gradient_accumulation",
        "memory_breakdown",
        "nebula",
        "optimizer",
        "pipeline",
        "prescale_gradients",
        "progressive_layer_drop",
        "quantize_training",
        "scheduler",
        "seq_parallel_communication_data_type",
        "sequence_parallel_size",
        "sparse_attention",
        "sparse_gradients",
        "steps_per_print",
        "tensor_parallel",
        "tensorboard",
        "timers",
        "torch_autocast",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "use_data_before_expert_parallelism",
        "vocabulary_size",
        "wall_clock_breakdown",
        "wandb",
        "weight_quantization",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "zero_optimization",
    }
)
"""The top-level keys that DeepSpeed reads; it ignores any other in silence."""


@dataclass(frozen=True)
class DeepSpeedConfig:
    """What a ds_config.json holds; ``lines`` says where, ``source`` in which file.

    Numbers, strings and "auto" are as they were written: whoever uses them resolves them.
    """

    values: Mapping[str, Any]
    source: str = ""
    lines: Mapping[Key, int] = field(default_factory=dict)

    @classmethod
    def from_file(cls, path: str | Path) -> DeepSpeedConfig:
        """Reads a file as DeepSpeed does: Hjson, so JSON with comments and trailing commas.

        Raises:
            ConfigError: there is no such file, it does not parse, or a key stands there twice.
        """
        try:
            text = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise ConfigError(
                f"the DeepSpeed configuration {path} cannot be read: {reason}",
                fix="name a file in strategy.config, relative to where the command runs",
            ) from error
        lines = _lines(text)
        try:
            values = hjson.loads(text, object_pairs_hook=_object(str(path)))
        except hjson.HjsonDecodeError as error:
            raise ConfigError(
                f"{path}, line {error.lineno}: {error.msg}",
                fix="DeepSpeed reads JSON, with comments and trailing commas allowed (Hjson)",
            ) from error
        if not isinstance(values, dict):
            raise ConfigError(
                f"{path} holds {type(values).__name__}, and not keys with values",
                fix='begin with { "zero_optimization": {"stage": 2} }',
            )
        return cls(values, str(path), lines)

    @property
    def stage(self) -> int:
        """The ZeRO stage; ``zero_optimization: true`` means 1, as it does to DeepSpeed."""
        zero = self.values.get("zero_optimization", {})
        if isinstance(zero, bool):
            return int(zero)
        return int(zero.get("stage", 0))

    def get(self, *key: str, default: Any = None) -> Any:
        """The value under these keys; ``default`` where one of them is missing."""
        value: Any = self.values
        for name in key:
            if not isinstance(value, Mapping) or name not in value:
                return default
            value = value[name]
        return value

    def place(self, *key: str) -> str:
        """``ds_config.json, line 3: zero_optimization.stage``, as far as that is known."""
        line = self.lines.get(key)
        where = self.source + (f", line {line}" if line is not None else "")
        return f"{where}: {'.'.join(key)}" if where else ".".join(key)

    def unknown_keys(self) -> Iterator[tuple[str, str]]:
        """(place, offer) of every top-level key that DeepSpeed would ignore in silence."""
        for name in self.values:
            if name not in KNOWN_KEYS:
                yield self.place(name), _near(name)

    def autos(self) -> list[Key]:
        """Where "auto" stands."""
        return [key for key, value in leaves(self.values) if value == "auto"]

    def find_blamed(self, message: str) -> str:
        """The place of the key that a message of DeepSpeed's is about; the source if none is."""
        found = [key for key in keys_of(self.values) if _mentions(message, key[-1])]
        deepest = max(found, key=_telling, default=None)
        return self.place(*deepest) if deepest else self.source


def leaves(values: Mapping[str, Any], above: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Every value that is no mapping, with its keys."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*above, name))
        else:
            yield (*above, name), value


def keys_of(values: Mapping[str, Any], above: Key = ()) -> Iterator[Key]:
    """Every key, those of mappings included."""
    for name, value in values.items():
        yield (*above, name)
        if isinstance(value, Mapping):
            yield from keys_of(value, (*above, name))


def _telling(key: Key) -> tuple[bool, int, int]:
    """How sure it is that a message with the key's last word in it is about that key."""
    return key[-1] not in ("device", "enabled", "params", "type"), len(key[-1]), len(key)


def _mentions(message: str, name: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", message, re.IGNORECASE) is not None


def _near(name: str, known: Iterable[str] = KNOWN_KEYS) -> str:
    offer = nearest(name, known)
    if offer.startswith("did you mean"):
        return offer
    return "DeepSpeed knows no such key: take it out"


def _object(path: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in pairs:
            if name in values:
                raise ConfigError(
                    f"{path}: the key {name!r} stands twice in one block",
                    fix="keep one of them; DeepSpeed refuses it as well",
                )
            values[name] = value
        return values

    return build


_TOKEN = re.compile(
    r"(?P<comment>\#[^\n]*|//[^\n]*|/\*.*?\*/)"
    r"|(?P<word>\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|[^\s{}\[\]:,\"'#]+)"
    r"|(?P<mark>[{}\[\]:])",
    re.DOTALL,
)


def _lines(text: str) -> dict[Key, int]:
    """The line of every key; Hjson's own reader does not tell."""
    found: dict[Key, int] = {}
    above: list[str] = []
    word, line_of_word, key = "", 0, ""
    line, at = 1, 0
    for token in _TOKEN.finditer(text):
        line, at = line + text.count("\n", at, token.start()), token.start()
        if token["word"]:
            word, line_of_word = token["word"].strip("\"'"), line
        elif token["mark"] == ":":
            key = word
            found.setdefault((*above, key), line_of_word)
        elif token["mark"] in ("{", "["):
            if line_of_word or above or key:
                above.append(key)
        elif token["mark"] in ("}", "]") and above:
            above.pop()
    return found
