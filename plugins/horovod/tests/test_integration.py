"""``HorovodIntegration`` in a script that torchrun has started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torsh_trainer_horovod as horovod
from torsh_trainer_horovod import HorovodIntegration

from torsh_trainer import Trainer
from torsh_trainer.comm.compression import TopK
from torsh_trainer.data.loading import Loading
from torsh_trainer.errors import ConfigError
from torsh_trainer.testing.ranks import RankPool, torchrun_variables
from torsh_trainer.testing.resuming import SentenceTask


def script(world: Any, port: int, folder: Path) -> dict[str, Any]:
    """What a user writes."""
    import horovod.torch as hvd

    os.chdir(folder)
    os.environ.update(torchrun_variables(world, port))
    integration = HorovodIntegration(HorovodIntegration.config_with_topk_compression(0.01))
    place = (horovod.rank(), horovod.size(), horovod.local_rank(), horovod.local_size())
    words = ""
    try:
        integration.initialize(1 - place[0], *place[1:])
    except ConfigError as error:
        words = str(error)
    integration.initialize(*place)
    again = ""
    try:
        integration.initialize(*place)
    except ConfigError as error:
        again = str(error)
    mean = integration.allreduce(torch.tensor([float(place[0])]), name="mean")
    trainer = Trainer(
        task=SentenceTask(),
        loading=Loading(batch_size=8, micro_batch_size=2),
        max_steps=2,
        eval_every_epochs=None,
        device="cpu",
        log_level="error",
        **integration.options,
    )
    answer = {
        "place": place,
        "result": dict(trainer.fit().content),
        "inside": (integration.rank(), integration.size()),
        "local": (integration.local_rank(), integration.local_size()),
        "mean": mean.tolist(),
        "words": words,
        "again": again,
    }
    integration.shutdown()
    return {**answer, "runs": hvd.is_initialized()}


def test_a_script_starts_horovod_and_trains_with_its_configuration(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with RankPool(2, join=False) as ranks:
        answers = ranks.run(script, store.port, tmp_path)
    for rank, answer in enumerate(answers):
        assert answer["place"] == (rank, 2, rank, 2)
        assert answer["inside"] == answer["local"] == (rank, 2)
        assert answer["mean"] == [0.5]
        assert f"this process is ({rank}, 2, {rank}, 2)" in answer["words"]
        assert "initialized already" in answer["again"]
        assert not answer["runs"]
        assert (answer["result"]["strategy"], answer["result"]["steps"]) == ("horovod", 2)


def test_the_presets_are_knobs_of_the_strategy_and_a_compression_of_the_trainer():
    plain = HorovodIntegration.default_config()
    assert (plain.strategy.fusion_threshold_mb, plain.strategy.cycle_time_ms) == (64.0, 1.0)
    chosen = HorovodIntegration(HorovodIntegration.config_with_topk_compression(0.01))
    assert chosen.options == {"strategy": plain.strategy, "compression": TopK(0.01)}
    with pytest.raises(ConfigError, match="is not in"):
        HorovodIntegration.config_with_topk_compression(2.0)


def test_before_it_is_initialized_it_says_so():
    integration = HorovodIntegration(HorovodIntegration.default_config())
    with pytest.raises(ConfigError, match=r"is not initialized; call initialize"):
        integration.rank()
