"""zero1 on four ranks over gloo; over mpi the plugin's own tests have it."""

from __future__ import annotations

import pytest

from torsh_trainer.strategies.builtin import Gloo
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.zero1 import check_zero1


@pytest.mark.parametrize("kind", [Gloo, DDP])
def test_four_ranks_step_a_part_each_and_end_where_all_of_them_step_everything(
    kind: type[Gloo] | type[DDP],
) -> None:
    check_zero1(shared_pool(4), kind(), kind(zero1=True))
