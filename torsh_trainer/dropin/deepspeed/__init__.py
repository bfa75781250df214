"""What a script under drop-in sees as ``deepspeed``: the semantics of its release 0.19."""

from __future__ import annotations

import argparse

from torsh_trainer.dropin.deepspeed import accelerator as accelerator
from torsh_trainer.dropin.deepspeed import checkpointing as checkpointing
from torsh_trainer.dropin.deepspeed import comm as comm
from torsh_trainer.dropin.deepspeed import ops as ops
from torsh_trainer.dropin.deepspeed import runtime as runtime
from torsh_trainer.dropin.deepspeed import utils as utils
from torsh_trainer.dropin.deepspeed import zero as zero
from torsh_trainer.dropin.deepspeed.comm import init_distributed as init_distributed
from torsh_trainer.dropin.deepspeed.utils import log_dist as log_dist
from torsh_trainer.dropin.deepspeed.utils import logger as logger
from torsh_trainer.dropin.missing import refuse_unknown
from torsh_trainer.dropin.zero.accelerator import get_accelerator as get_accelerator
from torsh_trainer.dropin.zero.engine import DeepSpeedEngine as DeepSpeedEngine
from torsh_trainer.dropin.zero.starting import initialize as initialize

__version__ = version = "0.19.8"
__getattr__ = refuse_unknown(__name__)
dist = comm


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds ``--deepspeed`` and ``--deepspeed_config``, and their older names."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    for name in ("deepspeed", "deepscale"):
        group.add_argument(f"--{name}", action="store_true", help="for the script's own use")
        group.add_argument(f"--{name}_config", default=None, help="file of the configuration")
    return parser
