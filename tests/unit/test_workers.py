"""``data.num_workers=auto``."""

import logging
from dataclasses import replace

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from torsh_trainer.callbacks.base import RunInfo
from torsh_trainer.callbacks.formatting import banner
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.data.loading import Loading
from torsh_trainer.data.workers import choose_workers
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError
from torsh_trainer.tasks.base import DataSource, Task

AUTO = Loading(num_workers="auto")


class Files(Dataset):
    def __getitem__(self, index):
        return index

    def __len__(self):
        return 8


class Passing(IterableDataset):
    def __iter__(self):
        return iter(range(8))


def reads(dataset):
    task = Task()
    task.data = DataSource()
    task.data.train = dataset
    return task


class Beside(LocalCommunicator):
    """A process beside others on its node, which have the same cores or others."""

    def __init__(self, device, others=(), *, same=True):
        super().__init__(torch.device(device))
        self._others, self._same = others, same

    def all_gather_object(self, value):
        return [value, *([value] if self._same else [(0, ["other"])]) * len(self._others)]


def chosen(dataset, comm, *, cores=8, loading=AUTO):
    return choose_workers(loading, reads(dataset), comm, cores=cores, seed=0).num_workers


@pytest.mark.parametrize(("cores", "number"), [(1, 0), (8, 7), (256, 16)])
def test_a_core_stays_for_the_training_process(cores, number):
    assert chosen(Files(), Beside("meta"), cores=cores) == number


def test_processes_that_may_use_the_same_cores_share_them():
    assert chosen(Files(), Beside("meta", others=(1, 2, 3))) == 1
    assert chosen(Files(), Beside("meta", others=(1, 2, 3), same=False)) == 7


@pytest.mark.parametrize(
    ("dataset", "device", "why"),
    [
        (Files(), "cpu", "a CPU trains and reads with the same cores"),
        (Passing(), "meta", "the order of a stream"),
        (TensorDataset(torch.ones(3)), "meta", "one by one"),
        (None, "meta", "one by one"),
    ],
)
def test_where_processes_would_not_help_or_change_the_result_there_are_none(
    caplog, dataset, device, why
):
    with caplog.at_level(logging.INFO):
        assert chosen(dataset, Beside(device)) == 0
    assert why in caplog.text


def test_a_number_stays_and_a_negative_one_is_refused():
    assert chosen(Files(), Beside("meta"), loading=Loading(num_workers=3)) == 3
    assert AUTO.workers == 0
    with pytest.raises(ConfigError, match="is negative"):
        Loading(num_workers=-1)


def test_the_summary_says_how_many_there_are(tmp_path):
    facts = {"run_dir": tmp_path, "world": World(), "first_step": 0, "max_steps": 1}
    words = dict.fromkeys(("strategy", "backend", "precision", "device"), "any")
    sizes = dict.fromkeys(("batch_size", "micro_batch_size", "accumulate", "steps_per_epoch"), 1)
    model = {"parameters": 1, "trainable_parameters": 1}
    info = RunInfo(**facts, **words, **sizes, **model)
    assert "loading" not in dict(banner(info))
    told = dict(banner(replace(info, loader_processes=7)))
    assert told["loading"] == "7 loader processes for each process"
