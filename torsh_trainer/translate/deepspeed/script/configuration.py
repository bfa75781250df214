"""The configuration that a script hands to ``deepspeed.initialize``: a file, or a dictionary.

What the script makes itself, an optimizer of torch, stands in the configuration as DeepSpeed would
take it from there: the same class, so that one table of rules judges both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torsh_trainer.translate.deepspeed.auto import AUTO, UNMATTERING
from torsh_trainer.translate.deepspeed.keys import schema
from torsh_trainer.translate.nodes import MappingEntry, Node, Place
from torsh_trainer.translate.plan import Fact
from torsh_trainer.translate.python.events import Event
from torsh_trainer.translate.python.torch_calls import name_positional
from torsh_trainer.translate.python.values import ImportedName, ScriptDict, Thing, Unknown, is_plain

CONFIG = "deepspeed_config"
"""The name of the fact that a configuration is missing."""

WORLD_SIZE = "world_size"
"""The same of the number of processes."""

_KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Adam": ("Adam", {"torch_adam": True, "adam_w_mode": False}),
    "AdamW": ("AdamW", {"torch_adam": True}),
    "FusedAdam": ("Adam", {}),
    "DeepSpeedCPUAdam": ("Adam", {}),
    "FusedLamb": ("Lamb", {}),
    "FusedLion": ("Lion", {}),
    "DeepSpeedCPULion": ("Lion", {}),
}
"""Class that a script makes -> the name and the options by which DeepSpeed makes the same."""

_FILLED = ': "auto", which somebody fills'
_FASTER = ("fused", "foreach", "capturable", "differentiable")
"""Options of torch's optimizers that change no result; nobody is asked for them."""

_RENAMED = {"adamw_mode": "adam_w_mode"}


@dataclass
class ScriptConfiguration:
    """A document for the translator: ``root`` with the places of all keys, ``files`` of keys that
    stand in another file than the script, what is missing, what ``--set`` has
    ``stated``, and changes of which the key cannot be told."""

    root: Node
    files: dict[tuple[str, ...], str] = field(default_factory=dict)
    facts: list[Fact] = field(default_factory=list)
    unknown: list[tuple[str, Unknown, Place, str]] = field(default_factory=list)
    stated: set[str] = field(default_factory=set)
    untold: list[tuple[str, Place, str]] = field(default_factory=list)


def find_path(event: Event) -> str | ScriptDict | Unknown | None:
    """What is handed over as configuration: a path, a dictionary, or None where nothing is."""
    config = event.facts.get("config")
    if config is None:
        config = event.facts.get("args_config")
    if isinstance(config, str | ScriptDict | Unknown) or config is None:
        return config
    named = config.dotted if isinstance(config, ImportedName) else "config"
    return Unknown(named, event.place)


def take_own_keys(config: ScriptDict) -> list[tuple[str, Any, Place, str]]:
    """Takes out what the script keeps there for itself: keys that it reads, and that DeepSpeed does
    not know; (key, value, place, file) of each."""
    known = {key[0] for key in schema()}
    own = [key for key in config if key in config.asked and key not in known]
    return [(key, config.pop(key), *config.places.get(key, (Place(), ""))) for key in own]


def take_own(config: ScriptDict, event: Event) -> list[tuple[str, Place, str]]:
    """Enters the optimizer and the scheduler that ``deepspeed.initialize`` is given, which count
    before the configuration's; (block, place, file) of what is passed over so."""
    passed = []
    for name, argument in (("optimizer", "optimizer"), ("scheduler", "lr_scheduler")):
        own = event.facts.get(argument)
        if own is None:
            continue
        if name in config:
            passed.append((name, *config.places.get(name, (Place(), ""))))
            config.pop(name)
        block = _optimizer_of(own, event) if name == "optimizer" else _scheduler_of(own, event)
        if block is not None:
            config.put(
                name, block, own.place if isinstance(own, Thing) else event.place, event.file
            )
    return passed


def _optimizer_of(own: Any, event: Event) -> ScriptDict:
    """The block for it; what it is counts as unknown where reading does not get to it."""
    if isinstance(own, Thing) and "class" in own.facts:
        made = Event("optimizer", own.place, event.node, own.facts, file=event.file)
        block = optimizer_record(made, file=event.file)
        if block is not None:
            return block
    hole = own if isinstance(own, Unknown) else Unknown("optimizer", event.place)
    return ScriptDict({"type": hole, "params": ScriptDict({"lr": hole})})


