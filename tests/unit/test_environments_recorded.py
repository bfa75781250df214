"""Each cluster's variables, as recorded inside one process there (names shortened)."""

import pytest

from torsh_trainer import environments
from torsh_trainer.errors import ConfigError

TORCHRUN = {  # torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d
    "LOCAL_RANK": "1",
    "RANK": "5",
    "GROUP_RANK": "1",
    "ROLE_RANK": "5",
    "ROLE_NAME": "default",
    "LOCAL_WORLD_SIZE": "4",
    "WORLD_SIZE": "8",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_WORLD_SIZE": "8",
    "MASTER_ADDR": "worker-0.example",
    "MASTER_PORT": "41673",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "OMP_NUM_THREADS": "1",
}
SRUN = {  # sbatch --nodes=4 --ntasks-per-node=4, then srun
    "SLURM_JOB_ID": "1731344",
    "SLURM_JOBID": "1731344",
    "SLURM_JOB_NAME": "train",
    "SLURM_JOB_NODELIST": "node[01-03,07]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NODELIST": "node[01-03,07]",
    "SLURM_NNODES": "4",
    "SLURM_NTASKS": "16",
    "SLURM_NPROCS": "16",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_TASKS_PER_NODE": "4(x4)",
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NODELIST": "node[01-03,07]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_TASKS_PER_NODE": "4(x4)",
    "SLURM_PROCID": "13",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "3",
    "SLURM_GTIDS": "12,13,14,15",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}
