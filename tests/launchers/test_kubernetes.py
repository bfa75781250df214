"""Runs on a Kubernetes whose API server is real: trained in two pods, stopped, begun again, told,
refused. Pods are processes of this machine (``kubernetes_lab.py``)."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.door import Door
from tests.launchers.conftest import PATIENCE_S, losses
from tests.launchers.kubernetes import KubeLab, free_ports
from torsh_trainer.launchers.job_folder import JobHandle
from torsh_trainer.launchers.kubernetes.manifest import name_job

HELD = "+callbacks.held={_target_: held.Held}"


def words(home: Path, *more: str) -> tuple[str, ...]:
    (port,) = free_ports(1)
    return (
        *("+recipe=quick.yaml", "strategy=ddp", "launcher=kubernetes", "hydra.run.dir=run"),
        *("launcher.image=none", f"launcher.volumes=['host:{home}:{home}']"),
        *(f"launcher.python={sys.executable}", f"launcher.port={port}", *more),
    )


def name_of(run_dir: Path) -> str:
    return JobHandle.read(run_dir).id.rpartition("/")[2]


def wait_for(path: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < end, f"there is no {path}"
        time.sleep(0.05)


def only(text: str) -> dict:
    (row,) = json.loads(text)["jobs"]
    return row


def outputs(run_dir: Path) -> str:
    return "\n".join(path.read_text() for path in sorted((run_dir / "logs").glob("*.out")))


# -- runs -----------------------------------------------------------------------------------------


def test_two_pods_train_as_two_local_processes_do(kube, door, home, local_losses):
    token = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub"}}
    kube.run("create", "--filename=-", given={**token, "stringData": {"token": "s3cr3t$(A)"}})
    (home / "asking.py").write_text(
        "import os\nfrom torsh_trainer import Callback\n\n\n"
        "class Asking(Callback):\n"
        "    def on_step(self, report):\n"
        "        assert os.environ['HF_TOKEN'] == 's3cr3t$(A)'\n"
        "        assert os.environ['PLAIN'] == '$(HF_TOKEN) $$'\n"
    )
    given = (
        "+callbacks.asking={_target_: asking.Asking}",
        "launcher.env_from_secrets=['HF_TOKEN=hub/token']",
        "launcher.env=['PLAIN=$(HF_TOKEN) $$']",
    )
    try:
        answer = door(*words(home, "launcher.nodes=2", *given))
        assert answer.code == 0, answer.err
        name = name_of(home / "run")
        assert answer.out == f"submitted: kubernetes job default/{name}, {home}/run\n"
        assert door("jobs", "wait", "run").code == 0, outputs(home / "run")
    finally:
        kube.run("delete", "secret", "hub")
    assert losses(home / "run") == local_losses
    row = only(door("jobs", "status", "run", "--json").out)
    assert (row["state"], row["exit_code"], row["restarts"]) == ("succeeded", 0, 0)
    assert json.loads((home / "run" / "result.json").read_text())["world_size"] == 2
    assert door("jobs", "logs", "run").out == (home / "run" / "logs" / "job.out").read_text()
    pods = kube.get("pods", f"--selector=job-name={name}")["items"]
    assert sorted(pod["spec"]["hostname"] for pod in pods) == [f"{name}-0", f"{name}-1"]
    assert all(pod["spec"]["subdomain"] == name for pod in pods)
    (owner,) = kube.get("service", name)["metadata"]["ownerReferences"]
    assert owner["uid"] == kube.get("job", name)["metadata"]["uid"]
    for file in (home / "run").rglob("*"):
        assert file.is_dir() or b"s3cr3t" not in file.read_bytes()


def test_a_pod_of_two_processes_is_preempted_and_goes_on_bit_for_bit(
    kube, door, home, local_losses
):
    more = ("launcher.ntasks_per_node=2", "launcher.backoff_limit=0", HELD)
    more += ("checkpoint.resume=never",)  # holds for the first attempt alone
    assert door(*words(home, *more)).code == 0
    wait_for(home / "held")
    (pod,) = kube.get("pods", f"--selector=job-name={name_of(home / 'run')}")["items"]
    disrupted = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    kube.write_status("pod", pod["metadata"]["name"], {"conditions": [disrupted]})
    kube.run("delete", "pod", pod["metadata"]["name"], "--wait=false", "--grace-period=200")
    time.sleep(1)  # the signal is on its way; a save that comes before it would only save later
    (home / "go").touch()
    assert door("jobs", "wait", "run").code == 0, outputs(home / "run")
    assert "resumed" in outputs(home / "run") + (home / "run/logs/rank-0.log").read_text()
    assert losses(home / "run") == local_losses


@pytest.mark.exhaustive
def test_a_cancelled_run_saves_and_is_resumed_bit_for_bit(kube, door, home, local_losses):
    assert door(*words(home, "launcher.nodes=2", "launcher.grace_s=200", HELD)).code == 0
    wait_for(home / "held")
    name = name_of(home / "run")
    cancelling = subprocess.Popen(
        [sys.executable, "-m", "torsh_trainer", "jobs", "cancel", "run", "--grace", "200"]
    )
    end = time.monotonic() + PATIENCE_S
    while not kube.get("job", name)["spec"].get("suspend"):
        assert time.monotonic() < end
        time.sleep(0.1)
    time.sleep(1)
    (home / "go").touch()
    assert cancelling.wait() == 0
    assert only(door("jobs", "status", "run", "--json").out)["state"] == "cancelled"
    assert len(list((home / "run" / "checkpoints").iterdir())) == 1
    assert door("jobs", "wait", "run").code == 130
    assert door("jobs", "resume", "run").code == 0
    assert door("jobs", "wait", "run").code == 0, outputs(home / "run")
    assert losses(home / "run") == local_losses


@pytest.mark.exhaustive
def test_a_bad_configuration_ends_the_job_and_no_pod_is_begun_again(kube, door, home):
    (home / "refusing.py").write_text(
        "import os\nfrom torsh_trainer import Callback\n"
        "from torsh_trainer.errors import ConfigError\n\n\n"
        "class Refusing(Callback):\n"
        "    def on_step(self, report):\n"
        "        if os.environ['JOB_COMPLETION_INDEX'] == '1' and report.step == 3:\n"
        "            raise ConfigError('vars.odd=1 is odd', fix='make it even')\n"
    )
    refusing = "+callbacks.refusing={_target_: refusing.Refusing}"
    assert door(*words(home, "launcher.nodes=2", refusing)).code == 0
    answer = door("jobs", "wait", "run")
    assert "is failed (exit code 2): vars.odd=1 is odd; make it even" in answer.out
    assert answer.code == 2
    name = name_of(home / "run")
    reasons = {one["reason"] for one in kube.get("job", name)["status"]["conditions"]}
    assert reasons == {"PodFailurePolicy"}
    second = f"--selector=job-name={name},batch.kubernetes.io/job-completion-index=1"
    assert len(kube.get("pods", second)["items"]) == 1


@pytest.mark.exhaustive
def test_a_pod_that_fails_is_begun_again_and_goes_on(kube, door, home, local_losses):
    (home / "killed.py").write_text(
        "import os, signal\nfrom pathlib import Path\nfrom torsh_trainer import Callback\n\n\n"
        "class Killed(Callback):\n"
        "    def on_step(self, report):\n"
        "        if report.step == 7 and not Path('once').exists():\n"
        "            Path('once').touch()\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    more = ("+callbacks.killed={_target_: killed.Killed}", "checkpoint.every_steps=5")
    assert door(*words(home, "launcher.ntasks_per_node=2", *more)).code == 0
    answer = door("jobs", "wait", "run")
    assert answer.code == 0, outputs(home / "run")
    assert "restarted 1 times" in answer.out
    assert losses(home / "run") == local_losses


# -- states, as the cluster writes them ----------------------------------------------------------


@pytest.fixture
def waiting(kube, door, home) -> str:
    """The name of a job of two pods that the lab leaves to the test."""
    answer = door(*words(home, "launcher.nodes=2", "launcher.labels=['lab=by-hand']"))
    assert answer.code == 0, answer.err
    return name_of(home / "run")


def read_status(door: Door) -> str:
    return door("jobs", "status", "run").out.partition(" is ")[2].strip()


def container(**state: dict) -> dict:
    one = {"name": "trainer", "image": "x", "imageID": "x", "ready": False, "restartCount": 0}
    return {"containerStatuses": [{**one, "state": state}]}


def warn(kube: KubeLab, kind: str, name: str, **event: str) -> None:
    """Writes an event, as a controller or a kubelet would."""
    involved = {"kind": kind, "name": name, "namespace": "default"}
    involved["uid"] = kube.get(kind, name)["metadata"]["uid"]
    head = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": f"{name}.1"}}
    given = {**head, "type": "Warning", "involvedObject": involved, **event}
    kube.run("create", "--filename=-", given=given)


def test_why_a_job_waits_is_told_in_words(kube, door, home, waiting):
    assert read_status(door) == "queued: its pods are not made yet"
    message = 'pods "x-0-a" is forbidden: exceeded quota: few, requested: pods=1, limited: pods=0'
    warn(kube, "Job", waiting, reason="FailedCreate", message=message)
    assert read_status(door) == f"queued: a quota of the namespace is used up: {message}"
    unfit = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    where = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    pod = kube.make_pod(waiting, 0, phase="Pending", conditions=[{**where, "message": unfit}])
    assert read_status(door) == f"queued: no node fits: {unfit} (Unschedulable)"
    kube.write_status("pod", pod, {"conditions": [{**where, "status": "True"}]})
    for reason, words in (
        ("ImagePullBackOff", "its image cannot be pulled (launcher.image, image_pull_secrets)"),
        ("CreateContainerConfigError", "a secret or a key of it is not there"),
        ("Strange", "it waits"),
    ):
        kube.write_status("pod", pod, container(waiting={"reason": reason, "message": "so"}))
        assert read_status(door).startswith(f"queued: pod {pod}: {words}")
        assert read_status(door).endswith(f": so ({reason})")
    kube.write_status("pod", pod, container(waiting={"reason": "ContainerCreating"}))
    warn(kube, "Pod", pod, reason="FailedMount", message="mount.nfs: access denied")
    assert read_status(door).endswith(": mount.nfs: access denied (ContainerCreating)")
    kube.write_status("pod", pod, {"phase": "Running", **container(running={})})
    assert read_status(door) == f"queued: a quota of the namespace is used up: {message}"
    kube.make_pod(waiting, 1, phase="Running")
    assert read_status(door) == "running"
    kube.run("patch", "job", waiting, "--type=merge", '--patch={"spec":{"suspend":true}}')
    assert read_status(door) == "queued: it is suspended, by a queue such as Kueue or by hand"


def fail_job(kube: KubeLab, name: str, reason: str, message: str = "") -> None:
    kinds = [{"type": kind, "status": "True"} for kind in ("FailureTarget", "Failed")]
    conditions = [{**kind, "reason": reason, "message": message} for kind in kinds]
    status = {"startTime": "2031-01-31T18:30:05Z", "failed": 1, "conditions": conditions}
    kube.write_status("job", name, status)


def test_the_pod_that_failed_is_told_with_its_last_words(kube, door, home, waiting):
    one = {"exitCode": 1, "finishedAt": "2031-01-31T18:30:09Z", "message": "x\nerror: no data\nz\n"}
    other = {"exitCode": 143, "finishedAt": "2031-01-31T18:30:08Z", "message": "stopped"}
    kube.make_pod(waiting, 1, phase="Failed", **container(terminated=other))
    pod = kube.make_pod(waiting, 0, phase="Failed", **container(terminated=one))
    fail_job(kube, waiting, "BackoffLimitExceeded")
    assert read_status(door) == f"failed (exit code 1): pod {pod}: no data"
    again = door("jobs", "wait", "run")
    assert again.code == 1


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (
            container(terminated={"exitCode": 137, "reason": "OOMKilled"}),
            "it used more memory than launcher.mem allows (OOMKilled)",
        ),
        (
            container(terminated={"exitCode": 127, "message": "no: No such file or directory"}),
            "no: No such file or directory (launcher.volumes, launcher.python)",
        ),
        ({"reason": "Evicted", "message": "The node was low on memory."}, "The node was low"),
    ],
)
def test_ends_without_words_are_explained(kube, door, home, waiting, state, words):
    kube.make_pod(waiting, 0, phase="Failed", **state)
    fail_job(kube, waiting, "BackoffLimitExceeded")
    assert words in read_status(door)


def test_a_deadline_is_told(kube, door, home, waiting):
    fail_job(kube, waiting, "DeadlineExceeded", "Job was active longer than specified deadline")
    assert read_status(door) == "failed (exit code 1): it reached launcher.deadline_s"


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        ("launcher.context=nope", 2, "launcher.context=nope: kubectl knows no such context"),
        ("launcher.context=gone", 1, "the cluster does not answer"),
        ("launcher.context=expired", 1, "the cluster does not take your credentials"),
        ("launcher.context=weak", 1, "you may not do this in the namespace of your context"),
        ("launcher.namespace=none", 2, "launcher.namespace=none: the cluster has no such"),
        ("launcher.resources=['a..b/c=1']", 2, "launcher.resources="),
        ("launcher.labels=['team=a b']", 2, "launcher.labels="),
    ],
)
def test_a_submission_that_is_refused_is_one_sentence_and_leaves_nothing(
    kube, door, home, more, code, said
):
    answer = door(*words(home, more))
    assert answer.code == code, answer.err
    assert said in answer.err
    assert answer.err.count("\n") == 1, answer.err
    assert not (home / "run").exists()
    assert kube.get("jobs,services", "--selector=torsh-trainer/run")["items"] == []


def test_without_kubectl_nothing_is_submitted(door, home, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    answer = door(*words(home))
    assert answer.code == 1
    assert "there is no kubectl on the PATH of this machine" in answer.err
    assert not (home / "run").exists()


def test_a_job_of_that_name_that_goes_on_is_left_alone(kube, door, home, waiting):
    uid = kube.get("job", waiting)["metadata"]["uid"]
    (home / "run" / "job.json").unlink()  # so that the folder tells nothing of it
    kube.make_pod(waiting, 0, phase="Running")
    answer = door(*words(home))
    assert answer.code == 2
    assert f"the cluster has a job {waiting} already" in answer.err
    assert kube.get("job", waiting)["metadata"]["uid"] == uid
    assert kube.get("service", waiting)["metadata"]["name"] == waiting


def test_what_has_the_name_already_and_is_not_the_runs_is_left_alone(kube, door, home):
    name = name_job(home / "run", None)
    meta = {"name": name, "labels": {"mine": "yes"}}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": meta}
    kube.run("create", "--filename=-", given={**service, "spec": {"ports": [{"port": 1}]}})
    try:
        answer = door(*words(home))
        assert answer.code == 2
        assert "the cluster has something of that name" in answer.err
        assert not (home / "run").exists()
        assert kube.get("service", name)["metadata"]["labels"] == meta["labels"]
        assert kube.get("jobs", "--selector=torsh-trainer/run")["items"] == []
    finally:
        kube.run("delete", "service", name)


# -- the manifest --------------------------------------------------------------------------------


def test_the_server_takes_every_knob_and_keeps_what_was_written(kube, door, home):
    """Strictly: a field that the server does not know, or drops, is an error."""
    more = (
        *("launcher.nodes=3", "launcher.gpus_per_node=8", "launcher.cpus_per_node=500m"),
        *("launcher.mem=64Gi", "launcher.resources=['rdma/hca=1','ephemeral-storage=5Gi']"),
        *("launcher.image_pull_policy=IfNotPresent", "launcher.image_pull_secrets=[reg,b.c]"),
        *("launcher.shm_size=null", "launcher.env=['A=b c','D=']", "launcher.namespace=default"),
        *("launcher.env_from_secrets=['HF_TOKEN=hub/token']", "launcher.service_account=trainer"),
        *("launcher.labels=['a=1e5','b=y','c=0o7','d=1_0','lab=by-hand']",),
        "launcher.priority_class=high",
        *("launcher.node_selector=['gpu=a100','x/y=']", "launcher.run_as='1000:100'"),
        "launcher.tolerations=['nvidia.com/gpu:NoSchedule','team=a','spot']",
        *("launcher.backoff_limit=2", "launcher.grace_s=90", "launcher.deadline_s=3600"),
        *("launcher.ttl_s=600", "launcher.job_name='My Job_9!'", "launcher.working_dir=/code"),
    )
    more_volumes = "'pvc:data/sub/x:/data:ro','nfs:srv/exp:/n','secret:keys:/keys'"
    volumes = f"launcher.volumes=['host:{home}:{home}',{more_volumes}]"
    answer = door(*words(home, *more, volumes))
    assert answer.code == 0, answer.err
    name = name_of(home / "run")
    assert name.startswith("my-job-9-")
    text = (home / "run" / "job" / "kubernetes.yaml").read_text()
    for written in yaml.safe_load_all(text):
        kept = kube.get(written["kind"], name)
        assert find_changed(written, kept) == []
    assert door("doctor", "script", "run/job/kubernetes.yaml", "run/job/pod.sh").code == 0


def find_changed(written: object, kept: object, place: str = "") -> list[str]:
    """Places of ``written`` that ``kept`` has not as they are."""
    if isinstance(written, dict) and isinstance(kept, dict):
        return [
            found
            for key, value in written.items()
            for found in find_changed(value, kept.get(key), f"{place}.{key}")
        ]
    if isinstance(written, list) and isinstance(kept, list) and len(written) == len(kept):
        pairs = enumerate(zip(written, kept, strict=True))
        return [found for i, (a, b) in pairs for found in find_changed(a, b, f"{place}[{i}]")]
    same = written == kept or (written == "" and kept is None)  # as an empty one is kept
    return [] if same else [f"{place}: {written!r} became {kept!r}"]


def test_a_field_that_the_server_does_not_know_is_refused(kube, home):
    """The control of the test before: the server is strict."""
    manifest = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": {}}
    manifest["spec"] = {
        "completionMod": "Indexed",
        "template": {"spec": {"restartPolicy": "Never"}},
    }
    manifest["spec"]["template"]["spec"]["containers"] = [{"name": "a", "image": "b"}]
    command = ["kubectl", "create", "--dry-run=server", "--validate=strict", "--filename=-"]
    done = subprocess.run(command, input=json.dumps(manifest), capture_output=True, text=True)
    assert 'unknown field "spec.completionMod"' in done.stderr
