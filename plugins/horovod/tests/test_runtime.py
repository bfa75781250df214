"""Horovod starts in every job with the settings that were asked for, and leaves no trace."""

from __future__ import annotations

import gc
import json
import os
from typing import Any

import psutil
import pytest
import torch
from torsh_trainer_horovod import runtime
from torsh_trainer_horovod.strategy import Horovod

from torsh_trainer.environments.world import Rendezvous, World
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.testing import cases
from torsh_trainer.testing.ranks import RankPool, shared_pool
from torsh_trainer.testing.reference import Scenario, TrainingOutcome


def test_knobs_become_horovods_variables_and_those_left_alone_none():
    assert Horovod().variables == {}
    knobs = Horovod(
        fusion_threshold_mb=0.5,
        stall_check=False,
        autotune=True,
        timeline="t.json",
        cycle_time_ms=2,
    )
    assert knobs.variables == {
        "HOROVOD_FUSION_THRESHOLD": str(2**19),
        "HOROVOD_CYCLE_TIME": "2",
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_TIMELINE": "t.json",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
    }


def started(comm: Any, *settings: dict[str, str]) -> list[Any]:
    """One sum and what is left in the environment, after each start; none is closed between."""
    answers, uses = [], []
    for variables in settings:
        uses.append(runtime.start(comm, variables))
        hvd = uses[-1].hvd
        total = hvd.allreduce(torch.full((2,), float(comm.world.rank)), op=hvd.Sum, name="total")
        left = sorted(name for name in os.environ if name.startswith("HOROVOD_"))
        answers.append((total.tolist(), left, hvd.local_rank(), hvd.cross_size()))
    for use in uses:
        use.close()
    return answers


def test_other_settings_start_it_anew_and_the_environment_is_as_before():
    cache = [{"HOROVOD_CACHE_CAPACITY": str(size)} for size in (0, 16, 16, 0)]
    for rank, answers in enumerate(shared_pool(2).run(started, *cache, {})):
        assert answers == [([1.0, 1.0], [], rank, 1)] * 5


def unstartable(comm: Any, first: dict[str, str]) -> tuple[list[Any], str]:
    both = {"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_CYCLE_TIME": "3"}
    answers = started(comm, {}, first, {}, first)
    try:
        runtime.start(comm, both)
    except ResourceError as error:
        return answers, str(error)
    return answers, ""


@pytest.mark.parametrize("first", ["HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME"])
def test_where_a_further_start_would_end_the_process_it_is_refused(first):
    with RankPool(2) as ranks:
        for answers, words in ranks.run(unstartable, {first: "2"}):
            assert [total for total, *_ in answers] == [[1.0, 1.0]] * 4
            assert "cannot be started anew once strategy.fusion_threshold_mb" in words


# -- when it ends ----------------------------------------------------------------------------------


def lives(comm: Any, knobs: Horovod, left_open: bool) -> tuple[list[bool], list[Any]]:
    """Whether Horovod runs during and after each of two trainings, and what they came to."""
    import horovod.torch as hvd

    runs, outcomes = [], []
    for _ in range(2):
        driver = cases.Driver(comm, knobs, Scenario())
        outcome = TrainingOutcome()
        driver.step(0, outcome)
        runs.append(hvd.is_initialized())
        parameter = next(driver.engine.model.parameters())
        if not left_open:
            driver.engine.close()
        del driver
        gc.collect()
        runs.append(hvd.is_initialized())
        # The model may outlive its engine: the hooks that Horovod has put there send nothing.
        parameter.sum().backward()
        outcomes.append(outcome.norms)
    return runs, outcomes


@pytest.mark.parametrize("left_open", [False, True], ids=["closed", "collected"])
def test_it_ends_with_its_last_engine_and_trains_again(left_open):
    for runs, (first, second) in shared_pool(2).run(lives, Horovod(), left_open):
        assert runs == [True, False] * 2
        assert first == second


def test_one_that_could_not_be_started_anew_stays():
    knobs = Horovod(fusion_threshold_mb=1, cycle_time_ms=2)
    with RankPool(2) as ranks:
        for runs, (first, second) in ranks.run(lives, knobs, False):
            assert runs == [True] * 4
            assert first == second


def used_by_two(comm: Any, knobs: Horovod) -> list[bool]:
    import horovod.torch as hvd

    runs = []
    first, second = (cases.Driver(comm, knobs, Scenario()) for _ in range(2))
    first.engine.close()
    first.engine.close()
    runs.append(hvd.is_initialized())
    second.step(0, TrainingOutcome())
    second.engine.close()
    runs.append(hvd.is_initialized())
    return runs


def test_the_first_of_two_engines_leaves_it_to_the_second():
    knobs = Horovod(fusion_threshold_mb=64, cycle_time_ms=1)  # 1 ms is what Horovod does anyway
    assert shared_pool(2).run(used_by_two, knobs) == [[True, False]] * 2


def closed_by_one(comm: Any) -> list[Any]:
    """Rank 1 has ended Horovod, and rank 0 has not, when both want it again."""
    first = runtime.start(comm, {})
    if comm.world.rank == 1:
        first.close()
    return started(comm, {}, {})


def test_ranks_that_do_not_agree_whether_it_runs_start_it_anew():
    for rank, answers in enumerate(shared_pool(2).run(closed_by_one)):
        assert answers == [([1.0, 1.0], [], rank, 1)] * 2


def trained_with_timeline(comm: Any, path: str) -> None:
    cases.train(comm, Horovod(timeline=path, timeline_mark_cycles=True), Scenario())


