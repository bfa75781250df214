"""``python -m torsh_trainer_deepspeed.build``: compiles what runs on a CPU need, before one does.

It happens by itself when such a run starts for the first time. Beforehand it costs no time of a
cluster's, and fails where somebody is looking.
"""

from __future__ import annotations

import logging
import os
import sys

import torch

from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.errors import TorshError
from torsh_trainer_deepspeed import library


def main() -> int:
    """Compiles the operators; returns the exit code."""
    logging.basicConfig(format="%(message)s")
    comm = LocalCommunicator(torch.device("cpu"))
    try:
        library.load(comm)
        library.compiled(library.OPERATORS, comm)
    except TorshError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{' and '.join(library.OPERATORS)}: ready in {os.environ['TORCH_EXTENSIONS_DIR']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
