"""Variables that a launch file exports, or sets before its line, and what hangs on each."""

from __future__ import annotations

import re

from torsh_trainer.translate.outcomes import Outcome, dead, exact, faster, refuse

_OFF = ("", "0", "false", "no", "none")
_KEEP = "keep the export around the command below"
_STANDS = "it stands before the command below"

_DECIDING = (
    (
        r"ACCELERATE_(USE_\w+|DEEPSPEED_\w+|MIXED_PRECISION|GRADIENT_ACCUMULATION_STEPS)|FSDP_\w+",
        (
            "accelerate takes its engine and its precision from it, beside the line: give them to "
            "accelerate launch as options, and translate that line"
        ),
    ),
    (
        r"PL_DEEPSPEED_CONFIG_PATH",
        (
            "Lightning takes its configuration of DeepSpeed from it: translate that file with "
            "--context lightning"
        ),
    ),
)
"""Variables that decide how is trained, where no option says so -> the next move."""

_PLACES = r"(MASTER_(ADDR|PORT)|(LOCAL_|GROUP_|NODE_)?RANK|(LOCAL_)?WORLD_SIZE)"
_KNOWN = (
    (
        _PLACES,
        "dead",
        "the launcher gives each process its own: leave it out around the command below",
    ),
    (
        (
            r"OMP_\w+|(MKL|OPENBLAS|NUMEXPR)_NUM_THREADS|(KMP|GOMP)_\w+|NUMBA_\w+|PYTORCH_\w*ALLOC_CONF|"
            r"MALLOC_\w+|CUDA_DEVICE_MAX_CONNECTIONS|(TORCH_)?NCCL_\w+|GLOO_\w+|UCX_\w+|FI_\w+|"
            r"TP_SOCKET_IFNAME|TORCH_DISTRIBUTED_DEBUG|TORCH_CPP_LOG_LEVEL|CUDA_LAUNCH_BLOCKING"
        ),
        "performance-only",
        "threads, memory and connections, which torch reads here as well",
    ),
    (
        r"(CUDA|ROCR|HIP|ASCEND_RT|NVIDIA)_VISIBLE_DEVICES|CUDA_DEVICE_ORDER",
        "exact",
        "which devices the processes see",
    ),
    (
        (
            r"(LD_LIBRARY_|PYTHON|CUDA_|CPLUS_INCLUDE_|C_INCLUDE_)?PATH|(CUDA|CUDNN|NCCL|CONDA|JAVA)_"
            r"HOME|CONDA_\w+|VIRTUAL_ENV|LD_PRELOAD|PYTHON(UNBUFFERED|WARNINGS|FAULTHANDLER)|LC_ALL|"
            r"LANG|TMPDIR|HOME|https?_proxy|no_proxy|HTTPS?_PROXY|TORCH_(HOME|EXTENSIONS_DIR)"
        ),
        "exact",
        "where programs and modules are found",
    ),
    (
        (
            r"NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|CUBLAS_WORKSPACE_CONFIG|"
            r"PYTHONHASHSEED|CUDNN_\w+|TORCHINDUCTOR_\w+|TORCH_COMPILE_\w+"
        ),
        "exact",
        "it changes how numbers are computed, and torch reads it here as well",
    ),
    (
        r"DS_ACCELERATOR|DS_SKIP_CUDA_CHECK|DS_BUILD_\w+|DS_ENV_FILE|DEEPSPEED_\w+|DLTS_\w+",
        "dead",
        "DeepSpeed alone reads it, and is not there",
    ),
    (
        (
            r"(WANDB|MLFLOW|COMET|CLEARML|NEPTUNE|HF|HUGGINGFACE|HUGGING_FACE|TRANSFORMERS|DATASETS|"
            r"TOKENIZERS|DIFFUSERS|ACCELERATE|FSDP|SLURM|SBATCH|AWS|TF|NLTK|KAGGLE)_\w+"
        ),
        "exact",
        "its library reads it, and no number of a step hangs on it",
    ),
)
"""Names -> verdict and reason, the first that fits."""


def is_deciding(name: str, value: str) -> bool:
    """Whether a variable chooses the engine beside the line."""
    named = any(re.fullmatch(pattern, name) for pattern, _ in _DECIDING)
    return named and value.lower() not in _OFF


def is_set_by_launcher(name: str) -> bool:
    """Whether a launcher gives each process its own, so that none is set around the command."""
    return re.fullmatch(_PLACES, name) is not None


def judge_variable(
    name: str, value: str, *, decides: bool, in_line: bool, in_script: bool, is_prefix: bool
) -> Outcome:
    """The verdict on a variable. ``decides``: it chooses the engine, and no launcher does;
    ``in_line``: the file makes its lines of it; ``in_script``: the script names it; ``is_prefix``:
    it stands before the line, which the command below keeps."""
    if decides and is_deciding(name, value):
        return refuse(next(why for pattern, why in _DECIDING if re.fullmatch(pattern, name)))
    where = _STANDS if is_prefix else _KEEP
    if in_script:
        return Outcome("yours", f"the script reads it: your task takes what it decides; {where}")
    for pattern, verdict, why in _KNOWN:
        if re.fullmatch(pattern, name):
            if verdict == "dead":
                return dead(why)
            judge = faster if verdict == "performance-only" else exact
            return judge(f"{why}: {where}")
    if in_line:
        return dead("the file makes its lines of it: what it says stands in them")
    return Outcome("yours", f"nothing that is known here reads it; where your task does, {where}")
