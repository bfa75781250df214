"""The benchmark of compression on a slow link: what it says where it can and cannot run."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def slow_link(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(repository))
    return importlib.import_module("benchmarks.slow_link")


def row(name: str, seconds: tuple[float, float, float], counted: float | None) -> dict[str, Any]:
    """As a rank tells it: seconds a step at no limit, 1 Gbit/s and 100 Mbit/s."""
    rates = [
        {
            "mbit": mbit,
            "steps": 3,
            "step_s": step_s,
            "compressing_s": 0.0 if counted is None else 0.05,
            "interface_bytes": 2e6 if counted else 100e6,
            "counted_bytes": counted,
        }
        for mbit, step_s in zip((None, 1000, 100), seconds, strict=True)
    ]
    return {"compression": name, "rates": rates}


def test_the_table_has_ratios_to_no_compression_and_says_where_it_loses(slow_link: Any) -> None:
    found = {
        "link": [{"mbit": 100, "measured_mbit": 95.4}],
        "rows": [row("none", (0.4, 1.0, 8.0), None), row("topk 1%", (0.5, 0.25, 0.4), 1.9e6)],
    }
    lines = slow_link.text(found).splitlines()
    assert lines[0].startswith("### (g) ")
    cells = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in lines if "|" in line}
    assert [cell.strip() for cell in cells["topk 1%"]] == [
        *("1.90", "2.00"),
        *("0.500", "1.25", "0.250", "0.25", "0.400", "0.05"),
        *("50", "10%"),
    ]
    assert cells["none"][0].strip() == "-", "nobody counts without compression"
    assert {len(row) for row in cells.values()} == {len(cells["none"])}
    assert "100 Mbit/s 95" in lines[-3]
    assert "at no limit topk 1%; at 1 Gbit/s nobody; at 100 Mbit/s nobody" in lines[-1]


def test_what_is_lacking_is_said_in_one_line(slow_link: Any, tmp_path: Path) -> None:
    tools = str(tmp_path)

    def lacking(*, device: str = "cpu", root: bool = True) -> str:
        lacks = slow_link.lacking(device=device, root=root, path=tools)
        text = slow_link.text({"lacks": lacks})
        assert text.splitlines() == [slow_link.HEADING, "", f"Not measured: it needs {lacks}."]
        return lacks

    assert "CPU" in lacking(device="cuda")
    assert "root" in lacking(root=False)
    assert "ip, tc, unshare (Debian: iproute2, util-linux)" in lacking()
    for tool in ("ip", "tc", "unshare"):
        (tmp_path / tool).write_text("#!/bin/sh\necho 'Operation not permitted' >&2\nexit 1\n")
        (tmp_path / tool).chmod(0o755)
    assert "tbf (Operation not permitted)" in lacking(), "a kernel that refuses is quoted"
