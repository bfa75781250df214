"""What the coordinator says to requests, in whatever order ranks make them."""

from __future__ import annotations

from itertools import permutations

import pytest

from torsh_trainer.dropin.negotiation.coordinator import ENDED, Coordinator, find_mismatch
from torsh_trainer.dropin.negotiation.requests import (
    MIN,
    Decision,
    Request,
    decode,
    encode,
)


def wish(
    name: str = "a", kind: str = "allreduce", shape: tuple[int, ...] = (2,), **more
) -> Request:
    return Request(name, kind, (("float32", shape),), **more)


def test_a_collective_is_ready_once_all_have_asked_in_any_order():
    for order in permutations(range(3)):
        coordinator = Coordinator(3)
        *early, last = [coordinator.submit(rank, [wish()]) for rank in order]
        assert early == [[], []]
        assert [decision.request.name for decision in last] == ["a"]
        assert last[0].error == ""


def test_ranks_that_ask_in_another_order_get_one_order():
    coordinator = Coordinator(2)
    assert coordinator.submit(0, [wish("a"), wish("b"), wish("c")]) == []
    ready = coordinator.submit(1, [wish("c"), wish("a"), wish("b")])
    assert [decision.request.name for decision in ready] == ["c", "a", "b"]


def test_the_same_name_in_two_sets_is_two_things():
    coordinator = Coordinator(3)
    coordinator.add_members(1, [0, 2])
    assert coordinator.submit(0, [wish(members=1), wish()]) == []
    (ready,) = coordinator.submit(2, [wish(members=1)])
    assert ready.request.members == 1


def test_who_has_joined_is_waited_for_no_more():
    coordinator = Coordinator(2)
    assert coordinator.submit(0, [wish()]) == []
    (ready,) = coordinator.join(1)
    assert ready.request.name == "a"
    (ready,) = coordinator.submit(0, [wish("b")])
    assert ready.request.parts == (("float32", (2,)),)
    (last,) = coordinator.join(0)
    assert (last.request.kind, last.value) == ("join", 0)
    assert coordinator.submit(0, [wish("b")]) == [], "the join is over"


@pytest.mark.parametrize("kind", ["allgather", "broadcast", "alltoall", "reducescatter"])
def test_what_cannot_be_done_without_those_who_joined_is_an_error(kind):
    coordinator = Coordinator(2)
    coordinator.join(1)
    (ready,) = coordinator.submit(0, [wish(kind=kind)])
    assert "not supported with Join at this time" in ready.error


def test_when_a_rank_leaves_all_that_waits_ends_and_so_does_what_comes():
    coordinator = Coordinator(2)
    coordinator.submit(0, [wish("a"), wish("b")])
    assert [(v.request.name, v.ended) for v in coordinator.leave()] == [("a", True), ("b", True)]
    assert coordinator.leave() == []
    (late,) = coordinator.submit(0, [wish("c")])
    assert late.error == ENDED
    (late,) = coordinator.join(0)
    assert late.ended


def test_what_waits_long_is_named_with_the_ranks_it_lacks():
    now = [0.0]
    coordinator = Coordinator(3, clock=lambda: now[0])
    coordinator.submit(1, [wish()])
    assert list(coordinator.find_stalled(60.0)) == []
    now[0] = 61.0
    assert list(coordinator.find_stalled(60.0)) == [("a", [0, 2], 61.0)]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (wish(kind="broadcast"), "One rank did an ALLREDUCE, but another rank did an BROADCAST"),
        (wish(shape=(3,)), "One rank sent a tensor of shape [2], but another rank sent"),
        (Request("a", "allreduce", (("float64", (2,)),)), "One rank had type float32"),
        (wish(op=MIN), "One rank sent reduction op 1, but another rank sent reduction op 3."),
        (wish(prescale=2.0), "One rank sent factors (1, 1), but another rank sent factors (2, 1)."),
        (wish(root=1), "One rank specified root rank -1, but another rank specified root rank 1."),
        (wish(device="cuda"), "One rank specified device CPU, but another rank specified device"),
        (Request("a", "allreduce"), "One rank sent 1 tensors, but another rank sent 0."),
    ],
)
def test_ranks_that_contradict_each_other_are_told_in_what(other, words):
    assert words in find_mismatch([wish(), wish(), other])


def test_rows_may_differ_where_they_are_gathered():
    one, other = wish(kind="allgather", shape=(1, 4)), wish(kind="allgather", shape=(5, 4))
    assert find_mismatch([one, other]) == ""
    coordinator = Coordinator(2)
    coordinator.submit(1, [other])
    (ready,) = coordinator.submit(0, [one])
    assert ready.by_rank == ((1,), (5,))


def test_messages_come_through_as_they_were():
    requests = [wish(), wish("b", "alltoall", (4, 2), splits=(1, 3), root=2)]
    assert decode(encode("requests", requests)[4:]) == ("requests", requests)
    decisions = [Decision(requests[1], ((1, 3), (2, 0))), Decision(requests[0], error="no")]
    assert decode(encode("decisions", decisions)[4:]) == ("decisions", decisions)