def _scheduler_of(own: Any, event: Event) -> ScriptDict | None:
    """The block for one of DeepSpeed's own; another has no block."""
    if not isinstance(own, Thing) or "args" in own.facts or "class" not in own.facts:
        return None
    params = ScriptDict()
    for key, value in own.facts["named"].items():
        if key not in ("optimizer", "last_batch_iteration"):
            params.put(key, value, own.place, event.file)
    block = ScriptDict()
    block.put("type", own.facts["class"], own.place, event.file)
    block.put("params", params, own.place, event.file)
    return block


def optimizer_record(event: Event, *, file: str) -> ScriptDict | None:
    """The block ``optimizer`` for an optimizer that the script makes; None where its options
    cannot be told."""
    kind = event.facts["class"]
    name, options = _KINDS.get(kind, (kind, {}))
    args, named = event.facts["args"], dict(event.facts["named"])
    for name_of_parameters in ("params", "model_params"):
        named.pop(name_of_parameters, None)
    if "**" in named:
        return None
    params = ScriptDict()
    own = {**name_positional(kind if kind in ("SGD", "RMSprop") else "Adam", args[1:]), **named}
    for key, value in {**own, **options}.items():
        if key in _FASTER and not is_plain(value):
            continue
        plain = list(value) if isinstance(value, tuple) else value
        params.put(_RENAMED.get(key, key), plain, event.place, file)
    block = ScriptDict()
    block.put("type", name, event.place, file)
    block.put("params", params, event.place, file)
    return block


def _is_dropped(dotted: str) -> bool:
    """Whether DeepSpeed takes its default for a key that is "auto", as blocks of pydantic do."""
    key = schema().get(tuple(dotted.split(".")))
    return key is not None and key.strict


def document_root(
    record: ScriptDict, place: Place, settings: Mapping[str, Any], *, is_filled: bool
) -> ScriptConfiguration:
    """``record`` as nodes; unknown values are filled from ``settings``, else they are facts.

    ``is_filled``: "auto" is filled by whoever hands the configuration over.
    """
    found = ScriptConfiguration(Node({}, place))

    def node_of(value: Any, path: tuple[str, ...], at: Place, file: str) -> Node | None:
        dotted = ".".join(path)
        if isinstance(value, dict):
            entries = {}
            places = getattr(value, "places", {})
            found.untold += getattr(value, "untold", [])
            for key, inner in value.items():
                where, source = places.get(key, (at, file))
                inner_path = (*path, key)
                made = node_of(inner, inner_path, where, source)
                if made is not None:
                    entries[key] = MappingEntry(where, made)
                    found.files[inner_path] = source
            return Node(entries, at)
        if isinstance(value, list | tuple):
            items = [node_of(item, path, at, file) for item in value]
            return None if None in items else Node([item for item in items if item], at)
        if dotted in settings:
            found.stated.add(dotted)
            return Node(settings[dotted], at)
        stands = _is_dropped(dotted) or (is_filled and dotted in UNMATTERING)
        if is_plain(value) and (value != AUTO or stands):
            return Node(value, at)
        if value == AUTO:
            value = Unknown(f"{dotted}{_FILLED}", at)
        hole = value if isinstance(value, Unknown) else Unknown(str(value), at)
        found.unknown.append((dotted, hole, at, file))
        return None

    root = node_of(record, (), place, "")
    assert root is not None
    found.root = root
    return found


def list_facts(found: ScriptConfiguration, script: str, *, knows_size: bool) -> Iterator[Fact]:
    """A question for each value that only a run would tell; the number of processes is one, and so
    is the condition of a block."""
    asked = False
    for dotted, hole, place, file in found.unknown:
        where = f"{dotted} ({file or script}:{place.line})"
        if not knows_size and re.search(r"world_size|WORLD_SIZE", hole.text):
            if not asked:
                look = "processes of the job: machines times GPUs of each"
                yield Fact(WORLD_SIZE, where, look, place.line, "N")
            asked = True
            continue
        if hole.under:
            look = "whether this holds when you train: true or false"
            yield Fact(hole.under, where, look, place.line)
            continue
        look = f"the script computes it: {hole.text}"[:160]
        if hole.text.endswith(_FILLED):
            look = 'it is "auto" there: the value that the run has'
        yield Fact(dotted, where, look, place.line)
