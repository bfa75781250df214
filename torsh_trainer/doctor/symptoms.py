"""What logs of distributed jobs say where a start fails: the words, what causes them, what helps.

A row for each: those that users report most (numbered as they were collected), then what this
trainer says itself. ``source`` is where the words were reported, or the module that prints them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Symptom:
    """Words of a log (``pattern``, of one line), their ``cause``, and the ``fix``.

    ``follows`` says that they are what a failure elsewhere leads to, and no cause themselves.
    """

    name: str
    pattern: re.Pattern[str]
    cause: str
    fix: str
    source: str
    follows: bool = False
    hints: tuple[str, ...] = ()

    def is_said_in(self, text: str, lower: str) -> bool:
        """Whether a line says it; ``lower`` is the line in small letters.

        ``hints`` are words of which a line has to have one: comparing them is many times quicker
        than the pattern, and logs are long.
        """
        return any(hint in lower for hint in self.hints) and bool(self.pattern.search(text))


def find_hints(pattern: str) -> tuple[str, ...]:
    """For each alternative of a pattern, the longest text that stands in it as it is.

    Empty text, which every line has, for one that has none.
    """
    hints = []
    for alternative in _split_alternatives(pattern):
        outside = re.sub(
            r"\((?:[^()]|\([^()]*\))*\)[?*+]?|\[[^]]*\][?*+]?|\\.[?*+]?", "\0", alternative
        )
        outside = re.sub(r".(?:[?*]|\{[^}]*\})|[.^$+]", "\0", outside)
        hints.append(max(outside.split("\0"), key=len).lower())
    return tuple(dict.fromkeys(hints))


def _split_alternatives(pattern: str) -> list[str]:
    """At each ``|`` outside of brackets."""
    parts, depth = [""], 0
    for at, character in enumerate(pattern):
        escaped = at > 0 and pattern[at - 1] == "\\"
        depth += 0 if escaped else (character in "([") - (character in ")]")
        if character == "|" and depth == 0 and not escaped:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _row(
    name: str, pattern: str, cause: str, fix: str, source: str, *, follows: bool = False
) -> Symptom:
    words = re.compile(pattern, re.IGNORECASE)
    return Symptom(name, words, cause, fix, source, follows, find_hints(pattern))


SYMPTOMS: tuple[Symptom, ...] = (
    # -- meeting -------------------------------------------------------------------------------
    _row(
        "store_timeout",
        r"client socket has timed out after|The client socket has failed to connect to",
        "rank 0's store is not reached: MASTER_ADDR is another host's or the loopback, its port is "
        "closed by a firewall, or rank 0 has not started",
        "on each host: python -m torsh_trainer doctor --only master_address,master_reachable; "
        "getent hosts $MASTER_ADDR; nc -vz $MASTER_ADDR $MASTER_PORT",
        "pytorch/pytorch#69197",
    ),
    _row(
        "rendezvous_unknown_self",
        r"(rendezvous|rdzv).* could not be reached|(rendezvous|rdzv).* cannot be reached|"
        r"RendezvousConnectionError|unable to (become|find) the (rendezvous )?(host|master)",
        "no host takes itself for the one that the rendezvous endpoint names, so none serves it: "
        "name and address of the endpoint are not what that host knows itself by",
        "--rdzv-endpoint with the name that `hostname` prints there, or rdzv_conf is_host=1 on it "
        "and is_host=0 elsewhere",
        "pytorch/pytorch#73656",
    ),
    _row(
        "name_unresolved",
        r"\bin getfqdn\b|Temporary failure in name resolution|Name or service not known|"
        r"gaierror|No address associated with hostname|"
        r"network addresses of .* cannot be retrieved|"
        r"The hostname of the client socket cannot be retrieved",
        "a host name has no address: that of this host (torchrun looks its full name up) or "
        "MASTER_ADDR",
        "python -m torsh_trainer doctor --only host_name,reverse_lookup,master_address; add the "
        "name to /etc/hosts",
        "pytorch/pytorch#150532",
    ),
    _row(
        "rendezvous_timeout",
        r"RendezvousTimeoutError|rendezvous.*timed out|join_timeout",
        "not all hosts came to the rendezvous in time: one started late (a pod whose name was not "
        "yet known, an image still pulled), or waits at another interface or endpoint",
        "start all hosts with the same --rdzv-endpoint and --rdzv-id; give --rdzv-conf "
        "join_timeout=600; in Kubernetes publishNotReadyAddresses: true on the headless service",
        "pytorch/torchx#541, pytorch/pytorch#64926, kubeflow/trainer#2000",
    ),
    _row(
        "rendezvous_closed",
        r"RendezvousClosedError",
        "an agent that was told to stop (SIGTERM) closed the rendezvous for all; those that start "
        "later find it closed",
        "start every host again under a new --rdzv-id; raise --max-restarts only where hosts stay",
        "pytorch/pytorch#150916, pytorch/pytorch#67742",
    ),
    _row(
        "torchrun_without_hosts",
        r"--nnodes.*is (not set|required)|WORLD_SIZE.*expected, but not set|"
        r"environment variable (RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected",
        "the process was started without torchrun's variables: it waits for a world that nobody "
        "has told it of",
        "torchrun --nnodes N --node-rank R --master-addr FIRST_HOST ..., or "
        "python -m torsh_trainer, which finds its place by itself",
        "kubeflow/sdk#142",
    ),
    _row(
        "port_taken",
        r"Address already in use|EADDRINUSE|errno: 98",
        "another program has the port that the job meets at: an earlier run that still lives, or a "
        "second job with the same fixed port (29500)",
        "ss -ltnp; export MASTER_PORT=29501, or leave it to launcher=local, which takes a free one",
        "pytorch/torchtune#392",
    ),
    _row(
        "stale_workers",
        r"world_size=(\d+), (worker_count|num_workers_joined)=(?!\1\b)\d+",
        "more processes met than the world has, or fewer: some of an earlier attempt are still "
        "there, or two launchers start the same ranks",
        "end what is left (pkill is too wide: scancel, or kill the pids of ss -tnp), start under "
        "another port or rendezvous id",
        "facebookincubator/submitit#1613",
    ),
    _row(
        "loopback_host_name",
        r"connectFullMesh.*(127\.|::1)|remote=\[?127\.|Gloo connectFullMesh failed",
        "a host told the others the loopback as its address, since /etc/hosts says so of its name "
        "(or gloo took the wrong interface)",
        "on each host: python -m torsh_trainer doctor --nodes 2 --only host_name_loopback,"
        "interfaces; export GLOO_SOCKET_IFNAME=eth0 (one real name: gloo takes no ^lo)",
        "aws-samples/aws-do-eks#69, aws-samples/aws-do-eks#51",
    ),
    _row(
        "interface_missing",
        r"no socket interface found|Unable to find address for|"
        r"Bootstrap\s*:\s*no socket interface|makeDeviceForInterface",
        "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names an interface that this host does not have, "
        "or that has no address",
        "ip -br addr; python -m torsh_trainer doctor --only interface_variables",
        "NVIDIA/nccl#1837",
    ),
    _row(
        "docker_bridge",
        r"(Bootstrap|NET/Socket)\s*: Using.*(docker\d|br-[0-9a-f]{6,}|virbr\d|veth)|"
        r"ncclSystemError|Call to connect returned Connection (refused|timed out)",
        "NCCL's sockets do not reach another host: it took a bridge of docker or another interface "
        "of this host alone, or a firewall stands between",
        "export NCCL_SOCKET_IFNAME=eth0 (the interface of the route between hosts); "
        "NCCL_DEBUG=INFO says which one it took",
        "NVIDIA/nccl#697",
    ),
    # -- devices -------------------------------------------------------------------------------
    _row(
        "duplicate_gpu",
        r"Duplicate GPU detected",
        "two ranks compute on one GPU: processes are started with the same device, or more "
        "processes than GPUs",
        "torch.cuda.set_device(LOCAL_RANK), one process for each GPU of the host; with srun "
        "--gpus-per-task=1",
        "NVIDIA/Megatron-LM#661",
    ),
    _row(
        "device_unbound",
        r"rank to GPU mapping is incorrect|using GPU \d+ (to perform barrier )?as device used by "
        r"this process is currently unknown|device_id.*barrier",
        "a process has not said which GPU is its own before the first collective: the wrong one "
        "may be taken, and the barrier hangs",
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), or "
        "init_process_group(..., device_id=...)",
        "huggingface/accelerate#3551",
    ),
    _row(
        "gpus_not_visible",
        r"requested gpu.*but your machine only has|invalid device ordinal|"
        r"CUDA error: invalid device ordinal",
        "the process sees fewer GPUs than it asks for: srun --gpus-per-task (or a mask) shows each "
        "process its own one alone",
        "ask with --gres=gpu:N for the node instead of --gpus-per-task, or use device 0 in each "
        "process; echo $CUDA_VISIBLE_DEVICES",
        "Lightning-AI/pytorch-lightning#16828",
    ),
    _row(
        "tasks_differ",
        r"You set `?--ntasks|does not match.*(SLURM|--ntasks)|"
        r"(SLURM_NTASKS|--ntasks).*does not match|SLURM_NTASKS.*(mismatch|differs)",
        "the number of Slurm's tasks is not the number of devices that the program counts on: it "
        "waits for processes that nobody starts",
        "#SBATCH --ntasks-per-node equal to the GPUs of a node, and start with srun",
        "Lightning-AI/pytorch-lightning#20391, Lightning-AI/pytorch-lightning#19883",
    ),
    _row(
        "world_lost",
        r"Distributed environment: (DistributedType\.)?NO\b",
        "this process does not know of any others and trains alone: the launcher's variables did "
        "not reach it",
        "start all of them by one launcher; pass its variables on (mpirun -x, docker -e, sudo -E); "
        "launcher.explain=true says what each process sees",
        "huggingface/accelerate#1795",
    ),
    _row(
        "first_allreduce_hangs",
        r"NET/IB.*got completion.*error|ACS (is )?enabled|"
        r"DMAR: .*fault|AMD-Vi: .*IO_PAGE_FAULT",
        "GPUs write to one another through PCIe switches with ACS, or an IOMMU, in the way: the "
        "first all-reduce never ends",
        "disable ACS (setpci) and the IOMMU, or NCCL_P2P_DISABLE=1 to see whether that is it",
        "NVIDIA/nccl#2079",
    ),
    _row(
        "container_without_gpus",
        r"could not select device driver|nvidia-container-cli|"
        r"Failed to initialize NVML|unknown runtime specified nvidia",
        "the container runtime cannot give GPUs: the NVIDIA container toolkit is not installed, or "
        "not configured",
        "install nvidia-container-toolkit; nvidia-ctk runtime configure --runtime=docker; "
        "systemctl restart docker",
        "NVIDIA/nvidia-docker#1034",
    ),
    _row(
        "gpu_lost",
        r"fallen off the bus|NVRM: Xid|uncorrectable ECC error|CUDA error: unspecified launch",
        "a GPU or its memory failed",
        "python -m torsh_trainer doctor --only gpu_health; nvidia-smi -q -d ECC; drain the host",
        "NVIDIA/open-gpu-kernel-modules#507",
    ),
    _row(
        "driver_too_old",
        r"driver (version )?is insufficient|driver on your system is too old|"
        r"no kernel image is available",
        "torch was built for another CUDA than the driver serves, or for other GPUs",
        "python -m torsh_trainer doctor --only cuda_versions; update the driver, or install "
        "another build of torch",
        "pytorch/pytorch (torch.cuda)",
    ),
    # -- limits --------------------------------------------------------------------------------
    _row(
        "shared_memory",
        r"Bus error|unhandled system error|insufficient shared memory|"
        r"unable to allocate shared memory|"
        r"No space left on device.*/dev/shm|/dev/shm.*No space left|unable to (write|mmap).*shm",
        "/dev/shm is too small for loader workers and NCCL: 64 MB in a container by default",
        "docker run --shm-size=8g (Compose shm_size, Kubernetes an emptyDir of medium Memory at "
        "/dev/shm); python -m torsh_trainer doctor --only shared_memory",
        "NVIDIA/nccl#473, mosaicml/streaming#493",
    ),
    _row(
        "locked_memory",
        r"ibv_reg_mr|ibv_create_(cq|qp).*Cannot allocate|Cannot allocate memory.*(ibv|IB)",
        "InfiniBand may not lock memory: ulimit -l is too low",
        "memlock unlimited in /etc/security/limits.conf; docker run --ulimit memlock=-1 --cap-add "
        "IPC_LOCK; LimitMEMLOCK=infinity for slurmd",
        "NVIDIA/nccl-tests#206",
    ),
    _row(
        "open_files",
        r"0 items of ancdata|Too many open files|EMFILE",
        "tensors that loader workers send take a file each, and the limit is reached",
        "ulimit -n 65536; torch.multiprocessing.set_sharing_strategy('file_system')",
        "pytorch/pytorch#973",
    ),
    _row(
        "two_nccl",
        r"undefined symbol: nccl|NCCL version mismatch|Mismatched NCCL version",
        "another NCCL is loaded than the one that torch was built with: two wheels, or one in "
        "LD_LIBRARY_PATH",
        "python -m torsh_trainer doctor --only nccl_libraries; pip list | grep nccl",
        "pytorch/pytorch#186591",
    ),
    _row(
        "out_of_memory",
        r"oom-kill|Out of memory: Killed process|OOMKilled|exit(ed with)? code:? 137\b|"
        r"oom_kill event|DefaultCPUAllocator: can't allocate",
        "the kernel or the scheduler killed a process that passed its limit of memory",
        "python -m torsh_trainer doctor --only memory; ask for more (--mem, resources.limits), "
        "or fewer loader workers",
        "Kubernetes, Slurm",
    ),
    # -- schedulers ----------------------------------------------------------------------------
    _row(
        "no_scontrol",
        r"scontrol: (command )?not found|No such file or directory: '?scontrol",
        "the compute node has no scontrol, by which the list of hosts is written out",
        "read SLURM_JOB_NODELIST without it (ours does: launcher=slurm's variables suffice), or "
        "expand it where the job is submitted",
        "facebookincubator/submitit#1601",
    ),
    _row(
        "site_policy",
        r"do not specify.*(cores|CPUs|tasks)|Requested node configuration is not available|"
        r"Job violates accounting/QOS policy|Invalid (account|partition|qos)",
        "the site's rules refuse the job as it asks for nodes",
        "scontrol show partition; sacctmgr show assoc user=$USER; leave out the option that the "
        "message names",
        "facebookincubator/submitit#1649",
    ),
    _row(
        "more_processors",
        r"More processors requested than permitted|Unable to create step for job",
        "a step asks for more cores than the job was given: cores are kept for the system, or srun "
        "runs within another srun",
        "lower --cpus-per-task; srun --overlap, or --exact",
        "E3SM-Project/scream#2112",
    ),
    _row(
        "old_slurm",
        r"(sbatch|srun|salloc|squeue): unrecognized option|(sbatch|srun): error: Unknown option",
        "this Slurm is older than the option",
        "sbatch --version; leave the option out",
        "skypilot-org/skypilot#8907",
    ),
    _row(
        "job_pends",
        r"PartitionConfig|PartitionNodeLimit|BadConstraints|ReqNodeNotAvail|"
        r"[(=]AssocGrp\w+|[(=]AssocMax\w+|[(=]QOSMax\w+|[(=]QOSGrp\w+",
        "the job asks for what its partition or account never gives: it waits for ever",
        "scontrol show job JOB | grep Reason; scontrol show partition; ask for fewer nodes or "
        "GPUs, less time, or name another --partition",
        "Slurm, tried with sbatch -N 9 on four nodes",
    ),
    _row(
        "log_folder",
        r"FAILED\s+0:53",
        "Slurm could not open the job's output: the folder of --output is not there",
        "mkdir -p the folder of #SBATCH --output before sbatch; doctor script JOB finds it",
        "Slurm, tried with a missing folder",
    ),
    _row(
        "time_limit",
        r"DUE TO TIME LIMIT|walltime.*exceeded|TERM_RUNLIMIT",
        "the job reached its time limit",
        "#SBATCH --signal=USR1@120 and checkpoint.resume=auto go on from the last checkpoint; "
        "raise --time",
        "Slurm, PBS, LSF",
    ),
    _row(
        "efa_fallback",
        r"NET/OFI.*(fail|not found|unable|abort)|NET/Plugin.*(fail|could not).*(ofi|efa)",
        "NCCL talks TCP: the plugin for the fast network (EFA, InfiniBand) was not loaded",
        'export NCCL_NET="AWS Libfabric" (or IB), so that it fails instead; NCCL_DEBUG=INFO',
        "aws/aws-ofi-nccl",
    ),
    # -- what follows a failure elsewhere --------------------------------------------------------
    _row(
        "another_failed_first",
        r"got signal: 15|Signal 15 \(SIGTERM\)|exitcode\s*:\s*-15",
        "this process was told to stop because another failed first, or the job was cancelled",
        "look for the first error among the logs of all ranks and hosts",
        "flyteorg/flytekit#2064",
        follows=True,
    ),
    _row(
        "child_failed",
        r"ChildFailedError",
        "a worker ended with an error; torchrun names the first, and waits for those that do not "
        "react (in the state D)",
        "see the error of the rank under 'Root Cause', and its own traceback: torchrun --redirects "
        "3 --log-dir logs",
        "pytorch/pytorch#185414",
        follows=True,
    ),
    _row(
        "peer_gone",
        r"Connection (closed by peer|reset by peer)|Broken pipe|remote process exited|"
        r"ncclRemoteError",
        "the process at the other end is gone: it failed before",
        "see the logs of the other ranks for the first error",
        "pytorch/pytorch",
        follows=True,
    ),
    _row(
        "collective_timeout",
        r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for|"
        r"Wait timeout|monitoredBarrier.*failed",
        "a process did not come to a collective: it failed, is far slower, or runs another one; "
        "or large packets are lost on the way",
        "python -m torsh_trainer doctor --hosts A,B tries the network; TORCH_DISTRIBUTED_DEBUG="
        "DETAIL names collectives that differ",
        "pytorch/pytorch",
        follows=True,
    ),
    # -- what this trainer says itself -----------------------------------------------------------
    _row(
        "torsh_port",
        r"port \d+ is in use, and rank 0 wanted to serve the job there",
        "another program has MASTER_PORT on rank 0's host",
        "ss -ltnp 'sport = :PORT'; export MASTER_PORT=29501",
        "torsh_trainer/comm/start.py",
    ),
    _row(
        "torsh_unreached",
        r"could not reach (rank 0|torchrun's agent) at \S+ within",
        "MASTER_ADDR is wrong on that host, a firewall drops the port, or rank 0 has not started",
        "python -m torsh_trainer doctor there; comm.startup_timeout_s waits longer",
        "torsh_trainer/comm/start.py",
    ),
    _row(
        "torsh_absent_ranks",
        r"of \d+ did not arrive within",
        "the named ranks were not started, failed before they met, or have another MASTER_ADDR",
        "see logs/rank-N.log of those ranks; launcher.explain=true prints how a process finds its "
        "place",
        "torsh_trainer/comm/start.py",
    ),
    _row(
        "torsh_mesh",
        r"all \d+ processes arrived, but \w+ could not connect rank",
        "they met at rank 0's store, but hosts do not reach each other directly: a host name that "
        "resolves to the loopback, the wrong interface, or a firewall beside the one port",
        "python -m torsh_trainer doctor --nodes 2 on each host; comm.network_interface=eth0",
        "torsh_trainer/comm/start.py",
    ),
    _row(
        "torsh_one_gpu",
        r"ranks [\d, .]+ compute on one GPU",
        "processes share a GPU",
        "start as many processes as the host has GPUs",
        "torsh_trainer/comm/devices.py",
    ),
    _row(
        "torsh_backends_differ",
        r"the processes ask for different backends",
        "hosts were given different configurations",
        "start every process with the same command",
        "torsh_trainer/comm/start.py",
    ),
)
