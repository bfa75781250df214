"""What the rules look at: a configuration of DeepSpeed in one shape, and how it is to be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torsh_trainer.translate.deepspeed import keys, versions
from torsh_trainer.translate.deepspeed.keys import Key, Path
from torsh_trainer.translate.nodes import Place
from torsh_trainer.translate.reading import Document

CONTEXTS = ("raw", "hf-trainer", "accelerate", "lightning")
MODES = ("exact", "clean")
"""exact reproduces roundings and start-up quirks, so that a run can be continued; clean states what
the author meant."""


@dataclass(frozen=True)
class Options:
    """How a source is to be read.

    ``sizes_from_loader``: the file may leave the batch sizes to the loader of a script.
    """

    world_size: int | None = None
    version: versions.Version = versions.NEWEST
    context: str = "raw"
    mode: str = "exact"
    lenient: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    sizes_from_loader: bool = False


@dataclass(frozen=True)
class Leaf:
    """One key of the file. ``path`` is its name in the schema, ``written`` the file's own.

    ``key`` None: DeepSpeed does not know it. ``mismatch``: the value is of a type that the engine
    overlooks and stumbles over later. ``note``: how ``value`` came to be, where not as written.
    """

    path: Path
    written: str
    value: Any
    place: Place
    key: Key | None
    note: str = ""
    mismatch: str = ""


@dataclass(frozen=True)
class Source:
    """What the rules look at."""

    document: Document
    options: Options
    leaves: tuple[Leaf, ...]
    warnings: tuple[str, ...]
    found: Mapping[Path, Leaf]
    world_size: int | None

    def is_given(self, dotted: str) -> bool:
        """The file sets the key, to something other than null."""
        leaf = self.found.get(tuple(dotted.split(".")))
        return leaf is not None and leaf.value is not None

    def is_given_or_auto(self, dotted: str) -> bool:
        """The file holds the key, be it as "auto" that somebody else fills."""
        return tuple(dotted.split(".")) in self.found

    def get(self, dotted: str) -> Any:
        """The value of the key, or the engine's default."""
        path = tuple(dotted.split("."))
        leaf = self.found.get(path)
        if leaf is not None and not leaf.mismatch and leaf.value is not None:
            return leaf.value
        key = keys.schema()[path]
        return key.default

    @property
    def reproduces(self) -> bool:
        """The translation is to give the same bits, quirks included."""
        return self.options.mode == "exact"

    @property
    def removed(self) -> list[str]:
        """Keys that the newest engine refuses because it has removed them."""
        return [leaf.written for leaf in self.leaves if leaf.key and leaf.key.removed]
