"""The one command that starts a job of a launch file natively."""

from __future__ import annotations

import re
import shlex
from typing import Any

from torsh_trainer.translate.launch.deepspeed_flags import parse_resources
from torsh_trainer.translate.launch.job import AUTO, LaunchJob
from torsh_trainer.translate.launch.lines import PYTHON
from torsh_trainer.translate.launch.variables import is_set_by_launcher
from torsh_trainer.translate.plan import RECIPE
from torsh_trainer.translate.shell.words import Word
from torsh_trainer.utils.masking import MASK, is_secret

RUN = f"-m torsh_trainer +recipe={RECIPE} task=TASK data=DATA"


def write_command(job: LaunchJob) -> str:
    """The one command that starts the job."""
    line = job.line
    prefix = [
        f"{name}={_quote(_hide_secret(name, word))}"
        for name, word in line.command.variables.items()
        if not is_set_by_launcher(name)
    ]
    visible = _list_devices(job)
    if visible and not any(text.startswith("CUDA_VISIBLE_DEVICES=") for text in prefix):
        prefix.append(f"CUDA_VISIBLE_DEVICES={visible}")
    words = [*prefix, *(_quote(word) for word in _list_words_around(job))]
    inner = line.launcher.launcher
    if job.line.is_kept and inner in ("srun", "mpirun", PYTHON):
        return " ".join([*words, f"python {RUN}"])
    if job.world.is_one_machine and not job.line.is_kept:
        return " ".join([*words, f"python {RUN}"])
    return " ".join([*words, _write_torchrun(job), RUN])


def _list_words_around(job: LaunchJob) -> list[Word]:
    """srun or mpirun with their own words, up to what they start."""
    line = job.line
    everything = (*line.command.around, *line.command.words)
    if not job.line.is_kept:
        return []
    first = next(link for link in line.links if link.launcher in ("srun", "mpirun"))
    last = line.launcher.word if line.launcher.launcher not in ("srun", "mpirun") else line.script
    start = next(i for i, word in enumerate(everything) if word is first.word)
    stop = next((i for i, word in enumerate(everything) if word is last), len(everything))
    return list(everything[start:stop])


def _write_torchrun(job: LaunchJob) -> str:
    """torchrun with what the line says of machines, and places to fill in."""
    if job.line.launcher.launcher == "torchrun":
        words = [
            " ".join([said.key, *(_quote(word) for word in said.values)])
            if said.name != "node_rank" or said.hole is not None or job.line.is_kept
            else f"{said.key} NODE_RANK"
            for said in job.line.launcher.said
            if said.name not in ("m", "module", "use_env", "no_python")
        ]
        return " ".join(["torchrun", *words])
    each = job.world.per_node
    parts = (
        ("nnodes", job.option("num_nodes", "num_machines"), job.world.nodes or "NODES"),
        ("nproc-per-node", None, "gpu" if each in (AUTO, None) else each),
        ("node-rank", job.option("node_rank", "machine_rank"), "NODE_RANK"),
        ("master-addr", job.option("master_addr", "main_process_ip"), "FIRST_MACHINE"),
        ("master-port", job.option("master_port", "main_process_port"), 29500),
    )
    said = [
        f"--{name}={_quote(found.values[0]) if found is not None and found.values else value}"
        for name, found, value in parts
    ]
    return " ".join(["torchrun", *said])


def _list_devices(job: LaunchJob) -> str:
    """The GPUs that the line chooses by number."""
    include = job.option("include", "i")
    if include is not None and include.hole is None:
        hosts = parse_resources(include.text)
        if len(hosts) == 1:
            return ",".join(next(iter(hosts.values())))
    chosen = job.option("gpu_ids")
    if chosen is not None and chosen.hole is None and chosen.text.lower() != "all":
        return chosen.text
    return ""


def _hide_secret(name: str, word: Word) -> Word:
    return Word(MASK, word.place) if is_secret(name) else word


def _quote(word: Word | Any) -> str:
    """A word as it is typed: holes stay as they are written."""
    text = word.text
    if not word.holes:
        return shlex.quote(text)
    return f'"{text}"' if re.search(r"[\s;&|<>]", text) else text
