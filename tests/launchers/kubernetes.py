"""A Kubernetes of this machine: a real API server, and processes in the place of pods."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
SERVER = HERE.parents[2] / "shared/research/launchers/kube-apiserver-1.36.2-linux-amd64.zst"
PATIENCE_S = 240.0
TOKENS = 'admin,admin,admin,"system:masters"\nweak,weak,weak\n'
CONFIG = """\
apiVersion: v1
kind: Config
clusters:
- {{name: lab, cluster: {{server: "{url}", insecure-skip-tls-verify: true}}}}
- {{name: gone, cluster: {{server: "https://127.0.0.1:1"}}}}
users:
- {{name: admin, user: {{token: admin}}}}
- {{name: weak, user: {{token: weak}}}}
- {{name: expired, user: {{token: old}}}}
contexts:
- {{name: lab, context: {{cluster: lab, user: admin}}}}
- {{name: weak, context: {{cluster: lab, user: weak}}}}
- {{name: expired, context: {{cluster: lab, user: expired}}}}
- {{name: gone, context: {{cluster: gone, user: admin}}}}
current-context: lab
"""


def require_kubernetes() -> None:
    """Skips where there is no API server to run; fails where only its surroundings are missing."""
    if not SERVER.exists():
        pytest.skip("no kube-apiserver in ../shared")
    if os.geteuid() != 0:
        pytest.skip("mounts want root")
    programs = ("kubectl", "etcd", "zstd", "openssl", "unshare", "setpriv")
    missing = [name for name in programs if not shutil.which(name)]
    assert not missing, f"install what .ci/run lists: {', '.join(missing)} missing"


@dataclass(frozen=True)
class KubeLab:
    """A cluster that runs; ``config`` is for kubectl."""

    folder: Path
    config: Path

    def run(self, *words: str, given: dict[str, Any] | None = None) -> str:
        """What kubectl prints; ``given`` is its input."""
        text = None if given is None else json.dumps(given)
        command = ["kubectl", f"--kubeconfig={self.config}", *words]
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def get(self, *words: str) -> dict[str, Any]:
        """Objects of the cluster."""
        return json.loads(self.run("get", *words, "--output=json"))

    def write_status(self, kind: str, name: str, status: dict[str, Any]) -> None:
        """Writes what a kubelet, or a controller, would."""
        patch = json.dumps({"status": status})
        words = ("--subresource=status", "--type=merge", f"--patch={patch}")
        self.run("patch", kind, name, *words)

    def make_pod(self, job: str, index: int, **status: Any) -> str:
        """A pod of a job that is left to the test; returns its name."""
        found = self.get("job", job)
        spec = found["spec"]["template"]["spec"]
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job, "controller": True}
        meta = {
            "name": f"{job}-{index}-abcde",
            "labels": found["spec"]["template"]["metadata"]["labels"],
            "ownerReferences": [{**owner, "uid": found["metadata"]["uid"]}],
        }
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
        self.run("create", "--filename=-", given=pod)
        self.write_status("pod", meta["name"], status)
        return meta["name"]


@contextmanager
def running(words: list[Any], log: Path) -> Iterator[subprocess.Popen]:
    """A program that ends with the block, or with this process."""
    with log.open("w") as out:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in found]


@contextmanager
def start_cluster() -> Iterator[KubeLab]:
    """etcd, the API server, and ``kubernetes_lab.py``."""
    folder = Path(tempfile.mkdtemp(prefix="kube-"))
    try:
        with ExitStack() as stack:
            yield _start(folder, stack)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path, stack: ExitStack) -> KubeLab:
    client, peer, secure = free_ports(3)
    server, key = folder / "kube-apiserver", folder / "sa.key"
    subprocess.run(["zstd", "-dq", SERVER, "-o", server], check=True)
    server.chmod(0o755)
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    (folder / "tokens").write_text(TOKENS)
    url = f"http://127.0.0.1:{client}"
    etcd = ["etcd", f"--data-dir={folder}/etcd", "--unsafe-no-fsync", "--logger=zap"]
    etcd += [f"--listen-client-urls={url}", f"--advertise-client-urls={url}"]
    etcd += [f"--listen-peer-urls=http://127.0.0.1:{peer}"]
    stack.enter_context(running(etcd, folder / "etcd.log"))
    words = [server, f"--etcd-servers={url}", f"--secure-port={secure}"]
    words += ["--bind-address=127.0.0.1", f"--cert-dir={folder}/certs"]
    words += ["--service-account-issuer=https://lab", f"--service-account-key-file={key}"]
    words += [f"--service-account-signing-key-file={key}", f"--token-auth-file={folder}/tokens"]
    words += ["--authorization-mode=RBAC", "--service-cluster-ip-range=10.96.0.0/16"]
    words += ["--disable-admission-plugins=ServiceAccount"]
    stack.enter_context(running(words, folder / "apiserver.log"))
    lab = KubeLab(folder, folder / "config")
    url = f"https://127.0.0.1:{secure}"
    lab.config.write_text(CONFIG.format(url=url))
    _wait_ready(lab)
    hosts = folder / "hosts"
    hosts.write_text(Path("/etc/hosts").read_text())
    script = 'mount --bind "$1" /etc/hosts; shift; exec "$@"'
    kubelet = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork"]
    kubelet += ["--kill-child=KILL", "sh", "-euc", script, "sh"]
    kubelet += [hosts, sys.executable, HERE / "kubernetes_lab.py", url, "admin", hosts]
    stack.enter_context(running(kubelet, folder / "kubelet.log"))
    return lab


def _wait_ready(lab: KubeLab) -> None:
    end = time.monotonic() + PATIENCE_S
    command = ["kubectl", f"--kubeconfig={lab.config}", "get", "namespace", "default"]
    while subprocess.run(command, capture_output=True).returncode:
        log = (lab.folder / "apiserver.log").read_text()
        assert time.monotonic() < end, f"the API server does not come up: {log[-2000:]}"
        time.sleep(0.1)
