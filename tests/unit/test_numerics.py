"""How numbers are rounded: what precision=auto comes to, and torch's switches while a run lasts.

No GPU is here: what torch says of one is patched.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from torsh_trainer import DataSource, Loading, OptimizerSpec, Task, Trainer
from torsh_trainer.assemble.verifying import pin_precision
from torsh_trainer.callbacks.base import Callback, RunInfo
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.optim.precision import AUTO, Precision
from torsh_trainer.training import numerics
from torsh_trainer.training.trainer import Result

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
BF16 = Precision(compute="bf16")


class Processes:
    """Stands in for the communicator of two processes; ``other`` is what the other one has."""

    def __init__(self, device: torch.device = GPU, *, other: float = 1.0) -> None:
        self.device = device
        self.other = other

    def reduce_values(self, values: list[float], *, op: str) -> list[float]:
        assert op == "min"
        return [min(value, self.other) for value in values]


def settle(asked: Precision, comm: Processes, **knobs: Any) -> Precision:
    return numerics.settle(asked, comm, **knobs)  # type: ignore[arg-type]


@pytest.fixture
def of_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives every process a GPU of this compute capability."""

    def give(major: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation=True: major >= 8
        )

    return give


def test_auto_is_bf16_by_autocast_where_all_gpus_have_it_and_fp32_on_a_cpu(
    of_gpu: Any, caplog: pytest.LogCaptureFixture
) -> None:
    of_gpu(8)
    assert settle(AUTO, Processes()).name == "bf16-mixed"
    assert settle(AUTO, Processes(CPU)) == Precision()
    assert not caplog.text
    assert settle(AUTO, Processes(other=0.0)) == Precision()
    assert "auto is fp32 here: the GPU of another process has no bf16" in caplog.text
    kept = settle(Precision(compute="auto", reduce="bf16", matmul="high"), Processes())
    assert kept == Precision(compute="bf16", reduce="bf16", matmul="high")


def test_a_gpu_without_bf16_computes_in_fp32_and_says_so(
    of_gpu: Any, caplog: pytest.LogCaptureFixture
) -> None:
    of_gpu(7)
    assert settle(AUTO, Processes()) == Precision()
    assert "precision=auto is fp32 here: Tesla T4 has no bf16; fp16_mixed is faster" in caplog.text


@pytest.mark.parametrize("params", ["fp32", "bf16"])
def test_bf16_is_refused_where_the_device_has_none(of_gpu: Any, params: Any) -> None:
    of_gpu(7)
    asked = Precision(params=params, compute="bf16")
    with pytest.raises(ResourceError, match=r"precision=bf16_\w+: Tesla T4 has no bf16; take "):
        settle(asked, Processes())
    assert settle(asked, Processes(CPU)) == asked
    of_gpu(9)
    assert settle(asked, Processes()) == asked


@pytest.mark.parametrize("name", ["fp32", "bf16-mixed", "bf16-true", "fp16-mixed", "fp16-true"])
def test_auto_goes_on_in_what_the_checkpoint_was_trained_in(
    of_gpu: Any, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    of_gpu(8)
    assert settle(AUTO, Processes(), saved=name).name == name
    said = f"precision=auto goes on in {name}, as the checkpoint was trained"
    assert (said in caplog.text) == (name != "bf16-mixed")
    assert settle(AUTO, Processes(CPU), saved=name).name == name
    assert settle(Precision(), Processes(), saved=name) == Precision()  # asked for by name


def test_a_checkpoint_in_bf16_goes_on_in_fp32_where_there_is_none_and_says_so(
    of_gpu: Any, caplog: pytest.LogCaptureFixture
) -> None:
    of_gpu(7)
    assert settle(AUTO, Processes(), saved="bf16-true") == Precision()
    assert "the checkpoint was trained in bf16-true, and goes on in fp32: Tesla" in caplog.text


# -- torch's switches -----------------------------------------------------------------------------


def read_switches() -> tuple[Any, ...]:
    backends: Any = torch.backends
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        backends.cudnn.benchmark,
        backends.cuda.matmul.fp32_precision,
        backends.mkldnn.matmul.fp32_precision,
        backends.cudnn.conv.fp32_precision,
        backends.cudnn.rnn.fp32_precision,
    )


@pytest.fixture
def leaving_no_trace() -> Any:
    with numerics.set_switches(deterministic=False, matmul=None):
        yield


@pytest.mark.usefixtures("leaving_no_trace")
@pytest.mark.parametrize("matmul", ["highest", "high", "medium", None])
@pytest.mark.parametrize("before", ["as it begins", "high", "older name", "newer name"])
def test_switches_are_put_back_whatever_they_were_and_however_the_run_ends(
    matmul: Any, before: str
) -> None:
    backends: Any = torch.backends
    if before == "high":
        torch.set_float32_matmul_precision("high")
    elif before == "older name":
        backends.cudnn.allow_tf32 = False
        backends.cudnn.benchmark = True
    elif before == "newer name":
        backends.cudnn.conv.fp32_precision = "ieee"
    found = read_switches()

    def run() -> None:
        with numerics.set_switches(deterministic=True, matmul=matmul):
            assert torch.are_deterministic_algorithms_enabled()
            assert not backends.cudnn.benchmark
            if matmul is not None:
                assert torch.get_float32_matmul_precision() == matmul
                convolutions = backends.cudnn.conv.fp32_precision
                assert (convolutions == "tf32") == (matmul != "highest")
            raise KeyError

    with pytest.raises(KeyError):
        run()
    assert read_switches() == found


