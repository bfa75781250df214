"""A Horovod job in a script of one's own, without Horovod: the names of the guides."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torsh_trainer
from torsh_trainer import distributed as tc
from torsh_trainer.comm.compression import FP16, NoCompression, TopK
from torsh_trainer.errors import ConfigError, Unsupported
from torsh_trainer.integrations.horovod import HorovodConfig, HorovodIntegration
from torsh_trainer.testing.ranks import shared_pool

WRAPPER = "op: Average\nbackward_passes_per_step: 2\ncompression: fp16\n"


def moved(comm, config):
    """By how much two backward passes move the weights of a linear model."""
    integration = HorovodIntegration(config)
    world = comm.world
    integration.initialize(world.rank, world.size, world.local_rank, world.local_size)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    before = model.weight.detach().double()
    wrapped = tc.DistributedDataParallel(model, integration.to_ddp_config())
    compression = integration.to_compression_config()
    if not isinstance(compression, NoCompression):
        wrapped.with_compression(compression)
    wrapped.with_optimizer(torch.optim.SGD(wrapped.parameters(), lr=1.0))
    for k in range(2):
        wrapped(torch.full((1, 3), 1.0 + world.rank + 2 * k)).sum().backward()
        wrapped.step()
    return before - model.weight.detach().double()


def test_a_model_is_reduced_as_horovod_would(tmp_path):
    path = tmp_path / "wrapper.yaml"
    path.write_text(WRAPPER)
    config = HorovodConfig.from_file(path, world_size=2)
    assert config.compression == FP16()
    for found in shared_pool(2).run(moved, config):
        # The sum over passes, the mean over ranks: (1 + 3 + 2 + 4) / 2; all of it fits fp16.
        assert torch.allclose(found, torch.full((2, 3), 5.0).double(), atol=1e-6)
    with pytest.raises(Exception, match="this process is rank"):
        HorovodIntegration(config).initialize(1, 2, 1, 2)


def test_the_names_of_the_guides_give_a_sparse_compression():
    config = torsh_trainer.HorovodIntegration.config_with_topk_compression(0.01)
    integration = torsh_trainer.HorovodIntegration(config)
    integration.initialize(0, 1, 0, 1)
    with pytest.raises(ConfigError, match="initialized already"):
        integration.initialize(0, 1, 0, 1)
    assert integration.to_compression_config() == TopK(0.01)
    found = integration.to_ddp_config()
    assert (found.bucket_size_mb, found.gradient_compression) == (64.0, True)


@pytest.mark.parametrize(
    ("text", "error"),
    [("op: Sum\n", "averages"), ("op: Adasum\n", "Adasum without Horovod")],
)
def test_what_has_no_translation_here_is_refused_by_name(tmp_path, text, error):
    path = tmp_path / "wrapper.yaml"
    path.write_text(text)
    with pytest.raises(Unsupported, match=error):
        HorovodConfig.from_file(path)


def test_no_fusion_is_a_bucket_for_each_gradient(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text("horovodrun -np 2 --fusion-threshold-mb 0 python train.py\n")
    config = HorovodConfig.from_file(path)
    assert HorovodIntegration(config).to_ddp_config().bucket_size_mb == 2.0**-20
    with pytest.raises(ConfigError, match="negative"):
        HorovodIntegration(HorovodConfig(fusion_threshold_mb=-1)).to_ddp_config()
