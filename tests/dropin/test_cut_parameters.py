"""What a DeepSpeed script does with parameters that stage 3 has cut, and would not notice."""

from __future__ import annotations

import io

import pytest
import torch
from safetensors import torch as safe
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torsh_trainer.dropin.zero import gathering
from torsh_trainer.dropin.zero.settings import Settings
from torsh_trainer.errors import Unsupported


@pytest.fixture(autouse=True)
def restore_saving(monkeypatch):
    """What saves is exchanged for a test alone."""
    monkeypatch.setattr(torch, "save", torch.save)
    for name in [name for name, held in vars(safe).items() if callable(held)]:
        monkeypatch.setattr(safe, name, getattr(safe, name))


@pytest.fixture
def cut():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    yield DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
    torch.distributed.destroy_process_group()


def test_a_part_is_not_saved_for_a_whole(cut, tmp_path):
    gathering.refuse_saved_parts()
    with pytest.raises(Unsupported, match=r"torch\.save of parameters that stage 3 has cut"):
        torch.save({"model": {"weight": cut}}, io.BytesIO())
    torch.save({"model": {"weight": cut}}, tmp_path / "model.pt")
    assert not (tmp_path / "model.pt").exists()
    with pytest.raises(Unsupported, match=r"model\.pt was not written"):
        gathering.check_saved()
    torch.save({"weight": torch.ones(2), "step": 3}, tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt")["step"] == 3
    gathering.check_saved()


def test_safetensors_saves_no_part(cut, tmp_path):
    gathering.refuse_saved_parts()
    with pytest.raises(Unsupported, match="safetensors of parameters"):
        safe.save_file({"weight": cut}, tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()
    safe.save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")


def test_a_gathered_parameter_is_a_plain_one_for_a_while(cut):
    module = torch.nn.Module()
    module.weight = parameter = torch.nn.Parameter(cut)
    gathering.mark_cut(module, torch.bfloat16)
    assert (parameter.ds_status, parameter.ds_numel) == (gathering.ZeroParamStatus(2), 12)
    with gathering.GatheredParameters(parameter):
        assert parameter.ds_status is gathering.ZeroParamStatus.AVAILABLE
        assert type(parameter.data) is torch.Tensor
        assert (parameter.dtype, list(parameter.shape)) == (torch.bfloat16, [4, 3])
        assert [type(v) for v in module.state_dict().values()] == [torch.Tensor]
        parameter.data.zero_()
    assert type(parameter) is DTensor
    assert parameter.dtype == torch.float32
    assert bool((parameter.to_local() == 1).all())


def test_the_clock_of_samples_may_be_told_of_an_epoch():
    assert Settings().tput_timer.update_epoch_count() is None
