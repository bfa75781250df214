"""Horovod's settings by all their names: option of horovodrun, key of its YAML file, variable.

Source: ``horovod/runner/launch.py`` and ``runner/common/util/config_parser.py`` of 0.28.1. Where
several set the same, the option counts before the file, and the file before the variable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torsh_trainer.translate.rule_plugins import collect_additions


class Mismatch(ValueError):
    """The value is not what the setting takes; the text says what would be."""


Kind = Callable[[Any], Any]


@dataclass(frozen=True)
class Setting:
    """One setting. ``flags`` set it, ``off`` are the flags that switch it off."""

    name: str
    kind: str
    rule: str
    flags: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    key: str = ""
    variable: str = ""

    @property
    def takes(self) -> int:
        """How many words stand behind its flag."""
        return {"switch": 0, "on": 0, "two ints": 2}.get(self.kind, 1)

    def value(self, raw: Any) -> Any:
        """What ``raw`` (a word, or a value of YAML) stands for.

        Raises:
            Mismatch: it is nothing that the setting takes.
        """
        return _KINDS[self.kind](raw)


def _lines(text: str) -> tuple[Setting, ...]:
    return tuple(Setting(*_fields(line)) for line in text.strip().splitlines())


def _fields(line: str) -> tuple[Any, ...]:
    name, kind, rule, flags, off, key, variable = (cell.strip() for cell in line.split("|"))
    return name, kind, rule, tuple(flags.split()), tuple(off.split()), key, variable


TUNED = _lines(
    """
    fusion_threshold_mb | float | fusion | --fusion-threshold-mb | | params.fusion_threshold_mb | HOROVOD_FUSION_THRESHOLD
    cycle_time_ms | float | cycle | --cycle-time-ms | | params.cycle_time_ms | HOROVOD_CYCLE_TIME
    cache_capacity | int | cache | --cache-capacity | | params.cache_capacity | HOROVOD_CACHE_CAPACITY
    hierarchical_allreduce | switch | hierarchical | --hierarchical-allreduce | --no-hierarchical-allreduce | params.hierarchical_allreduce | HOROVOD_HIERARCHICAL_ALLREDUCE
    hierarchical_allgather | switch | hierarchical | --hierarchical-allgather | --no-hierarchical-allgather | params.hierarchical_allgather | HOROVOD_HIERARCHICAL_ALLGATHER
    torus_allreduce | switch | hierarchical | --torus-allreduce | --no-torus-allreduce | params.torus_allreduce | HOROVOD_TORUS_ALLREDUCE
    autotune | switch | autotune | --autotune | --no-autotune | autotune.enabled | HOROVOD_AUTOTUNE
    autotune_log_file | text | autotune.knob | --autotune-log-file | | autotune.log_file | HOROVOD_AUTOTUNE_LOG
    autotune_warmup_samples | int | autotune.knob | --autotune-warmup-samples | | autotune.warmup_samples | HOROVOD_AUTOTUNE_WARMUP_SAMPLES
    autotune_steps_per_sample | int | autotune.knob | --autotune-steps-per-sample | | autotune.steps_per_sample | HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE
    autotune_bayes_opt_max_samples | int | autotune.knob | --autotune-bayes-opt-max-samples | | autotune.bayes_opt_max_samples | HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES
    autotune_gaussian_process_noise | share | autotune.knob | --autotune-gaussian-process-noise | | autotune.gaussian_process_noise | HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE
    timeline_filename | text | timeline | --timeline-filename | | timeline.filename | HOROVOD_TIMELINE
    timeline_mark_cycles | switch | timeline.cycles | --timeline-mark-cycles | --no-timeline-mark-cycles | timeline.mark_cycles | HOROVOD_TIMELINE_MARK_CYCLES
    stall_check | switch | stall | --stall-check | --no-stall-check | stall_check.enabled | HOROVOD_STALL_CHECK_DISABLE
    stall_warning_s | int | stall.warning | --stall-check-warning-time-seconds | | stall_check.warning_time_seconds | HOROVOD_STALL_CHECK_TIME_SECONDS
    stall_shutdown_s | int | stall.shutdown | --stall-check-shutdown-time-seconds | | stall_check.shutdown_time_seconds | HOROVOD_STALL_SHUTDOWN_TIME_SECONDS
    mpi_threads_disable | switch | library.tuning | --mpi-threads-disable | --no-mpi-threads-disable | library_options.mpi_threads_disable | HOROVOD_MPI_THREADS_DISABLE
    num_nccl_streams | int | library.tuning | --num-nccl-streams | | library_options.num_nccl_streams | HOROVOD_NUM_NCCL_STREAMS
    thread_affinity | int | library.tuning | --thread-affinity | | library_options.thread_affinity | HOROVOD_THREAD_AFFINITY
    gloo_timeout_s | int | gloo-timeout | --gloo-timeout-seconds | | library_options.gloo_timeout_seconds | HOROVOD_GLOO_TIMEOUT_SECONDS
    log_level | level | log.level | --log-level | | logging.level | HOROVOD_LOG_LEVEL
    log_with_timestamp | switch | log.time | --log-with-timestamp --no-log-hide-timestamp | --log-without-timestamp --log-hide-timestamp | logging.with_timestamp | HOROVOD_LOG_HIDE_TIME
    controller | controller | launch.controller | | | controller | HOROVOD_CONTROLLER
    """  # noqa: E501
)
"""What all three sources know."""

LAUNCH = _lines(
    """
    num_proc | count | launch.processes | -np --num-proc | | |
    check_build | on | launch.no-run | -cb --check-build | | |
    version | on | launch.no-run | -v --version | | |
    disable_cache | on | launch.checks | --disable-cache | | |
    start_timeout | int | launch.start-timeout | --start-timeout | | | HOROVOD_START_TIMEOUT
    network_interfaces | text | launch.interface | --network-interfaces --network-interface | | |
    output_filename | text | launch.output | --output-filename | | |
    verbose | on | launch.verbose | --verbose | | |
    config_file | text | launch.config-file | --config-file | | |
    ssh_port | int | launch.ssh | -p --ssh-port | | |
    ssh_identity_file | text | launch.ssh | -i --ssh-identity-file | | |
    min_num_proc | count | elastic.range | --min-np --min-num-proc | | |
    max_num_proc | count | elastic.range | --max-np --max-num-proc | | |
    slots | count | elastic.knob | --slots-per-host | | |
    elastic_timeout | int | elastic.knob | --elastic-timeout | | | HOROVOD_ELASTIC_TIMEOUT
    reset_limit | int | elastic.knob | --reset-limit | | |
    cooldown_range | two ints | elastic.knob | --blacklist-cooldown-range | | |
    host_discovery_script | text | elastic.range | --host-discovery-script | | |
    mpi_args | text | launch.mpi | --mpi-args | | |
    binding_args | text | launch.mpi | --binding-args | | |
    tcp | on | launch.tcp | --tcp | | |
    prefix_timestamp | on | log.time | -prefix-timestamp --prefix-output-with-timestamp | | |
    hosts | hosts | launch.hosts | -H --hosts | | |
    hostfile | text | launch.hostfile | -hostfile --hostfile | | |
    gloo | on | launch.controller | --gloo | | |
    mpi | on | launch.controller | --mpi | | |
    jsrun | on | launch.controller | --jsrun | | |
    """
)
"""What the command line alone knows, but for the two that have a variable as well."""

ENVIRONMENT = _lines(
    """
    env.place | text | env.place | | | | HOROVOD_RANK HOROVOD_SIZE HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE HOROVOD_CROSS_RANK HOROVOD_CROSS_SIZE HOROVOD_HOSTNAME HOROVOD_GLOO_RENDEZVOUS_ADDR HOROVOD_GLOO_RENDEZVOUS_PORT HOROVOD_SECRET_KEY
    env.interface | text | launch.interface | | | | HOROVOD_GLOO_IFACE
    env.tuning | text | library.tuning | | | | HOROVOD_CPU_OPERATIONS HOROVOD_CCL_CACHE HOROVOD_CCL_BGT_AFFINITY HOROVOD_DISABLE_GROUP_FUSION HOROVOD_BATCH_D2D_MEMCOPIES HOROVOD_ENABLE_ASYNC_COMPLETION HOROVOD_ADASUM_MPI_CHUNK_SIZE HOROVOD_DISABLE_NVTX_RANGES
    env.elastic | flag | elastic.switch | | | | HOROVOD_ELASTIC
    env.sets | flag | process-sets.permission | | | | HOROVOD_DYNAMIC_PROCESS_SETS
    env.elsewhere | text | env.elsewhere | | | | HOROVOD_ENABLE_XLA_OPS HOROVOD_GPU_OPERATIONS HOROVOD_GPU_ALLREDUCE HOROVOD_GPU_ALLGATHER HOROVOD_GPU_ALLTOALL HOROVOD_GPU_BROADCAST HOROVOD_GPU_REDUCESCATTER HOROVOD_WITH_PYTORCH HOROVOD_WITH_GLOO HOROVOD_WITH_MPI HOROVOD_WITHOUT_PYTORCH HOROVOD_WITHOUT_GLOO HOROVOD_WITHOUT_MPI HOROVOD_WITHOUT_TENSORFLOW HOROVOD_WITHOUT_MXNET HOROVOD_WITH_TENSORFLOW HOROVOD_WITH_MXNET HOROVOD_NCCL_HOME HOROVOD_CUDA_HOME
    """  # noqa: E501
)
"""What the environment alone knows; a line is for many variables."""

OLDER = {
    "autotune.batches_per_sample": "autotune.steps_per_sample",
    "autotune.cycles_per_sample": "autotune.steps_per_sample",
    "library_options.mpi_threads_disabled": "library_options.mpi_threads_disable",
    "library_options.mlsl_bgt_affinity": "library_options.thread_affinity",
    "library_options.ccl_bgt_affinity": "library_options.thread_affinity",
    "logging.hide_timestamp": "logging.with_timestamp",
    "timeline.enabled": "timeline.filename",
}
"""Keys of older releases, over which 0.28.1 passes in silence -> what they are called now."""


@cache
def collect_settings() -> tuple[Setting, ...]:
    """Settings that plugins add; one takes the place of ours where it has a name of it.

    Raises:
        ConfigError: two plugins add the same.
    """
    added = collect_additions("SETTINGS", lambda found: ((one.name, one) for one in found))
    return tuple(added.values())


@cache
def by_flag() -> dict[str, tuple[Setting, bool]]:
    """Option of horovodrun -> its setting, and whether it switches it on."""
    found: dict[str, tuple[Setting, bool]] = {}
    for setting in (*TUNED, *LAUNCH, *collect_settings()):
        found |= dict.fromkeys(setting.flags, (setting, True))
        found |= dict.fromkeys(setting.off, (setting, False))
    return found


@cache
def by_key() -> dict[str, Setting]:
    """Dotted key of the YAML file -> its setting."""
    return {setting.key: setting for setting in (*TUNED, *collect_settings()) if setting.key}


@cache
def by_variable() -> dict[str, Setting]:
    """Variable -> its setting."""
    return {
        variable: setting
        for setting in (*TUNED, *LAUNCH, *ENVIRONMENT, *collect_settings())
        for variable in setting.variable.split()
    }


def of_variable(setting: Setting, raw: str) -> Any:
    """The value that a variable's text stands for: bytes are MiB there, and some say the opposite.

    Raises:
        Mismatch: it stands for nothing.
    """
    if setting.name == "fusion_threshold_mb":
        return float(_whole(raw)) / 2**20
    if setting.kind == "switch":
        on = _flag(raw)
        return not on if setting.name in ("stall_check", "log_with_timestamp") else on
    return setting.value(raw)


# -- kinds ---------------------------------------------------------------------------------------


def _whole(raw: Any) -> int:
    try:
        if isinstance(raw, bool) or (isinstance(raw, float) and not raw.is_integer()):
            raise ValueError
        number = int(raw)
    except (TypeError, ValueError, OverflowError) as error:
        raise Mismatch("a whole number") from error
    if number < 0:
        raise Mismatch("a whole number, 0 or more")
    return number


def _count(raw: Any) -> int:
    number = _whole(raw)
    if number < 1:
        raise Mismatch("a number of processes, 1 or more")
    return number


def _number(raw: Any) -> float:
    try:
        if isinstance(raw, bool):
            raise ValueError
        number = float(raw)
    except (TypeError, ValueError, OverflowError) as error:
        raise Mismatch("a number") from error
    if not 0 <= number < float("inf"):
        raise Mismatch("a number, 0 or more")
    return number


def _share(raw: Any) -> float:
    number = _number(raw)
    if number > 1:
        raise Mismatch("a number from 0 to 1")
    return number


def _switch(raw: Any) -> bool:
    """YAML's value as Horovod takes it: whatever Python calls true."""
    if isinstance(raw, bool | int):
        return bool(raw)
    raise Mismatch("true or false")


