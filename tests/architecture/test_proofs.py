"""What reports name as the proof of a rule is what the tests say of themselves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from torsh_trainer.translate.deepspeed import rules as deepspeed_rules
from torsh_trainer.translate.deepspeed import translator as deepspeed
from torsh_trainer.translate.horovod import rules as horovod_rules
from torsh_trainer.translate.horovod import translator as horovod
from torsh_trainer.translate.proofs import ENGINES, proofs


def test_the_tables_are_what_the_tests_say(repository: Path, run_command: Any) -> None:
    command = [sys.executable, "-m", "torsh_trainer.testing.proofs", "--check"]
    done = run_command(command, cwd=repository)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("engine", ENGINES)
def test_every_rule_that_is_proved_is_a_rule(engine: str) -> None:
    assert deepspeed.RULE_MODULES  # which enter the rules
    assert horovod.RULE_MODULES
    rules = {"deepspeed": deepspeed_rules.RULES, "horovod": horovod_rules.RULES}
    assert set(proofs(engine)) <= set(rules[engine])
