"""A model in two stages equals plain PyTorch, alone and beside shards and replicas."""

from __future__ import annotations

import pytest

from torsh_trainer.strategies.parallel import Parallel
from torsh_trainer.testing.compare import OF_CUT_LAYERS
from torsh_trainer.testing.strategy import StrategyContract
from torsh_trainer.testing.tiny import TinyModelOptions

MANUAL = {"manual_optimization": "a process has a stage of the model, and no loss of its own"}


class InTwoStages(StrategyContract):
    pipeline_parallel = 2
    refuses = MANUAL
    world_sizes = (1,)
    rules_of_a_variant = frozenset(["test_adamw_with_clipping_and_a_schedule_equals_plain_pytorch"])
    for_branches = Parallel(split=("blocks.1",))  # its experts are more than its blocks


class TestPipeline(InTwoStages):
    strategy = Parallel()


class TestPipelineOfShards(InTwoStages):
    variant = True
    strategy = Parallel(wrap_min_bytes=0)
    world_sizes = (2,)


class TestPipelineOfReplicas(InTwoStages):
    variant = True
    strategy = Parallel(schedule="gpipe", shard_size=1)
    world_sizes = (2,)


class TestPipelineOfCutLayers(InTwoStages):
    variant = True
    strategy = Parallel()
    tensor_parallel = 2
    tolerances = OF_CUT_LAYERS
    model = TinyModelOptions(attention=True)


@pytest.mark.exhaustive
def test_stages_of_cut_layers_of_shards_equal_plain_pytorch_on_eight_processes() -> None:
    class Suite(InTwoStages):
        strategy = Parallel(wrap_min_bytes=0)
        tensor_parallel = 2
        model = TinyModelOptions(attention=True)

    Suite().test_adamw_with_clipping_and_a_schedule_equals_plain_pytorch(2)
    Suite().test_three_steps_of_sgd_equal_plain_pytorch(2)
