"""The user's line in a traceback, by where the files lie."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from torsh_trainer.utils.user_code import place_here, place_in, place_of, words_of

HERE = str(Path(__file__))
LOADER = "in DataLoader worker process 0:"


def line_of(text: str) -> int:
    """The line of this file that ends with ``text`` behind a mark."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {text}"))


class Mismatched(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x)  # the forward


def error_of(call, *args):
    try:
        call(*args)
    except Exception as error:  # noqa: BLE001 - the error is what is asked for
        return error
    raise AssertionError


def test_an_error_in_torch_is_told_with_the_users_line():
    error = error_of(Mismatched(), torch.ones(1, 5))
    assert place_of(error) == f"{HERE}:{line_of('the forward')}"


class Reads:
    """A sample each raises an error of its own."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        if index == 0:
            return Path("/nowhere/image.png").open()  # the sample
        if index == 1:
            return {}["label"]  # the key
        try:
            return int("none")
        except ValueError as error:
            raise Unlike("no sample", index) from error  # the last error


class Unlike(Exception):
    """One that torch cannot make again."""

    def __init__(self, what, index):
        super().__init__(f"{what}\n  of number {index}")


@pytest.mark.parametrize(
    ("index", "words", "place"),
    [
        (
            0,
            f"FileNotFoundError {LOADER} [Errno 2] No such file or directory: '/nowhere/image.png'",
            "the sample",
        ),
        (1, f"KeyError {LOADER} 'label'", "the key"),
        (2, f"Unlike {LOADER} no sample", "the last error"),
    ],
)
def test_an_error_in_a_loader_process_is_told_as_it_was_there(index, words, place):
    loader = DataLoader(Reads(), batch_size=None, sampler=[index], num_workers=1)
    error = error_of(next, iter(loader))
    assert words_of(error) == f"{words} ({HERE}:{line_of(place)})"


def test_samples_of_unequal_shape_in_a_loader_process_have_no_line_of_the_users_to_show():
    data = [torch.ones(2), torch.ones(3)]
    error = error_of(next, iter(DataLoader(data, batch_size=2, num_workers=1)))
    assert words_of(error).startswith(f"RuntimeError {LOADER} stack expects")
    assert "collate.py" not in words_of(error)


def place_among(*files: str) -> str:
    """The place in calls of ``files``, the outermost first, as faulthandler writes it."""
    lines = [f'  File "{file}", line 7 in f' for file in reversed(files)]
    return place_in("\n".join(["Current thread 0x01 (most recent call first):", *lines]))


def test_an_installed_package_counts_as_the_users_where_nothing_else_does():
    site = "/opt/venv/lib/python3.11/site-packages"
    theirs, imaging, torchs = f"{site}/theirs/data.py", f"{site}/imaging/io.py", torch.__file__
    assert place_among(torchs, theirs, imaging, torchs) == f"{theirs}:7"
    assert place_among("/home/me/train.py", theirs, torchs) == "/home/me/train.py:7"
    assert place_among(torchs, "<frozen runpy>", json.__file__) == ""


def test_of_a_crash_the_place_of_the_thread_at_work_is_told_else_of_the_main_one():
    words = ["Fatal Python error: Segmentation fault", "Extension modules: yaml._yaml"]
    stacks = {
        "Thread 0x01": "/home/me/loader.py",
        "Current thread 0x02": "/home/me/model.py",
        "Thread 0x03": "/home/me/train.py",
    }
    parts = [
        f'{name} (most recent call first):\n  File "{file}", line 7 in f'
        for name, file in stacks.items()
    ]
    assert place_in("\n\n".join([words[0], *parts, words[1]])) == "/home/me/model.py:7"
    parts[1] = (
        f'Current thread 0x02 (most recent call first):\n  File "{json.__file__}", line 1 in f'
    )
    assert place_in("\n\n".join([words[0], *parts, words[1]])) == "/home/me/train.py:7"


def test_the_call_under_way_is_looked_for_within_the_run_alone():
    assert place_here() == ""
    seen = []

    class Called:  # by the product
        def __str__(self):
            seen.append(place_here())  # the call
            return "text"

    words_of(Exception(Called()))
    assert seen[0] == f"{HERE}:{line_of('the call')}"
