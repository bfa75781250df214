"""What is installed here, and what stands in its way: torch, CUDA, NCCL, Python, the locale."""

from __future__ import annotations

import codecs
import locale
import re
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torsh_trainer
from torsh_trainer.doctor.base import Check, CheckResult, pass_check, report_finding, skip_check
from torsh_trainer.doctor.checks.gpu import has_gpu_hardware, list_gpus
from torsh_trainer.doctor.machine import Machine

_OLDEST_TORCH = (2, 13)
_SHADOWED = ("torch", "numpy", "hydra", "yaml", "omegaconf", "torsh_trainer", "random", "types")
_DEBUG = {
    "CUDA_LAUNCH_BLOCKING": ("1",),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL",),
    "NCCL_DEBUG": ("TRACE",),
    "TORCH_SHOW_DISPATCH_TRACE": ("1",),
    "CUDA_DEVICE_WAITS_ON_EXCEPTION": ("1",),
}


class Versions(Check):
    """torch and torsh-trainer are installed once each, in versions that go together."""

    why = (
        "without torch nothing trains; with two installations one is imported and the other is "
        "listed: a fix that was installed is not there, and hosts run different code"
    )

    def look(self, machine: Machine) -> CheckResult:
        torch = _version_of("torch")
        if torch is None:
            return report_finding("torch is not installed", fix="pip install 'torch>=2.13'")
        number = tuple(int(part) for part in re.findall(r"\d+", torch)[:2])
        saw = f"torsh-trainer {torsh_trainer.__version__}, torch {torch}, Python "
        saw += ".".join(map(str, sys.version_info[:3]))
        if number < _OLDEST_TORCH:
            return report_finding(saw, fix="pip install --upgrade 'torch>=2.13'")
        doubled = _list_doubled("torch") or _list_doubled("torsh-trainer")
        if doubled:
            return report_finding(
                f"{saw}; installed twice: {', '.join(doubled)}",
                fix="pip uninstall one of them; unset PYTHONPATH; export PYTHONNOUSERSITE=1",
            )
        listed = _version_of("torsh-trainer")
        if listed is not None and listed != torsh_trainer.__version__:
            return report_finding(
                f"{saw}, of {Path(torsh_trainer.__file__).parent}, but {listed} is installed",
                fix="unset PYTHONPATH, or pip install --force-reinstall torsh-trainer",
            )
        return pass_check(saw)


class CudaVersions(Check):
    """The driver serves the CUDA that torch was built with."""

    why = (
        "a driver that is older than torch's CUDA refuses every kernel (CUDA driver version is "
        "insufficient); a torch for CPUs never sees a GPU"
    )

    def look(self, machine: Machine) -> CheckResult:
        built = _read_torch_cuda()
        if not list_gpus(machine) and not has_gpu_hardware(machine):
            return skip_check(
                "no NVIDIA GPU here" + (f"; torch is built for CUDA {built}" if built else "")
            )
        if not built:
            return report_finding(
                "this torch is built without CUDA, and the host has a GPU",
                fix="pip install --force-reinstall torch, from an index with CUDA builds",
            )
        head = machine.ask(["nvidia-smi"]).out
        served = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", head)
        if served is None:
            return skip_check(f"torch is built for CUDA {built}; nvidia-smi does not say its own")
        saw = f"torch is built for CUDA {built}, the driver serves {served[1]}.{served[2]}"
        if int(served[1]) < int(built.partition(".")[0]):
            return report_finding(
                saw, fix=f"update the driver, or install a torch built for CUDA {served[1]}"
            )
        return pass_check(saw)


class NcclLibraries(Check):
    """One NCCL is installed, and no variable puts another before it."""

    why = (
        "two packages write the same file (nvidia/nccl/lib/libnccl.so.2), and the last wins: "
        "'undefined symbol: nccl...', or hosts that speak different versions and hang"
    )

    def look(self, machine: Machine) -> CheckResult:
        found = {
            f"{one.metadata['Name']} {one.version}"
            for one in metadata.distributions()
            if re.match(r"nvidia[-_]nccl[-_]cu\d+$", one.metadata["Name"] or "", re.IGNORECASE)
        }
        saw = ", ".join(sorted(found)) or "no NCCL package"
        names = {text.split()[0].lower().replace("_", "-") for text in found}
        if len(names) > 1:
            return report_finding(
                saw,
                fix=f"pip uninstall {' '.join(sorted(names))}; pip install --force-reinstall torch",
            )
        for variable in ("LD_PRELOAD", "LD_LIBRARY_PATH"):
            for text in re.split(r"[:\s]+", machine.env.get(variable, "")):
                path = Path(text) if text else None
                if path is None or "nvidia/nccl/lib" in text:
                    continue
                if "libnccl.so" in path.name or next(_find_nccl(path), None) is not None:
                    return report_finding(
                        f"{saw}; {variable} has another: {text}", fix=f"unset {variable}"
                    )
        return pass_check(saw)


