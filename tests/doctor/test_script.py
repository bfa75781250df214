"""``doctor script``: each mistake is found in a text that has it, and none in one that is right."""

from __future__ import annotations

import contextlib
import json
import random
import re
from pathlib import Path
from textwrap import dedent

import pytest

from torsh_trainer.doctor.command import main
from torsh_trainer.doctor.script.reading import read_files
from torsh_trainer.errors import ConfigError, ResourceError

WRONG = {
    "ranks_are_not_started": (
        "run.sh",
        """
        WORLD_SIZE=8
        NODES=("node1" "node2")
        GPUS_PER_NODE=4
        for i in "${!NODES[@]}"; do
            ssh ${NODES[$i]} "
                MASTER_ADDR=node1 \\
                WORLD_SIZE=$WORLD_SIZE \\
                LOCAL_RANK=0 \\
                ./train
            " &
        done
        """,
        "LOCAL_RANK=0 \\",
        ("6 ranks never come", "--nnodes 2 --nproc-per-node 4"),
    ),
    "node_rank_counts_processes": (
        "run.sh",
        """
        for i in 0 1; do
            NODE_RANK=$((i * GPUS_PER_NODE))
            ssh node$i NODE_RANK=$NODE_RANK ./train
        done
        """,
        "NODE_RANK=$((i * GPUS_PER_NODE))",
        ("number of the host",),
    ),
    "torchrun_overrides_rank": (
        "run.sh",
        """
        export MASTER_ADDR=192.168.1.1
        export RANK=4 WORLD_SIZE=8
        torchrun --nproc_per_node=4 train.py
        """,
        "torchrun --nproc_per_node=4 train.py",
        ("trains alone", "--nnodes=2 --node-rank=1"),
    ),
    "master_is_each_host": (
        "run.sh",
        """
        torchrun --nnodes=2 --nproc_per_node=2 --node_rank=$SLURM_NODEID \\
            --master_addr=$(hostname -i) train.py
        """,
        "--master_addr=$(hostname -i) train.py",
        ("waits at its own", "scontrol show hostnames"),
    ),
    "master_is_the_loopback": (
        "run.sh",
        "torchrun --nnodes=2 --node_rank=1 --master_addr=localhost train.py\n",
        "torchrun --nnodes=2",
        ("is each host itself",),
    ),
    "list_on_one_line": (
        "run.sh",
        """
        NODELIST=$(cat $PBS_NODEFILE | uniq)
        MASTER=$(echo $NODELIST | head -n 1)
        """,
        "MASTER=$(echo $NODELIST | head -n 1)",
        ("the whole list", 'echo "$NODELIST"'),
    ),
    "ports_of_collectives_stay_closed": (
        "open.sh",
        "sudo ufw allow 61000:61010/tcp  # NCCL\n",
        "sudo ufw",
        ("no option of theirs names 61000-61010", "ip_local_port_range"),
    ),
    "variable_that_nothing_reads": (
        "run.sh",
        "export NCCL_TIMEOUT=3600\n",
        "export NCCL_TIMEOUT",
        ("init_process_group(timeout",),
    ),
    "exit_code_is_lost": (
        "run.sh",
        "torchrun --nproc_per_node=2 train.py | tee log.txt\n",
        "torchrun",
        ("pipefail",),
    ),
    "more_processes_than_gpus": (
        "run.sh",
        "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=4 train.py\n",
        "CUDA_VISIBLE_DEVICES",
        ("shows 2 GPU(s)",),
    ),
    "shared_memory_of_64_mb": (
        "run.sh",
        "docker run --gpus all image python train.py\n",
        "docker run",
        ("--shm-size=8g",),
    ),
    "quote_is_not_closed": ("run.sh", "echo 'one\n", "echo", ("nothing closes",)),
    "launcher_refuses_an_option": (
        "run.sh",
        "torchrun --nproc_per_node=2 --rdzc_backend=c10d train.py\n",
        "torchrun",
        ("no option --rdzc_backend", "--rdzv_backend"),
    ),
    "windows_lines": ("run.sh", "#!/bin/bash\r\necho one\r\n", "#!/bin/bash", ("bad interpreter",)),
    "directive_is_ignored": (
        "job.sbatch",
        """\
        #!/bin/bash
        #SBATCH --nodes=1
        module load cuda
        #SBATCH --gres=gpu:4
        srun python train.py
        """,
        "#SBATCH --gres=gpu:4",
        ("stops reading at the first command",),
    ),
    "no_interpreter": (
        "job.sbatch",
        "#SBATCH --nodes=1\nsrun python train.py\n",
        "#SBATCH",
        ("does not look like a batch script",),
    ),
    "launcher_runs_on_the_first_node": (
        "job.sbatch",
        """\
        #!/bin/bash
        #SBATCH -N 4
        torchrun --nnodes=4 --nproc_per_node=8 train.py
        """,
        "torchrun --nnodes=4",
        ("4 nodes", "srun --ntasks-per-node=1"),
    ),
    "launcher_in_every_task": (
        "job.sbatch",
        """\
        #!/bin/bash
        #SBATCH --nodes=2
        #SBATCH --ntasks-per-node=4
        srun torchrun --nnodes=2 --nproc_per_node=4 train.py
        """,
        "srun torchrun",
        ("4 tasks on a node",),
    ),
    "fewer_gpus_than_processes": (
        "job.sbatch",
        """\
        #!/bin/bash
        #SBATCH --gres=gpu:a100:2
        torchrun --nproc_per_node=4 train.py
        """,
        "torchrun",
        ("asks 2 GPU(s)",),
    ),
    "log_folder_is_missing": (
        "job.sbatch",
        "#!/bin/bash\n#SBATCH --output=logs/%j.out\nsrun python train.py\n",
        "#SBATCH --output",
        ("0:53", "mkdir -p logs"),
    ),
    "resources_of_torque": (
        "job.pbs",
        "#!/bin/bash\n#PBS -l nodes=4:ppn=4:gpus=4\n./train\n",
        "#PBS -l",
        ("select=4:ncpus=4:mpiprocs=4:ngpus=4",),
    ),
    "variables_stay_on_the_first_host": (
        "job.pbs",
        "#!/bin/bash\nexport MASTER_ADDR=a\nmpirun -machinefile $PBS_NODEFILE ./train\n",
        "mpirun",
        ("-x MASTER_ADDR",),
    ),
    "sacct_time_is_the_limit": (
        "look.sh",
        "sacct -j 7 --format=JobID,State,Time,MaxRSS\n",
        "sacct",
        ("Elapsed",),
    ),
    "tool_before_it_is_installed": (
        "Dockerfile",
        "FROM ubuntu:22.04\nRUN curl -sSf https://x | sh\n",
        "RUN curl",
        ("has no curl",),
    ),
    "cuda_tag_without_patch": (
        "Dockerfile",
        "FROM nvidia/cuda:11.8-devel-ubuntu20.04\n",
        "FROM",
        ("nvidia/cuda:11.8.0-devel",),
    ),
    "image_is_not_pinned": ("Dockerfile", "FROM pytorch/pytorch:latest\n", "FROM", ("moves",)),
    "rank_in_image": ("Dockerfile", "FROM a:1\nENV RANK=0\n", "ENV RANK=0", ("every container",)),
    "install_without_update": (
        "Dockerfile",
        "FROM a:1\nRUN apt-get install -y git\n",
        "RUN apt-get",
        ("404",),
    ),
    "world_size_is_not_started": (
        "compose.yaml",
        """
        services:
          a: {image: x, shm_size: 8gb, environment: [WORLD_SIZE=4, NODE_RANK=0, LOCAL_RANK=0]}
          b: {image: x, shm_size: 8gb, environment: [WORLD_SIZE=4, NODE_RANK=1, LOCAL_RANK=0]}
        """,
        "a: {image",
        ("2 services start 2 process(es)",),
    ),
    "replicas_have_one_rank": (
        "compose.yaml",
        """
        services:
          worker:
            image: x
            environment:
              NODE_RANK: 1
            deploy:
              replicas: 3
        """,
        "replicas: 3",
        ("3 copies of worker",),
    ),
    "rank_stands_twice": (
        "compose.yaml",
        """
        services:
          a: {image: x, environment: {RANK: 0}}
          b:
            image: x
            environment:
              RANK: 0
        """,
        "RANK: 0",
        ("a has RANK=0 as well",),
    ),
    "master_is_no_service": (
        "compose.yaml",
        """
        services:
          a: {image: x, environment: {RANK: 0, MASTER_ADDR: localhost}}
          b: {image: x, environment: {RANK: 1, MASTER_ADDR: a}}
        """,
        "a: {image",
        ("MASTER_ADDR=a",),
    ),
    "job_is_not_indexed": (
        "job.yaml",
        """
        apiVersion: batch/v1
        kind: Job
        metadata: {name: train}
        spec:
          parallelism: 4
          completions: 4
          template:
            spec:
              containers:
              - name: a
                env:
                - name: RANK
                  valueFrom:
                    fieldRef:
                      fieldPath: metadata.annotations['batch.kubernetes.io/job-completion-index']
        """,
        "fieldPath",
        ("completionMode: Indexed",),
    ),
    "master_is_any_pod": (
        "job.yaml",
        """
        apiVersion: batch/v1
        kind: Job
        metadata: {name: train}
        spec:
          parallelism: 4
          completionMode: Indexed
          template:
            spec:
              containers:
              - name: a
                env:
                - name: MASTER_ADDR
                  value: service
        """,
        "value: service",
        ("train-0.service",),
    ),
    "pod_has_no_rank": (
        "job.yaml",
        """
        apiVersion: batch/v1
        kind: Job
        spec:
          parallelism: 4
          template:
            spec:
              containers:
              - name: a
                command: [python, train.py]
                env:
                - name: WORLD_SIZE
                  value: "4"
        """,
        "- name: WORLD_SIZE",
        ("nothing says a pod's rank",),
    ),
    "pods_wait_for_one_another": (
        "job.yaml",
        """
        apiVersion: batch/v1
        kind: Job
        spec:
          parallelism: 2
          completions: 4
        """,
        "parallelism: 2",
        ("parallelism: 4",),
    ),
    "one_pod_restarts_alone": (
        "job.yaml",
        """
        apiVersion: batch/v1
        kind: Job
        spec:
          parallelism: 2
          template:
            spec:
              restartPolicy: OnFailure
        """,
        "restartPolicy",
        ("JobSet",),
    ),
    "part_of_a_gpu": (
        "job.yaml",
        """
        apiVersion: batch/v1
        kind: Job
        spec:
          template:
            spec:
              containers:
              - name: a
                volumeMounts: [{name: shm, mountPath: /dev/shm}]
                resources:
                  limits:
                    nvidia.com/gpu: 0.5
        """,
        "nvidia.com/gpu: 0.5",
        ("whole GPUs",),
    ),
    "gpu_without_limit": (
        "job.yaml",
        """
        apiVersion: batch/v1
        kind: Job
        spec:
          template:
            spec:
              containers:
              - name: a
                resources:
                  requests:
                    nvidia.com/gpu: 1
        """,
        "nvidia.com/gpu: 1",
        ("limits:",),
    ),
    "local_rank_as_rank": (
        "train.py",
        "import os\ninit_process_group(\n    'nccl',\n    rank=int(os.environ['LOCAL_RANK']),\n)\n",
        "rank=int",
        ("read RANK",),
    ),
    "prometheus_port": (
        "settings.yaml",
        "metrics:\n  prometheus_port: 9090\n",
        "prometheus_port: 9090",
        ("9400 + LOCAL_RANK",),
    ),
    "missing_nccl_has_two_answers": (
        "guide.md",
        "Without NCCL there is a fallback.\n```rust\nif !is_nccl_available() {\n```\n",
        "Without NCCL",
        ("comm.on_missing",),
    ),
    "scaled_service_has_one_rank": (
        "guide.md",
        """
        ```yaml
        services:
          worker: {image: x, environment: [NODE_RANK=1]}
        ```
        ```bash
        docker-compose up --scale worker=3
        ```
        """,
        "docker-compose up",
        ("3 copies of worker",),
    ),
}

