"""Which tests prove a rule: tables that the tests' own marks make, one for each engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from torsh_trainer.translate.plan import Verdict

ENGINES = ("deepspeed", "horovod")
"""Engines whose rules have a table: proofs.json in the folder of that name."""

_PROVED: tuple[Verdict, ...] = ("exact", "emulated", "performance-only")
"""Verdicts that say that numbers are the same."""


@cache
def proofs(engine: str) -> Mapping[str, tuple[str, ...]]:
    """Id of a rule -> ids of the tests that prove it, or that hold a definition to its words.

    ``python -m torsh_trainer.testing.proofs`` writes the tables.
    """
    text = files(__package__).joinpath(engine).joinpath("proofs.json").read_text("utf-8")
    return {name: tuple(tests) for name, tests in json.loads(text).items()}


def find_proofs(engine: str, rule: str, verdict: Verdict) -> tuple[str, ...]:
    """The tests that hold ``rule`` where its verdict says that numbers are the same."""
    return proofs(engine).get(rule, ()) if verdict in _PROVED else ()
