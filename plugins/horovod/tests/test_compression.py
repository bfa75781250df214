"""The trainer's own compressions over Horovod do what they do over gloo."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torsh_trainer_horovod.strategy import Horovod

from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.comm.compression import (
    BF16,
    FP16,
    Compressing,
    Int4,
    Int8,
    NoCompression,
    OneBit,
    PowerSGD,
    RandomK,
    SignSGD,
    Threshold,
    TopK,
)
from torsh_trainer.data.loading import Loading
from torsh_trainer.errors import Unsupported
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.builtin import Gloo
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.resuming import Leg, SentenceTask, live, saving
from torsh_trainer.training.trainer import Trainer

METHODS = {
    "fp16": FP16(memory="residual"),
    "topk": TopK(0.1),
    "randomk": RandomK(0.2),
    "threshold": Threshold(0.01),
    "int8": Int8(rounding="stochastic"),
    "int4": Int4(block_size=32),
    "signsgd": SignSGD(memory="none"),
    "onebit": OneBit(block_size=32),
}


def trainer(strategy: Strategy, compression: Any, options: CheckpointOptions) -> Trainer:
    if isinstance(compression, Compressing):
        compression = replace(compression, min_size=8)
    return Trainer(
        task=SentenceTask(),
        strategy=strategy,
        compression=compression,
        loading=Loading(batch_size=8, micro_batch_size=2),
        checkpoint=options,
        max_steps=6,
        seed=3,
        log_every=1,
        eval_every_epochs=None,
        device="cpu",
        log_level="error",
    )


def run(comm: Any, made: Trainer, folder: Path, until: int | None = None) -> Leg:
    # Imported here: the test process has no Horovod running.
    import horovod.torch as hvd

    leg = live(comm, made, folder, until=until)
    assert not hvd.is_initialized(), "it ends with its engine"
    return leg


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", METHODS)
def test_a_compressed_run_is_that_over_gloo_and_goes_on_there(name, tmp_path):
    none = CheckpointOptions(dir=None, at_end=False, resume="never")
    few = 0.0005  # MiB: several buckets
    ours, theirs = Horovod(fusion_threshold_mb=few), Gloo(bucket_cap_mb=few)
    plain = shared_pool(2).run(run, trainer(theirs, METHODS[name], none), tmp_path)
    first = shared_pool(2).run(run, trainer(ours, METHODS[name], saving(tmp_path)), tmp_path, 3)
    second = shared_pool(2).run(run, trainer(theirs, METHODS[name], saving(tmp_path)), tmp_path)
    for expected, before, after in zip(plain, first, second, strict=True):
        before.follow(after)
        assert before.losses == expected.losses
        assert before.norms == expected.norms


def test_and_it_would_show_if_nothing_were_compressed(tmp_path):
    none = CheckpointOptions(dir=None, at_end=False, resume="never")
    legs = [
        shared_pool(2).run(run, trainer(Horovod(), compression, none), tmp_path)[0]
        for compression in (TopK(0.1), NoCompression())
    ]
    assert legs[0].losses[1] == legs[1].losses[1]
    assert legs[0].losses[3] != legs[1].losses[3]


@pytest.mark.parametrize(
    ("knobs", "compression", "words"),
    [
        ({}, BF16(), "compression=bf16: Horovod cannot add bf16 numbers"),
        ({}, PowerSGD(), "compression=powersgd"),
        ({"op": "sum"}, TopK(0.1), "compression=topk with strategy.op=sum"),
        ({"compression": "fp16"}, TopK(0.1), "compression=topk with strategy.compression=fp16"),
        ({"groups": 2}, TopK(0.1), "compression=topk with strategy.groups=2"),
        ({"find_unused_parameters": True}, TopK(0.1), "compression.memory=residual with"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(knobs, compression, words):
    with pytest.raises(Unsupported) as refusal:
        Horovod(**knobs)._check_compression(compression)
    assert f"strategy=horovod cannot honour {words}" in str(refusal.value)