SALLOC_SHELL = {  # the shell of an interactive step: salloc --ntasks=8
    "SLURM_JOB_ID": "1731344",
    "SLURM_JOB_NAME": "interactive",
    "SLURM_JOB_NODELIST": "GPU71E4",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_PTY_PORT": "39933",
    "SLURM_STEPID": "4294967290",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NODELIST": "GPU71E4",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_TASKS_PER_NODE": "8",
}
SBATCH_SCRIPT = {  # the script itself, before any srun; the seed guide's exports included
    "SLURM_JOB_ID": "1731344",
    "SLURM_JOB_NODELIST": "node[01-04]",
    "SLURM_NNODES": "4",
    "SLURM_NTASKS": "16",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_TASKS_PER_NODE": "4(x4)",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASK_PID": "2937593",
}
OPENMPI = {  # mpirun -n 2, Open MPI 5
    "OMPI_COMMAND": "python",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_UNIVERSE_SIZE": "2",
    "OMPI_VERSION": "5.0.11",
    "PMIX_HOSTNAME": "vm",
    "PMIX_NAMESPACE": "prterun-vm-12423@1",
    "PMIX_RANK": "1",
    "PMIX_SERVER_URI41": "prterun-vm-12423@0.0;tcp4://127.0.0.1:40699",
    "PRTE_LAUNCHED": "1",
}
MPICH = {  # mpiexec -n 2, MPICH 5
    "GFORTRAN_UNBUFFERED_PRECONNECTED": "y",
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_HOSTNAME": "vm",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
INTEL_MPI = {  # mpiexec.hydra -n 2, Intel MPI 2021
    "HYDRA_BSTRAP_LOCALHOST": "vm",
    "I_MPI_HYDRA_UUID": "65310000-c20d-a8e3-c660-0600d5aa3776",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "0",
    "PMI_FD": "8",
    "PMI_RANK": "0",
    "PMI_SIZE": "2",
}
PALS = {  # mpiexec -n 8 --ppn 4 on an HPE Cray under PBS
    "PBS_JOBID": "844931.pbs-server",
    "PBS_NODEFILE": "/var/spool/pbs/aux/844931.pbs-server",
    "PALS_APID": "5e1c0f9c-6d3b-4f5b-bb1c-1d4b7b7c7f10",
    "PALS_NODEID": "1",
    "PALS_RANKID": "6",
    "PALS_LOCAL_RANKID": "2",
    "PALS_LOCAL_SIZE": "4",
    "PMI_RANK": "6",
    "PMI_SIZE": "8",
    "PMI_LOCAL_RANK": "2",
    "PMI_LOCAL_SIZE": "4",
    "MASTER_ADDR": "x3005c0s13b0n0",
}
JSRUN = {  # jsrun -n 8 -r 4 on an LSF cluster with a launch node
    "LSB_JOBID": "2037845",
    "LSB_MCPU_HOSTS": "batch5 1 h41n01 42 h41n02 42",
    "LSB_HOSTS": "batch5 " + "h41n01 " * 42 + "h41n02 " * 42,
    "JSM_NAMESPACE_RANK": "6",
    "JSM_NAMESPACE_SIZE": "8",
    "JSM_NAMESPACE_LOCAL_RANK": "2",
    "JSM_NAMESPACE_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "6",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "1",
    "PMIX_RANK": "6",
}
INDEXED_JOB = {  # a pod of a Job with completionMode: Indexed
    "JOB_COMPLETION_INDEX": "3",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
    "HOSTNAME": "train-3",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "train-0.train",
    "MASTER_PORT": "29500",
}
HOROVODRUN = {  # horovodrun --gloo -np 4 -H host1:2,host2:2
    "HOROVOD_HOSTNAME": "host2",
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.5",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "38311",
    "HOROVOD_CONTROLLER": "gloo",
    "HOROVOD_CPU_OPERATIONS": "gloo",
    "HOROVOD_GLOO_IFACE": "eth0",
    "NCCL_SOCKET_IFNAME": "eth0",
}
GROWING = {  # horovodrun -np 1 --min-np 1 --max-np 2 --host-discovery-script hosts.sh
    **HOROVODRUN,
    "HOROVOD_RANK": "0",
    "HOROVOD_SIZE": "1",
    "HOROVOD_LOCAL_RANK": "0",
    "HOROVOD_LOCAL_SIZE": "1",
    "HOROVOD_CROSS_RANK": "0",
    "HOROVOD_CROSS_SIZE": "1",
    "HOROVOD_ELASTIC": "1",
}
PLAIN_DESKTOP = {"PATH": "/usr/bin", "HOME": "/home/me", "OMP_NUM_THREADS": "4", "LANG": "C.UTF-8"}


def place(world):
    return (
        world.source,
        world.rank,
        world.size,
        world.local_rank,
        world.local_size,
        world.node_rank,
        world.nodes,
    )


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (TORCHRUN, ("torchrun", 5, 8, 1, 4, 1, 2)),
        (SRUN, ("slurm", 13, 16, 1, 4, 3, 4)),
        (OPENMPI, ("openmpi", 1, 2, 1, 2, 0, 1)),
        (MPICH, ("pmi", 1, 2, 1, 2, 0, 1)),
        (INTEL_MPI, ("pmi", 0, 2, 0, 2, 0, 1)),
        (PALS, ("pbs", 6, 8, 2, 4, 1, 2)),
        (JSRUN, ("lsf", 6, 8, 2, 4, 1, 2)),
        (INDEXED_JOB, ("kubernetes", 3, 4, 0, 1, 3, 4)),
        (HOROVODRUN, ("horovod", 3, 4, 1, 2, 1, 2)),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_each_cluster_tells_a_process_its_place(env, expected):
    world = environments.detect(env)
    assert place(world) == expected
    assert world.told == "process"
    assert world.reasons, "the reasons say which variables decided"
    assert f"decided by {expected[0]}" in environments.explain(env)


def test_horovods_elastic_mode_is_known_and_its_first_process_hides_behind_nothing():
    world = environments.detect({**GROWING, **INDEXED_JOB})
    assert place(world) == ("horovod", 0, 1, 0, 1, 0, 1)
    assert world.elastic
    assert not environments.detect(HOROVODRUN).elastic


@pytest.mark.parametrize(
    ("env", "address", "port"),
    [
        (TORCHRUN, "worker-0.example", 41673),
        (SRUN, "node01", None),
        (OPENMPI, "127.0.0.1", None),
        (MPICH, "127.0.0.1", 29500),
        (PALS, "x3005c0s13b0n0", None),
        (JSRUN, "h41n01", None),
        (INDEXED_JOB, "train-0.train", 29500),
        (HOROVODRUN, "10.0.0.5", None),
    ],
)
def test_the_processes_of_a_job_meet_where_rank_0_runs(env, address, port):
    meeting = environments.detect(env).rendezvous
    assert meeting.address == address
    if port is None:  # derived from the job, below the ephemeral range
        assert 20000 <= meeting.port < 30000
    else:
        assert meeting.port == port
    override = {**env, "MASTER_ADDR": "other", "MASTER_PORT": "1234"}
    assert environments.detect(override).rendezvous.address == "other"
    assert environments.detect(override).rendezvous.port == 1234


@pytest.mark.parametrize(
    "env", [SALLOC_SHELL, SBATCH_SCRIPT, PLAIN_DESKTOP, {}, {"JOB_COMPLETION_INDEX": "2"}]
)
def test_a_process_that_nothing_started_in_parallel_stands_alone(env):
    assert environments.detect(env) is None
    assert "stands alone" in environments.explain(env)


def test_all_ranks_of_a_step_derive_the_same_port_and_two_jobs_different_ones():
    other_rank = {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    port = environments.detect(SRUN).rendezvous.port
    assert environments.detect(other_rank).rendezvous.port == port
    assert environments.detect({**SRUN, "SLURM_JOB_ID": "1731345"}).rendezvous.port != port
    assert environments.detect({**SRUN, "SLURM_STEP_ID": "1"}).rendezvous.port != port


def test_only_torchruns_agent_hosts_the_store():
    assert environments.detect(TORCHRUN).rendezvous.hosted
    own = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert not environments.detect(own).rendezvous.hosted
    assert not environments.detect(SRUN).rendezvous.hosted
    assert not environments.detect(INDEXED_JOB).rendezvous.hosted


def test_mpirun_inside_an_sbatch_script_is_mpiruns_world_and_meets_on_the_first_node():
    env = {
        **SBATCH_SCRIPT,
        **OPENMPI,
        "SLURM_STEP_ID": "0",  # on the other nodes, srun started mpirun's helper
        "SLURM_PROCID": "1",
        "SLURM_NTASKS": "2",
        "OMPI_COMM_WORLD_RANK": "6",
        "OMPI_COMM_WORLD_SIZE": "8",
        "OMPI_COMM_WORLD_LOCAL_RANK": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    }
    world = environments.detect(env)
    assert place(world) == ("openmpi", 6, 8, 2, 4, 1, 2)
    assert world.rendezvous.address == "node01"


def test_torchrun_inside_an_srun_step_is_torchruns_world():
    assert environments.detect({**SRUN, **TORCHRUN}).source == "torchrun"


def test_a_launcher_inside_a_step_that_sets_rank_wins_over_the_step():
    env = {**SRUN, "RANK": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "64"}
    assert environments.detect({**env, "MASTER_ADDR": "node01"}).source == "env"
    same = {**SRUN, "RANK": "13", "LOCAL_RANK": "1", "WORLD_SIZE": "16"}
    assert environments.detect(same).source == "slurm"


def test_srun_with_pmi2_is_slurms_world_because_slurm_knows_the_nodes():
    env = {**SRUN, "PMI_RANK": "13", "PMI_SIZE": "16", "PMI_FD": "9"}
    assert place(environments.detect(env)) == ("slurm", 13, 16, 1, 4, 3, 4)


def test_an_outer_world_of_one_does_not_hide_an_inner_world_of_many():
    one_task = {
        **SRUN,
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
    }
    assert place(environments.detect(one_task)) == ("slurm", 0, 1, 0, 1, 0, 1)
    by_hand = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a"}
    assert environments.detect({**one_task, **by_hand}).size == 2


def test_unequal_numbers_of_tasks_per_node_are_read_from_slurms_list():
    env = {
        **SRUN,
        "SLURM_STEP_TASKS_PER_NODE": "5(x2),3(x2)",
        "SLURM_PROCID": "14",
        "SLURM_LOCALID": "1",
    }
    assert environments.detect(env).local_size == 3


def test_ranks_dealt_out_to_the_nodes_in_turn_find_their_node():
    env = {
        **OPENMPI,
        "OMPI_COMM_WORLD_RANK": "3",  # --map-by node over 2 nodes: 0,2,4,6 and 1,3,5,7
        "OMPI_COMM_WORLD_SIZE": "8",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        "MASTER_ADDR": "head",
    }
    assert place(environments.detect(env)) == ("openmpi", 3, 8, 1, 4, 1, 2)


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({**OPENMPI, "OMPI_COMM_WORLD_SIZE": "8"}, "MASTER_ADDR"),
        ({**MPICH, "PMI_SIZE": "4"}, "MASTER_ADDR"),
        ({k: v for k, v in PALS.items() if k != "MASTER_ADDR"}, "head -n 1 $PBS_NODEFILE"),
        ({k: v for k, v in INDEXED_JOB.items() if k != "MASTER_ADDR"}, "headless Service"),
    ],
)
def test_several_nodes_without_an_address_are_refused_with_the_next_move(env, says):
    with pytest.raises(ConfigError) as caught:
        environments.detect(env)
    assert says in str(caught.value)
    assert str(caught.value) in environments.explain(env)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"SLURM_PROCID": "16"}, "rank 16 is outside 0..15"),
        ({"SLURM_PROCID": "one"}, "SLURM_PROCID='one' is not a whole number"),
        ({"SLURM_STEP_NODELIST": "node[01-"}, "cannot read the list of hosts"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4x4"}, "cannot read the list of tasks per node"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
    ],
)
def test_variables_that_contradict_one_another_are_a_clear_error(change, says):
    with pytest.raises(ConfigError) as caught:
        environments.detect({**SRUN, **change})
    assert says in str(caught.value)


