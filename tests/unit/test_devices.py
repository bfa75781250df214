"""Which device a process gets, and the words where it gets none; CUDA's answers are patched."""

import logging
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from torsh_trainer.comm import devices
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, ResourceError

GPU = torch.device("cuda", 0)
TASK = World(rank=3, size=8, local_rank=3, local_size=4, node_rank=0, nodes=2, source="slurm")


@pytest.fixture
def show(monkeypatch):
    """A host that shows ``count`` GPUs, by ``uuid`` where any is given."""

    def shown(count, uuid=None, **masks):
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)
        for name, value in masks.items():
            monkeypatch.setenv(name, value)
        properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=65, pci_device_id=0)
        if uuid is not None:
            properties.uuid = uuid
        chosen = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return chosen

    return shown


@pytest.fixture
def refuse(monkeypatch):
    """CUDA does not start, and says ``words``."""

    def refused(words, kind=RuntimeError):
        def init():
            raise kind(words)

        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "init", init)

    return refused


# -- a place ---------------------------------------------------------------------------------------


def test_a_process_that_sees_one_gpu_takes_it_whatever_its_local_rank(show):
    chosen = show(1, CUDA_VISIBLE_DEVICES="MIG-5c1e")
    assert devices.choose_device("auto", TASK) == GPU
    assert chosen == [GPU]


def test_processes_that_see_all_gpus_take_one_each(show):
    show(4)
    assert devices.choose_device("cuda", TASK) == torch.device("cuda", 3)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("slurm", "--ntasks-per-node=2"),
        ("torchrun", "--nproc-per-node=2"),
        ("local", "launcher.num_processes=2"),
        ("openmpi", "ppr:2:node"),
        ("kubernetes", "start 2 on each host"),
    ],
)
@pytest.mark.parametrize("local_rank", [0, 3])
def test_more_processes_than_gpus_are_told_in_words_of_what_started_them(
    show, source, words, local_rank
):
    show(2, CUDA_VISIBLE_DEVICES="0,1")
    world = replace(TASK, source=source, rank=local_rank, local_rank=local_rank)
    with pytest.raises(ConfigError, match="4 processes on this host, and each sees 2") as caught:
        devices.choose_device("auto", world)
    assert "CUDA_VISIBLE_DEVICES=0,1" in str(caught.value)
    assert words in str(caught.value)


def test_a_gpu_is_told_by_its_uuid_and_a_part_of_one_by_its_name(show):
    show(2, uuid="7b61-aa")
    assert devices.identify(GPU) == "GPU-7b61-aa"
    show(2, uuid="7b61-aa", CUDA_VISIBLE_DEVICES="MIG-one, MIG-two")
    assert devices.identify(torch.device("cuda", 1)) == "MIG-two"
    show(2)
    assert devices.identify(GPU).endswith(":0:65:0")
    assert devices.identify(torch.device("cpu")) is None


def test_two_processes_on_one_gpu_are_refused_by_name():
    gpus = {0: "GPU-a", 1: "GPU-b", 2: "GPU-a", 3: None, 4: None}
    with pytest.raises(ConfigError, match="ranks 0, 2 compute on one GPU, GPU-a") as caught:
        devices.check_apart(gpus, TASK, shares=False)
    assert "--gpus-per-task=1" in str(caught.value)
    devices.check_apart({0: "GPU-a", 1: "GPU-b", 2: None, 3: None}, TASK, shares=False)


def test_sharing_a_gpu_on_purpose_is_said(caplog):
    with caplog.at_level(logging.WARNING):
        devices.check_apart({0: "GPU-a", 1: "GPU-a"}, TASK, shares=True)
    assert "ranks 0, 1 compute on one GPU" in caplog.text


# -- no GPU ----------------------------------------------------------------------------------------

