"""The launcher of Kubernetes: a run becomes an Indexed Job, one pod for each node."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.launchers.batch.options import check_text
from torsh_trainer.launchers.job_folder import CANCELLED, FOLDER, JobHandle, JobStatus
from torsh_trainer.launchers.kubernetes import options, told
from torsh_trainer.launchers.kubernetes.manifest import (
    POD_SCRIPT,
    RUN_LABEL,
    digest_folder,
    name_job,
    write_manifest,
)
from torsh_trainer.launchers.kubernetes.script import write_pod_script
from torsh_trainer.launchers.plan import JobRequest, PlannedFile
from torsh_trainer.launchers.submission import SubmissionPlan, SubmitLauncher, run_client

_MANIFEST = "kubernetes.yaml"
_SAYS = 'jsonpath={.kind} {.metadata.namespace}/{.metadata.name} {.metadata.uid}{"\\n"}'


@dataclass(frozen=True)
class KubernetesLauncher(SubmitLauncher):
    """Submits the run by kubectl, as an Indexed Job of ``nodes`` pods and a headless service.

    ``ntasks_per_node`` auto is ``gpus_per_node``, else 1. ``volumes`` are
    ``KIND:SOURCE:PATH[:ro]`` with KIND pvc, nfs, host or secret; one has to cover the run's folder,
    under the path that it has here. ``env`` are NAME=VALUE, ``env_from_secrets`` NAME=SECRET/KEY,
    ``labels`` and ``node_selector`` KEY=VALUE, ``tolerations`` ``KEY[=VALUE][:EFFECT]``,
    ``resources`` VENDOR/NAME=N. ``backoff_limit`` is how many failed pods are begun again; those
    that are preempted do not count, and exit code 2 ends the job. ``grace_s`` is the time to save
    after SIGTERM, ``ttl_s`` how long an ended job is kept, ``deadline_s`` how long it may run.
    ``working_dir`` is where the code lies in the image; None is this folder. What is None is left
    to the cluster.

    Raises:
        ConfigError: a knob makes no sense.
    """

    name = "kubernetes"
    client = "kubectl"

    nodes: int = 1
    ntasks_per_node: int | str = "auto"
    image: str | None = None
    image_pull_policy: str | None = None
    image_pull_secrets: tuple[str, ...] = ()
    context: str | None = None
    namespace: str | None = None
    gpus_per_node: int | None = None
    gpu_resource: str = "nvidia.com/gpu"
    cpus_per_node: int | float | str | None = None
    mem: str | int | None = None
    resources: tuple[str, ...] = ()
    shm_size: str | int | None = "8Gi"
    volumes: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    env_from_secrets: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    node_selector: tuple[str, ...] = ()
    tolerations: tuple[str, ...] = ()
    service_account: str | None = None
    priority_class: str | None = None
    run_as: str | None = None
    port: int = 29500
    backoff_limit: int = 6
    grace_s: int = 30
    deadline_s: int | None = None
    ttl_s: int | None = None
    job_name: str | None = None
    python: str = "python"
    working_dir: str | None = None
    wait_for_end: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        options.check_number("nodes", self.nodes, least=1, most=9999)
        if self.ntasks_per_node != "auto":
            options.check_number("ntasks_per_node", self.ntasks_per_node, least=1)  # type: ignore[arg-type]
        options.check_number("gpus_per_node", self.gpus_per_node, least=1)
        options.check_number("port", self.port, least=1, most=65535)
        for name in ("backoff_limit", "grace_s"):
            options.check_number(name, getattr(self, name))
        options.check_number("ttl_s", self.ttl_s)
        options.check_number("deadline_s", self.deadline_s, least=1)
        options.check_cpus(self.cpus_per_node)
        options.check_quantity("mem", self.mem)
        options.check_quantity("shm_size", self.shm_size)
        for name in ("image", "context", "job_name", "python", "working_dir", "gpu_resource"):
            check_text(name, getattr(self, name))
        for name in ("namespace", "service_account", "priority_class"):
            options.check_name(name, getattr(self, name))
        for item in self.image_pull_secrets:
            options.check_name("image_pull_secrets", item)
        if self.image_pull_policy not in (None, "Always", "IfNotPresent", "Never"):
            raise ConfigError(
                f"launcher.image_pull_policy={self.image_pull_policy} is none",
                fix="Always, IfNotPresent or Never",
            )
        if self.working_dir is not None and not Path(self.working_dir).is_absolute():
            raise ConfigError(
                f"launcher.working_dir={self.working_dir} is no absolute path",
                fix="give where your code lies in the image",
            )
        options.read_volumes(self.volumes)
        options.read_environment(self.env, self.env_from_secrets)
        options.read_resources(self.resources)
        options.read_pairs("labels", self.labels)
        options.read_pairs("node_selector", self.node_selector)
        options.read_user(self.run_as)
        for item in self.tolerations:
            options.read_toleration(item)

    @property
    def elsewhere(self) -> bool:
        return True

    @property
    def tasks_per_node(self) -> int:
        """Processes in each pod."""
        if self.ntasks_per_node != "auto":
            return int(self.ntasks_per_node)
        return self.gpus_per_node or 1

    # -- SubmitLauncher --------------------------------------------------------------------------

    def plan(self, request: JobRequest) -> SubmissionPlan:
        folder = request.run_dir / FOLDER
        manifest = PlannedFile(folder / _MANIFEST, write_manifest(self, request))
        within = request
        if self.working_dir is not None:
            within = replace(request, folder=Path(self.working_dir))
        script = write_pod_script(within, python=self.python, env=self._place(request.run_dir))
        create = (
            *self._kubectl("create"),
            "--validate=strict",
            f"--filename={_quote_item(manifest.path)}",
        )
        return SubmissionPlan(
            files=(*request.files, PlannedFile(folder / POD_SCRIPT, script, 0o755), manifest),
            commands=((*create, "--dry-run=server"), (*create, f"--output={_SAYS}")),
            run_dir=request.run_dir,
        )

    def submit(self, plan: SubmissionPlan) -> JobHandle:
        self.check_site()
        name = name_job(plan.run_dir, self.job_name)
        self._make_room(name, plan.run_dir)
        try:
            handle = super().submit(plan)
        except BaseException:
            self._clear(f"--selector={RUN_LABEL}={digest_folder(plan.run_dir)}")
            raise
        self._give_service(handle)
        return handle

    def check_site(self) -> None:
        if shutil.which("kubectl") is None:
            raise ResourceError(
                "there is no kubectl on the PATH of this machine",
                fix="install it (package kubernetes-client of Debian); launcher.dry_run=true shows "
                "the manifest here",
            )

    def read_id(self, output: str) -> str:
        for line in output.splitlines():
            words = line.split()
            if len(words) == 3 and words[0] == "Job":
                return words[1]
        raise ResourceError(
            f"kubectl has created the job and told no name: {output.strip()[:200]!r}",
            fix="kubectl get jobs shows it",
        )

    def explain_refusal(self, said: str) -> ConfigError | ResourceError:
        return told.explain_refusal(said, asdict(self))

    def ask(self, handle: JobHandle) -> JobStatus | None:
        cancelled = (handle.home / FOLDER / CANCELLED).exists()
        job = self._get(handle, "job", handle.id.rpartition("/")[2])
        if job is None:
            return JobStatus("cancelled") if cancelled else None
        uid = job["metadata"]["uid"]
        found = self._get(handle, "pods", f"--selector=batch.kubernetes.io/controller-uid={uid}")
        pods = (found or {}).get("items", [])
        events: list[dict[str, Any]] = []
        subject = told.find_subject(job, pods)
        if subject is not None:
            field = f"--field-selector=type=Warning,involvedObject.uid={subject}"
            events = (self._get(handle, "events", field) or {}).get("items", [])
        return told.tell_status(job, pods, events, cancelled=cancelled)

    def ask_to_save(self, handle: JobHandle) -> None:
        """Suspends the job: its pods get SIGTERM and ``grace_s``, and no others are made."""
        patch = json.dumps({"spec": {"suspend": True}})
        name = handle.id.rpartition("/")[2]
        self._do(handle, "patch", "job", name, "--type=merge", f"--patch={patch}")

    def end(self, handle: JobHandle) -> None:
        name = handle.id.rpartition("/")[2]
        words = ("--ignore-not-found", "--wait=false")
        self._do(handle, "delete", f"job/{name}", f"service/{name}", *words)
        # Pods go with their job, but with all of their grace; it does not matter where this fails.
        namespace = handle.id.rpartition("/")[0] or None
        pods = f"--selector=batch.kubernetes.io/job-name={name}"
        command = ("delete", "pods", pods, "--grace-period=1", *words)
        run_client(self._kubectl(*command, namespace=namespace))

    def cancel(self, handle: JobHandle, *, grace_s: float) -> JobStatus:
        status = super().cancel(handle, grace_s=grace_s)
        if status.state == "cancelled":
            self.end(handle)
        return status

    # -- kubectl ---------------------------------------------------------------------------------

    def _place(self, run_dir: Path) -> dict[str, str]:
        """What tells the processes of a pod their place, beside its index."""
        name = name_job(run_dir, self.job_name)
        return {
            "NNODES": str(self.nodes),
            "LOCAL_WORLD_SIZE": str(self.tasks_per_node),
            "MASTER_ADDR": f"{name}-0.{name}",
            "MASTER_PORT": str(self.port),
        }

    def _kubectl(self, *words: str, namespace: str | None = None) -> tuple[str, ...]:
        namespace = namespace or self.namespace
        return (
            "kubectl",
            *(() if self.context is None else (f"--context={self.context}",)),
            *(() if namespace is None else (f"--namespace={namespace}",)),
            *words,
        )

    def _get(self, handle: JobHandle, *words: str) -> dict[str, Any] | None:
        """Objects of the job's namespace; None where there is none of that name."""
        namespace = handle.id.rpartition("/")[0] or None
        command = self._kubectl("get", *words, "--output=json", namespace=namespace)
        done = run_client(command)
        if done.returncode and told.is_absent(done.stderr):
            return None
        if done.returncode:
            raise self.explain_refusal(done.stderr)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def _do(self, handle: JobHandle, *words: str) -> None:
        namespace = handle.id.rpartition("/")[0] or None
        done = run_client(self._kubectl(*words, namespace=namespace))
        if done.returncode and not told.is_absent(done.stderr):
            raise self.explain_refusal(done.stderr)

    def _make_room(self, name: str, run_dir: Path) -> None:
        """Takes away the ended job that was submitted from ``run_dir`` before.

        Raises:
            ConfigError: the job of that name is another's, or goes on.
        """
        handle = JobHandle(self.name, name, str(run_dir), "")
        job = self._get(handle, "job", name)
        if job is None:
            return
        ours = job["metadata"].get("labels", {}).get(RUN_LABEL) == digest_folder(run_dir)
        status = told.tell_status(job, (), (), cancelled=False)
        if not ours or not (status.ended or job["spec"].get("suspend")):
            raise ConfigError(
                f"the cluster has a job {name} already, and it is {status}",
                fix=f"kubectl delete job {name} ends it; or choose another folder (hydra.run.dir)",
            )
        self.end(handle)

    def _clear(self, selector: str) -> None:
        """Takes away what a submission that was refused has made of the run."""
        words = ("--ignore-not-found", "--wait=false")
        run_client(self._kubectl("delete", "jobs,services", selector, *words))

    def _give_service(self, handle: JobHandle) -> None:
        """Makes the service the job's own, so that both go together."""
        name = handle.id.rpartition("/")[2]
        try:
            job = self._get(handle, "job", name)
            owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name}
            owner["uid"] = job["metadata"]["uid"] if job else ""
            patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
            self._do(handle, "patch", "service", name, "--type=merge", f"--patch={patch}")
        except (ConfigError, ResourceError) as error:
            print(
                f"note: the service {name} stays when its job is gone: {error.sentence}",
                file=sys.stderr,
            )


def _quote_item(path: Path) -> str:
    """``path`` as an item of a flag that kubectl reads as a line of CSV."""
    text = str(path)
    return '"' + text.replace('"', '""') + '"' if any(c in text for c in ',"\n\r') else text
