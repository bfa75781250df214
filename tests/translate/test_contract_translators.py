"""The built-in translators keep the contract of translators."""

from typing import ClassVar

from torsh_trainer.testing import TranslatorContract
from torsh_trainer.testing.translator import Sample
from torsh_trainer.translate.deepspeed.engine import DeepSpeedTranslator
from torsh_trainer.translate.horovod.translator import HorovodTranslator
from torsh_trainer.translate.launch.translator import LaunchTranslator

DS = """{
  "train_batch_size": 32,
  "train_micro_batch_size_per_gpu": 8,
  "zero_optimization": {"stage": 1},
  "gradient_clipping": 1.0
}
"""


class TestDeepSpeed(TranslatorContract):
    translator = DeepSpeedTranslator()
    samples: ClassVar = {
        "zero_1": Sample(
            "ds.json",
            DS,
            keys=(
                "train_batch_size",
                "train_micro_batch_size_per_gpu",
                "zero_optimization.stage",
                "gradient_clipping",
            ),
            choices={"strategy": "ddp"},
            values={"data.batch_size": 32, "data.micro_batch_size": 8, "strategy.zero1": True},
        )
    }
    foreign: ClassVar = {
        "helm": ("values.yaml", "ssh: {port: 22}\nworker: {number: 3}\n"),
        "notes": ("notes.txt", "hello"),
    }
    invalid: ClassVar = {
        "unknown_key": ("ds.json", '{"train_batch_size": 8, "trian": 1}'),
        "no_json": ("ds.json", "{"),
    }


class TestHorovod(TranslatorContract):
    translator = HorovodTranslator()
    samples: ClassVar = {
        "settings": Sample(
            "hvd.yaml",
            "params:\n  fusion_threshold_mb: 32\n",
            keys=("params.fusion_threshold_mb",),
            choices={"strategy": "ddp"},
        )
    }
    foreign: ClassVar = {
        "deepspeed": ("ds.json", '{"train_batch_size": 8}'),
        "accelerate": ("a.yaml", "deepspeed_config: {zero_stage: 2}\n"),
        "notes": ("notes.txt", "hello"),
    }
    invalid: ClassVar = {"wrong_type": ("hvd.yaml", "params: {cache_capacity: many}\n")}


class TestLaunch(TranslatorContract):
    translator = LaunchTranslator()
    samples: ClassVar = {
        "deepspeed": Sample(
            "run.sh",
            "export A=1\nN=2\ndeepspeed --num_gpus $N train.py --lr 0.1 data\n",
            keys=("A", "--num_gpus", "--lr"),
            values={"launcher.num_processes": 2},
        ),
        "slurm": Sample(
            "job.txt",
            "#SBATCH --nodes=1\nsrun -n 2 python train.py\n",
            keys=("#SBATCH --nodes", "-n"),
        ),
    }
    foreign: ClassVar = {
        "deepspeed": ("ds.json", '{"train_batch_size": 8}'),
        "horovod": ("run.sh", "horovodrun -np 2 python train.py\n"),
        "script": ("train.py", "import torch\n# torchrun train.py\n"),
        "notes": ("notes.txt", "hello"),
    }
    invalid: ClassVar = {
        "unknown_flag": ("run.sh", "torchrun --nprocs 2 train.py\n"),
        "no_launch": ("run.sh", "#!/bin/sh\nls\n"),
        "open_quote": ("run.sh", "torchrun 'train.py\n"),
    }
