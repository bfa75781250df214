"""The script of the library's page in the kernel of a real notebook."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

PAGE = Path(__file__).parents[2] / "docs" / "library.md"
SCRIPT = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
DEFINITIONS = SCRIPT.split('if __name__ == "__main__":\n')[0]

RUN = """
Trainer(task=Classify(), loading=Loading(batch_size=50), max_steps=20, run_dir="whole").fit()
"""
TWO_PROCESSES = """
from torsh_trainer.launchers.local import Local

Trainer(
    task=Classify(), loading=Loading(batch_size=50), max_steps=20, run_dir="two",
    launcher=Local(num_processes=2),
).fit()
"""
INTERRUPTED = """
import os, signal
from torsh_trainer import Callback

class Stop(Callback):
    def on_step(self, report):
        if report.step == 5:
            os.kill(os.getpid(), signal.SIGINT)  # as the notebook's button does

Trainer(
    task=Classify(), loading=Loading(batch_size=50), max_steps=100_000, run_dir="stopped",
    callbacks=[Stop()],
).fit()
"""


def printed(notebook: nbformat.NotebookNode, cell: int) -> str:
    outputs = notebook.cells[cell].outputs
    return "".join(one.text for one in outputs if one.output_type == "stream")


def test_a_notebook_shows_progress_and_leaves_a_run_and_an_interrupt_ends_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with it a kernel does not capture its processes
    cells = [
        nbformat.v4.new_code_cell(cell) for cell in (DEFINITIONS, RUN, TWO_PROCESSES, INTERRUPTED)
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(notebook, timeout=900, kernel_name="python3", resources=resources)
    with pytest.raises(CellExecutionError) as error:
        client.execute()

    for cell in (1, 2):
        assert "step 20/20" in printed(notebook, cell)
        assert "Done" in printed(notebook, cell)
    assert "ddp, 2 processes" in printed(notebook, 2)
    whole = tmp_path / "whole"
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert max(row["step"] for row in rows) == 20
    assert (whole / "result.json").exists()
    assert (whole / "config.yaml").exists()

    assert error.value.ename == "Interrupted"
    assert "stopped by Ctrl-C (SIGINT) after step 5" in error.value.evalue
    assert "checkpoint.resume=auto" in error.value.evalue
    assert [one.name for one in (tmp_path / "stopped" / "checkpoints").glob("step-*")] == [
        "step-00000005"
    ]
