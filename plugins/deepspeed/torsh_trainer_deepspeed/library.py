"""The deepspeed package, loaded when the first engine is made: where, for what, and how told."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import logging
import os
import re
import resource
import sysconfig
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.importing import collector_at_rest
from torsh_trainer.world import World

log = logging.getLogger(__name__)

MISSING = "pip install torsh-trainer-deepspeed"

_REPLACED = ("linear", "embedding")
"""What stage 3 replaces in torch.nn.functional: the second when weights are quantised."""


def load(comm: Communicator) -> Any:
    """The package, on the accelerator that ``comm`` is on.

    DeepSpeed chooses its accelerator once, when it is imported, and by what it finds installed. A
    run without an accelerator says so beforehand: ``DS_ACCELERATOR=cpu``. It also looks up its
    device in LOCAL_RANK, now and later, which a launcher of ours does not set.

    Raises:
        ResourceError: it is not installed.
        ConfigError: it was imported before, for another kind of device.
    """
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(extensions_dir()))
    os.environ["LOCAL_RANK"] = str(comm.world.local_rank)
    device = comm.device
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        # Imported here: it takes seconds, and chooses its accelerator.
        with collector_at_rest():
            import deepspeed
        from deepspeed.accelerator import get_accelerator
    except ImportError as error:
        raise ResourceError(f"DeepSpeed cannot be imported: {error}", fix=MISSING) from error
    # torch's names for collectives have changed, and DeepSpeed uses the old ones.
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
    )
    _find_ninja()
    _leave_former_group()
    chosen = get_accelerator().device_name()
    if chosen != device.type:
        raise ConfigError(
            f"DeepSpeed drives {chosen} in this process, and the run is on {device.type}",
            fix=f"set DS_ACCELERATOR={device.type}, or trainer.device={chosen}",
        )
    return deepspeed


def _leave_former_group() -> None:
    """Makes DeepSpeed forget the process group of an earlier run in this process, if it is gone."""
    # Imported here: see ``load``.
    from deepspeed.comm import comm as theirs
    from deepspeed.utils import groups

    if theirs.cdb is not None and groups._WORLD_GROUP is not None:
        known = dist.distributed_c10d._world.pg_map if dist.is_initialized() else {}
        if groups._WORLD_GROUP not in known:
            groups._release_process_group_references(group=None)
            theirs.cdb = None


def _find_ninja() -> None:
    """Puts the ninja that DeepSpeed was installed with before any other.

    Without the environment's bin directory in PATH there may be none, or one of another version,
    which would compile everything again: the two do not read each other's logs.
    """
    folder, path = sysconfig.get_path("scripts"), os.environ.get("PATH", "")
    if Path(folder, "ninja").exists() and path.split(os.pathsep)[0] != folder:
        os.environ["PATH"] = os.pathsep.join(filter(None, (folder, path)))


def extensions_dir() -> Path:
    """Where operators are compiled and kept: the user's cache, by Python, torch and its place.

    The paths of torch's headers stand in what is built: two environments that shared a folder would
    compile everything again in turns, while the other waits.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    place = hashlib.sha256(str(Path(torch.__file__).parent).encode()).hexdigest()[:8]
    build = f"{sysconfig.get_config_var('SOABI')}-torch-{torch.__version__}-{place}"
    return Path(home) / "torsh-trainer" / "torch_extensions" / build


def available_bytes() -> int | None:
    """Host memory that this machine could give now; None where the kernel does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def check_memory(elements: int, world: World, available: int | None) -> None:
    """Holds what an offloaded optimizer takes against what there is, before anything is made.

    Raises:
        ResourceError: it is more, and the kernel would end the run in the middle.
    """
    # fp32 masters, gradients and two moments, spread over all ranks.
    needed = 16 * elements * world.local_size // world.size
    if available is not None and needed > available:
        raise ResourceError(
            f"offloading the optimizer of {elements:,} parameters takes {needed / 2**30:.1f} GiB "
            f"of memory here, and {available / 2**30:.1f} GiB are available",
            fix="run on more machines, or leave offload_optimizer out",
        )


def lockable_bytes() -> int | None:
    """Memory that this process may keep from being paged out; None where that has no bound."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    try:
        held = re.search(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text("ascii"))
    except OSError:
        held = None
    unbound = held is not None and bool(int(held[1], 16) >> _CAP_IPC_LOCK & 1)
    return None if unbound or limit == resource.RLIM_INFINITY else limit


