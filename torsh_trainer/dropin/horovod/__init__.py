"""What a script under drop-in sees as ``horovod``: the semantics of its release 0.28."""

from typing import Any

from torsh_trainer.dropin.missing import refuse_unknown
from torsh_trainer.errors import Unsupported

__version__ = "0.28.1"
__getattr__ = refuse_unknown(__name__)


def run(*args: Any, **kwargs: Any) -> Any:
    """Refused: the processes of the job run already.

    Raises:
        Unsupported: always.
    """
    raise Unsupported(
        "horovod.run starts processes, and drop-in has started them",
        fix="have the script call its training itself, as under horovodrun",
    )
