"""Predictions: on the host as they come, and in the order of the samples whatever ranks share."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torsh_trainer.comm.base import Communicator
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.training.predictions import to_host, write_predictions

pytestmark = pytest.mark.usefixtures("warm_interpreters")


class OnDevice(Tensor):
    """A tensor of which ``cpu`` gives a plain one."""

    def cpu(self, *args: Any) -> Tensor:  # type: ignore[override]
        return self.as_subclass(Tensor)


def on_device(*values: float) -> Tensor:
    return torch.tensor(values).as_subclass(OnDevice)


def test_tensors_leave_the_device_wherever_they_stand() -> None:
    graph = torch.ones(2, requires_grad=True).as_subclass(OnDevice) * 2
    output = {"a": (on_device(1.0), [on_device(2.0), "word"]), "b": graph, "c": 3}
    held = to_host(output)
    leaves = [held["a"][0], held["a"][1][0], held["b"]]
    assert all(type(leaf) is Tensor and not leaf.requires_grad for leaf in leaves)
    assert [leaf.tolist() for leaf in leaves] == [[1.0], [2.0], [2.0, 2.0]]
    assert held["a"][1][1] == "word"
    assert held["c"] == 3


def test_a_view_does_not_keep_what_it_looks_into() -> None:
    logits = torch.arange(5000.0).view(5, 1000)
    held = to_host({"first": logits[:, 0]})["first"]
    assert held.untyped_storage().nbytes() == 5 * 4
    assert held.tolist() == [0.0, 1000.0, 2000.0, 3000.0, 4000.0]


def batches_of(rank: int, size: int) -> list[Any]:
    """This rank's of seven batches, which ranks take in turns."""
    return [{"number": n, "logits": torch.full((3, 1000), float(n))} for n in range(rank, 7, size)]


def predict(comm: Communicator, folder: Path, together: bool) -> int:
    """Writes predictions; how many bytes of objects went through collectives."""
    sent = 0
    for name in ("all_gather_object", "broadcast_object"):
        call = getattr(comm, name)

        def counted(value: Any, call: Any = call) -> Any:
            nonlocal sent
            sent += len(pickle.dumps(value))
            return call(value)

        setattr(comm, name, counted)
    rank, size = comm.world.rank, comm.world.size
    home = folder if together else folder / str(rank)
    home.mkdir(parents=True, exist_ok=True)
    try:
        write_predictions(batches_of(rank, size), comm, home / "predictions.pt")
    finally:
        for name in ("all_gather_object", "broadcast_object"):
            delattr(comm, name)
    return sent


@pytest.mark.parametrize("together", [True, False], ids=["one disk", "a disk each"])
@pytest.mark.parametrize("size", [1, 2])
def test_all_ranks_predictions_are_in_one_file_in_the_order_of_the_samples(
    tmp_path: Path, size: int, together: bool
) -> None:
    sent = shared_pool(size).run(predict, tmp_path, together)
    (path,) = tmp_path.rglob("predictions.pt*")  # and nothing beside it
    found = torch.load(path)
    assert [part["number"] for part in found] == list(range(7))
    assert all((part["logits"] == part["number"]).all() for part in found)
    assert (max(sent) < 1000) is (together or size == 1)
