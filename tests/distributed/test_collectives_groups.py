"""init_process_group in its forms, and what is said when it cannot succeed."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torsh_trainer import distributed as tc
from torsh_trainer.errors import ResourceError
from torsh_trainer.testing.ranks import RankPool


@pytest.fixture(scope="module")
def ranks():
    """Two processes without a group."""
    with RankPool(2, join=False) as pool:
        yield pool


@pytest.fixture
def port():
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def used_and_left(group):
    """What a group is like, the sum over it, and that nothing is left of it."""
    tensor = torch.tensor([float(group.rank() + 1)])
    tc.all_reduce(tensor, group=group)
    facts = (tc.get_rank(), tc.get_world_size(), group.backend_type(), tensor.item())
    tc.destroy_process_group()
    tc.destroy_process_group()  # twice does no harm
    assert not tc.is_initialized()
    assert (tc.get_rank(), tc.get_world_size()) == (0, 1)
    return facts


def expected(rank):
    return (rank, 2, tc.BackendType.GLOO, 3.0)


def set_environment(rank, port):
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def test_by_place_as_the_guides_write_it(ranks, port):
    def case(world, port):
        group = tc.init_process_group(tc.BackendType.GLOO, world.rank, 2, "localhost", port)
        first = used_and_left(group)
        # Once more, at the same place.
        rank, size = tc.Rank(world.rank), tc.WorldSize(2)
        return first, used_and_left(
            tc.init_process_group(tc.BackendType.Gloo, rank, size, "localhost", port)
        )

    for rank, answers in enumerate(ranks.run(case, port)):
        assert answers == (expected(rank), expected(rank))


def test_by_the_environment(ranks, port):
    def case(world, port):
        set_environment(world.rank, port)
        first = used_and_left(tc.init_process_group(tc.Backend.GLOO, tc.InitMethod.ENV, None, None))
        return first, used_and_left(tc.init_process_group("gloo"))

    for rank, answers in enumerate(ranks.run(case, port)):
        assert answers == (expected(rank), expected(rank))


def test_by_name_with_a_timeout(ranks, port):
    def case(world, port):
        set_environment(1 - world.rank, port)  # what is passed counts, not what is set
        group = tc.init_process_group(
            backend="gloo", world_size=2, rank=world.rank, timeout=timedelta(seconds=30)
        )
        assert group.timeout_s == 30.0
        return used_and_left(group)

    assert ranks.run(case, port) == [expected(0), expected(1)]


def test_at_a_url_and_in_a_file(ranks, port, tmp_path):
    def case(world, port, path):
        url = tc.InitMethod.tcp("127.0.0.1", port)
        first = tc.init_process_group("gloo", url, rank=world.rank, world_size=2, timeout=30)
        answers = [used_and_left(first)]
        file = tc.InitMethod.file(path)
        second = tc.init_process_group("gloo", file, 2, world.rank, timeout=30)
        return [*answers, used_and_left(second)]

    for rank, answers in enumerate(ranks.run(case, port, tmp_path / "meeting")):
        assert answers == [expected(rank)] * 2


def test_leaving_the_block_leaves_the_group(ranks, port):
    def case(world, port):
        with tc.init_process_group("gloo", world.rank, 2, "127.0.0.1", port) as group:
            inside = tc.is_initialized(), group.size(), tc.get_backend()
        return inside, tc.is_initialized()

    assert ranks.run(case, port) == [((True, 2, "gloo"), False)] * 2


def test_a_group_that_torch_made_is_used_and_found_again(ranks, tmp_path):
    def case(world, path):
        url = Path(path).as_uri()
        dist.init_process_group("gloo", init_method=url, rank=world.rank, world_size=2)
        tensor = torch.ones(1)
        tc.all_reduce(tensor)
        answer = tensor.item(), tc.get_rank()
        dist.destroy_process_group()
        try:
            tc.all_reduce(tensor)
        except tc.BackendNotInitialized:
            return answer
        return None

    assert ranks.run(case, tmp_path / "meeting") == [(2.0, 0), (2.0, 1)]


def failure(call):
    try:
        call()
    except RuntimeError as error:
        return type(error).__name__, str(error), isinstance(error, ResourceError)
    return None


def test_a_missing_backend_is_an_error_or_gloo_on_all_as_asked(ranks, port):
    def case(world, port):
        place = (world.rank, 2, "127.0.0.1", port)
        refused = failure(lambda: tc.init_process_group("nccl", *place, timeout=30))
        group = tc.init_process_group("nccl", *place, timeout=30, on_missing="fallback")
        return refused, used_and_left(group)

    for rank, (refused, facts) in enumerate(ranks.run(case, port)):
        kind, words, is_resource = refused
        assert (kind, is_resource) == ("BackendError", True)
        assert "cannot use nccl" in words
        assert facts == expected(rank)


def test_a_process_that_does_not_arrive_is_named(ranks, port):
    def case(world, port):
        if world.rank == 1:
            return None
        place = (0, 3, "127.0.0.1", port)
        return failure(lambda: tc.init_process_group("gloo", *place, startup_timeout=1.0))

    kind, words, is_resource = ranks.run(case, port)[0]
    assert (kind, is_resource) == ("RendezvousError", True)
    assert "ranks 1, 2 of 3 did not arrive within 1 s" in words
