"""What the launcher of Kubernetes makes of knobs and names, without a cluster."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from torsh_trainer.errors import ConfigError
from torsh_trainer.launchers.kubernetes.launcher import KubernetesLauncher
from torsh_trainer.launchers.kubernetes.manifest import name_job
from torsh_trainer.launchers.plan import JobRequest

NAMES = ("", "a", "-", "A B", "ä", "1", "x" * 300, "a.b_c", "../..", "\n", "default", "$(id)", "_")


def request(run_dir: str = "/data/me/run", folder: str = "/data/me") -> JobRequest:
    return JobRequest(Path(run_dir), Path(folder), ("-m", "x"), "python")


def launcher(**knobs: object) -> KubernetesLauncher:
    return KubernetesLauncher(**{"image": "i:1", "volumes": ("pvc:c:/data",), **knobs})


def write(**knobs: object) -> dict:
    (manifest,) = (f for f in launcher(**knobs).plan(request()).files if f.path.suffix == ".yaml")
    _, job = yaml.safe_load_all(manifest.content)
    return job


@pytest.mark.parametrize("name", NAMES)
def test_whatever_a_folder_is_called_its_job_has_a_name_that_dns_takes(name):
    made = name_job(Path("/runs", name, "x") if name != "x" else Path("/x"), name or None)
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", made)
    assert len(f"{made}-9999") <= 63


def test_two_folders_have_two_names_also_where_their_last_names_are_alike():
    folders = ("/a/runs/x", "/b/runs/x", "/a/runs/X", "/a/runs/x_", "/a/runs/" + "x" * 99)
    assert len({name_job(Path(folder), None) for folder in folders}) == len(folders)
    assert len({name_job(Path(folder), "mine") for folder in folders}) == len(folders)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"image": None}, "launcher.image is not set"),
        ({"volumes": ()}, "covers the run's folder /data/me/run"),
        ({"volumes": ("pvc:c:/data:ro",)}, "covers the run's folder"),
        ({"volumes": ("secret:c:/data",)}, "covers the run's folder"),
        ({"volumes": ("pvc:c:/dat",)}, "covers the run's folder"),
        ({"volumes": ("pvc:c:/data/me/run",)}, "covers /data/me, where the command was typed"),
        ({"volumes": ("/data:/data",)}, "is not KIND:SOURCE:PATH"),
        ({"volumes": ("pvc:c:/data", "nfs:s/e:/data")}, "two of them lie at /data"),
        ({"volumes": ("pvc:c:/dev/shm",)}, "/dev/shm is the launcher's own"),
        ({"volumes": ("pvc:c:/data/../x",)}, "no absolute path below /"),
        ({"volumes": ("pvc:C_1:/data",)}, "is no name in Kubernetes"),
        ({"volumes": ("host:x:/data",)}, "no absolute folder of the nodes"),
        ({"nodes": 0}, "launcher.nodes=0"),
        ({"nodes": True}, "launcher.nodes=True"),
        ({"gpus_per_node": "half"}, "launcher.gpus_per_node=half"),
        ({"cpus_per_node": "4cores"}, "no number of cores"),
        ({"mem": "32m"}, "launcher.mem=32m is no amount of memory"),
        ({"shm_size": "big"}, "launcher.shm_size=big"),
        ({"port": 70000}, "launcher.port=70000"),
        ({"grace_s": -1}, "launcher.grace_s=-1"),
        ({"image_pull_policy": "always"}, "launcher.image_pull_policy=always"),
        ({"namespace": "A b"}, "is no name in Kubernetes"),
        ({"env": ("HF_TOKEN=abc",)}, "HF_TOKEN is a secret"),
        ({"env": ("URL=https://me:pw@host/x",)}, "URL is a secret"),
        ({"env": ("RANK=1",)}, "RANK is set by the launcher"),
        ({"env": ("A-B=1",)}, "no name of a variable"),
        ({"env_from_secrets": ("HF_TOKEN=hf_abc",)}, "names no secret of the cluster"),
        ({"resources": ("cpu=1",)}, "launcher.cpus_per_node"),
        ({"resources": ("rdma/hca=1.5",)}, "no whole number"),
        ({"tolerations": ("a:Never",)}, "is not KEY[=VALUE][:EFFECT]"),
        ({"labels": ("a",)}, "is not KEY=VALUE"),
        ({"run_as": "me"}, "launcher.run_as=me"),
        ({"working_dir": "code"}, "no absolute path"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(knobs, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        write(**knobs)
    assert caught.value.fix
    assert "hf_abc" not in str(caught.value)
    assert "pw@" not in str(caught.value)


def test_secrets_are_references_and_never_values():
    job = write(env_from_secrets=("HF_TOKEN=hub/token",))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    reference = {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert container["env"] == [{"name": "HF_TOKEN", "valueFrom": reference}]


def test_a_preempted_pod_is_begun_again_and_a_bad_configuration_is_not():
    first, second = write()["spec"]["podFailurePolicy"]["rules"]
    assert (first["action"], first["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert second["action"] == "FailJob"
    assert 2 in second["onExitCodes"]["values"]
    assert not {0, 1, 3, 137, 138, 143} & {*second["onExitCodes"]["values"]}


def test_gpus_make_processes_unless_they_are_counted():
    def processes(**knobs: object) -> str:
        plan = launcher(**knobs).plan(request())
        (script,) = (file.content for file in plan.files if file.path.name == "pod.sh")
        return re.search(r"LOCAL_WORLD_SIZE=(\d+)", script)[1]

    assert [processes(), processes(gpus_per_node=8)] == ["1", "8"]
    assert processes(gpus_per_node=8, ntasks_per_node=2) == "2"


def test_code_of_the_image_needs_no_volume_for_the_folder():
    plan = launcher(working_dir="/code").plan(request(folder="/home/me"))
    (script,) = (file.content for file in plan.files if file.path.name == "pod.sh")
    assert "cd -- /code ||" in script


def test_texts_that_kubectl_would_take_for_numbers_are_quoted():
    texts = ("1e5", "y", "0o7", "1_0", "12345678", "n", "null", "12e34567", "on", ".5")
    labels = tuple(f"l{i}={text}" for i, text in enumerate(texts))
    (manifest,) = (
        f for f in launcher(labels=labels).plan(request()).files if f.path.suffix == ".yaml"
    )
    for i, text in enumerate(texts):
        assert re.search(rf"(l{i}|'l{i}'): '{re.escape(text)}'\n", manifest.content), text