def test_a_pbs_job_without_mpirun_is_one_process_and_says_so():
    env = {"PBS_JOBID": "7.server", "PBS_NODEFILE": "/spool/aux/7.server", "PBS_TASKNUM": "1"}
    assert environments.detect(env) is None
    assert "start it with mpirun" in environments.explain(env)


def test_lsf_without_a_launch_node_meets_on_the_first_host():
    env = {**JSRUN, "LSB_MCPU_HOSTS": "grid03 4 grid05 4"}
    assert environments.detect(env).rendezvous.address == "grid03"
    mpirun = {k: v for k, v in env.items() if not k.startswith("JSM")}
    assert environments.detect({**mpirun, "LSB_MCPU_HOSTS": "grid03 1 grid05 4"}).source == "lsf"
    assert environments.detect(mpirun).rendezvous.address == "grid03"


def test_pods_with_several_processes_leave_them_to_the_launcher():
    env = {**INDEXED_JOB, "JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    world = environments.detect(env)
    assert place(world) == ("kubernetes", 4, 8, 0, 4, 1, 2)
    assert world.told == "node"
    inner = environments.detect({**env, "LOCAL_RANK": "3"})
    assert (inner.rank, inner.told) == (7, "process")
    by_pods = {**INDEXED_JOB, "JOB_COMPLETION_INDEX": "1", "NNODES": "2", "WORLD_SIZE": "8"}
    assert place(environments.detect(by_pods)) == place(world)


def test_a_pod_index_beyond_the_world_is_refused():
    with pytest.raises(ConfigError, match="there are 4 pods"):
        environments.detect({**INDEXED_JOB, "JOB_COMPLETION_INDEX": "4"})
