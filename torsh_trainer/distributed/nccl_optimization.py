"""The scheduler of collectives under the module name that the guides import it from."""

from torsh_trainer.distributed.scheduler import CommunicationScheduler, NcclScheduler, Priority
from torsh_trainer.distributed.tuning import AlgorithmTable

__all__ = ["AlgorithmTable", "CommunicationScheduler", "NcclScheduler", "Priority"]
