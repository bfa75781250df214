"""Horovod's own settings: the variables of the environment in which it reads them."""

from __future__ import annotations

from typing import Any

VARIABLES = {
    "fusion_threshold_mb": "HOROVOD_FUSION_THRESHOLD",
    "cycle_time_ms": "HOROVOD_CYCLE_TIME",
    "cache_capacity": "HOROVOD_CACHE_CAPACITY",
    "hierarchical_allreduce": "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "hierarchical_allgather": "HOROVOD_HIERARCHICAL_ALLGATHER",
    "autotune": "HOROVOD_AUTOTUNE",
    "autotune_log": "HOROVOD_AUTOTUNE_LOG",
    "autotune_warmup_samples": "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
    "autotune_steps_per_sample": "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
    "autotune_bayes_opt_max_samples": "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
    "autotune_gaussian_process_noise": "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
    "timeline": "HOROVOD_TIMELINE",
    "timeline_mark_cycles": "HOROVOD_TIMELINE_MARK_CYCLES",
    "stall_check": "HOROVOD_STALL_CHECK_DISABLE",
    "stall_warning_s": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "stall_shutdown_s": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "dynamic_process_sets": "HOROVOD_DYNAMIC_PROCESS_SETS",
}
"""Knob of ``strategy=horovod`` -> the variable of ``horovodrun``'s option of nearly that name."""


def variables_of(knobs: Any) -> dict[str, str]:
    """The variables for those knobs that are set; the others stay as they are found."""
    chosen = {knob: getattr(knobs, knob) for knob in VARIABLES}
    return {
        VARIABLES[knob]: _word(knob, value) for knob, value in chosen.items() if value is not None
    }


def _word(knob: str, value: Any) -> str:
    if knob == "fusion_threshold_mb":
        return str(int(value * 2**20))  # Horovod counts bytes
    if knob == "stall_check":
        return str(int(not value))  # Horovod's variable switches it off
    return str(int(value)) if isinstance(value, bool) else str(value)
