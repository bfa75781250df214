"""What is installed, by name: every kind of plugin is one group of entry points, read in one way.

Ours stand in the tables below and read like those of a plugin; nothing is imported before it is
chosen. ``docs/plugins.md`` says what each group wants and who reads it:

``torsh_trainer.plugins``             NAME = package       its ``conf/`` and ``recipes/`` are found
``torsh_trainer.strategies``          NAME = module:Class  a Strategy
``torsh_trainer.backends``            NAME = module:func   a backend of torch.distributed
``torsh_trainer.environments``        NAME = module:Class  an Environment
``torsh_trainer.launchers``           NAME = module:Class  a Launcher
``torsh_trainer.checkpointers``       NAME = module:Class  a Checkpointer
``torsh_trainer.export_formats``      NAME = module:Class  an ExportFormat
``torsh_trainer.import_formats``      NAME = module:Class  an ImportFormat
``torsh_trainer.translators``         NAME = module:Class  a Translator
``torsh_trainer.translation_rules``   NAME = module        keys and rules of DeepSpeed and Horovod
``torsh_trainer.stages``              NAME = module:func   a stage of a run
``torsh_trainer.callbacks``           NAME = module:Class  a Callback
``torsh_trainer.loggers``             NAME = module:Class  a Callback that sends reports elsewhere
``torsh_trainer.checks``              NAME = module:Class  a Check of the doctor
``torsh_trainer.verbs``               NAME = module:func   a word of the command line
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torsh_trainer.errors import ConfigError, ResourceError, TorshError, nearest
from torsh_trainer.utils.importing import collector_at_rest

GROUPS = (
    "trainer",
    "task",
    "model",
    "data",
    "optimizer",
    "schedule",
    "strategy",
    "comm",
    "mesh",
    "precision",
    "compression",
    "launcher",
    "checkpoint",
    "callbacks",
    "logger",
)
"""The groups of conf/config.yaml."""

SETTINGS = ("debug", "log_level", "vars")
"""What stands beside the groups."""

DISTRIBUTIONS = {
    ("comm", "mpi"): "torsh-trainer-mpi",
    ("launcher", "mpi"): "torsh-trainer-mpi",
    ("strategy", "horovod"): "torsh-trainer-horovod",
    ("strategy", "deepspeed"): "torsh-trainer-deepspeed",
    ("task", "lightning"): "torsh-trainer-lightning",
}
"""Options that a plugin of ours brings: what to install where one is asked for and missing. What is
not installed registers nothing, so this is a table."""

OWN = "torsh-trainer"


@dataclass(frozen=True)
class Registration:
    """One name of a kind: ``reference`` is ``module:attribute`` or ``module``."""

    name: str
    reference: str
    point: EntryPoint | None = None

    @property
    def distribution(self) -> str:
        """Who registers it."""
        if self.point is None:
            return OWN
        return "a distribution without a name" if self.point.dist is None else self.point.dist.name


@dataclass(frozen=True)
class PluginKind:
    """A kind of plugin: a group of entry points, and what of it is ours.

    ``noun`` is one of the kind, in words. ``builtin`` are ours, by name. ``contract`` is the class
    that a plugin's class inherits from, as ``module:Class``; empty for functions and modules.
    """

    group: str
    noun: str
    builtin: Mapping[str, str] = field(default_factory=dict)
    contract: str = ""

    def registrations(self) -> Mapping[str, Registration]:
        """By name: ours, then those of installed plugins; nothing is imported."""
        return {name: found[0] for name, found in _find_registrations(self).items()}

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(_find_registrations(self))

    def __contains__(self, name: object) -> bool:
        return name in _find_registrations(self)

    def __hash__(self) -> int:
        return hash(self.group)

    def find(self, name: str, *, option: str = "") -> Registration:
        """The registration of ``name``; ``option`` is the knob that asks for it, for the message.

        Raises:
            ConfigError: nothing of that name is installed, or it is registered twice.
        """
        found = _find_registrations(self).get(name)
        if found is None:
            missing = DISTRIBUTIONS.get((self.noun, name))
            raise ConfigError(
                f"{option}={name}: there is no such {self.noun}"
                if option
                else f"unknown {self.noun} {name!r}",
                fix=f"pip install {missing}" if missing else nearest(name, self.names()),
                name=name,
            )
        if len(found) > 1:
            raise ConfigError(
                f"the {self.noun} {name!r} is registered {len(found)} times: by "
                + " and by ".join(f"{one.distribution} ({one.reference})" for one in found),
                fix=f"uninstall {found[-1].distribution}, or have it choose another name",
                name=name,
            )
        return found[0]

    def load(self, name: str, *, option: str = "") -> Any:
        """What ``name`` refers to, imported.

        Raises:
            ConfigError: as ``find``.
            ResourceError: the plugin that registers it cannot be imported, or brings something
                else; the message names its distribution and says why.
        """
        found = self.find(name, option=option)
        if found.point is None:
            return load(found.reference)
        try:
            loaded = load(found.reference)
        except TorshError:
            raise
        except Exception as error:  # whatever the module does while it is imported
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise self._load_error(found, f"cannot be loaded: {why}") from error
        if self.contract and not _inherits(loaded, self.contract):
            base = self.contract.replace(":", ".")
            raise self._load_error(found, f"does not inherit from {base}")
        return loaded

    def load_all(self, *, strict: bool) -> dict[str, Any]:
        """All of the kind, by name, ours first.

        Where not ``strict``, one that ``load`` refuses is said to be, and left out: who does not
        use it goes on.

        Raises:
            ConfigError, ResourceError: as ``load``, for any of them, where ``strict``.
        """
        loaded = {}
        for name in self.registrations():
            try:
                loaded[name] = self.load(name)
            except TorshError as error:
                if strict:
                    raise
                _note(f"left out: {error}")
        return loaded

    def _load_error(self, found: Registration, why: str) -> ResourceError:
        return ResourceError(
            f"the {self.noun} {found.name!r} of {found.distribution} ({found.reference}) {why}",
            fix=f"reinstall {found.distribution}, or uninstall it",
            distribution=found.distribution,
        )


PLUGINS = PluginKind("torsh_trainer.plugins", "plugin")
STRATEGIES = PluginKind(
    "torsh_trainer.strategies",
    "strategy",
    {
        "auto": "torsh_trainer.strategies.auto:Auto",
        "single": "torsh_trainer.strategies.single:Single",
        "dp": "torsh_trainer.strategies.dp:DP",
        "ddp": "torsh_trainer.strategies.ddp:DDP",
        "fsdp": "torsh_trainer.strategies.fsdp:FSDP",
        "parallel": "torsh_trainer.strategies.parallel:Parallel",
        "nccl": "torsh_trainer.strategies.builtin:NCCL",
        "gloo": "torsh_trainer.strategies.builtin:Gloo",
        "mpi": "torsh_trainer.strategies.builtin:MPI",
    },
    contract="torsh_trainer.strategies.base:Strategy",
)
BACKENDS = PluginKind("torsh_trainer.backends", "backend")
"""Called as ``function(world, store)`` in every process of a job that asks for the backend, and in
no other, once the processes have met in ``store``; raises a TorshError where it cannot serve."""

ENVIRONMENTS = PluginKind(
    "torsh_trainer.environments",
    "environment",
    {
        "torchrun": "torsh_trainer.environments.torchrun:Torchrun",
        "horovod": "torsh_trainer.environments.horovod:Horovod",
        "lsf": "torsh_trainer.environments.lsf:Lsf",
        "pbs": "torsh_trainer.environments.pbs:Pbs",
        "openmpi": "torsh_trainer.environments.openmpi:OpenMPI",
        "pmi": "torsh_trainer.environments.pmi:Pmi",
        "slurm": "torsh_trainer.environments.slurm:Slurm",
        "kubernetes": "torsh_trainer.environments.kubernetes:Kubernetes",
        "env": "torsh_trainer.environments.by_hand:ByHand",
    },
    contract="torsh_trainer.environments.base:Environment",
)
LAUNCHERS = PluginKind(
    "torsh_trainer.launchers",
    "launcher",
    {
        "inline": "torsh_trainer.launchers.inline:Inline",
        "kubernetes": "torsh_trainer.launchers.kubernetes.launcher:KubernetesLauncher",
        "local": "torsh_trainer.launchers.local:Local",
        "lsf": "torsh_trainer.launchers.lsf:LsfLauncher",
        "mpirun": "torsh_trainer.launchers.mpirun:MpirunLauncher",
        "pbs": "torsh_trainer.launchers.pbs:PbsLauncher",
        "slurm": "torsh_trainer.launchers.slurm.launcher:SlurmLauncher",
        "ssh": "torsh_trainer.launchers.ssh:Ssh",
    },
    contract="torsh_trainer.launchers.base:Launcher",
)
CHECKPOINTERS = PluginKind(
    "torsh_trainer.checkpointers",
    "checkpointer",
    {"dcp": "torsh_trainer.checkpoint.dcp:DcpCheckpointer"},
    contract="torsh_trainer.checkpoint.base:Checkpointer",
)
EXPORT_FORMATS = PluginKind(
    "torsh_trainer.export_formats",
    "format",
    {
        "safetensors": "torsh_trainer.checkpoint.cli.export_formats:SafetensorsExport",
        "torch": "torsh_trainer.checkpoint.cli.export_formats:TorchExport",
        "lightning": "torsh_trainer.checkpoint.cli.lightning_format:LightningExport",
        "hf": "torsh_trainer.checkpoint.cli.export_formats:HuggingFaceExport",
    },
    contract="torsh_trainer.checkpoint.cli.exporting:ExportFormat",
)
IMPORT_FORMATS = PluginKind(
    "torsh_trainer.import_formats",
    "format",
    {
        "torch": "torsh_trainer.checkpoint.cli.import_formats:TorchImport",
        "safetensors": "torsh_trainer.checkpoint.cli.import_formats:SafetensorsImport",
        "lightning": "torsh_trainer.checkpoint.cli.import_formats:LightningImport",
        "hf": "torsh_trainer.checkpoint.cli.import_formats:HuggingFaceImport",
        "deepspeed": "torsh_trainer.checkpoint.cli.import_formats:DeepSpeedImport",
        "horovod": "torsh_trainer.checkpoint.cli.import_formats:Horovod",
    },
    contract="torsh_trainer.checkpoint.cli.imported:ImportFormat",
)
TRANSLATORS = PluginKind(
    "torsh_trainer.translators",
    "translator",
    {
        "deepspeed": "torsh_trainer.translate.deepspeed.engine:DeepSpeedTranslator",
        "horovod": "torsh_trainer.translate.horovod.translator:HorovodTranslator",
        "launch": "torsh_trainer.translate.launch.translator:LaunchTranslator",
    },
    contract="torsh_trainer.translate.base:Translator",
)
TRANSLATION_RULES = PluginKind("torsh_trainer.translation_rules", "set of translation rules")
STAGES = PluginKind(
    "torsh_trainer.stages",
    "stage",
    {
        "find_lr": "torsh_trainer.training.finders:find_lr_stage",
        "find_batch_size": "torsh_trainer.training.finders:find_batch_size_stage",
    },
)
CALLBACKS = PluginKind(
    "torsh_trainer.callbacks",
    "callback",
    {
        "console": "torsh_trainer.callbacks.console:Console",
        "early_stopping": "torsh_trainer.callbacks.early_stopping:EarlyStopping",
        "profiler": "torsh_trainer.callbacks.profiler:Profiler",
    },
    contract="torsh_trainer.callbacks.base:Callback",
)
LOGGERS = PluginKind(
    "torsh_trainer.loggers",
    "logger",
    {
        "jsonl": "torsh_trainer.callbacks.jsonl:Jsonl",
        "tensorboard": "torsh_trainer.callbacks.tensorboard:TensorBoard",
        "csv": "torsh_trainer.callbacks.csv:Csv",
        "wandb": "torsh_trainer.callbacks.wandb:WandB",
        "mlflow": "torsh_trainer.callbacks.mlflow:MLflow",
    },
    contract="torsh_trainer.callbacks.base:Callback",
)
CHECKS = PluginKind(
    "torsh_trainer.checks",
    "check",
    {
        "host_name": "torsh_trainer.doctor.checks.network:HostName",
        "host_name_loopback": "torsh_trainer.doctor.checks.network:HostNameLoopback",
        "reverse_lookup": "torsh_trainer.doctor.checks.network:ReverseLookup",
        "interface_variables": "torsh_trainer.doctor.checks.network:InterfaceVariables",
        "interfaces": "torsh_trainer.doctor.checks.network:Interfaces",
        "master_address": "torsh_trainer.doctor.checks.network:MasterAddress",
        "master_port": "torsh_trainer.doctor.checks.network:MasterPort",
        "master_reachable": "torsh_trainer.doctor.checks.network:MasterReachable",
        "firewall": "torsh_trainer.doctor.checks.network:Firewall",
        "local_ports": "torsh_trainer.doctor.checks.network:LocalPorts",
        "mtu": "torsh_trainer.doctor.checks.network:Mtu",
        "link_speed": "torsh_trainer.doctor.checks.network:LinkSpeed",
        "proxies": "torsh_trainer.doctor.checks.network:Proxies",
        "rank_variables": "torsh_trainer.doctor.checks.ranks:RankVariables",
        "duplicate_ranks": "torsh_trainer.doctor.checks.ranks:DuplicateRanks",
        "scheduler_tasks": "torsh_trainer.doctor.checks.ranks:SchedulerTasks",
        "master_per_node": "torsh_trainer.doctor.checks.ranks:MasterPerNode",
        "rank_environment": "torsh_trainer.doctor.checks.ranks:RankEnvironment",
        "open_files": "torsh_trainer.doctor.checks.limits:OpenFiles",
        "processes": "torsh_trainer.doctor.checks.limits:ProcessLimit",
        "locked_memory": "torsh_trainer.doctor.checks.limits:LockedMemory",
        "address_space": "torsh_trainer.doctor.checks.limits:AddressSpace",
        "cpu_quota": "torsh_trainer.doctor.checks.limits:CpuQuota",
        "threads": "torsh_trainer.doctor.checks.limits:Threads",
        "affinity": "torsh_trainer.doctor.checks.limits:Affinity",
        "numa": "torsh_trainer.doctor.checks.limits:Numa",
        "shared_memory": "torsh_trainer.doctor.checks.memory:SharedMemoryFolder",
        "memory": "torsh_trainer.doctor.checks.memory:FreeMemory",
        "swap": "torsh_trainer.doctor.checks.memory:Swap",
        "huge_pages": "torsh_trainer.doctor.checks.memory:HugePages",
        "overcommit": "torsh_trainer.doctor.checks.memory:Overcommit",
        "disk_space": "torsh_trainer.doctor.checks.disk:DiskSpace",
        "run_directory": "torsh_trainer.doctor.checks.disk:RunDirectory",
        "run_directory_shared": "torsh_trainer.doctor.checks.disk:RunDirectoryShared",
        "file_locks": "torsh_trainer.doctor.checks.disk:FileLocks",
        "file_clock": "torsh_trainer.doctor.checks.disk:FileClock",
        "temporary_folder": "torsh_trainer.doctor.checks.disk:TemporaryFolder",
        "cache_folders": "torsh_trainer.doctor.checks.disk:CacheFolders",
        "clock": "torsh_trainer.doctor.checks.clock:Clock",
        "gpu_driver": "torsh_trainer.doctor.checks.gpu:GpuDriver",
        "gpu_count": "torsh_trainer.doctor.checks.gpu:GpuCount",
        "visible_devices": "torsh_trainer.doctor.checks.gpu:VisibleDevices",
        "gpu_health": "torsh_trainer.doctor.checks.gpu:GpuHealth",
        "gpu_busy": "torsh_trainer.doctor.checks.gpu:GpuBusy",
        "gpu_peers": "torsh_trainer.doctor.checks.gpu:GpuPeers",
        "nccl_switches": "torsh_trainer.doctor.checks.gpu:NcclSwitches",
        "infiniband": "torsh_trainer.doctor.checks.gpu:InfiniBand",
        "versions": "torsh_trainer.doctor.checks.software:Versions",
        "cuda_versions": "torsh_trainer.doctor.checks.software:CudaVersions",
        "nccl_libraries": "torsh_trainer.doctor.checks.software:NcclLibraries",
        "shadowed_modules": "torsh_trainer.doctor.checks.software:ShadowedModules",
        "python_path": "torsh_trainer.doctor.checks.software:PythonPath",
        "locale": "torsh_trainer.doctor.checks.software:Locale",
        "debug_variables": "torsh_trainer.doctor.checks.software:DebugVariables",
    },
    contract="torsh_trainer.doctor.base:Check",
)
VERBS = PluginKind(
    "torsh_trainer.verbs",
    "verb",
    {
        "checkpoint": "torsh_trainer.checkpoint.cli.command:main",
        "comm": "torsh_trainer.bench.command:main",
        "doctor": "torsh_trainer.doctor.command:main",
        "drop-in": "torsh_trainer.dropin.command:main",
        "jobs": "torsh_trainer.__main__:jobs",
        "rerun": "torsh_trainer.__main__:rerun",
        "report": "torsh_trainer.__main__:report",
        "verify": "torsh_trainer.__main__:verify",
        "translate": "torsh_trainer.__main__:translate",
    },
)
KINDS = (
    PLUGINS,
    STRATEGIES,
    BACKENDS,
    ENVIRONMENTS,
    LAUNCHERS,
    CHECKPOINTERS,
    EXPORT_FORMATS,
    IMPORT_FORMATS,
    TRANSLATORS,
    TRANSLATION_RULES,
    STAGES,
    CALLBACKS,
    LOGGERS,
    CHECKS,
    VERBS,
)
"""Every kind there is."""


@cache
def plugin_folders() -> dict[str, Path]:
    """Plugin name -> folder of its package; found without importing the package.

    One whose package is gone is said to be, and left out: who does not use it goes on. So is the
    second of two with one name.
    """
    folders = {}
    for name, found in sorted(_find_registrations(PLUGINS).items()):
        first, *others = found
        for other in others:
            _note(
                f"plugin {name!r} is registered by {first.distribution} and by "
                f"{other.distribution}; the options of {other.distribution} are left out, until "
                "one of the two is uninstalled"
            )
        package = first.reference
        spec = find_spec(package.split(".")[0])
        if spec is None or not spec.submodule_search_locations:
            _note(
                f"plugin {name!r} is registered, but its package {package!r} cannot be "
                f"found; reinstall the distribution that registers it, or uninstall it "
                f"({first.distribution})"
            )
            continue
        folders[name] = Path(next(iter(spec.submodule_search_locations)), *package.split(".")[1:])
    return folders


def load(reference: str) -> Any:
    """The object behind ``package.module:name``, or the module ``package.module``."""
    module, _, name = reference.partition(":")
    with collector_at_rest():
        found = importlib.import_module(module)
        return getattr(found, name) if name else found


def strategy_class(name: str) -> Any:
    """The Strategy class called ``name``.

    Raises:
        ConfigError, ResourceError: see ``PluginKind.load``.
    """
    return STRATEGIES.load(name)


def refresh() -> None:
    """Forgets what was found: something has been installed, or removed, since."""
    importlib.invalidate_caches()
    for found in (plugin_folders, _find_registrations, _read_entry_points):
        found.cache_clear()


def _inherits(loaded: Any, contract: str) -> bool:
    return isinstance(loaded, type) and issubclass(loaded, load(contract))


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


@cache
def _find_registrations(kind: PluginKind) -> dict[str, list[Registration]]:
    """Name -> all that are registered under it; more than one is a mistake that is told on use."""
    found = {name: [Registration(name, target)] for name, target in kind.builtin.items()}
    for point in _find_points(kind.group):
        one = Registration(point.name, point.value, point)
        same = found.setdefault(point.name, [])
        if one.reference not in (other.reference for other in same):
            same.append(one)
    return found


def _find_points(group: str) -> list[EntryPoint]:
    """The entry points of plugins; one read of all that is installed serves every group."""
    return list(_read_entry_points().select(group=group))


@cache
def _read_entry_points() -> Any:
    return entry_points()
