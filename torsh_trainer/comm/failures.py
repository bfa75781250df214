"""What goes wrong among processes, in kinds that handlers written for torch catch as well.

Each kind is both one of ``torsh_trainer.errors`` (a sentence, a next move, an exit code) and one of
torch's: ``except dist.DistError`` and ``except RuntimeError`` see them all.
"""

from __future__ import annotations

from torch.distributed import (
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
)

from torsh_trainer.errors import ConfigError, ResourceError, TrainingError


class BackendNotInitialized(ConfigError, DistError, ValueError):
    """A collective was called before ``init_process_group``; torch raises a ValueError there."""


class BackendError(ResourceError, DistBackendError):
    """The backend is not there, or cannot do what was asked of it."""


class CommunicationError(TrainingError, DistNetworkError, DistBackendError):
    """A collective failed: a rank did not take part, ended, or a connection broke.

    ``facts``: ``rank``, ``operation``, and ``missing``, the ranks that did not take part, where
    they could be found out.
    """


class MismatchError(CommunicationError):
    """The ranks called different collectives, or with tensors that do not fit together."""


class RendezvousError(CommunicationError, ResourceError, DistStoreError):
    """The processes did not find one another; ``facts['ranks']`` did not arrive, where known."""

    exit_code = ResourceError.exit_code


class CollectiveArgumentError(ConfigError, DistError, ValueError, TypeError):
    """What this rank passed cannot be right, whatever the others do."""