class ShadowedModules(Check):
    """No file of this folder has the name of a library."""

    why = (
        "python -m puts the current folder first: a torch.py or random.py there is imported in "
        "place of the library, and what fails has another name"
    )

    def look(self, machine: Machine) -> CheckResult:
        here = Path.cwd()
        ours = Path(torsh_trainer.__file__).parent
        for name in _SHADOWED:
            for path in (here / f"{name}.py", here / name / "__init__.py"):
                if path.exists() and path.parent != ours:
                    return report_finding(
                        f"{path} hides the library {name}",
                        fix=f"mv {path.name} my_{name}.py"
                        if path.name != "__init__.py"
                        else "start from another folder",
                    )
        return pass_check(f"{here} hides no library")


class PythonPath(Check):
    """PYTHONPATH names folders that exist, of this Python."""

    why = (
        "packages of another Python are found first and fail to load ('invalid ELF header', 'No "
        "module named ...._C'): left over by modules of a cluster, or by another environment"
    )

    def look(self, machine: Machine) -> CheckResult:
        own = f"python{sys.version_info.major}.{sys.version_info.minor}"
        entries = [text for text in machine.env.get("PYTHONPATH", "").split(":") if text]
        for text in entries:
            other = re.search(r"python3\.\d+", text)
            if other and other[0] != own and "packages" in text:
                return report_finding(
                    f"PYTHONPATH has {text}, of {other[0]}, before those of {own}",
                    fix="unset PYTHONPATH (module purge, conda deactivate)",
                )
        return pass_check(f"PYTHONPATH={':'.join(entries)}" if entries else "PYTHONPATH is not set")


class Locale(Check):
    """Text is read and written as UTF-8, and the locale that variables name exists."""

    why = (
        "with another encoding a log, a configuration or a file name with one letter beyond ASCII "
        "ends the run in UnicodeDecodeError, on the hosts that have it"
    )

    def look(self, machine: Machine) -> CheckResult:
        named = next((n for n in ("LC_ALL", "LC_CTYPE", "LANG") if machine.env.get(n)), "")
        encoding = codecs.lookup(locale.getpreferredencoding(False)).name
        system = sys.getfilesystemencoding()
        saw = f"{encoding} for text, {system} for file names"
        saw += f", by {named}={machine.env[named]}" if named else ""
        if encoding != "utf-8" or system != "utf-8":
            return report_finding(saw, fix="export LC_ALL=C.UTF-8 PYTHONUTF8=1")
        try:
            locale.setlocale(locale.LC_CTYPE, "")
        except locale.Error:
            return report_finding(
                f"{saw}, which this host does not have", fix="export LC_ALL=C.UTF-8"
            )
        return pass_check(saw)


class DebugVariables(Check):
    """No variable that is meant for debugging is left on."""

    why = (
        "CUDA_LAUNCH_BLOCKING=1 waits for every kernel, TORCH_DISTRIBUTED_DEBUG=DETAIL checks "
        "every collective with another: guides tell to set them, and they stay"
    )

    def look(self, machine: Machine) -> CheckResult:
        for name, slow in _DEBUG.items():
            if machine.env.get(name, "").strip().upper() in slow:
                return report_finding(f"{name}={machine.env[name]}", fix=f"unset {name}")
        return pass_check("none is set")


def _version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _list_doubled(name: str) -> list[str]:
    """The folders in which a distribution is installed, where there are several."""
    places = {
        str(Path(str(one.locate_file(""))).resolve()) for one in metadata.distributions(name=name)
    }
    return sorted(places) if len(places) > 1 else []


def _read_torch_cuda() -> str:
    """The CUDA that torch was built for, by its file of versions; torch is not imported."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        text = (Path(spec.origin).parent / "version.py").read_text("utf-8")
    except OSError:
        return ""
    found = re.search(r"^cuda[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found[1] if found else ""


def _find_nccl(folder: Path):  # type: ignore[no-untyped-def]
    try:
        return iter(sorted(folder.glob("libnccl.so*")))
    except OSError:
        return iter(())
