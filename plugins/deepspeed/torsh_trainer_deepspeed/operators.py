"""DeepSpeed's operators: where they are compiled, by what, and that it happens once."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import io
import logging
import os
import platform
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ResourceError

log = logging.getLogger(__name__)

STAMP = "compiled"
"""The file beside an operator that says by what it was compiled, once it is whole."""


def extensions_dir() -> Path:
    """Where operators are compiled and kept: the user's cache, by what they depend on.

    That is Python, torch, DeepSpeed, the processor's instructions (DeepSpeed compiles for those of
    this machine) and the compiler; not the environment, of which several may lie over one torch.
    Where there is no compiler, what any has built is as good.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    parent = Path(home) / "torsh-trainer" / "torch_extensions"
    build = (
        f"{sysconfig.get_config_var('SOABI')}-torch-{torch.__version__}"
        f"-deepspeed-{_deepspeed_version()}-{_instructions()}"
    )
    compiler = _compiler(os.environ.get("CXX", "c++"))
    if compiler is None:
        built = sorted(parent.glob(f"{build}-*"))
        return built[0] if built else parent / f"{build}-none"
    return parent / f"{build}-{compiler}"


def _deepspeed_version() -> str:
    try:
        return version("deepspeed")
    except PackageNotFoundError:
        return "unknown"


@functools.cache
def _instructions() -> str:
    """Eight digits that stand for the instructions that this machine's processor has."""
    told = platform.machine()
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
        told += next((line for line in text.splitlines() if line.startswith("flags")), "")
    return hashlib.sha256(told.encode()).hexdigest()[:8]


