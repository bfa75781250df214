"""Imports without the garbage collector, which is back at work afterwards."""

from __future__ import annotations

import gc
import sys

import pytest

from torsh_trainer.utils.importing import collector_at_rest


def test_the_collector_rests_within_the_block_and_is_then_as_it_was() -> None:
    assert gc.isenabled()
    with collector_at_rest():
        assert not gc.isenabled()
        with collector_at_rest():
            pass
        assert not gc.isenabled(), "the outer block is not over"
    assert gc.isenabled()
    with pytest.raises(ModuleNotFoundError), collector_at_rest():
        import nowhere_to_be_found  # noqa: F401
    assert gc.isenabled()


def test_what_is_loaded_for_good_is_out_of_sight_and_what_comes_later_is_not(
    run_command, tmp_path
) -> None:
    (tmp_path / "large.py").write_text("kept = [[i] for i in range(5000)]\n")
    script = """
import gc, sys, weakref
from torsh_trainer.utils.importing import load_for_good
load_for_good("large", "json")
assert gc.isenabled()
large = sys.modules["large"]
seen = gc.get_objects()
assert not any(kept is large.kept for kept in seen)
assert gc.get_freeze_count() > 5000
frozen = gc.get_freeze_count()

class Knot:
    def __init__(self):
        self.itself = self

later = weakref.ref(Knot())
load_for_good("json", "large")
gc.collect()
assert later() is None, "what has been loaded already freezes nothing again"
assert gc.get_freeze_count() <= frozen
print("done")
"""
    result = run_command([sys.executable, "-c", script], cwd=tmp_path)
    assert result.stdout == "done\n", result.stderr