RIGHT = {
    "run.sh": """\
        #!/bin/bash
        set -euo pipefail
        export MASTER_ADDR=node1 MASTER_PORT=29500
        torchrun --nnodes=2 --node_rank=$1 --nproc_per_node=4 --master_addr=$MASTER_ADDR train.py \\
            | tee log.txt
        """,
    "one.sh": "torchrun --standalone --nproc_per_node=4 train.py\n",
    "job.sbatch": """\
        #!/bin/bash
        #SBATCH --nodes=4
        #SBATCH --ntasks-per-node=4
        #SBATCH --gres=gpu:4
        #SBATCH --output=%x-%j.out
        export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
        export MASTER_PORT=29500
        export WORLD_SIZE=$SLURM_NTASKS
        srun python train.py
        """,
    "torchrun.sbatch": """\
        #!/bin/bash
        #SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8
        head=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
        srun torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d \\
            --rdzv_id $SLURM_JOB_ID --rdzv_endpoint $head:29500 train.py
        """,
    "job.pbs": """\
        #!/bin/bash
        #PBS -l select=4:ncpus=8:mpiprocs=4:ngpus=4
        cd $PBS_O_WORKDIR
        export MASTER_ADDR=$(head -n 1 $PBS_NODEFILE)
        mpirun -x MASTER_ADDR -hostfile $PBS_NODEFILE python train.py
        """,
    "Dockerfile": """\
        FROM nvidia/cuda:12.4.1-runtime-ubuntu22.04 AS base
        RUN apt-get update && apt-get install -y curl git \\
            && curl -sSf https://example.org/x | sh
        FROM base
        COPY . /app
        """,
    "compose.yaml": """\
        services:
          node0:
            image: x:1
            shm_size: 8gb
            command: torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 train.py
            environment: {MASTER_ADDR: node0, WORLD_SIZE: 4, NODE_RANK: 0}
          node1:
            image: x:1
            shm_size: 8gb
            command: torchrun --nnodes 2 --node-rank 1 --nproc-per-node 2 train.py
            environment: {MASTER_ADDR: node0, WORLD_SIZE: 4, NODE_RANK: 1}
        """,
    "job.yaml": """\
        apiVersion: batch/v1
        kind: Job
        metadata: {name: train}
        spec:
          completionMode: Indexed
          parallelism: 2
          completions: 2
          backoffLimit: 0
          template:
            spec:
              subdomain: train
              restartPolicy: Never
              containers:
              - name: a
                image: x:1
                command: [python, -m, torsh_trainer]
                env:
                - {name: MASTER_ADDR, value: train-0.train}
                - {name: WORLD_SIZE, value: "2"}
                resources: {limits: {nvidia.com/gpu: 1}}
                volumeMounts: [{name: shm, mountPath: /dev/shm}]
        ---
        apiVersion: v1
        kind: Service
        metadata: {name: train}
        spec: {clusterIP: None, selector: {job-name: train}}
        """,
    "train.py": "import os\ninit_process_group('nccl', rank=int(os.environ['RANK']))\n",
    "guide.md": "# Guide\n\n```python\nprint(1)\n```\n\n```bash\npip install torch\n```\n",
}

