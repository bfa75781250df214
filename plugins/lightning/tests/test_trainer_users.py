"""What scripts for Lightning's Trainer do: trained as under its strategies, or refused first."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from test_strategy import Net, fitted

from torsh_trainer.errors import ConfigError


class MadeEarly(Net):
    """Its optimizer is made in the constructor, over whole parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.made = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> Any:
        return self.made


class Beside(Net):
    """Its optimizer has a tensor that the module does not know."""

    def configure_optimizers(self) -> Any:
        beside = torch.ones(7, requires_grad=True)
        return torch.optim.SGD([*self.parameters(), beside], lr=0.1)


class NoOptimizer(Net):
    """Goes through its batches and steps nothing."""

    def configure_optimizers(self) -> Any:
        return None


def seeded(kind: type[Net]) -> Net:
    """The same module whenever it is asked for."""
    L.seed_everything(11, verbose=False)
    return kind()


def test_an_optimizer_made_early_trains_where_parameters_are_whole_else_is_refused(tmp_path):
    theirs = seeded(MadeEarly)
    fitted("ddp", theirs, tmp_path)
    torch.distributed.destroy_process_group()
    ours = seeded(MadeEarly)
    fitted("torsh_ddp", ours, tmp_path)
    assert ours.losses == theirs.losses
    torch.distributed.destroy_process_group()
    sharded = seeded(MadeEarly)
    with pytest.raises(ConfigError, match=r"7 of the 7 parameters.*build it in configure_optimiz"):
        fitted("torsh_fsdp", sharded, tmp_path)
    assert not sharded.losses


@pytest.mark.parametrize("name", ["torsh_single", "torsh_fsdp"])
def test_a_tensor_that_is_no_parameter_of_the_module_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=r"shape \(7,\) which is no parameter of the module"):
        fitted(name, seeded(Beside), tmp_path)


def test_a_module_without_an_optimizer_goes_through_its_batches(tmp_path):
    theirs, ours = seeded(NoOptimizer), seeded(NoOptimizer)
    fitted("ddp", theirs, tmp_path)
    torch.distributed.destroy_process_group()
    fitted("torsh_fsdp", ours, tmp_path)
    torch.testing.assert_close(ours.losses, theirs.losses)
