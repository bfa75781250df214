"""``torch.compile(module)`` as the module of a run of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loops import as_alone, as_torchrun, quiet
from test_loop_ranks import Net, Rows
from torsh_trainer_lightning.task import LightningTask

from torsh_trainer import CheckpointOptions, Trainer
from torsh_trainer.environments.world import World


class Validates(Net):
    def validation_step(self, batch, batch_idx):
        self.log_dict({"square": self.net(batch).square().mean()})

    def val_dataloader(self):
        return Rows().train_dataloader()


def losses(world: World, port: int, folder: Path, strategy: str) -> tuple[Any, ...]:
    """What a run comes to as it is, and compiled, and how many graphs were compiled."""
    if strategy == "single":
        as_alone(folder)
        if world.rank:
            return ()
    else:
        as_torchrun(world, port, folder)
    quiet()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def trained(made: Any, name: str) -> dict[str, float]:
        content = (
            Trainer(
                task=LightningTask(made, Rows),
                strategy=strategy,
                seed=3,
                max_epochs=2,
                run_dir=folder / name,
                checkpoint=CheckpointOptions(resume="never"),
            )
            .fit()
            .content
        )
        return {"loss": content["train_loss"], **content["metrics"]}

    try:
        plain = trained(Validates, "plain")
        compiled = trained(lambda: torch.compile(Validates(), backend=backend), "compiled")
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return plain, compiled, len(graphs)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_a_compiled_module_trains_as_it_is(strategy, on_ranks, tmp_path):
    plain, compiled, graphs = on_ranks(losses, tmp_path, strategy)[0]
    assert compiled == pytest.approx(plain, rel=1e-6)
    assert graphs