SEEDS = Path(__file__).resolve().parents[3] / "shared" / "seeds"
CONTRADICTIONS = {
    "C-1": ("000", 227, "ranks_are_not_started"),
    "C-1, of NODE_RANK": ("000", 219, "node_rank_counts_processes"),
    "C-2": ("000", 266, "local_rank_as_rank"),
    "C-2, of gloo": ("000", 295, "local_rank_as_rank"),
    "C-3": ("000", 538, "world_size_is_not_started"),
    "C-3, of --scale": ("000", 587, "scaled_service_has_one_rank"),
    "C-4": ("000", 622, "job_is_not_indexed"),
    "C-4, of the service": ("000", 614, "master_is_any_pod"),
    "C-4, of RANK": ("000", 617, "pod_has_no_rank"),
    "C-5": ("000", 704, "list_on_one_line"),
    "C-6": ("003", 167, "master_is_each_host"),
    "C-7": ("004", 120, "torchrun_overrides_rank"),
    "C-7, of the worker": ("004", 127, "torchrun_overrides_rank"),
    "C-8": ("002", 25, "missing_nccl_has_two_answers"),
    "C-10": ("000", 871, "prometheus_port"),
    "C-16": ("000", 183, "ports_of_collectives_stay_closed"),
    "curl before it is there": ("000", 502, "tool_before_it_is_installed"),
    "gpus of Torque": ("000", 696, "resources_of_torque"),
    "torchrun without srun": ("003", 163, "launcher_runs_on_the_first_node"),
    "Time of sacct": ("003", 189, "sacct_time_is_the_limit"),
}
"""Those of the seeds' own text: the file, its line, and what it is called here."""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(dedent(text).encode())
    return path


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_found_at_its_line_with_a_correction(tmp_path, name):
    file, text, line, words = WRONG[name]
    found = read_files([write(tmp_path, file, text)])
    (mistake,) = [one for one in found.mistakes if one.name == name][:1] or [None]
    assert mistake is not None, found.mistakes
    lines = (tmp_path / file).read_text().splitlines()
    assert lines[mistake.line - 1].strip().startswith(line), mistake
    for word in words:
        assert word in f"{mistake.why} {mistake.fix}", mistake


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_found_in_what_is_right(tmp_path, name):
    found = read_files([write(tmp_path, name, RIGHT[name])])
    assert found.mistakes == ()
    assert sum(found.pieces.values()) > 0, "nothing was read"