@pytest.mark.usefixtures("leaving_no_trace")
@pytest.mark.parametrize(
    ("asked", "device", "deterministic", "fixed", "found"),
    [
        ("auto", GPU, False, True, True),
        ("auto", GPU, False, False, False),
        ("auto", GPU, True, True, False),
        ("auto", CPU, False, True, False),
        (True, GPU, False, False, True),
        (False, GPU, False, True, False),
    ],
)
def test_kernels_are_measured_on_a_gpu_for_fixed_shapes(
    asked: Any, device: torch.device, deterministic: bool, fixed: bool, found: bool
) -> None:
    numerics.search_kernels(asked, device, deterministic=deterministic, fixed_shapes=fixed)
    assert torch.backends.cudnn.benchmark == found


@pytest.mark.usefixtures("leaving_no_trace")
def test_auto_leaves_on_what_the_program_has_switched_on() -> None:
    torch.backends.cudnn.benchmark = True
    numerics.search_kernels("auto", GPU, deterministic=False, fixed_shapes=False)
    assert torch.backends.cudnn.benchmark


# -- what is told ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("leaving_no_trace")
def test_what_changes_numbers_is_told_and_so_is_a_faster_way(of_gpu: Any) -> None:
    of_gpu(8)
    assert numerics.in_words(AUTO, Precision(), CPU) == ""
    assert numerics.in_words(AUTO, BF16, GPU) == "chosen by precision=auto"
    with numerics.set_switches(deterministic=False, matmul="highest"):
        hint = "precision.matmul=high (TF32) or precision=bf16_mixed is faster here"
        assert numerics.in_words(Precision(), Precision(), GPU) == hint
        assert numerics.facts(Precision(), GPU)["convolutions"] == "highest"
    with numerics.set_switches(deterministic=False, matmul="high"):
        torch.backends.cudnn.benchmark = True
        assert numerics.in_words(Precision(), Precision(), GPU) == (
            "products of fp32 matrices in TF32; convolutions in TF32; cuDNN measures its kernels"
        )
        assert numerics.facts(BF16, GPU) == {
            "precision": "bf16-mixed",
            "matmul": "high",
            "convolutions": "high",
            "cudnn_benchmark": True,
            "deterministic": False,
        }
        of_gpu(7)  # which has no TF32, whatever the switches say
        assert numerics.products(GPU) == "highest"
        assert numerics.in_words(Precision(), Precision(), GPU) == "cuDNN measures its kernels"


# -- runs -----------------------------------------------------------------------------------------


class Line(Task):
    """Linear regression."""

    def __init__(self) -> None:
        self.optimizer = OptimizerSpec("SGD", lr=0.01)
        self.data = DataSource()
        self.data.train = TensorDataset(torch.ones(16, 3), torch.ones(16, 1))

    def build_model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch[1])


class Listener(Callback):
    """Keeps what a run says of itself, and torch's switches within it."""

    def on_start(self, info: RunInfo) -> None:
        self.info = info
        self.switches = read_switches()


def run_line(folder: Path, *, steps: int = 1, **knobs: Any) -> tuple[Result, Listener]:
    listener = Listener()
    trainer = Trainer(
        task=Line(),
        strategy="single",
        loading=Loading(batch_size=4),
        max_steps=steps,
        run_dir=folder,
        device="cpu",
        callbacks=[listener],
        eval_every_epochs=None,
        **knobs,
    )
    return trainer.fit(), listener


def test_a_run_settles_auto_once_and_says_so_everywhere(tmp_path: Path) -> None:
    before = read_switches()
    asked = Precision(compute="auto", matmul="medium")
    result, listener = run_line(tmp_path, precision=asked)
    assert (listener.info.precision, result.content["precision"]) == ("fp32", "fp32")
    assert listener.info.numerics == "precision.matmul=medium, as far as the CPU has it"
    assert listener.switches[1] == "medium"
    assert read_switches() == before
    told = json.loads((tmp_path / "provenance.json").read_text())
    assert told["numerics"]["precision"] == "fp32"
    assert told["numerics"]["matmul"] == "medium"
    assert told["hardware"]["host"]


def test_a_run_goes_on_in_bf16_without_the_option_that_began_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_line(tmp_path, precision=BF16)
    result, _ = run_line(tmp_path, steps=2)
    assert result.content["precision"] == "bf16-mixed"
    assert "precision=auto goes on in bf16-mixed, as the checkpoint was trained" in caplog.text
    with caplog.at_level(logging.INFO, logger="torsh_trainer"):
        result, _ = run_line(tmp_path, steps=3, precision=Precision())
    assert result.content["precision"] == "fp32"
    assert "numbers are rounded otherwise: precision was bf16-mixed and is fp32" in caplog.text


def test_samples_that_torch_stacks_are_of_one_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def listen(asked: Any, device: torch.device, **knobs: Any) -> None:
        seen.append((asked, knobs["fixed_shapes"]))

    monkeypatch.setattr(numerics, "search_kernels", listen)
    run_line(tmp_path / "a")
    monkeypatch.setattr(DataSource, "collate", staticmethod(torch.utils.data.default_collate))
    run_line(tmp_path / "b", cudnn_benchmark=False)
    assert seen == [("auto", True), (False, False)]


def test_measured_and_deterministic_kernels_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cudnn_benchmark=true takes the kernels"):
        run_line(tmp_path, cudnn_benchmark=True, deterministic=True)


def test_a_verification_pins_what_is_another_on_another_device() -> None:
    assert pin_precision({}) == {
        "_target_": "torsh_trainer.optim.precision.Precision",
        "matmul": "highest",
    }
    assert pin_precision({"compute": "auto", "matmul": None})["compute"] == "fp32"
    asked = {"compute": "bf16", "matmul": "high"}
    assert asked.items() <= pin_precision(asked).items()