def test_a_timeline_names_the_parameters(tmp_path):
    path = tmp_path / "timeline.json"
    with RankPool(2) as ranks:
        ranks.run(trained_with_timeline, str(path))
    text = path.read_text()
    names = {event.get("args", {}).get("name") for event in json.loads(_closed(text))}
    assert any("blocks.0.linear.weight" in str(name) for name in names)


def _closed(text: str) -> str:
    """Chrome takes an array without its end."""
    text = text.strip().removesuffix(",")
    return text if text.endswith("]") else f"{text}]"


def by_a_script(comm: Any, some: bool) -> tuple[list[float], bool, str]:
    """A script that has called hvd.init() itself; on rank 0 alone, where ``some``."""
    import horovod.torch as hvd

    use = runtime.start(comm, {})
    runtime._process.variables = None  # as if it were not we who started it
    norms, words = cases.train(comm, Horovod(cycle_time_ms=3), Scenario()).norms, ""
    use.close()
    running = hvd.is_initialized()
    if some and comm.world.rank:
        hvd.shutdown()
    try:
        runtime.start(comm, {})
    except ConfigError as error:
        words = str(error)
    return norms, running, words


def test_one_that_runs_already_is_taken_as_it_is_and_left_running():
    plain, *_ = shared_pool(2).run(cases.train, Horovod(), Scenario())
    for some, said in ((False, ""), (True, "has started Horovod on rank 0 and not on rank 1")):
        with RankPool(2) as ranks:
            for norms, running, words in ranks.run(by_a_script, some):
                assert norms == plain.norms
                assert running
                assert said in words


# -- several nodes ---------------------------------------------------------------------------------


def nodes(world: World, address: str) -> World:
    """``world`` as it would be with one process on each of two nodes."""
    rendezvous = Rendezvous(address, 1)
    return World(world.rank, world.size, 0, 1, node_rank=world.rank, nodes=2, rendezvous=rendezvous)


def on_two_nodes(comm: Any, address: str) -> list[Any]:
    comm.world = nodes(comm.world, address)
    return started(comm, {})


def own_address() -> str:
    """One of this host that is not the loopback, else the loopback."""
    found = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family.name == "AF_INET" and not entry.address.startswith("127.")
    ]
    return next(iter(found), "")


def test_nodes_meet_at_the_address_of_the_first_and_count_one_another():
    address = own_address()
    if not address:
        pytest.fail("this host has no network interface but the loopback")
    with RankPool(2) as ranks:
        assert ranks.run(on_two_nodes, address) == [[([1.0, 1.0], [], 0, 2)]] * 2


def test_an_address_that_other_nodes_cannot_reach_is_refused():
    with pytest.raises(ResourceError, match=r"is the loopback.*comm.network_interface=eth0"):
        runtime._address(nodes(World(0, 2), "127.0.0.1"))


# -- what it refuses -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"fusion_threshold_mb": -1}, "strategy.fusion_threshold_mb=-1 is below 0"),
        ({"backward_passes_per_step": 0}, "strategy.backward_passes_per_step=0 is below 1"),
        ({"op": "max"}, "strategy.op=max is unknown"),
        ({"compression": "fp8"}, "strategy.compression=fp8 is unknown; choose one of fp16, none"),
        ({"groups": 0}, "strategy.groups=0 is below 1"),
        ({"groups": (("a",), ("a",))}, "strategy.groups names 'a' twice"),
        ({"groups": 2, "find_unused_parameters": True}, "exclude each other"),
        ({"gradient_predivide_factor": 0.0}, "is not positive"),
        ({"gradient_predivide_factor": 2.0, "groups": 2}, "does nothing with strategy.groups=2"),
        ({"gradient_predivide_factor": 2.0, "op": "sum"}, "does nothing with strategy.op=sum"),
    ],
)
def test_a_knob_out_of_range_is_refused_in_one_sentence(knobs, words):
    with pytest.raises(ConfigError) as refusal:
        Horovod(**knobs)
    assert words in str(refusal.value)


def asked_for_a_process_set(comm: Any, ranks: tuple[int, ...]) -> str:
    try:
        cases.train(comm, Horovod(process_set=ranks), Scenario())
    except ConfigError as error:
        return str(error)
    return ""


def test_a_process_set_of_some_ranks_is_refused_and_one_of_all_is_what_there_is_anyway():
    for words in shared_pool(2).run(asked_for_a_process_set, (1,)):
        assert "cannot honour process_set=[1] of 2 processes: rank 0 would" in words
    assert shared_pool(2).run(asked_for_a_process_set, (1, 0)) == ["", ""]


def summed_by_one(comm: Any) -> list[float]:
    """What a task may do with a process set of its own, beside the engine."""
    driver = cases.Driver(comm, Horovod(dynamic_process_sets=True), Scenario())
    driver.step(0, TrainingOutcome())
    import horovod.torch as hvd

    mine = [hvd.add_process_set([rank]) for rank in range(2)][comm.world.rank]
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="own", process_set=mine).tolist()
    driver.step(1, TrainingOutcome())
    driver.engine.close()
    return total


def test_code_of_ones_own_makes_process_sets_where_that_is_asked_for():
    with RankPool(2) as ranks:
        assert ranks.run(summed_by_one) == [[1.0], [1.0]]


def asked_for_a_group_that_is_not_there(comm: Any) -> str:
    try:
        cases.train(comm, Horovod(groups=(("head.wait",),)), Scenario())
    except ConfigError as error:
        return str(error)
    return ""


def test_a_group_of_an_unknown_parameter_offers_the_nearest():
    (words,) = shared_pool(1).run(asked_for_a_group_that_is_not_there)
    assert "strategy.groups names 'head.wait'" in words
    assert "'head.weight'" in words
