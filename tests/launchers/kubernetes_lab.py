"""The Job controller and a kubelet in small, for a real API server: makes the pods of Indexed Jobs,
runs each as a process of this machine, and writes what becomes of them into the status.

    kubernetes_lab.py URL TOKEN HOSTS     HOSTS is written as /etc/hosts of the pods

Jobs with the label ``lab=by-hand`` are left to the tests.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from datetime import datetime, timezone
from pathlib import Path

URL, TOKEN, HOSTS = sys.argv[1], sys.argv[2], Path(sys.argv[3])
CONTEXT = ssl._create_unverified_context()
MERGE = "application/merge-patch+json"
INDEX = "batch.kubernetes.io/job-completion-index"


class Container:
    def __init__(self, process: subprocess.Popen, output: Path) -> None:
        self.process, self.output, self.kill_at = process, output, 0.0


running: dict[str, Container] = {}


def call(method: str, path: str, body: dict | None = None, kind: str = "application/json") -> dict:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": kind}
    request = urllib.request.Request(URL + path, method=method, data=data, headers=headers)
    with urllib.request.urlopen(request, context=CONTEXT, timeout=60) as answer:
        return json.load(answer)


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def path_of(thing: dict, kind: str) -> str:
    group = "/apis/batch/v1" if kind == "jobs" else "/api/v1"
    meta = thing["metadata"]
    return f"{group}/namespaces/{meta['namespace']}/{kind}/{meta['name']}"


def is_over(pod: dict) -> bool:
    return pod["status"].get("phase") in ("Succeeded", "Failed")


# -- the controller -------------------------------------------------------------------------------


def control(job: dict, pods: list[dict]) -> None:
    status, spec = job["status"], job["spec"]
    conditions = status.get("conditions", [])
    if any(c["type"] in ("Complete", "Failed") and c["status"] == "True" for c in conditions):
        return
    living = [pod for pod in pods if not is_over(pod)]
    if spec.get("suspend"):
        for pod in living:
            if "deletionTimestamp" not in pod["metadata"]:
                call("DELETE", path_of(pod, "pods"))
        write_job(job, active=len(living))
        return
    failed = [pod for pod in pods if pod["status"].get("phase") == "Failed"]
    counted = [pod for pod in failed if judge(spec, pod) != "Ignore"]
    end = next((pod for pod in failed if judge(spec, pod) == "FailJob"), None)
    done = [pod for pod in pods if pod["status"].get("phase") == "Succeeded"]
    numbers = {"active": len(living), "failed": len(counted), "succeeded": len(done)}
    if end is not None or len(counted) > spec["backoffLimit"]:
        reason = "PodFailurePolicy" if end is not None else "BackoffLimitExceeded"
        for pod in living:
            call("DELETE", path_of(pod, "pods"))
        if living:
            write_job(job, **numbers)
            return
        last = {"type": "FailureTarget"}, {"type": "Failed"}
        both = [{**one, "status": "True", "reason": reason, "message": reason} for one in last]
        write_job(job, **numbers, conditions=both)
        return
    if len(done) == spec["completions"]:
        both = [{"type": kind, "status": "True"} for kind in ("SuccessCriteriaMet", "Complete")]
        indexes = f"0-{len(done) - 1}" if len(done) > 1 else "0"
        more = {"completionTime": now(), "completedIndexes": indexes}
        write_job(job, **numbers, conditions=both, **more)
        return
    taken = {pod["metadata"]["annotations"][INDEX] for pod in (*living, *done)}
    for index in map(str, range(spec["completions"])):
        if index not in taken:
            make_pod(job, index)
    write_job(job, **numbers)


def judge(spec: dict, pod: dict) -> str:
    """What the policy for failures says of a pod: the first rule that fits."""
    ends = [c["state"]["terminated"] for c in pod["status"].get("containerStatuses", [])]
    for rule in spec.get("podFailurePolicy", {}).get("rules", []):
        for wanted in rule.get("onPodConditions", []):
            if any(c["type"] == wanted["type"] for c in pod["status"].get("conditions", [])):
                return rule["action"]
        codes = rule.get("onExitCodes", {}).get("values", [])
        if any(end["exitCode"] in codes for end in ends):
            return rule["action"]
    return "Count"


def write_job(job: dict, **status: object) -> None:
    before = job["status"]
    wanted = {"startTime": before.get("startTime") or now(), **status}
    if any(before.get(key, 0) != value for key, value in wanted.items()):
        call("PATCH", path_of(job, "jobs") + "/status", {"status": wanted}, MERGE)


def make_pod(job: dict, index: str) -> None:
    template, name = json.loads(json.dumps(job["spec"]["template"])), job["metadata"]["name"]
    meta, spec = template["metadata"], template["spec"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "controller": True}
    meta["ownerReferences"] = [{**owner, "uid": job["metadata"]["uid"]}]
    meta["generateName"] = f"{name[:57]}-{index}-"
    meta.setdefault("annotations", {})[INDEX] = index
    meta["labels"][INDEX] = index
    spec["hostname"] = f"{name}-{index}"
    for container in spec["containers"]:
        told = {"name": "JOB_COMPLETION_INDEX", "value": index}
        container.setdefault("env", []).append(told)
    space = job["metadata"]["namespace"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
    call("POST", f"/api/v1/namespaces/{space}/pods", pod)


# -- the kubelet ----------------------------------------------------------------------------------


def expand(text: str, env: dict[str, str]) -> str:
    """``$(NAME)`` and ``$$`` as Kubernetes reads them."""

    def replace(found: re.Match) -> str:
        if found[0] == "$$":
            return "$"
        return env.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([\w.-]+)\)", replace, text)


def start(pod: dict) -> None:
    meta, (container,) = pod["metadata"], pod["spec"]["containers"]
    env: dict[str, str] = {}
    for entry in container.get("env", []):
        key = entry.get("valueFrom", {}).get("secretKeyRef")
        if key is None:
            env[entry["name"]] = expand(entry.get("value", ""), env)
        else:
            secret = call("GET", f"/api/v1/namespaces/{meta['namespace']}/secrets/{key['name']}")
            env[entry["name"]] = base64.b64decode(secret["data"][key["key"]]).decode()
    service, host = pod["spec"]["subdomain"], pod["spec"]["hostname"]
    with HOSTS.open("a") as hosts:
        hosts.write(f"127.0.0.1 {host}.{service} {host}\n")
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": meta["name"]}}
    target = {"kind": "Node", "name": "lab1"}
    call("POST", path_of(pod, "pods") + "/binding", {**binding, "target": target})
    output = HOSTS.parent / f"{meta['name']}.log"
    words = [expand(word, env) for word in (*container["command"], *container.get("args", []))]
    with output.open("wb") as file:
        process = subprocess.Popen(
            words,
            env={**os.environ, **env},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    running[meta["name"]] = Container(process, output)
    write_pod(pod, "Running", {"running": {"startedAt": now()}})


def write_pod(pod: dict, phase: str, state: dict) -> None:
    name = pod["spec"]["containers"][0]["name"]
    one = {"name": name, "image": "x", "imageID": "x", "ready": phase == "Running"}
    status = {"phase": phase, "containerStatuses": [{**one, "restartCount": 0, "state": state}]}
    call("PATCH", path_of(pod, "pods") + "/status", {"status": status}, MERGE)


def keep(pod: dict) -> None:
    """Starts a pod, ends it where it is deleted, and tells how it ended."""
    name = pod["metadata"]["name"]
    deleted = "deletionTimestamp" in pod["metadata"]
    container = running.get(name)
    if container is None:
        if deleted:
            call("DELETE", path_of(pod, "pods") + "?gracePeriodSeconds=0")
        elif not is_over(pod):
            start(pod)
        return
    if deleted and not container.kill_at:
        container.process.send_signal(signal.SIGTERM)
        container.kill_at = time.monotonic() + pod["metadata"]["deletionGracePeriodSeconds"]
    if container.kill_at and time.monotonic() > container.kill_at:
        os.killpg(container.process.pid, signal.SIGKILL)
    code = container.process.poll()
    if code is None:
        return
    del running[name]
    code = code if code >= 0 else 128 - code
    end = {"exitCode": code, "finishedAt": now(), "reason": "Error" if code else "Completed"}
    if code:
        end["message"] = container.output.read_bytes()[-2048:].decode(errors="replace")
    write_pod(pod, "Failed" if code else "Succeeded", {"terminated": end})
    if deleted:
        call("DELETE", path_of(pod, "pods") + "?gracePeriodSeconds=0")


def sweep() -> None:
    jobs = call("GET", "/apis/batch/v1/jobs")["items"]
    pods = call("GET", "/api/v1/pods")["items"]
    by_hand = {j["metadata"]["uid"] for j in jobs if j["metadata"]["labels"].get("lab")}
    for job in jobs:
        uid = job["metadata"]["uid"]
        if uid not in by_hand:
            own = [p for p in pods if p["metadata"]["ownerReferences"][0]["uid"] == uid]
            attempt(control, job, own)
    known = {job["metadata"]["uid"] for job in jobs}
    for pod in pods:
        owner = pod["metadata"]["ownerReferences"][0]["uid"]
        if owner in by_hand:
            continue
        if owner not in known and "deletionTimestamp" not in pod["metadata"]:
            attempt(call, "DELETE", path_of(pod, "pods"))  # as the garbage collector
        else:
            attempt(keep, pod)


def attempt(action, *args) -> None:
    try:
        action(*args)
    except urllib.error.HTTPError as error:  # it went while we looked
        if error.code not in (404, 409):
            print(error.code, error.read().decode()[:1000], flush=True)


while True:
    sweep()
    time.sleep(0.1)