def _flag(raw: Any) -> bool:
    """A variable is read as a number, and on where that is more than 0."""
    try:
        return int(raw) > 0
    except (TypeError, ValueError) as error:
        raise Mismatch("0 or 1") from error


def _text(raw: Any) -> str:
    if not isinstance(raw, str | int | float) or isinstance(raw, bool):
        raise Mismatch("a text")
    return str(raw)


_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")


def _level(raw: Any) -> str:
    if not isinstance(raw, str) or raw.lower() not in _LEVELS:
        raise Mismatch(f"one of {', '.join(_LEVELS).upper()}")
    return raw.lower()


def _controller(raw: Any) -> str:
    if not isinstance(raw, str) or raw.lower() not in ("gloo", "mpi"):
        raise Mismatch("gloo or mpi")
    return raw.lower()


def _two(raw: Any) -> list[int]:
    return [_whole(word) for word in raw]


def _hosts(raw: Any) -> list[tuple[str, int]]:
    found = []
    for part in str(raw).split(","):
        name, colon, slots = part.strip().rpartition(":")
        if not colon or not name:
            raise Mismatch("a list host:slots,host:slots")
        found.append((name, _count(slots)))
    return found


_KINDS: dict[str, Kind] = {
    "int": _whole,
    "count": _count,
    "float": _number,
    "share": _share,
    "switch": _switch,
    "flag": _flag,
    "on": lambda raw: True,
    "text": _text,
    "level": _level,
    "controller": _controller,
    "two ints": _two,
    "hosts": _hosts,
}
