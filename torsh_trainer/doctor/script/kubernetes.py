"""Mistakes in Kubernetes manifests that the API server accepts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torsh_trainer.doctor.script.base import PieceRule, ScriptMistake, ScriptPiece, node_at
from torsh_trainer.translate.nodes import Node

_INDEX = "batch.kubernetes.io/job-completion-index"
_OTHER_WORKLOADS = frozenset(
    (
        *("Pod", "Deployment", "StatefulSet", "DaemonSet", "CronJob"),
        *("JobSet", "TrainJob", "PyTorchJob", "MPIJob", "RayJob"),
    )
)
_LAUNCHERS = re.compile(r"torchrun|torch\.distributed|torsh_trainer|accelerate|deepspeed")
_RANKS = ("RANK", "NODE_RANK", "JOB_COMPLETION_INDEX", "GROUP_RANK")


def find_index_without_mode(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """The index of a pod in a Job that does not number its pods."""
    job = _job(piece)
    if job is None or _value(job, "completionMode") == "Indexed":
        return
    used = next((n for n, line in piece.lines() if "job-completion-index" in line.lower()), None)
    used = used or next((n for n, line in piece.lines() if "JOB_COMPLETION_INDEX" in line), None)
    if used is not None:
        yield piece.mistake(
            "job_is_not_indexed",
            used,
            why="only pods of an Indexed Job have the annotation: here the variable is empty in "
            "every pod, and none knows its rank",
            fix="spec: completionMode: Indexed",
        )


def find_any_pod_as_master(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """MASTER_ADDR that names a service, and so any of the job's pods."""
    job = _job(piece)
    if job is None or _number(job, "parallelism") < 2:
        return
    name = node_at(piece.root, "metadata", "name")
    first = f"{name.value if name is not None else 'JOB'}-0"
    for container in _containers(job):
        for entry in _environment(container):
            address = _value(entry, "value")
            if _value(entry, "name") == "MASTER_ADDR" and address and "-0" not in str(address):
                at = node_at(entry, "value")
                assert at is not None
                yield piece.mistake(
                    "master_is_any_pod",
                    at.place.line,
                    why=f"{address} has the address of every pod that its selector finds (a "
                    "headless service gives all): each rank may ask another one",
                    fix=f"MASTER_ADDR={first}.{address}, with completionMode: Indexed and "
                    f"subdomain: {address} in the pod's spec",
                )


