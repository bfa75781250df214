"""What the tests of the translation share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torsh_trainer.translate.deepspeed.source import Options
from torsh_trainer.translate.deepspeed.translator import translate
from torsh_trainer.translate.plan import Finding, Plan

sys.path.insert(0, str(Path(__file__).parent))  # helpers are imported by name

Translated = Callable[..., Plan]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """``write(text, name="ds.json")``: a file to translate."""

    def written(text: str, name: str = "ds.json") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return written


@pytest.fixture(scope="session")
def corpus(repository) -> list[Path]:
    """Public DeepSpeed files beside the repository; it must stand without them."""
    files = sorted((repository.parent / "shared" / "corpus" / "deepspeed").glob("*.json"))
    if not files:
        pytest.skip("there are no public files beside this checkout")
    return files


@pytest.fixture(scope="session")
def plan_of() -> Translated:
    """``plan_of(world_size=2, **keys)``: the plan for a dict with a micro-batch size."""

    def planned(config: dict[str, Any] | None = None, /, **options: Any) -> Plan:
        config = {"train_micro_batch_size_per_gpu": 4, **(config or {})}
        return translate(config, Options(**options))

    return planned


@pytest.fixture(scope="session")
def finding_of() -> Callable[[Plan, str], Finding]:
    """The one finding on a key."""

    def found(plan: Plan, key: str) -> Finding:
        [finding] = [finding for finding in plan.findings if finding.key == key]
        return finding

    return found
