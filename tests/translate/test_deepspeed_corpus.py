"""Public files: each is translated whole or refused in words, as the live engine takes it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.deepspeed.source import Options
from torsh_trainer.translate.deepspeed.translator import translate
from torsh_trainer.translate.nodes import leaves
from torsh_trainer.translate.plan import Plan
from torsh_trainer.translate.reading import read

pytestmark = pytest.mark.usefixtures("warm_interpreters")

OPTIONS = Options(
    context="hf-trainer",
    lenient=True,
    world_size=8,
    settings={"hidden_size": "768", "warmup_steps": "10", "max_steps": "100"},
)
"""As engine.py fills "auto"."""


def plan_or_refusal(path: Path) -> Plan | ConfigError:
    try:
        return translate(path, OPTIONS)
    except ConfigError as error:
        return error


def test_every_file_has_a_verdict_for_each_of_its_keys_or_is_refused_with_its_place(corpus):
    for path in corpus:
        found, again = plan_or_refusal(path), plan_or_refusal(path)
        if isinstance(found, ConfigError):
            assert found.fix, path.name
            assert str(found) == str(again)
            assert found.facts.get("line") or "neither train_batch_size" in str(found), path.name
            continue
        assert found == again
        written = [".".join(keys) for keys, _ in leaves(read(path).root)]
        assert sorted(f.key for f in found.findings if f.given) == sorted(written), path.name
        assert all(f.line and f.rule != "ledger" for f in found.findings if f.given), path.name


def test_the_live_engine_takes_what_is_called_valid_and_nothing_else(corpus, run_command, tmp_path):
    pairs = tmp_path / "pairs.json"
    pairs.write_text(json.dumps([[path.name, path.read_text()] for path in corpus]))
    program = Path(__file__).with_name("engine.py")
    answer = run_command([sys.executable, program, pairs], cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    engine = json.loads(answer.stdout)
    seen: Counter[str] = Counter()
    disagreeing = []
    for path in corpus:
        verdict, words = engine[path.name]
        refused = isinstance(plan_or_refusal(path), ConfigError)
        seen[verdict] += 1
        if refused != (verdict == "malformed"):
            disagreeing.append((path.name, verdict, words, refused))
    agreeing = 1 - len(disagreeing) / len(corpus)
    print(f"agreement with the engine: {agreeing:.1%} of {len(corpus)} files, {dict(seen)}")
    assert agreeing >= 0.99, disagreeing
    # A test that never sees one of the three says nothing about it.
    assert set(seen) == {"takes", "removed", "malformed"}