def test_every_mistake_that_can_be_named_has_a_text_above():
    import torsh_trainer.doctor.script as package

    folder = Path(next(iter(package.__path__)))
    text = "".join(file.read_text() for file in folder.glob("*.py"))
    known = set(re.findall(r"\.mistake\(\s*\"(\w+)\"", text))
    assert len(known) > 35
    assert known == set(WRONG)


def test_the_contradictions_of_the_seeds_are_found_in_their_own_text():
    if not SEEDS.is_dir():
        pytest.skip("the seeds are not here; the same mistakes stand above")
    files = {path.name[:3]: path for path in sorted(SEEDS.glob("*.txt"))}
    found = read_files(list(files.values()))
    there = {(Path(one.file).name[:3], one.line, one.name) for one in found.mistakes}
    missing = {title: place for title, place in CONTRADICTIONS.items() if place not in there}
    assert missing == {}


def test_the_page_and_the_json_say_the_same(tmp_path, capsys):
    path = write(tmp_path, "run.sh", WRONG["torchrun_overrides_rank"][1])
    assert main(["script", str(path)]) == 1
    page = capsys.readouterr().out
    assert f"{path}:4: torchrun_overrides_rank" in page
    assert "1 mistake in 1 file; read: 1 shell" in page
    assert main(["script", "--json", str(path)]) == 1
    (mistake,) = json.loads(capsys.readouterr().out)["mistakes"]
    assert (mistake["line"], mistake["name"]) == (4, "torchrun_overrides_rank")
    right = write(tmp_path, "one.sh", RIGHT["one.sh"])
    assert main(["script", str(right)]) == 0