def find_missing_rank(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """WORLD_SIZE without anything that tells a pod its rank."""
    job = _job(piece)
    if job is None:
        return
    for container in _containers(job):
        entries = {str(_value(entry, "name")): entry for entry in _environment(container)}
        size = entries.get("WORLD_SIZE")
        words = " ".join(
            str(node.plain())
            for node in (node_at(container, "command"), node_at(container, "args"))
            if node is not None
        )
        starts_several = bool(_LAUNCHERS.search(words))
        if size is None or starts_several or "RANK" in entries:
            continue
        told = [name for name in _RANKS if name in entries]
        has = f"{', '.join(told)} is set, and no RANK" if told else "nothing says a pod's rank"
        yield piece.mistake(
            "pod_has_no_rank",
            size.place.line,
            why=f"{has}: a program that reads RANK and WORLD_SIZE stops, or takes every pod for "
            "rank 0",
            fix="RANK by fieldRef to metadata.annotations['batch.kubernetes.io/"
            "job-completion-index'] (one process a pod), or start with torchrun "
            "--node-rank $(JOB_COMPLETION_INDEX); python -m torsh_trainer reads the index itself",
        )


def find_world_of_another_size(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """WORLD_SIZE, completions and parallelism that differ."""
    job = _job(piece)
    if job is None:
        return
    pods, at_once = _number(job, "completions"), _number(job, "parallelism")
    if pods and at_once and at_once < pods:
        node = node_at(job, "parallelism")
        assert node is not None
        yield piece.mistake(
            "pods_wait_for_one_another",
            node.place.line,
            why=f"{at_once} of {pods} pods run at once: they wait for ranks that start after them",
            fix=f"parallelism: {pods}",
        )


def find_small_shared_memory(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """GPUs in a pod with 64 MB of /dev/shm."""
    job = _job(piece)
    if job is None:
        return
    for container in _containers(job):
        gpu = next((key for key in _resources(container, "limits") if key.endswith("/gpu")), None)
        mounts = node_at(container, "volumeMounts")
        has_shm = mounts is not None and "/dev/shm" in str(mounts.plain())
        if gpu is not None and not has_shm:
            yield piece.mistake(
                "shared_memory_of_64_mb",
                container.place.line,
                why="/dev/shm of a pod has 64 MB: NCCL and loader workers end in Bus error",
                fix="volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 8Gi}}], and "
                "volumeMounts: [{name: shm, mountPath: /dev/shm}]",
            )


def find_restarts_alone(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """A pod that is restarted in place while the others wait for the one that failed."""
    job = _job(piece)
    template = node_at(job, "template", "spec")
    if job is None or template is None or _number(job, "parallelism") < 2:
        return
    policy = node_at(template, "restartPolicy")
    if policy is not None and policy.value == "OnFailure":
        yield piece.mistake(
            "one_pod_restarts_alone",
            policy.place.line,
            why="a container that failed comes back alone: the others are in the middle of a "
            "collective, and fail in turn until backoffLimit",
            fix="restartPolicy: Never, and a JobSet (or backoffLimit: 0 and resume) that starts "
            "all of them anew",
        )


def find_odd_resources(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """GPUs in parts, or requested without a limit."""
    job = _job(piece)
    for container in _containers(job) if job is not None else ():
        limits, requests = _resources(container, "limits"), _resources(container, "requests")
        for key, (value, line) in {**requests, **limits}.items():
            if not key.endswith("/gpu"):
                continue
            if not re.fullmatch(r"\d+", str(value)):
                yield piece.mistake(
                    "part_of_a_gpu",
                    line,
                    why=f"{key} is counted in whole GPUs: the API server refuses {value}",
                    fix=f"{key}: 1",
                )
            elif key not in limits:
                yield piece.mistake(
                    "gpu_without_limit",
                    line,
                    why="GPUs are given by limits: a request alone is refused",
                    fix=f"limits: {{{key}: {value}}}",
                )


def why_not_judged(piece: ScriptPiece) -> str:
    """Why a workload is not looked at; empty for a Job, and for what starts nothing."""
    kind = str(_value(piece.root, "kind")) if piece.root is not None else ""
    return f"of kind {kind}: only Jobs are judged" if kind in _OTHER_WORKLOADS else ""


def _job(piece: ScriptPiece) -> Node | None:
    if piece.root is None or _value(piece.root, "kind") != "Job":
        return None
    return node_at(piece.root, "spec")


def _containers(job: Node) -> list[Node]:
    found = node_at(job, "template", "spec", "containers")
    return [node for node in found.value if node.is_mapping] if found and found.is_list else []


def _environment(container: Node) -> list[Node]:
    found = node_at(container, "env")
    return [node for node in found.value if node.is_mapping] if found and found.is_list else []


def _resources(container: Node, kind: str) -> dict[str, tuple[object, int]]:
    found = node_at(container, "resources", kind)
    if found is None or not found.is_mapping:
        return {}
    return {key: (entry.node.value, entry.place.line) for key, entry in found.value.items()}


def _value(node: Node, key: str) -> object:
    found = node_at(node, key)
    return None if found is None else found.value


def _number(node: Node, key: str) -> int:
    value = _value(node, key)
    return value if isinstance(value, int) else 0


RULES: tuple[PieceRule, ...] = (
    find_index_without_mode,
    find_any_pod_as_master,
    find_missing_rank,
    find_world_of_another_size,
    find_small_shared_memory,
    find_restarts_alone,
    find_odd_resources,
)
