"""Mistakes in shell scripts: how processes are started, and what they are told."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torsh_trainer.doctor.script import batch
from torsh_trainer.doctor.script.base import PieceRule, ScriptMistake, ScriptPiece
from torsh_trainer.doctor.script.shell_reading import (
    StartedCommand,
    assignments_of,
    commands_of,
    flag_number,
    is_open_quote,
    number_of,
    read_shell,
)
from torsh_trainer.environments.reading import LOOPBACK
from torsh_trainer.errors import ConfigError

_OWN_NAME = re.compile(r"\$\(\s*hostname\b|`\s*hostname\b|\$\{?HOSTNAME\b")
_ONE_LINE = re.compile(r"echo\s+\$\{?(\w+)\}?\s*\|\s*(head|sed|awk\s+'?NR)")
_LAUNCH = re.compile(r"\b(torchrun|srun|mpirun|deepspeed|accelerate launch|python3?)\b.*\|\s*tee\b")
_PORTS = re.compile(r"(?<![\d.])(\d{2,5})\s*[:-]\s*(\d{2,5})(?=/tcp\b|/udp\b|\s|$|\")")
_FIREWALLS = ("ufw", "iptables", "ip6tables", "firewall-cmd", "aws", "gcloud", "az")
_EPHEMERAL = (32768, 60999)
_UNREAD = {
    "NCCL_TIMEOUT": "neither NCCL nor torch reads it: init_process_group(timeout=...), or "
    "comm.timeout_s",
    "NCCL_BLOCKING_WAIT": "torch reads TORCH_NCCL_BLOCKING_WAIT since 2.2",
    "NCCL_ASYNC_ERROR_HANDLING": "torch reads TORCH_NCCL_ASYNC_ERROR_HANDLING since 2.2",
    "GLOO_TIMEOUT_MS": "gloo does not read it: init_process_group(timeout=...)",
    "TORCH_NCCL_TIMEOUT": "nobody reads it: init_process_group(timeout=...), or comm.timeout_s",
}


def find_open_quote(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """The script cannot be read to its end."""
    script = read_shell(piece)
    if isinstance(script, ConfigError) and is_open_quote(piece, script):
        yield piece.mistake(
            "quote_is_not_closed",
            int(script.facts["line"]),
            why="a quotation mark that nothing closes: the shell ends there with 'unexpected EOF'",
            fix=script.fix,
        )


def find_unknown_options(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """An option that a launcher does not have."""
    for started in commands_of(piece):
        launch = started.launch
        for link in launch.links if launch is not None else ():
            for problem in link.problems:
                yield piece.mistake(
                    "launcher_refuses_an_option",
                    problem.place.line or started.line,
                    why=f"{problem.what}: it ends before it has started anything",
                    fix=problem.fix,
                )


def find_windows_lines(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """Lines that end as Windows has them."""
    if piece.is_whole and "\r\n" in piece.text:
        yield piece.mistake(
            "windows_lines",
            1,
            why="each line ends in a carriage return: '/bin/bash^M: bad interpreter', and the "
            "last word of each command has one more letter",
            fix=f"sed -i 's/\\r$//' {piece.file}",
        )


def find_partial_world(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """One process on each host, told that it is local rank 0 of a larger world."""
    sizes = {name: number_of(word.text) for name, word, _ in assignments_of(piece)}
    hosts = _count_array(piece)
    for started in commands_of(piece):
        size, local = _number(started, "WORLD_SIZE"), _number(started, "LOCAL_RANK")
        if size is None or local is None or started.inner is not None:
            continue
        line = _line_of(piece, started, "LOCAL_RANK")
        if started.remote and (hosts is None or hosts < size):
            each = next((n for key, n in sizes.items() if n and "PER_NODE" in key), None)
            yield piece.mistake(
                "ranks_are_not_started",
                line,
                why=f"each host starts one process with LOCAL_RANK={local}, and WORLD_SIZE={size}: "
                f"{'the others' if hosts is None else f'{size - hosts} ranks'} never come",
                fix=f"torchrun --nnodes {hosts or 'HOSTS'} --nproc-per-node {each or 'GPUS'} "
                "--node-rank $i --master-addr ... on each host",
            )


def find_multiplied_node_rank(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """NODE_RANK that counts processes."""
    for name, word, line in assignments_of(piece):
        if name in ("NODE_RANK", "GROUP_RANK") and re.search(r"\$\(\(.*\*.*\)\)", word.text):
            yield piece.mistake(
                "node_rank_counts_processes",
                line or piece.first,
                why="NODE_RANK is the number of the host (0, 1, 2, ...): a product is a host that "
                "does not exist",
                fix=f"{name}=$i; the first rank of a host is RANK",
            )


def find_overridden_ranks(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """RANK for torchrun, which numbers its processes itself."""
    for started in commands_of(piece):
        link = started.link("torchrun")
        if link is None or link.find("nnodes") is not None:
            continue
        rank, size = _number(started, "RANK"), _number(started, "WORLD_SIZE")
        each = flag_number(link, "nproc_per_node") or 1
        if rank is None and (size is None or size <= each):
            continue
        nodes = size // each if size else 2
        node = rank // each if rank is not None else "R"
        yield piece.mistake(
            "torchrun_overrides_rank",
            started.line,
            why=f"torchrun without --nnodes starts a job of {each} process(es) of its own, and "
            "sets RANK and WORLD_SIZE itself: each host trains alone, without an error",
            fix=f"torchrun --nnodes={nodes} --node-rank={node} --nproc-per-node={each} "
            "--master-addr=$MASTER_ADDR --master-port=$MASTER_PORT ...",
        )


def find_own_master(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """The master's address asked of each host for itself."""
    for started in commands_of(piece):
        link = started.link("torchrun", "accelerate", "deepspeed")
        said = link.find("master_addr", "main_process_ip", "rdzv_endpoint") if link else None
        if said is None or link is None or started.link("srun", "mpirun") is not None:
            continue
        nodes = link.find("nnodes", "num_machines", "num_nodes")
        if _OWN_NAME.search(said.text) and (nodes is None or nodes.text not in ("1", "1:1")):
            slurm = "SLURM" in piece.text
            yield piece.mistake(
                "master_is_each_host",
                said.place.line,
                why=f"{said.text} is another address on each host: each waits at its own",
                fix='--master_addr=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
                if slurm
                else "--master_addr=FIRST_HOST, the same on every host",
            )