def test_texts_cut_anywhere_are_read_or_refused(tmp_path):
    """Whatever stands in a file: mistakes, or one error in words."""
    draw = random.Random(0)
    texts = [dedent(case[1]) for case in WRONG.values()] + [dedent(text) for text in RIGHT.values()]
    odd = ("'", '"', "$(", "}", "\\", "---\n", "```\n", "| tee x\n", "null", "[]", "- 1\n", "\t")
    files = ("x.md", "x.sh", "x.yaml", "Dockerfile", "x.py", "x.pbs")
    read = 0
    for number in range(400):
        text = draw.choice(texts)[draw.randrange(20) :]
        for _ in range(draw.randrange(6)):
            at = draw.randrange(len(text) + 1)
            text = text[:at] + draw.choice(odd) + text[at + draw.randrange(3) :]
        path = tmp_path / files[number % len(files)]
        path.write_text(text)
        with contextlib.suppress(ConfigError):
            read_files([path])
            read += 1
    assert read > 200


def test_nothing_of_a_script_is_executed(tmp_path):
    path = write(tmp_path, "run.sh", f"touch {tmp_path}/ran; x=$(touch {tmp_path}/ran2)\n")
    read_files([path])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.sh"]


def test_what_was_not_read_is_said(tmp_path, capsys):
    """A loop without end for the reader, and a block of a page that is no YAML."""
    many = write(tmp_path, "many.sh", "for ((i = 0; i < 9000; i++)); do echo $i; done\n")
    page = write(tmp_path, "page.md", "```yaml\na: [1\n```\n```bash\necho 'one\n```\n")
    pod = write(tmp_path, "pod.yaml", "apiVersion: v1\nkind: Pod\n")
    found = read_files([many, page, pod])
    assert found.mistakes == ()
    assert len(found.unread) == 4
    assert main(["script", str(many), str(page), str(pod)]) == 0
    out = capsys.readouterr().out
    assert f"not read: {many}:1: it would run more than 5000 commands" in out
    assert f"not read: {page}:" in out
    assert f"not read: {pod}:1: of kind Pod: only Jobs are judged" in out


def test_what_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is a folder; name its files"):
        read_files([tmp_path])
    with pytest.raises(ResourceError, match=r"cannot read .*gone\.sh"):
        read_files([tmp_path / "gone.sh"])
    (tmp_path / "a.sh").write_bytes(b"\0\1")
    with pytest.raises(ConfigError, match="is no text"):
        read_files([tmp_path / "a.sh"])
    (tmp_path / "weights.bin").write_text("hello")
    with pytest.raises(ConfigError, match="is no shell script, Dockerfile, YAML or page"):
        read_files([tmp_path / "weights.bin"])
    (tmp_path / "a.yaml").write_text("a: [1\n")
    with pytest.raises(ConfigError, match="is not YAML"):
        read_files([tmp_path / "a.yaml"])