FOUND_NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed "
    "a driver from http://www.nvidia.com/Download/index.aspx"
)
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
    "driver by downloading and installing a new version from the URL"
)
UNEXPECTED = "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions? Error "


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (FOUND_NO_DRIVER, "no NVIDIA driver is loaded"),
        (TOO_OLD, "the NVIDIA driver serves CUDA to 11.4: too old for torch"),
        (UNEXPECTED + "802: system not yet initialized", "nvidia-fabricmanager"),
        (UNEXPECTED + "803: system has unsupported display driver", "of two versions"),
        (UNEXPECTED + "804: forward compatibility was attempted", "LD_LIBRARY_PATH"),
        (UNEXPECTED + "999: unknown error", "999: unknown error"),
        ("No CUDA GPUs are available", "this host shows torch no GPU"),
    ],
)
def test_why_there_is_no_cuda_is_said_in_one_sentence(show, refuse, words, told):
    show(0)
    refuse(words)
    with pytest.raises(ResourceError, match=r"^trainer\.device=cuda: ") as caught:
        devices.choose_device("cuda", World())
    assert told in str(caught.value)
    assert "or set trainer.device=auto" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_torch_without_cuda_says_so(show, refuse):
    if torch.backends.cuda.is_built():
        show(0)
        refuse("Torch not compiled with CUDA enabled")
    with pytest.raises(ResourceError, match="was built without CUDA; install a CUDA build"):
        devices.choose_device("cuda", World())


@pytest.mark.parametrize(
    ("mask", "told"),
    [
        ("7", "CUDA_VISIBLE_DEVICES=7 names no GPU of this host"),
        ("", "CUDA_VISIBLE_DEVICES= hides every GPU"),
        ("-1", "CUDA_VISIBLE_DEVICES=-1 hides every GPU"),
    ],
)
def test_a_mask_that_leaves_no_gpu_is_named(show, refuse, mask, told):
    show(0, CUDA_VISIBLE_DEVICES=mask)
    refuse("No CUDA GPUs are available")
    with pytest.raises(ResourceError) as caught:
        devices.choose_device("cuda", World())
    assert told in str(caught.value)


def test_auto_says_why_a_gpu_of_this_host_is_left_unused(show, refuse, monkeypatch, caplog):
    show(0)
    refuse(TOO_OLD)
    monkeypatch.setattr(devices, "_has_device_files", lambda: True)
    cpu = devices.choose_device("auto", World())
    assert cpu == torch.device("cpu")
    with caplog.at_level(logging.WARNING):
        devices.warn_of_unused("auto", cpu, {"CUDA_VISIBLE_DEVICES": ""})
        devices.warn_of_unused("cpu", cpu, {})
        assert not caplog.text
        devices.warn_of_unused("auto", cpu, {})
    assert "the run uses the CPU: the NVIDIA driver serves CUDA to 11.4" in caplog.text


# -- no room ---------------------------------------------------------------------------------------


@pytest.fixture
def fill(show, monkeypatch, tmp_path):
    """A GPU on which an allocation raises ``words``, or ``free`` bytes are left of 80 GB."""
    script = tmp_path / "nvidia-smi"
    rows = ["7b61, 12, 900, old", "7b61, 4711, 40000, /usr/bin/python3", "other, 5, 70000, x"]
    rows.append(f"7b61, {os.getpid()}, 1, me")
    lines = "\n".join(f"GPU-{row}" for row in rows)
    script.write_text(f"#!/bin/sh\ncat <<END\n{lines}\nEND\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def filled(words=None, free=80 * 10**9):
        def empty(*sizes, **where):
            if words is not None:
                raise torch.AcceleratorError(words)

        show(1, uuid="7b61")
        monkeypatch.setattr(torch, "empty", empty)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * 10**9))

    return filled


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"words": "CUDA error: out of memory"}, "cuda:0 is full: pid 4711 (python3, 41.9 GB), "),
        ({"words": "CUDA-capable device(s) is/are busy or unavailable"}, "another process's alone"),
        ({"free": 10**7}, "is full (10 MB of 80.0 GB are free): pid 4711"),
    ],
)
def test_a_gpu_that_others_fill_is_refused_with_their_names(fill, state, told):
    fill(**state)
    with pytest.raises(ResourceError) as caught:
        devices.check_room(GPU)
    assert told in str(caught.value)
    assert "pid 12 (old, 0.9 GB)" in str(caught.value)
    assert f"pid {os.getpid()}" not in str(caught.value)
    assert "pid 5" not in str(caught.value)


def test_a_gpu_half_taken_is_said_and_an_empty_one_is_not(fill, caplog):
    with caplog.at_level(logging.WARNING):
        fill()
        devices.check_room(GPU)
        devices.check_room(torch.device("cpu"))
        assert not caplog.text
        fill(free=30 * 10**9)
        devices.check_room(GPU)
    assert "50.0 of 80.0 GB of cuda:0 are taken before the run begins: pid 4711" in caplog.text


def test_another_error_of_the_device_passes_as_it_is(fill):
    fill("CUDA error: an illegal memory access was encountered")
    with pytest.raises(torch.AcceleratorError):
        devices.check_room(GPU)
