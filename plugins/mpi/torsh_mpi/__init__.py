"""An MPI backend for torch.distributed, over mpi4py; nothing here loads MPI until it is asked for.

``register()`` makes ``torch.distributed`` know the backend, ``init_process_group()`` also joins the
processes that mpirun has started. ``comm=mpi`` does both.
"""

from torsh_mpi.backend import init_process_group, register

__all__ = ["init_process_group", "register"]
