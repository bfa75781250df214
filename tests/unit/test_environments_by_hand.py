"""RANK, WORLD_SIZE and their like: complete, incomplete and odd."""

import pytest

from torsh_trainer import environments
from torsh_trainer.environments.hostlist import counts, hosts
from torsh_trainer.errors import ConfigError

HOST = {"MASTER_ADDR": "192.168.1.10", "MASTER_PORT": "29500"}


def detect(**env):
    return environments.detect({**HOST, **env})


def numbers(world):
    return (world.rank, world.size, world.local_rank, world.local_size, world.node_rank)


def test_complete_variables_are_taken_as_they_are():
    world = detect(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4")
    assert numbers(world) == (5, 8, 1, 4, 1)
    assert (world.source, world.nodes, world.told) == ("env", 2, "process")
    assert not world.rendezvous.hosted


def test_rank_is_derived_from_node_rank_and_local_rank():
    world = detect(NODE_RANK="1", LOCAL_RANK="3", LOCAL_WORLD_SIZE="4", WORLD_SIZE="8")
    assert numbers(world) == (7, 8, 3, 4, 1)


def test_node_rank_may_be_the_first_rank_of_the_node():
    world = detect(NODE_RANK="4", LOCAL_RANK="3", LOCAL_WORLD_SIZE="4", WORLD_SIZE="8")
    assert numbers(world) == (7, 8, 3, 4, 1)
    assert any("first rank" in reason for reason in world.reasons)


def test_node_rank_that_is_neither_is_refused():
    with pytest.raises(ConfigError, match="neither a node's number"):
        detect(NODE_RANK="3", LOCAL_RANK="0", LOCAL_WORLD_SIZE="4", WORLD_SIZE="8")


def test_the_ssh_script_with_one_process_per_node_is_a_world_for_the_launcher_to_fill():
    # NODE_RANK holds first ranks (0, 4), LOCAL_RANK is 0, and nothing says 4 per node.
    world = detect(NODE_RANK="4", LOCAL_RANK="0", WORLD_SIZE="8")
    assert (world.rank, world.size, world.told) == (4, 8, "node")


def test_node_rank_without_local_rank_leaves_the_processes_to_the_launcher():
    world = detect(NODE_RANK="1", LOCAL_WORLD_SIZE="4", WORLD_SIZE="8")
    assert numbers(world) == (4, 8, 0, 4, 1)
    assert world.told == "node"


def test_node_rank_alone_is_the_rank_when_nodes_have_one_process():
    world = detect(NODE_RANK="3", WORLD_SIZE="4")
    assert (world.rank, world.size, world.local_size) == (3, 4, 1)


def test_a_missing_local_rank_follows_from_the_local_size():
    world = detect(RANK="6", WORLD_SIZE="8", LOCAL_WORLD_SIZE="4")
    assert numbers(world) == (6, 8, 2, 4, 1)
    assert world.told == "rank"


def test_a_missing_local_rank_on_the_loopback_is_the_rank():
    world = detect(RANK="2", WORLD_SIZE="4", MASTER_ADDR="127.0.0.1")
    assert numbers(world) == (2, 4, 2, 4, 0)


def test_a_missing_local_rank_elsewhere_means_one_process_per_node():
    world = detect(RANK="4", WORLD_SIZE="8")
    assert numbers(world) == (4, 8, 0, 1, 4)
    assert world.told == "rank"


def test_the_global_rank_is_never_the_local_rank_on_several_nodes():
    world = detect(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4", NODE_RANK="1")
    assert (world.rank, world.local_rank) == (5, 1)


def test_local_variables_alone_describe_one_node():
    world = detect(LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    assert numbers(world) == (1, 2, 1, 2, 0)


def test_the_size_is_derived_from_nodes_and_processes_per_node():
    world = detect(RANK="3", NNODES="2", LOCAL_WORLD_SIZE="2", LOCAL_RANK="1")
    assert (world.size, world.nodes) == (4, 2)


def test_the_port_is_torchs_usual_one_when_none_is_given():
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "head"}
    assert environments.detect(env).rendezvous.port == 29500


def test_a_world_of_one_needs_no_address():
    world = environments.detect({"RANK": "0", "WORLD_SIZE": "1"})
    assert (world.size, world.rendezvous) == (1, None)


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"RANK": "2"}, "RANK=2 is set, but WORLD_SIZE is not"),
        ({"NODE_RANK": "1"}, "NODE_RANK=1 is set, but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "4"}, "neither RANK nor NODE_RANK"),
        ({"WORLD_SIZE": "4", "NODE_RANK": ""}, "neither RANK nor NODE_RANK"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "rank 4 is outside 0..3"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK='-1' is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "leaves no process"),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, "LOCAL_WORLD_SIZE is not set"),
        ({"RANK": "1", "WORLD_SIZE": "6", "NNODES": "2", "LOCAL_WORLD_SIZE": "4"}, "does not fit"),
        (
            {"NODE_RANK": "0", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "4"},
            "cannot be cut into nodes",
        ),
    ],
)
def test_what_cannot_be_derived_is_refused_in_one_sentence(env, says):
    with pytest.raises(ConfigError) as caught:
        detect(**env)
    assert says in str(caught.value)
    assert caught.value.fix
    assert caught.value.exit_code == 2


def test_several_nodes_without_an_address_are_refused():
    with pytest.raises(ConfigError, match="MASTER_ADDR is not set"):
        environments.detect({"RANK": "1", "WORLD_SIZE": "2"})


@pytest.mark.parametrize("env", [{}, {"LOCAL_RANK": "0"}, HOST, {"RANK": "", "WORLD_SIZE": " "}])
def test_leftovers_that_tell_no_place_are_no_world(env):
    assert environments.detect(env) is None


def test_explain_names_every_environment_and_the_variables_that_decided():
    text = environments.explain({**HOST, "RANK": "5", "WORLD_SIZE": "8"})
    for environment in environments.find_environments():
        assert environment.name in text
    assert "RANK=5 -> rank 5" in text
    assert "decided by env" in text


def test_detecting_reads_only_the_mapping_it_is_given(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert environments.detect({}) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node[01-03,07],gpu-a[1-2]", "node01 node02 node03 node07 gpu-a1 gpu-a2"),
        ("node7", "node7"),
        ("a,b,c", "a b c"),
        ("rack[1-2]n[08-10]", "rack1n08 rack1n09 rack1n10 rack2n08 rack2n09 rack2n10"),
        ("x3005c0s[1,5]b0n0-hsn0", "x3005c0s1b0n0-hsn0 x3005c0s5b0n0-hsn0"),
        ("n[098-101]", "n098 n099 n100 n101"),
    ],
)
def test_host_lists_expand_as_scontrol_does(text, expected):
    assert " ".join(hosts(text)) == expected


@pytest.mark.parametrize("text", ["", "n[1-", "n1]", "n[3-1]", "n[a-b]", "n[[1]]", "a,,b"])
def test_malformed_host_lists_are_refused(text):
    with pytest.raises(ConfigError, match="list of hosts"):
        list(hosts(text))


def test_task_counts_expand():
    assert counts("4(x2),3") == [4, 4, 3]
