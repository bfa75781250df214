"""What reports name as the proof of a rule is what the tests say of themselves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torsh_trainer.translate.deepspeed import translator
from torsh_trainer.translate.deepspeed.rules import RULES, proofs


def test_the_table_is_what_the_tests_say(repository: Path, run_command: Any) -> None:
    command = [sys.executable, "-m", "torsh_trainer.testing.proofs", "--check"]
    done = run_command(command, cwd=repository)
    assert done.returncode == 0, done.stderr


def test_every_rule_that_is_proved_is_a_rule() -> None:
    assert translator.RULE_MODULES  # which enter the rules
    assert set(proofs()) <= set(RULES)
