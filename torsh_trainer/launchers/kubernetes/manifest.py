"""The manifest of a run: an Indexed Job, and the headless service by which its pods meet."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import yaml

from torsh_trainer.errors import ConfigError
from torsh_trainer.launchers.job_folder import FOLDER
from torsh_trainer.launchers.kubernetes import options
from torsh_trainer.launchers.plan import JobRequest

if TYPE_CHECKING:
    from torsh_trainer.launchers.kubernetes.launcher import KubernetesLauncher

POD_SCRIPT = "pod.sh"
RUN_LABEL = "torsh-trainer/run"
"""A label that holds the digest of the run's folder, on all that a run has in the cluster."""

NEVER_AGAIN = (2, 126, 127)
"""Exit codes that begin no pod again: a bad configuration, and what bash cannot start."""

_WORD = re.compile(r"[A-Za-z/][\w./:@ -]{3,}")
_LENGTH = 42
"""Of a name before its digest: pods are called after it, and host names have 63 characters."""


def digest_folder(run_dir: Path) -> str:
    """Eight characters that tell the folders of runs apart."""
    return hashlib.sha256(str(run_dir).encode()).hexdigest()[:8]


def name_job(run_dir: Path, job_name: str | None) -> str:
    """The name of job and service: a label of DNS, unique by the run's folder."""
    wanted = job_name or "-".join(run_dir.parts[-2:])
    plain = re.sub(r"[^a-z0-9]+", "-", wanted.lower()).strip("-")[:_LENGTH].strip("-")
    name = f"{plain}-{digest_folder(run_dir)}" if plain else digest_folder(run_dir)
    return name if name[0].isalpha() else f"run-{name}"


def write_manifest(launcher: KubernetesLauncher, request: JobRequest) -> str:
    """The manifest as YAML.

    Raises:
        ConfigError: there is no image, or no volume covers the run's folder.
    """
    if launcher.image is None:
        raise ConfigError(
            "launcher.image is not set, and pods run nothing else",
            fix="launcher.image=REGISTRY/NAME:TAG, with torsh_trainer and torch in it",
        )
    _check_covered(launcher, request)
    parts = [_write_service(launcher, request), _write_job(launcher, request)]
    return yaml.dump_all(parts, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=100)