_CAP_IPC_LOCK = 14


def check_buffers(
    needed: int, world: World, lockable: int | None, *, available: int | None
) -> None:
    """Holds what a rank's buffers for files lock of memory against what there is.

    Raises:
        ResourceError: it is more; DeepSpeed would go on with buffers that are not there.
    """
    fix = "make the buffers smaller: strategy.sub_group_size"
    takes = f"DeepSpeed's buffers for files lock {needed / 2**20:.0f} MiB of memory a process"
    if lockable is not None and needed > lockable:
        raise ResourceError(
            f"{takes}, and this one may lock {lockable / 2**20:.0f} MiB",
            fix=f"raise that bound (ulimit -l), or {fix}",
        )
    if available is not None and needed * world.local_size > available:
        raise ResourceError(
            f"{takes}, and {available / 2**20:.0f} MiB are available to {world.local_size}", fix=fix
        )


@contextlib.contextmanager
def putting_back() -> Iterator[dict[str, Any]]:
    """Undoes, at its end, what making an engine replaces in the whole process; gives it, by name.

    DeepSpeed never does. Its ``linear`` rounds once more than torch's in bf16 and fp16, for every
    model that this process trains from then on.
    """
    before = {name: getattr(functional, name) for name in _REPLACED}
    theirs: dict[str, Any] = {}
    try:
        yield theirs
    finally:
        for name, function in before.items():
            if getattr(functional, name) is not function:
                theirs[name] = getattr(functional, name)
                setattr(functional, name, function)


class Replacement:
    """Functions of ``torch.nn.functional`` that are DeepSpeed's while a model of it computes."""

    def __init__(self, theirs: Mapping[str, Any]) -> None:
        self._theirs = theirs
        self._before: list[dict[str, Any]] = []

    def within(self, model: nn.Module) -> None:
        """Puts them in force during every forward of ``model``."""
        if self._theirs:
            model.register_forward_pre_hook(self._begin)
            model.register_forward_hook(self._end, always_call=True)

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Within backward, which computes forward again where activations were not kept."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    def _begin(self, *_: Any) -> None:
        self._before.append({name: getattr(functional, name) for name in self._theirs})
        for name, function in self._theirs.items():
            setattr(functional, name, function)

    def _end(self, *_: Any) -> None:
        if self._before:  # a hook before ours may have failed
            for name, function in self._before.pop().items():
                setattr(functional, name, function)


def compiled(operators: Sequence[str], comm: Communicator) -> None:
    """Makes DeepSpeed's ``operators`` ready: compiled at their first use, with a line that says so.

    Raises:
        ResourceError: it failed; the message has what the compiler said.
    """
    # Imported here: see ``load``.
    from deepspeed.accelerator import get_accelerator

    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    due = [name for name in operators if not (folder / name / f"{name}.so").exists()]
    if "async_io" in due and not _has_libaio():
        raise ResourceError(
            "DeepSpeed compiles async_io, for files, against libaio, which is not there",
            fix=_LIBAIO,
        )
    if due and comm.world.is_main:
        log.warning(
            "DeepSpeed compiles %s, once: a few minutes; it stays in %s",
            " and ".join(due),
            folder,
        )
    for name in operators:
        builder = get_accelerator().create_op_builder(BUILDERS[name])
        # Every rank would say that it has it.
        with _alone(folder / name), contextlib.redirect_stdout(io.StringIO()):
            try:
                builder.load(verbose=False)
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


_LIBAIO = "apt-get install libaio-dev, or offload to cpu"


def _has_libaio() -> bool:
    # Imported here: see ``load``.
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
"""What can be compiled for a CPU, and DeepSpeed's class that does it."""

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
