"""One name, one meaning: functions are verbs (or nouns), and a public class's name is its own."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PAST = re.compile(r"[a-z]{2,}ed")
"""A regular participle, as the first word of a name."""

NO_PARTICIPLES = {"embed", "exceed", "feed", "need", "proceed", "seed", "speed", "deepspeed"}

IRREGULAR = re.compile(
    r"become|begun|born|borne|bought|bound|broken|brought|built|caught|chosen|dealt|done|"
    r"drawn|driven|fallen|fed|felt|forgotten|fought|found|frozen|given|gone|gotten|grown|"
    r"heard|held|hidden|kept|known|laid|led|left|lent|lost|made|meant|met|overridden|"
    r"overwritten|paid|proven|redone|said|seen|sent|shown|sold|spent|spoken|stolen|stood|"
    r"struck|stuck|sworn|swept|taken|taught|thought|thrown|told|undone|understood|unbound|"
    r"withdrawn|won|worn|woven|wrapped|written"
)
"""Those that are no verb in the present as well (``set``, ``read``, ``cut``, ``split`` are)."""

ADJECTIVES = {
    "elapsed_time": "torch's own name, of events",
    "installed_packages": "the packages that are installed",
    "loaded_libraries": "the libraries that are loaded",
    "masked_select": "torch's own name, of an operation",
    "shared_state": "the state that is shared",
    "shared_template": "the template of that state",
    "shared_zeros": "zeros in memory that is shared",
    "shared_pool": "the pool that all tests share",
    "tied_names": "the names that are tied",
    "unused_error": "the error for parameters that are not used",
    "unused_names": "the names of those parameters",
    "unused_parameters": "the same error, of a list of names",
    "frozen_value": "the value of a frozen parameter",
    "frozen_values": "those of all of them",
    "uncalled_error": "the error for a method that nothing calls",
    "hidden_size": "a model's own word",
    "hidden_path": "the path of a folder that is not shown",
    "fixed_rule": "a rule whose verdict is fixed",
    "fixed_rules": "several of them",
    "stated_value": "the value that data states",
    "restored_rows": "the rows of what a run would restore",
    "prefixed_metrics": "metrics with a prefix",
    "dotted_name": "a name with dots",
    "dotted_names": "several of them",
    "known_backends": "the backends that torch knows",
    "left_out_error": "the error for parameters that a micro-batch leaves out",
}
"""A participle that says which, with the noun that it says it of."""

SAME_CLASS = {
    # One contract, several who keep it.
    "Original": "another product alone, to compare with; a plugin names it",
    "OriginalEngine": "what `Original` makes",
    "Horovod": "the strategy, and the environment of its launcher: one product",
    "DeepSpeedConfig": "the integration and the plugin read one file",
    "DeepSpeedEngine": "the plugin runs DeepSpeed's; scripts import drop-in's by that name",
    "DeepSpeedIntegration": "drop-in classes of one name, with the library and without it",
    "HorovodConfig": "the same",
    "HorovodIntegration": "the same",
    "Parts": "the protocol of a communicator, and MPI's own",
    # The translators of DeepSpeed and of Horovod are made alike, room by room.
    "Leaf": "one thing that a source says, for the rules of that source",
    "Mismatch": "a value that a key of that source does not take",
    "Options": "how that source is read",
    "Problem": "what does not fit in that source",
    "Rule": "a rule for that source",
    # Models: what a user writes into wrap_modules.
    "Block": "a block of a model, in the task and in the models of tests",
    # Told apart by another branch of this work.
    "Rank": "a process's number in the library; the parts of a run on one process",
}
"""Why a name may stand for classes of several modules."""


DICTATED = ROOT / "torsh_trainer" / "dropin" / "horovod"
"""Modules that stand for those of another product, whose names scripts use."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for folder in (ROOT / "torsh_trainer", ROOT / "plugins"):
        for path in sorted(folder.rglob("*.py")):
            if "tests" not in path.parts and DICTATED not in path.parents:
                yield str(path.relative_to(ROOT)), ast.parse(path.read_text("utf-8"))


def is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in function.decorator_list)


def is_participle(word: str) -> bool:
    if word in NO_PARTICIPLES:
        return False
    return IRREGULAR.fullmatch(word) is not None or PAST.fullmatch(word) is not None


def test_no_function_is_called_by_a_participle() -> None:
    found = []
    for where, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property(node):
                name = node.name.strip("_")
                if is_participle(name.split("_")[0]) and name not in ADJECTIVES:
                    found.append(f"{where}:{node.lineno} {node.name}")
    assert not found, "a verb says what a function does:\n" + "\n".join(found)


def test_adjectives_stand_before_a_noun() -> None:
    assert [name for name in ADJECTIVES if "_" not in name] == []


def test_the_check_knows_a_participle() -> None:
    wrong = ("told", "laid_out", "gathered", "_checked", "unmarked", "shown", "undone")
    right = ("seed", "read_all", "set_rates", "embed", "split", "feed", "deepspeed_version", "run")
    assert all(is_participle(name.strip("_").split("_")[0]) for name in wrong)
    assert not any(is_participle(name.split("_")[0]) for name in right)


def test_a_public_class_shares_its_name_with_none_but_those_of_one_contract() -> None:
    places = defaultdict(list)
    for where, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(where)
    several = {name: there for name, there in places.items() if len(there) > 1}
    found = [f"{name}: {', '.join(there)}" for name, there in several.items()]
    assert not set(several) - set(SAME_CLASS), "one name, one meaning:\n" + "\n".join(
        line for line in found if line.partition(":")[0] not in SAME_CLASS
    )
