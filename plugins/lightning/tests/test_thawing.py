"""Parameters that a callback or a module frees, or freezes, while a run goes on: two ranks are one.

The expected values are those of ``lightning.Trainer`` on one process, over the same global batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case
from lightning.pytorch.callbacks import ModelCheckpoint
from loops import as_torchrun, in_our_words, quiet, under_lightning, under_our_loop
from modules.data import Shares
from modules.finetuning import Freezes, Milestones, Stack, StackOfAll, Thaws, ThawsAll, ThawsWithin
from recorder import THE_SAME_BITS, Keeper, Recording, same
from torsh_trainer_lightning.processes import choose_strategy
from torsh_trainer_lightning.task import LightningTask

from torsh_trainer import CheckpointOptions, Trainer
from torsh_trainer.environments.world import World

Parameters = dict[str, torch.Tensor]

SHARES = partial(Shares, batch_size=8, train=40)
FLAGS = {"max_epochs": 4, "limit_val_batches": 0}
KINDS = {
    "callback": Case(
        Stack,
        SHARES,
        callbacks=lambda: [Thaws()],
        flags={**FLAGS, "accumulate_grad_batches": 2},  # three steps an epoch
    ),
    "module": Case(ThawsWithin, SHARES, flags=FLAGS),
    "frees": Case(Stack, SHARES, callbacks=lambda: [Milestones()], flags=FLAGS),
    "all": Case(StackOfAll, SHARES, callbacks=lambda: [ThawsAll()], flags=FLAGS),
    "freezes": Case(Stack, SHARES, callbacks=lambda: [Freezes()], flags=FLAGS),
}
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "ddp, unused allowed": ("ddp", {"find_unused_parameters": True}),
    "ddp, after backward": ("ddp", {"overlap": False}),
    "gloo": ("gloo", {}),
    "gloo, unused allowed": ("gloo", {"find_unused_parameters": True}),
    "fsdp": ("fsdp", {}),
    "deepspeed, stage 0": ("deepspeed", {"stage": 0}),
    "deepspeed, stage 2": ("deepspeed", {"stage": 2}),
    "deepspeed, stage 3": (
        "deepspeed",
        {"stage": 3, "stage3_param_persistence_threshold": 0},
    ),
    "horovod": ("horovod", {}),
    "horovod, groups": ("horovod", {"groups": 2}),
}
UNABLE = ("deepspeed, stage 2", "deepspeed, stage 3", "horovod, groups")
ABLE = [name for name in ENGINES if name not in UNABLE]


def trained(
    world: World,
    port: int,
    folder: Path,
    runs: Mapping[str, str],
    strategy: Any,
    resume: Any = None,
) -> dict[str, Parameters | str]:
    """What this rank has at the end, or what it refused, by kind; ``runs`` says in whose loop."""
    found: dict[str, Parameters | str] = {}
    for number, (kind, loop) in enumerate(runs.items()):
        as_torchrun(world, port, folder / str(number))
        run: Any = {"theirs": under_lightning, "ours": under_our_loop}[loop]
        made = choose_strategy(*strategy) if loop == "ours" else strategy
        options = {"devices": world.size, "watched": "nothing", "resume": resume}
        try:
            recording: Recording = run(KINDS[kind], Path.cwd(), strategy=made, **options)
            found[kind] = recording.parameters
        except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
            found[kind] = f"{type(error).__name__}: {error}"
    if dist.is_initialized():
        dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, Parameters]:
    """What one process comes to, by kind."""
    folder = tmp_path_factory.mktemp("alone")
    return {
        kind: under_lightning(case, folder, watched="nothing").parameters
        for kind, case in KINDS.items()
    }


def close(one: Parameters, other: Any) -> None:
    """Makes sure that they are the same within rounding; a rank without parts of its own passes."""
    assert not isinstance(other, str), other
    for name in other:
        torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", ABLE)
def test_what_is_freed_and_frozen_later_trains_on_two_ranks_as_on_one(
    on_ranks, alone, tmp_path, name
):
    ranks = on_ranks(trained, tmp_path, {"callback": "ours", "module": "theirs"}, ENGINES[name])
    assert ranks[0]["callback"]
    for rank in ranks:
        close(alone["callback"], rank["callback"])
        close(alone["module"], rank["module"])


@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", ["ddp", "ddp, after backward", "gloo", "fsdp", "horovod"])
def test_a_module_that_is_frozen_whole_trains_once_it_is_freed(on_ranks, alone, tmp_path, name):
    ours = on_ranks(trained, tmp_path / "ours", {"all": "ours"}, ENGINES[name])
    theirs = on_ranks(trained, tmp_path / "theirs", {"all": "theirs"}, ENGINES[name])
    assert ours[0]["all"]
    for rank in (*ours, *theirs):
        close(alone["all"], rank["all"])


def test_a_module_frozen_whole_at_first_goes_on(on_ranks, alone, tmp_path):
    for name in ("ddp", "fsdp"):
        folder = tmp_path / name
        on_ranks(saved, folder, ENGINES[name], "never", "all")
        kept = folder / "run" / "checkpoints" / "step-00000004"
        again, _ = on_ranks(saved, tmp_path / f"{name}-more", ENGINES[name], str(kept), "all")
        close(alone["all"], again[0])


def test_under_lightnings_own_ddp_each_rank_goes_its_own_way(on_ranks, alone, tmp_path):
    first, second = on_ranks(trained, tmp_path, {"frees": "theirs"}, "ddp")
    frozen = "backbone.0.weight"
    assert torch.equal(first["frees"][frozen], second["frees"][frozen])
    with pytest.raises(AssertionError, match=r"backbone\.2"):
        close(first["frees"], second["frees"])
    ours, _ = on_ranks(trained, tmp_path, {"frees": "ours"}, ENGINES["ddp"])
    close(alone["frees"], ours["frees"])


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("deepspeed, stage 2", "frees", "were frozen at the start and train now: backbone.2.w"),
        ("deepspeed, stage 2", "freezes", "trained at the start and are frozen now: head.weight"),
        ("deepspeed, stage 3", "frees", "were frozen at the start and train now: backbone.2.w"),
        ("deepspeed, stage 3", "freezes", "trained at the start and are frozen now: head.weight"),
        ("horovod, groups", "frees", "were frozen at the start and train now: backbone.2.w"),
    ],
)
def test_an_engine_that_cannot_follow_says_so_on_every_rank(on_ranks, tmp_path, name, kind, words):
    for rank in on_ranks(trained, tmp_path, {kind: "theirs"}, ENGINES[name]):
        assert words in rank[kind]
        assert "Unsupported" in rank[kind]


# -- through a checkpoint --------------------------------------------------------------------------


def saved(
    world: World, port: int, folder: Path, strategy: Any, resume: str, kind: str = "callback"
) -> tuple[Parameters, float | None]:
    """A run of ours that saves every four steps."""
    as_torchrun(world, port, folder)
    quiet()
    recording = Recording()
    case = KINDS[kind]
    ours, theirs = in_our_words(case.flags)
    trainer = Trainer(
        task=LightningTask(
            case.module, case.data, callbacks=[*case.callbacks(), Keeper(recording)], **theirs
        ),
        strategy=choose_strategy(*strategy),
        seed=7,
        run_dir=folder / "run",
        checkpoint=CheckpointOptions(resume=resume, every_steps=4, keep_last=9),
        **ours,
    )
    try:
        answer = trainer.fit().content["train_loss"]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return recording.parameters, answer


def test_a_run_goes_on_in_the_middle_with_what_was_freed_and_frozen(on_ranks, alone, tmp_path):
    whole, _ = on_ranks(saved, tmp_path / "whole", ENGINES["ddp"], "never")
    close(alone["callback"], whole[0])
    kept = tmp_path / "whole" / "run" / "checkpoints"
    for number, (name, step) in enumerate(
        [("ddp", 4), ("ddp", 8), ("horovod", 8), ("fsdp", 4), ("gloo", 8)]
    ):
        folder, checkpoint = tmp_path / str(number), str(kept / f"step-{step:08d}")
        again, _ = on_ranks(saved, folder, ENGINES[name], checkpoint)
        close(alone["callback"], again[0])
        if name == "ddp":
            assert same(again, whole, THE_SAME_BITS)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", ["ddp", "horovod"])
def test_a_ckpt_of_lightnings_goes_on_as_on_one_process(on_ranks, tmp_path, name):
    case = KINDS["callback"]
    keep: Any = lambda: [*case.callbacks(), ModelCheckpoint("kept", save_top_k=-1)]  # noqa: E731
    under_lightning(replace(case, callbacks=keep), tmp_path, watched="nothing")
    for epoch in (0, 1):  # before anything is freed, and after
        (file,) = (tmp_path / "kept").glob(f"epoch={epoch}-*.ckpt")
        expected = under_lightning(case, tmp_path, watched="nothing", resume=file).parameters
        for loop in ("ours", "theirs"):
            folder = tmp_path / f"{loop}-{epoch}"
            ranks = on_ranks(trained, folder, {"callback": loop}, ENGINES[name], file)
            for rank in ranks:
                close(expected, rank["callback"])
