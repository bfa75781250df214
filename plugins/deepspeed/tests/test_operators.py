"""DeepSpeed's operators are compiled once, whatever environment asks for them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torsh_trainer_deepspeed import DeepSpeed, operators

from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.errors import ResourceError

BUILD = [sys.executable, "-m", "torsh_trainer_deepspeed.build", "deepspeed_shm_comm"]


@pytest.fixture
def without_own_ninja(monkeypatch, tmp_path):
    """An environment that has no programs of its own, and nothing in PATH."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "own" / "bin"))
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_ninja_is_found_in_the_environment_that_torch_lies_in(without_own_ninja):
    assert shutil.which("ninja") is None
    operators.find_ninja()
    assert shutil.which("ninja") is not None
    before = os.environ["PATH"]
    operators.find_ninja()
    assert os.environ["PATH"] == before


def test_ninja_is_found_in_any_environment_that_packages_come_from(without_own_ninja, monkeypatch):
    below = without_own_ninja / "below"
    (below / "bin").mkdir(parents=True)
    (below / "pyvenv.cfg").touch()
    (below / "bin" / "ninja").touch(mode=0o755)
    monkeypatch.setattr(torch, "__file__", str(without_own_ninja / "torch" / "__init__.py"))
    monkeypatch.setattr(sys, "path", [str(below / "lib" / "site-packages")])
    operators.find_ninja()
    assert os.environ["PATH"].split(os.pathsep)[0] == str(below / "bin")


def test_ninja_of_the_path_is_taken_where_there_is_no_other(without_own_ninja, monkeypatch):
    monkeypatch.setattr(operators, "_below", list)
    before = os.environ["PATH"]
    operators.find_ninja()
    assert os.environ["PATH"] == before


def test_the_cache_is_the_same_wherever_torch_lies_and_another_for_another_release(monkeypatch):
    here = operators.extensions_dir()
    monkeypatch.setattr(torch, "__file__", "/elsewhere/torch/__init__.py")
    assert operators.extensions_dir() == here
    for name, value in (("_deepspeed_version", "0.0.1"), ("_instructions", "00000000")):
        with monkeypatch.context() as patched:
            patched.setattr(operators, name, lambda value=value: value)
            assert operators.extensions_dir() != here
    monkeypatch.setattr(torch, "__version__", "1.0")
    assert operators.extensions_dir() != here


def test_without_a_compiler_what_any_has_built_is_taken(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built = operators.extensions_dir()
    built.mkdir(parents=True)
    monkeypatch.setenv("CXX", "no-compiler")
    assert operators.extensions_dir() == built
    built.rmdir()
    assert operators.extensions_dir().name.endswith("-none")


@pytest.mark.timeout(600)
def test_what_was_compiled_is_loaded_by_an_environment_without_ninja_and_compiler(tmp_path):
    first = subprocess.run(BUILD, capture_output=True, text=True, timeout=500, check=False)
    assert first.returncode == 0, first.stderr
    bare = {**os.environ, "CXX": "no-compiler", "PATH": str(tmp_path)}
    script = (
        "import sys; from torsh_trainer_deepspeed import operators; "
        "operators.find_ninja = lambda: None; "
        "from torsh_trainer_deepspeed.build import main; sys.exit(main(['deepspeed_shm_comm']))"
    )
    again = subprocess.run(
        [sys.executable, "-c", script],
        env=bare,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    assert "compiles" not in again.stderr
    assert again.stdout == first.stdout


def test_one_that_is_not_whole_is_compiled_anew(monkeypatch, tmp_path):
    from torsh_trainer_deepspeed import library

    library.load(LocalCommunicator(torch.device("cpu")))

    class Builder:
        name = "halved"
        _loaded_ops: ClassVar[dict[str, object]] = {}

        def load(self, *, verbose: bool) -> None:
            Path(tmp_path, "halved.so").touch()
            self._loaded_ops[self.name] = "compiled"

    (tmp_path / "halved.so").write_bytes(b"half of it")
    (tmp_path / operators.STAMP).write_text(operators._key())
    operators._load(Builder(), tmp_path)
    assert Builder._loaded_ops == {"halved": "compiled"}
    assert operators._is_whole(tmp_path)


class Fused:
    """DeepSpeed's builder of fused_adam as it is beside CUDA; ``error`` is what compiling meets."""

    name = "fused_adam"
    _loaded_ops: ClassVar[dict[str, object]] = {}

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def load(self, *, verbose: bool) -> None:
        if self.error is not None:
            raise self.error


def beside_cuda(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, error: Exception | None = None
) -> LocalCommunicator:
    """A communicator on a GPU, with what DeepSpeed and torch say of one."""
    from torsh_trainer_deepspeed import library

    library.load(LocalCommunicator(torch.device("cpu")))
    gpu = SimpleNamespace(
        device_name=lambda: "cuda", create_op_builder=lambda name: Fused(error=error)
    )
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
    return LocalCommunicator(torch.device("cuda", 0))


def test_fused_adam_is_compiled_with_a_line_beside_cuda_too(monkeypatch, tmp_path, caplog):
    comm = beside_cuda(monkeypatch, tmp_path, error=RuntimeError("stops here"))
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    plan: Any = SimpleNamespace(stage=1, offloads=False)
    with pytest.raises(ResourceError, match="could not compile fused_adam: stops here"):
        DeepSpeed(optimizer="fused_adam")._inner(optimizer, plan, comm)
    assert "DeepSpeed compiles fused_adam, once" in caplog.text


def test_without_nvcc_the_error_says_what_is_missing_and_what_to_take_instead(
    monkeypatch, tmp_path
):
    from deepspeed.ops.op_builder.builder import MissingCUDAException

    missing = MissingCUDAException("CUDA_HOME does not exist, unable to compile CUDA op(s)")
    comm = beside_cuda(monkeypatch, tmp_path, error=missing)
    with pytest.raises(ResourceError, match="CUDA_HOME does not exist") as caught:
        operators.compile_operators(["fused_adam"], comm)
    assert "strategy.optimizer=torch" in str(caught.value)


def test_what_came_compiled_with_deepspeed_is_not_said_to_be_compiled(
    monkeypatch, tmp_path, caplog
):
    comm = beside_cuda(monkeypatch, tmp_path)
    monkeypatch.setattr("deepspeed.git_version_info.installed_ops", {"fused_adam": True})
    operators.compile_operators(["fused_adam"], comm)
    assert "compiles" not in caplog.text


def test_what_was_compiled_for_other_gpus_is_compiled_anew(monkeypatch, tmp_path):
    beside_cuda(monkeypatch, tmp_path)
    (tmp_path / operators.STAMP).write_text(operators._key())
    assert operators._is_whole(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not operators._is_whole(tmp_path)
