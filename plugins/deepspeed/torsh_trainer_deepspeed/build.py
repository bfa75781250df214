"""``python -m torsh_trainer_deepspeed.build``: compiles what runs on a CPU need, before one does.

Names of operators after it compile these instead: ``cpu_adam``, ``fused_adam``, ... It happens by
itself when such a run starts for the first time. Beforehand it costs no time of a cluster's, and
fails where somebody is looking.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

import torch

from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.errors import TorshError
from torsh_trainer_deepspeed import library, operators


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles the operators; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m torsh_trainer_deepspeed.build")
    parser.add_argument(
        "operators",
        nargs="*",
        metavar="OPERATOR",
        help=f"of {', '.join(operators.BUILDERS)}; {' and '.join(operators.OPERATORS)} by default",
    )
    wanted = parser.parse_args(argv).operators or operators.OPERATORS
    unknown = [name for name in wanted if name not in operators.BUILDERS]
    if unknown:
        parser.error(f"no operator {unknown[0]!r}; choose from {', '.join(operators.BUILDERS)}")
    logging.basicConfig(format="%(message)s")
    comm = LocalCommunicator(torch.device("cpu"))
    try:
        library.load(comm)
        operators.compile_operators(wanted, comm)
    except TorshError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{' and '.join(wanted)}: ready in {os.environ['TORCH_EXTENSIONS_DIR']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
