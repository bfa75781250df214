"""What the cluster says of a job, its pods and its events, and what it refuses, in our words.

Each function reads objects as ``kubectl get --output=json`` gives them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.launchers.job_folder import JobStatus

KubeObject = Mapping[str, Any]

_WAITS = {
    "ImagePullBackOff": "its image cannot be pulled (launcher.image, image_pull_secrets)",
    "ErrImagePull": "its image cannot be pulled (launcher.image, image_pull_secrets)",
    "InvalidImageName": "for ever: launcher.image is no name of an image",
    "ErrImageNeverPull": "for ever: the image is not on the node, and launcher.image_pull_policy "
    "is Never",
    "CreateContainerConfigError": "a secret or a key of it is not there "
    "(launcher.env_from_secrets, volumes)",
    "CreateContainerError": "its container cannot be made",
    "RunContainerError": "its container cannot be started",
    "ContainerCreating": "its image is pulled, its volumes are mounted",
    "PodInitializing": "its pods are made ready",
}
_REFUSED_PODS = (
    ("exceeded quota", "a quota of the namespace is used up"),
    ("no PriorityClass", "for ever: there is no such launcher.priority_class"),
    ("serviceaccount", "for ever: there is no such launcher.service_account"),
    ("violates PodSecurity", "for ever: the namespace forbids such pods (PodSecurity)"),
)
_FIELDS = (
    ("gpu", "gpus_per_node"),
    (r"resources.*memory", "mem"),
    (r"resources.*cpu", "cpus_per_node"),
    (r"resources", "resources"),
    (r"emptyDir", "shm_size"),
    (r"volume", "volumes"),
    (r"labels", "labels"),
    (r"tolerations", "tolerations"),
    (r"nodeSelector", "node_selector"),
    (r"image", "image"),
    (r"annotations|metadata\.name", "job_name"),
)
_LOG = re.compile(r"[EWI]\d{4} \d\d:")
"""Lines that kubectl logs of its own attempts, before it says what came of them."""

_SERVER = re.compile(r"^.*?Error from server(?: \(\w+\))?: |^error: ", re.DOTALL)
_FILE = re.compile(r'error (?:when creating|validating) "[^"]*": ')
_SILENT = (
    *("connection refused", "no such host", "i/o timeout", "network is unreachable", "EOF", "x509"),
    *("TLS handshake", r"Client\.Timeout", "deadline exceeded", "Unable to connect"),
    *("no route to host",),
)
_REFUSALS: tuple[tuple[str, type[ConfigError] | type[ResourceError], str, str], ...] = (
    (
        "|".join(_SILENT),
        ResourceError,
        "the cluster does not answer: {words}",
        "kubectl cluster-info tells more; KUBECONFIG and launcher.context say which it is",
    ),
    (
        r"Unauthorized|must be logged in|provide credentials|getting credentials",
        ResourceError,
        "the cluster does not take your credentials: {words}",
        "log in again, as your cluster's pages say: a token may have expired (kubectl auth whoami)",
    ),
    (
        r"context was not found|context .* does not exist",
        ConfigError,
        "launcher.context={context}: kubectl knows no such context",
        "kubectl config get-contexts lists them",
    ),
    (
        r"namespaces \"[^\"]*\" not found",
        ConfigError,
        "launcher.namespace={namespace}: the cluster has no such namespace",
        "kubectl get namespaces lists them",
    ),
    (
        r"exceeded quota",
        ConfigError,
        "a quota of the namespace {namespace} refuses the job: {words}",
        "ask for less, or wait until others have ended; kubectl describe quota shows it",
    ),
    (
        r"[Ff]orbidden",
        ResourceError,
        "you may not do this in the namespace {namespace}: {words}",
        "kubectl auth can-i create jobs; ask for the right, or choose a launcher.namespace",
    ),
    (
        r"already exists",
        ConfigError,
        "the cluster has something of that name: {words}",
        "choose another folder (hydra.run.dir), or launcher.job_name",
    ),
)
"""Words of kubectl, and what they mean to whoever submits; the first that fits."""


def tell_status(
    job: KubeObject,
    pods: Sequence[KubeObject],
    events: Sequence[KubeObject],
    *,
    cancelled: bool,
) -> JobStatus:
    """Where ``job`` is; ``cancelled`` says that somebody has asked for its end."""
    said = job.get("status", {})
    restarts = int(said.get("failed", 0))
    conditions = {c["type"]: c for c in said.get("conditions", ()) if c.get("status") == "True"}
    if "Complete" in conditions:
        return JobStatus("succeeded", exit_code=0, restarts=restarts)
    if "Failed" in conditions:
        return _tell_failure(conditions["Failed"], pods, restarts=max(0, restarts - 1))
    left = [pod for pod in pods if not _has_ended(pod)]
    if cancelled and not left and not said.get("active") and not said.get("terminating"):
        return JobStatus("cancelled", restarts=restarts)
    if cancelled:
        return JobStatus("running", "its pods are being ended", restarts=restarts)
    if job["spec"].get("suspend"):
        return JobStatus("queued", "it is suspended, by a queue such as Kueue or by hand")
    waiting = next(filter(None, (_explain_pod(pod, events) for pod in left)), "")
    if not waiting and _count_missing(job, pods) > 0:
        waiting = _explain_events(events) or "its pods are not made yet"
    return JobStatus("queued" if waiting else "running", waiting, restarts=restarts)


def find_subject(job: KubeObject, pods: Sequence[KubeObject]) -> str | None:
    """The uid of what the events may tell more of: a pod that waits, or a job without its pods."""
    pending = (pod for pod in pods if pod.get("status", {}).get("phase") == "Pending")
    first = next(pending, job if _count_missing(job, pods) > 0 else None)
    return None if first is None else str(first["metadata"]["uid"])


def explain_refusal(said: str, knobs: Mapping[str, Any]) -> ConfigError | ResourceError:
    """What kubectl refused, in a sentence that names the knob."""
    words = shorten(said)
    told = {**knobs, "namespace": knobs["namespace"] or "of your context", "words": words}
    for pattern, kind, sentence, fix in _REFUSALS:
        if re.search(pattern, said):
            return kind(sentence.format(**told), fix=fix)
    if "is invalid" in said or "decoding error" in said:
        for pattern, knob in _FIELDS:
            if re.search(pattern, words):
                return ConfigError(
                    f"launcher.{knob}={knobs[knob]}: the cluster says {words}",
                    fix="launcher.dry_run=true shows the manifest",
                )
    return ConfigError(
        f"kubectl refuses the job: {words}",
        fix="look at the knobs of the launcher; launcher.dry_run=true shows the manifest",
    )


def shorten(said: str) -> str:
    """What kubectl says without what it says each time, on one line."""
    lines = said.strip().splitlines()
    text = "\n".join([line for line in lines if not _LOG.match(line)] or lines)
    if not text.partition("\n")[0].rstrip().endswith(":"):  # else it is a list
        text = text.partition("\n")[0]
    text = _FILE.sub("", _SERVER.sub("", text)).split("; if you choose to ignore")[0]
    return " ".join(text.split())[:400]


def is_absent(said: str) -> bool:
    """Whether kubectl says that there is no such object."""
    return "(NotFound)" in said and "namespaces" not in said


# -- pods -----------------------------------------------------------------------------------------


def _has_ended(pod: KubeObject) -> bool:
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def _count_missing(job: KubeObject, pods: Sequence[KubeObject]) -> int:
    failed = sum(pod.get("status", {}).get("phase") == "Failed" for pod in pods)
    return int(job["spec"].get("completions", 1)) - (len(pods) - failed)


def _containers(pod: KubeObject, state: str) -> Iterator[KubeObject]:
    for container in pod.get("status", {}).get("containerStatuses", ()):
        found = container.get("state", {}).get(state)
        if found is not None:
            yield found


def _explain_pod(pod: KubeObject, events: Sequence[KubeObject]) -> str:
    """Why a pod does not run; empty where it does."""
    status, name = pod.get("status", {}), pod["metadata"]["name"]
    if status.get("phase") != "Pending":
        return ""
    for condition in status.get("conditions", ()):
        unscheduled = condition["type"] == "PodScheduled" and condition["status"] == "False"
        if unscheduled and condition.get("reason") == "SchedulingGated":
            return "a gate holds its pods back"
        if unscheduled:
            return f"no node fits: {condition.get('message', '')} ({condition.get('reason')})"
    own = [one for one in events if one["involvedObject"].get("uid") == pod["metadata"].get("uid")]
    for waiting in _containers(pod, "waiting"):
        reason = waiting.get("reason", "")
        said = waiting.get("message") or (own[-1].get("message") if own else "")
        message = f": {' '.join(said.split())[:400]}" if said else ""
        return f"pod {name}: {_WAITS.get(reason, 'it waits')}{message} ({reason})"
    return f"pod {name} waits for a node"


def _explain_events(events: Sequence[KubeObject]) -> str:
    """Why the cluster makes no pods for a job."""
    for event in reversed(events):
        if event.get("reason") != "FailedCreate":
            continue
        message = " ".join(event.get("message", "").split())[:400]
        for words, told in _REFUSED_PODS:
            if words in message:
                return f"{told}: {message}"
        return f"the cluster refuses its pods: {message}"
    return ""


def _tell_failure(condition: KubeObject, pods: Sequence[KubeObject], *, restarts: int) -> JobStatus:
    reason = condition.get("reason", "")
    failed = sorted(
        (pod for pod in pods if pod.get("status", {}).get("phase") == "Failed"), key=_end_of
    )
    # Those that the end of another one ends come later, or by a signal.
    own = [pod for pod in failed if not _is_disrupted(pod) and _code(pod) not in (0, 143, 137)]
    final = own or [pod for pod in failed if not _is_disrupted(pod)] or failed
    named = re.search(r"for pod \S*?/(\S+) ", condition.get("message", ""))
    chosen = [pod for pod in final if named is not None and pod["metadata"]["name"] == named[1]]
    if reason == "DeadlineExceeded":
        return JobStatus("failed", "it reached launcher.deadline_s", 1, restarts)
    if not final:
        words = condition.get("message", "") or reason
        return JobStatus("failed", words, 1, restarts)
    pod = (chosen or final[:1])[0]
    return JobStatus("failed", _explain_end(pod), _code(pod) or 1, restarts)


def _is_disrupted(pod: KubeObject) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any(c["type"] == "DisruptionTarget" and c["status"] == "True" for c in conditions)


def _end_of(pod: KubeObject) -> str:
    return next((str(end.get("finishedAt")) for end in _containers(pod, "terminated")), "")


def _code(pod: KubeObject) -> int:
    return next((int(end.get("exitCode", 0)) for end in _containers(pod, "terminated")), 0)


def _explain_end(pod: KubeObject) -> str:
    """What ended a pod, with its last words."""
    status, name = pod.get("status", {}), pod["metadata"]["name"]
    node = pod.get("spec", {}).get("nodeName")
    where = f"pod {name} on {node}" if node else f"pod {name}"
    for end in _containers(pod, "terminated"):
        if end.get("reason") == "OOMKilled":
            return f"{where}: it used more memory than launcher.mem allows (OOMKilled)"
        if "No such file or directory" in end.get("message", "") and end.get("exitCode") == 127:
            return f"{where}: {_last_words(end)} (launcher.volumes, launcher.python)"
        return f"{where}: {_last_words(end) or 'it has told nothing'}"
    return f"{where}: {status.get('message') or status.get('reason') or 'it has told nothing'}"


def _last_words(end: KubeObject) -> str:
    lines = [line.strip() for line in end.get("message", "").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines[-1:] or [""])[0].removeprefix("error: ")[:400]