class _Plain(yaml.SafeDumper):
    """Writes what comes twice out twice, without anchors, and quotes texts such as 1e5, which
    kubectl would take for numbers: PyYAML knows another YAML than it."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.Node:
        """``text`` as a scalar, quoted unless it reads as a word to all."""
        style = None if _WORD.fullmatch(text) else "'"
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Plain.add_representer(str, _Plain.represent_text)


def _check_covered(launcher: KubernetesLauncher, request: JobRequest) -> None:
    volumes = options.read_volumes(launcher.volumes)
    run_dir = PurePosixPath(request.run_dir)
    if not any(volume.covers(run_dir) for volume in volumes):
        raise ConfigError(
            f"no volume of launcher.volumes covers the run's folder {run_dir}: pods would not see "
            "it",
            fix="launcher.volumes=['pvc:CLAIM:PATH'], with PATH the shared folder that this "
            "machine sees too, and hydra.run.dir below it",
        )
    folder = PurePosixPath(request.folder)
    if launcher.working_dir is None and not any(folder.is_relative_to(v.path) for v in volumes):
        raise ConfigError(
            f"no volume of launcher.volumes covers {folder}, where the command was typed",
            fix="type it below a shared folder, or launcher.working_dir=PATH, where your code lies "
            "in the image",
        )


def _metadata(launcher: KubernetesLauncher, request: JobRequest, name: str) -> dict[str, Any]:
    labels: dict[str, str] = {
        **options.read_pairs("labels", launcher.labels),
        "app.kubernetes.io/name": "torsh-trainer",
        "app.kubernetes.io/instance": name,
        RUN_LABEL: digest_folder(request.run_dir),
    }
    return {
        "name": name,
        "labels": labels,
        "annotations": {"torsh-trainer/run-dir": str(request.run_dir)},
    }


def _write_service(launcher: KubernetesLauncher, request: JobRequest) -> dict[str, Any]:
    name = name_job(request.run_dir, launcher.job_name)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(launcher, request, name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # names are there before containers have started
            "selector": {"batch.kubernetes.io/job-name": name},
            "ports": [{"name": "rendezvous", "port": launcher.port}],
        },
    }


def _write_job(launcher: KubernetesLauncher, request: JobRequest) -> dict[str, Any]:
    name = name_job(request.run_dir, launcher.job_name)
    metadata = _metadata(launcher, request, name)
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    again = {"operator": "In", "values": [*NEVER_AGAIN]}
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": launcher.nodes,
        "parallelism": launcher.nodes,
        "backoffLimit": launcher.backoff_limit,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [disrupted]},
                {"action": "FailJob", "onExitCodes": again},
            ]
        },
    }
    if launcher.deadline_s is not None:
        spec["activeDeadlineSeconds"] = launcher.deadline_s
    if launcher.ttl_s is not None:
        spec["ttlSecondsAfterFinished"] = launcher.ttl_s
    spec["template"] = {
        "metadata": {"labels": metadata["labels"], "annotations": metadata["annotations"]},
        "spec": _write_pod(launcher, request, name),
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _write_pod(launcher: KubernetesLauncher, request: JobRequest, name: str) -> dict[str, Any]:
    volumes = options.read_volumes(launcher.volumes)
    shm: dict[str, Any] = {"medium": "Memory"}
    if launcher.shm_size is not None:
        shm["sizeLimit"] = str(launcher.shm_size)
    pod: dict[str, Any] = {
        "restartPolicy": "Never",  # of a pod alone; the Job makes new ones
        "subdomain": name,
        "terminationGracePeriodSeconds": launcher.grace_s,
        "enableServiceLinks": False,  # variables of services could look like ours
    }
    told = (
        ("serviceAccountName", launcher.service_account),
        ("priorityClassName", launcher.priority_class),
        ("nodeSelector", options.read_pairs("node_selector", launcher.node_selector)),
        ("tolerations", [options.read_toleration(item) for item in launcher.tolerations]),
        ("imagePullSecrets", [{"name": item} for item in launcher.image_pull_secrets]),
        ("securityContext", options.read_user(launcher.run_as)),
    )
    pod |= {key: value for key, value in told if value}
    pod["containers"] = [_write_container(launcher, request)]
    pod["volumes"] = [
        {"name": "shm", "emptyDir": shm},
        *({"name": f"volume-{i}", **volume.write_source()} for i, volume in enumerate(volumes)),
    ]
    return pod


def _write_container(launcher: KubernetesLauncher, request: JobRequest) -> dict[str, Any]:
    volumes = options.read_volumes(launcher.volumes)
    script = options.escape_references(str(request.run_dir / FOLDER / POD_SCRIPT))
    container: dict[str, Any] = {
        "name": "trainer",
        "image": launcher.image,
        "command": ["/bin/bash", script],
        "ports": [{"name": "rendezvous", "containerPort": launcher.port}],
        "volumeMounts": [
            {"name": "shm", "mountPath": options.SHM},
            *(volume.write_mount(f"volume-{i}") for i, volume in enumerate(volumes)),
        ],
        # Its last words, for status: they outlive its log.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if launcher.image_pull_policy is not None:
        container["imagePullPolicy"] = launcher.image_pull_policy
    env = options.read_environment(launcher.env, launcher.env_from_secrets)
    if env:
        container["env"] = env
    resources = _write_resources(launcher)
    if resources:
        container["resources"] = {"limits": resources, "requests": dict(resources)}
    if any(key.startswith("rdma/") for key in resources):
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}  # to register memory
    return container


def _write_resources(launcher: KubernetesLauncher) -> dict[str, str]:
    """Limits and requests are the same: a run is not the one that is evicted first."""
    told = {
        "cpu": launcher.cpus_per_node,
        "memory": launcher.mem,
        launcher.gpu_resource: launcher.gpus_per_node,
    }
    found = {key: str(value) for key, value in told.items() if value is not None}
    return {**found, **options.read_resources(launcher.resources)}
