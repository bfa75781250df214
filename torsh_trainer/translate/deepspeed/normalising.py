"""A configuration of DeepSpeed in one shape: names resolved, "auto" filled, values as the engine
takes them, and every key that does not fit named with its place."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.deepspeed import keys
from torsh_trainer.translate.deepspeed.auto import ARGUMENTS, AUTO, UNMATTERING, Filling, filling
from torsh_trainer.translate.deepspeed.checks import contradictions
from torsh_trainer.translate.deepspeed.keys import Key, Path
from torsh_trainer.translate.deepspeed.kinds import Mismatch
from torsh_trainer.translate.deepspeed.source import Leaf, Options, Source
from torsh_trainer.translate.nodes import Node, Place, leaves
from torsh_trainer.translate.reading import Document

ELSEWHERE = {
    "zero3_init_flag": "Accelerate reads it, not DeepSpeed",
    "deepspeed_multinode_launcher": "Accelerate's launcher reads it, not DeepSpeed",
    "deepspeed_hostfile": "Accelerate's launcher reads it, not DeepSpeed",
    "deepspeed_inclusion_filter": "Accelerate's launcher reads it, not DeepSpeed",
    "deepspeed_exclusion_filter": "Accelerate's launcher reads it, not DeepSpeed",
    "deepspeed_moe_layer_cls_names": "Accelerate reads it, not DeepSpeed",
}
"""Keys of tools around DeepSpeed that stand beside its own."""

_ADVISED = 100
"""Unknown keys for which the nearest known one is looked up; nobody reads on."""


@dataclass(frozen=True)
class Problem:
    """Something that does not fit. ``engine`` says whether DeepSpeed refuses it as well."""

    place: Place
    what: str
    fix: str
    engine: bool


def normalise(document: Document, options: Options) -> Source:
    """The configuration in ``document``, normalised and checked.

    Raises:
        ConfigError: keys that are unknown, misplaced or of the wrong type, "auto" that nothing
            fills; all of them in one message, each with its line.
    """
    return _Reading(document, options).source()


class _Reading:
    def __init__(self, document: Document, options: Options) -> None:
        self.document, self.options = document, options
        self.world_size = options.world_size or _whole(document.facts.get("world_size"))
        self.filling: Filling = filling(
            options.settings,
            context=options.context,
            world_size=self.world_size,
            known={key.dotted: key for key in keys.schema().values()},
        )
        self.problems: list[Problem] = []
        self.warnings: list[str] = []
        self.reported: set[Path] = set()

    def source(self) -> Source:
        found = [leaf for path, leaf in self.read_leaves()]
        by_path: dict[Path, Leaf] = {}
        for leaf in found:
            if leaf.path in by_path:
                other = by_path[leaf.path]
                self.problem(
                    leaf.place,
                    f"{leaf.written!r} and {other.written!r} set the same",
                    "keep one",
                    engine=True,
                )
            by_path[leaf.path] = leaf
        self.check_stated(found)
        source = Source(
            self.document,
            self.options,
            tuple(found),
            tuple(self.warnings),
            by_path,
            self.world_size,
        )
        self.check(source)
        self.refuse()
        return source

    def check(self, source: Source) -> None:
        for dotted, what, fix in contradictions(source):
            leaf = source.found.get(tuple(dotted.split(".")))
            place = leaf.place if leaf else self.document.root.place
            self.problem(place, what, fix, engine=True)

    def check_stated(self, found: Sequence[Leaf]) -> None:
        """What ``--set`` says of a key is used, or the file says the same; else it is a problem."""
        written = {leaf.key.dotted: leaf for leaf in found if leaf.key is not None}
        for name, value in self.filling.keys.items():
            leaf = written.get(name)
            if name in ARGUMENTS or (leaf is not None and (leaf.note or leaf.value == value)):
                continue
            says = "leaves it out" if leaf is None else f"says {_as_json(leaf.value)}"
            self.problem(
                leaf.place if leaf is not None else self.document.root.place,
                f'--set {name} fills an "auto", and the file {says}',
                "write the value into the file, or leave --set out",
            )

    def read_leaves(self) -> list[tuple[Path, Leaf]]:
        read = []
        for written, entry in leaves(self.document.root):
            leaf = self.leaf(written, entry.place, entry.node)
            if leaf is not None:
                read.append((leaf.path, leaf))
        return read

    def leaf(self, written: Path, place: Place, node: Node) -> Leaf | None:
        dotted = ".".join(written)
        path = self.canonical(written)
        value = node.plain()
        if path == ("zero_optimization",) and isinstance(value, bool):
            return Leaf(path, dotted, value, place, None)
        if path in keys.blocks() and (key := keys.find(path)) is None:
            if value == {} or (value is None and path in keys.OPTIONAL_BLOCKS):
                return Leaf(path, dotted, value, place, None)
            self.problem(
                place, f"{dotted!r} wants an object {{...}}, not {_as_json(value)}", engine=True
            )
            return None
        key = keys.find(path)
        if key is None or (len(written) > 1 and self.scalar_above(path, key)):
            return self.unknown(written, path, place, value)
        note = ""
        if value == AUTO and not self.means_auto(key):
            value, note = self.fill(key, dotted, place)
            if note == "open":
                return None
        return self.check_type(Leaf(path, dotted, value, place, key, note), node)

    def scalar_above(self, path: Path, key: Key) -> bool:
        """Something stands below a key that is no block: ``stage: {a: 1}``."""
        return len(path) > len(key.path) and key.path[-1] != "*"

    def canonical(self, written: Path) -> Path:
        for length in (2, 1):
            alias = keys.ALIASES.get(written[:length])
            if alias is not None:
                return (*alias, *written[length:])
        return written

    def means_auto(self, key: Key) -> bool:
        """Keys for which auto is a value of its own."""
        return key.default == AUTO

    def fill(self, key: Key, dotted: str, place: Place) -> tuple[Any, str]:
        value = self.filling.value(key.dotted)
        if value is not None:
            return value, f'"auto", filled from {self.filling.where(key.dotted)}'
        if key.dotted in UNMATTERING and self.filling.hugging_face:
            return None, '"auto": Hugging Face fills it from the model or the world'
        if key.strict and self.options.sizes_from_loader:
            return key.default, '"auto", which DeepSpeed drops for its default'
        if key.strict and self.filling.hugging_face:
            self.warnings.append(
                f'{self.document.name}:{place}: {dotted} is "auto", which nothing fills: '
                f"DeepSpeed drops it and takes its default, {_as_json(key.default)}"
            )
            return key.default, '"auto", which DeepSpeed drops for its default'
        if self.filling.hugging_face and not key.checked:
            return AUTO, ""  # the engine takes it for a value, and stumbles over it later
        if self.filling.hugging_face:
            fix = f"state it: --set {key.dotted}=VALUE"
        else:
            fix = (
                f"fill it: --set {key.dotted}=VALUE, or --context hf-trainer for the values that "
                "Hugging Face's Trainer takes"
            )
        self.problem(place, f'{dotted} is "auto", which DeepSpeed itself does not know', fix)
        return None, "open"

    def check_type(self, leaf: Leaf, node: Node) -> Leaf | None:
        key = leaf.key
        assert key is not None
        if leaf.value is None and leaf.note:
            return leaf
        try:
            value = key.kind(leaf.value, key.strict)
        except Mismatch as wanted:
            return self.note_mismatch(leaf, key, str(wanted), node)
        return Leaf(leaf.path, leaf.written, value, leaf.place, key, leaf.note)

    def note_mismatch(self, leaf: Leaf, key: Key, wanted: str, node: Node) -> Leaf | None:
        what = f"{leaf.written} should be {wanted}, not {_as_json(leaf.value)}"
        if _is_placeholder(node):
            what += ", which looks like a placeholder of a template"
        if key.checked:
            fix = "fill in the template first" if _is_placeholder(node) else "correct the value"
            self.problem(node.place, what, fix, engine=True)
            return None
        return Leaf(leaf.path, leaf.written, leaf.value, leaf.place, key, leaf.note, what)

    def unknown(self, written: Path, path: Path, place: Place, value: Any) -> Leaf:
        depth = next((n for n in range(1, len(path)) if path[:n] not in keys.blocks()), len(path))
        leaf = Leaf(path, ".".join(written), value, place, None)
        foreign = path[0] in ELSEWHERE or self.document.dialect == "gpt-neox"
        if (foreign or self.is_remark(path)) and path[:1] not in keys.blocks():
            return leaf
        top = path[:depth]
        if top in self.reported:
            return leaf
        self.reported.add(top)
        strict = _in_strict_block(top)
        name = ".".join(written[:depth])
        self.problem(
            place,
            f"DeepSpeed knows no key {name!r}",
            _advice(top, near=len(self.reported) <= _ADVISED),
            engine=strict,
            overlooked=not strict,
        )
        return leaf

    def is_remark(self, path: Path) -> bool:
        return path[0].startswith(("_", "#", "//")) or path[0] in ("comment", "comments")

    def problem(
        self,
        place: Place,
        what: str,
        fix: str = "correct it",
        *,
        engine: bool = False,
        overlooked: bool = False,
    ) -> None:
        if overlooked and self.options.lenient:
            self.warnings.append(f"{self.document.name}:{place}: {what}; {fix}")
            return
        self.problems.append(Problem(place, what, fix, engine))

    def refuse(self) -> None:
        if not self.problems:
            return
        self.problems.sort(key=lambda p: (p.place.line, p.place.column))
        first, *others = self.problems
        sentence = f"{self.document.name}:{first.place}: {first.what}"
        fix = first.fix
        if not any(problem.engine for problem in self.problems) and "auto" not in first.what:
            fix += "; --lenient passes over it, as DeepSpeed does in silence"
        for problem in others[:20]:
            fix += f"\n  also {problem.place}: {problem.what}; {problem.fix}"
        if len(others) > 20:
            fix += f"\n  and {len(others) - 20} more"
        raise ConfigError(
            sentence,
            fix=fix,
            line=first.place.line,
            column=first.place.column,
            problems=[(p.place.line, p.place.column, p.what) for p in self.problems],
        )


def _in_strict_block(path: Path) -> bool:
    """The engine refuses unknown keys beside this one."""
    return len(path) > 1 and path[:-1] in _strict_blocks()


@cache
def _strict_blocks() -> frozenset[Path]:
    strict = [key.path for key in keys.schema().values() if key.strict]
    return frozenset(path[:length] for path in strict for length in range(1, len(path) + 1))


@cache
def _siblings(parent: Path) -> frozenset[str]:
    """Names of keys in the block ``parent``."""
    known = {path[len(parent)] for path in keys.schema() if path[:-1][: len(parent)] == parent}
    return frozenset(known | {alias[-1] for alias in keys.ALIASES if alias[:-1] == parent} - {"*"})


@cache
def _everywhere() -> Mapping[str, str]:
    """Every name -> the block that it is found in first."""
    found: dict[str, str] = {}
    for known in keys.schema():
        for length in range(1, len(known) + 1):
            if known[length - 1] != "*":
                found.setdefault(known[length - 1], ".".join(known[: length - 1]))
    return found


def _advice(path: Path, *, near: bool) -> str:
    """The nearest key where ``near`` asks for it, or the block that the key belongs into."""
    name, parent = path[-1], path[:-1]
    everywhere = _everywhere()
    if parent == ("bf16",) and ("fp16", name) in keys.schema():
        return "remove it: bf16 needs no loss scale"
    if name in everywhere and (name,) != parent:
        home = everywhere[name]
        return f"it belongs into {home}" if home else "it belongs on the outermost level"
    if not near:
        return "remove it"
    close = difflib.get_close_matches(name, sorted(_siblings(parent) - {"*"}), n=2, cutoff=0.7)
    if close:
        return "did you mean " + " or ".join(repr(word) for word in close) + "?"
    far = difflib.get_close_matches(name, sorted(everywhere), n=1, cutoff=0.8)
    if far:
        home = everywhere[far[0]]
        return f"did you mean {(home + '.') if home else ''}{far[0]}?"
    return "remove it"


def _is_placeholder(node: Node) -> bool:
    return node.bare and isinstance(node.value, str) and node.value.upper() == node.value


def _whole(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _as_json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