def find_joined_list(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """A list of hosts put on one line before its first line is taken."""
    lists = {
        name
        for name, word, _ in assignments_of(piece)
        if re.search(r"\$\(.*\b(cat|sort|uniq|scontrol|hostnames)\b", word.text)
    }
    for number, line in piece.lines():
        code = line.split(" #")[0]
        for name, _ in _ONE_LINE.findall(code):
            if name in lists and not line.lstrip().startswith("#"):
                yield piece.mistake(
                    "list_on_one_line",
                    number,
                    why=f"without quotes echo ${name} prints all hosts on one line: the first "
                    "line is the whole list",
                    fix=code.strip().replace(f"${name}", f'"${name}"')
                    + ", or head -n 1 of the file itself",
                )


def find_opened_ports(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """Ports opened for NCCL or gloo that they do not take."""
    ports = {"29500"} | {w.text for n, w, _ in assignments_of(piece) if n == "MASTER_PORT"}
    for started in commands_of(piece):
        words = [word for word in started.words if word != "sudo"]
        if not words or words[0] not in _FIREWALLS:
            continue
        text = " ".join(words)
        for low, high in ((int(a), int(b)) for a, b in _PORTS.findall(text)):
            if low >= high or (low <= _EPHEMERAL[0] and high >= _EPHEMERAL[1]):
                continue
            has_master = any(low <= int(port) <= high for port in ports if port.isdigit())
            line = next(
                (n for n, said in piece.lines() if n >= started.line and f"{low}" in said),
                started.line,
            )
            why = (
                f"NCCL and gloo take ports that the system gives out (ip_local_port_range, "
                f"{_EPHEMERAL[0]}-{_EPHEMERAL[1]}); no option of theirs names {low}-{high}"
            )
            if has_master:
                why = (
                    f"{low}-{high} holds the port where processes meet, and none of those that "
                    "they exchange over: the first collective hangs"
                )
            yield piece.mistake(
                "ports_of_collectives_stay_closed",
                line,
                why=why,
                fix="open all TCP ports among the hosts of the job (ufw allow from NETWORK), or "
                "sysctl net.ipv4.ip_local_port_range and that range",
            )


def find_unread_variables(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """Variables that nothing reads."""
    for name, _, line in assignments_of(piece):
        if name in _UNREAD:
            yield piece.mistake(
                "variable_that_nothing_reads",
                line,
                why=f"{name} changes nothing",
                fix=_UNREAD[name],
            )


def find_lost_exit_code(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """A launch whose exit code is that of ``tee``."""
    if "pipefail" in piece.text or "PIPESTATUS" in piece.text or not piece.is_whole:
        return
    for number, line in piece.join_lines():
        if _LAUNCH.search(line):
            yield piece.mistake(
                "exit_code_is_lost",
                number,
                why="the exit code of a pipe is tee's: a job that failed counts as done, and is "
                "neither requeued nor noticed",
                fix="set -o pipefail, at the top",
            )


def find_local_master(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """The loopback as the master of several hosts."""
    for started in commands_of(piece):
        link = started.link("torchrun", "accelerate", "deepspeed")
        if link is None:
            continue
        nodes = flag_number(link, "nnodes", "num_machines", "num_nodes") or 1
        said = link.find("master_addr", "main_process_ip", "rdzv_endpoint")
        if nodes > 1 and said is not None and re.sub(r":\d+$", "", said.text) in LOOPBACK:
            yield piece.mistake(
                "master_is_the_loopback",
                said.place.line,
                why=f"{said.text} is each host itself, and the job has {nodes}",
                fix="the name or address of the first host",
            )


def find_unseen_gpus(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """More processes than the visible GPUs."""
    for started in commands_of(piece):
        link, mask = started.inner, started.variables.get("CUDA_VISIBLE_DEVICES")
        each = flag_number(link, "nproc_per_node", "num_processes", "num_gpus")
        if mask is None or mask.open or each is None:
            continue
        seen = len([text for text in mask.text.split(",") if text.strip()])
        nodes = flag_number(link, "num_machines") or 1
        if each > seen * nodes:
            yield piece.mistake(
                "more_processes_than_gpus",
                started.line,
                why=f"{each} processes, and CUDA_VISIBLE_DEVICES={mask.text} shows {seen} GPU(s): "
                "invalid device ordinal, or two on one",
                fix=f"--nproc-per-node={seen}, or name {each} GPUs",
            )


def find_small_container(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """``docker run --gpus`` with 64 MB of /dev/shm."""
    for started in commands_of(piece):
        words = [word for word in started.words if word != "sudo"]
        if words[:2] not in (["docker", "run"], ["podman", "run"]):
            continue
        text = " ".join(words)
        if "--gpus" in text and not re.search(r"--shm-size|--ipc[= ]host|/dev/shm", text):
            yield piece.mistake(
                "shared_memory_of_64_mb",
                started.line,
                why="/dev/shm of a container has 64 MB: NCCL and loader workers end in Bus error",
                fix=f"{words[0]} run --gpus ... --shm-size=8g (or --ipc=host)",
            )


def _number(started: StartedCommand, name: str) -> int | None:
    word = started.variables.get(name)
    return None if word is None or word.open else number_of(word.text)


def _line_of(piece: ScriptPiece, started: StartedCommand, name: str) -> int:
    """The line within a command of several lines on which a variable is set."""
    for number, line in piece.lines():
        if number >= started.line and re.search(rf"\b{name}=", line):
            return number
    return started.line


def _count_array(piece: ScriptPiece) -> int | None:
    """How many hosts an array of the script names."""
    found = re.search(r"^\s*(?:NODES|HOSTS|nodes|hosts)=\(([^)$]*)\)", piece.text, re.MULTILINE)
    return len(found[1].split()) if found else None


RULES: tuple[PieceRule, ...] = (
    find_open_quote,
    find_unknown_options,
    find_windows_lines,
    find_partial_world,
    find_multiplied_node_rank,
    find_overridden_ranks,
    find_own_master,
    find_local_master,
    find_joined_list,
    find_opened_ports,
    find_unread_variables,
    find_lost_exit_code,
    find_unseen_gpus,
    find_small_container,
    *batch.RULES,
)
