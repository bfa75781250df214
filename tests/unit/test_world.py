import pickle

import pytest

from torsh_trainer.environments.world import ALONE, Rendezvous, World
from torsh_trainer.errors import ConfigError


@pytest.mark.parametrize(
    "numbers",
    [
        {"rank": 2, "size": 2},
        {"rank": -1, "size": 2},
        {"local_rank": 1, "local_size": 1},
        {"node_rank": 3, "nodes": 2},
    ],
)
def test_numbers_outside_their_range_are_refused(numbers):
    with pytest.raises(ConfigError, match="is outside 0"):
        World(**numbers)


def test_the_world_of_one_is_its_own_main_process():
    assert ALONE.is_rank_zero
    assert not ALONE.is_distributed


def test_reasons_do_not_make_two_places_different():
    assert World(rank=1, size=2, reasons=("RANK=1",)) == World(rank=1, size=2)


def test_a_world_pickles():
    world = World(rank=1, size=2, rendezvous=Rendezvous("host", 1234))
    assert pickle.loads(pickle.dumps(world)) == world