@functools.cache
def _compiler(command: str) -> str | None:
    """``c++-12.2.0``; None where there is none."""
    words = command.split()
    try:
        told = subprocess.run(
            [*words, "-dumpfullversion", "-dumpversion"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
    return re.sub(r"[^\w.+-]", "_", f"{Path(words[-1]).name}-{told.stdout.split()[0]}")


def find_ninja() -> None:
    """Puts a ninja into PATH: this environment's, else that of one which it lies over.

    Without the environment's bin directory in PATH there may be none, or one of another version,
    which would compile everything again: the two do not read each other's logs.
    """
    path = os.environ.get("PATH", "")
    own = Path(sysconfig.get_path("scripts"))
    folders = [own, *_below()]
    found = next((folder for folder in folders if os.access(folder / "ninja", os.X_OK)), None)
    if found is not None and path.split(os.pathsep)[0] != str(found):
        os.environ["PATH"] = os.pathsep.join(filter(None, (str(found), path)))


def _below() -> Iterator[Path]:
    """Folders of programs of the environments that this one takes packages from."""
    scripts = Path(sysconfig.get_path("scripts")).name
    for package in (torch.__file__, *sys.path):
        for folder in Path(package).parents:
            if (folder / "pyvenv.cfg").exists():
                yield folder / scripts
                break
    yield Path(sys.base_prefix) / scripts


def compile_operators(operators: Sequence[str], comm: Communicator) -> None:
    """Makes DeepSpeed's ``operators`` ready: compiled at their first use, with a line that says so.

    Raises:
        ResourceError: it failed; the message has what the compiler said.
    """
    # Imported here: see ``library.load``.
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.builder import CUDAMismatchException, MissingCUDAException

    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    builders = {name: get_accelerator().create_op_builder(BUILDERS[name]) for name in operators}
    due = [
        name
        for name, builder in builders.items()
        if not installed_ops.get(builder.name, False) and not _is_whole(folder / name)
    ]
    if "async_io" in due and not _has_libaio():
        raise ResourceError(
            "DeepSpeed compiles async_io, for files, against libaio, which is not there",
            fix=_LIBAIO,
        )
    if due and comm.world.is_rank_zero:
        log.warning(
            "DeepSpeed compiles %s, once: a few minutes; it stays in %s",
            " and ".join(due),
            folder,
        )
    began_s = time.monotonic()
    for name, builder in builders.items():
        # Every rank would say that it has it.
        with _alone(folder / name), contextlib.redirect_stdout(io.StringIO()):
            try:
                _load(builder, folder / name)
            except (MissingCUDAException, CUDAMismatchException) as error:
                words = " ".join(str(error).removeprefix(">- DeepSpeed Op Builder: ").split())
                raise ResourceError(
                    f"DeepSpeed could not compile {name}: {words}",
                    fix=f"it takes nvcc of CUDA {torch.version.cuda}, torch's own, in CUDA_HOME; "
                    "or set strategy.optimizer=torch",
                ) from error
            except (RuntimeError, OSError, ImportError) as error:
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                telling = [line for line in lines if re.search(r"error: |not found", line)]
                raise ResourceError(
                    f"DeepSpeed could not compile {name}: {(telling or lines)[-1]}",
                    fix=_LIBAIO
                    if "libaio" in str(error)
                    else "it takes a C++ compiler (apt-get install g++) and room in "
                    f"TORCH_EXTENSIONS_DIR ({folder})",
                ) from error
    if due and comm.world.is_rank_zero:
        log.warning("compiled in %.0f s", time.monotonic() - began_s)


def _load(builder: Any, folder: Path) -> None:
    """What is there whole is taken as it is; else ninja has its turn, which looks at every path.

    The paths of DeepSpeed's sources stand in ninja's log: two environments would compile everything
    again in turns.
    """
    if builder.name in builder._loaded_ops:
        return
    if _is_whole(folder):
        with contextlib.suppress(ImportError, OSError):
            builder._loaded_ops[builder.name] = _import_operator(builder.name, folder)
            return
    (folder / STAMP).unlink(missing_ok=True)
    builder.load(verbose=False)
    if (folder / f"{builder.name}.so").exists():
        (folder / STAMP).write_text(_key(), encoding="utf-8")


def _is_whole(folder: Path) -> bool:
    try:
        return (folder / STAMP).read_text(encoding="utf-8") == _key()
    except OSError:
        return False


def _key() -> str:
    """What an operator was compiled for, where the folder's name may be the user's."""
    # Imported here: see ``library.load``.
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator().device_name()
    if device == "cuda":  # compiled for the GPUs that were there
        there = range(torch.cuda.device_count())
        device += f" {sorted({torch.cuda.get_device_capability(gpu) for gpu in there})}"
    return f"{extensions_dir().name} {device}"


def _import_operator(name: str, folder: Path) -> Any:
    from torch.utils import cpp_extension  # it takes a second, and few runs need it

    return cpp_extension._import_module_from_library(name, str(folder), True)


_LIBAIO = "apt-get install libaio-dev, or offload to cpu"


def _has_libaio() -> bool:
    # Imported here: see ``library.load``.
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder(BUILDERS["async_io"])
    with contextlib.redirect_stdout(io.StringIO()):
        return bool(builder.is_compatible(verbose=False))


BUILDERS = {
    "deepspeed_shm_comm": "ShareMemCommBuilder",
    "cpu_adam": "CPUAdamBuilder",
    "cpu_adagrad": "CPUAdagradBuilder",
    "cpu_lion": "CPULionBuilder",
    "fused_adam": "FusedAdamBuilder",
    "pin_memory": "PinMemoryBuilder",
    "async_io": "AsyncIOBuilder",
}
"""What can be compiled, and DeepSpeed's class that does it."""

OPERATORS = ("deepspeed_shm_comm", "cpu_adam")
"""What a run on a CPU needs unless it asks for another optimizer of DeepSpeed's."""


FILES = ("pin_memory", "async_io")
"""What keeping anything in files takes, and libaio."""


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time compiles into ``folder``; one that was killed meanwhile is no obstacle.

    torch's own lock is a file, for which everybody waits for ever when its owner was killed. In a
    folder of ours nobody owns it who does not hold this one too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.building").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if folder.parent == extensions_dir():
            (folder / "lock").unlink(missing_ok=True)
        yield
