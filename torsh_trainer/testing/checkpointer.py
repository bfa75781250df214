"""The contract of a checkpointer as a test suite: what was saved comes back."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch

from torsh_trainer.checkpoint.base import Checkpointer, CheckpointOptions
from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.errors import ConfigError
from torsh_trainer.testing.ranks import shared_pool

State = dict[str, Any]


class CheckpointerContract:
    """What every checkpointer must do; a plugin's test is one class that inherits this one."""

    checkpointer: ClassVar[type[Checkpointer]]

    def test_a_state_comes_back_bit_for_bit_in_the_tensors_of_the_run(self) -> None:
        saved = _state(seed=1, step=3)
        expected = copy.deepcopy(saved)
        with _folder() as folder:
            saver = self._at(folder)
            saver.save(3, saved, {"loss": 0.5})
            saver.close()
            target = _state(seed=2, step=0)
            weight = target["engine"]["model"]["weight"]
            loaded = self._at(folder).load(target)
        assert _differences(loaded, expected) == []
        assert loaded["engine"]["model"]["weight"] is weight, "it is not filled in place"

    def test_plain_parts_are_read_without_a_tensor(self) -> None:
        with _folder() as folder:
            saver = self._at(folder)
            path = saver.save(3, _state(seed=1, step=3), {})
            saver.close()
            plain = self._at(folder).plain(path)
        assert plain["position"] == {"step": 3, "samples": 48}
        assert "weight" not in plain.get("engine", {}).get("model", {})

    def test_the_newest_is_found_and_every_step_is_listed(self) -> None:
        with _folder() as folder:
            saver = self._at(folder)
            paths = [saver.save(step, _state(seed=step, step=step), {}) for step in (2, 4, 10)]
            saver.close()
            fresh = self._at(folder)
            assert fresh.steps() == [2, 4, 10]
            assert fresh.find("auto") == paths[-1]
            assert fresh.find("never") is None
            assert fresh.find(str(paths[0])) == paths[0]
            loaded = fresh.load(_state(seed=0, step=0), 4)
            assert loaded["position"]["step"] == 4

    def test_where_nothing_was_saved_there_is_nothing_to_go_on_from(self) -> None:
        with _folder() as folder:
            fresh = self._at(folder / "new")
            assert fresh.find("auto") is None
            assert fresh.steps() == []

    def test_a_path_that_is_not_there_is_the_users_mistake_with_a_next_move(self) -> None:
        with _folder() as folder:
            error = self._error_of_finding(folder, str(folder / "nowhere"))
        assert error is not None, "a checkpoint that is not there was found"
        assert error.fix, "the error names no next move"

    def test_what_does_not_fit_is_told_and_not_read(self) -> None:
        with _folder() as folder:
            saver = self._at(folder)
            path = saver.save(1, _state(seed=1, step=1), {})
            saver.close()
            model = {"weight": torch.zeros(2, 2), "bias": torch.zeros(3), "new": torch.zeros(1)}
            target = {"engine": {"model": model}}
            fit = self._at(folder).compare(target, path)
            assert fit.missing == (("engine", "model", "new"),)
            assert ("engine", "model", "scale") in fit.unexpected
            assert list(fit.other) == [("engine", "model", "weight")]
            assert not model["bias"].any(), "compare has read into the state"

    def test_a_state_that_may_change_after_save_returns_is_saved_as_it_was(self) -> None:
        saved = _state(seed=1, step=1)
        expected = copy.deepcopy(saved)
        with _folder() as folder:
            saver = self._at(folder, mode="async")
            saver.save(1, saved, {})
            saved["engine"]["model"]["weight"].zero_()
            saver.wait()
            assert self._at(folder).find("auto") is not None, "wait returned before it was visible"
            saver.close()
            loaded = self._at(folder).load(_state(seed=2, step=0))
        assert _differences(loaded["engine"], expected["engine"]) == []

    def test_what_any_rank_has_is_saved_and_loads_on_another_number_of_ranks(self) -> None:
        kind = self.checkpointer

        def save(comm: Communicator, folder: Path) -> str:
            saver = _make(kind, folder, comm)
            path = saver.save(1, _state_of_rank(comm.world.rank), {})
            saver.close()
            return str(path)

        with _folder() as folder:
            assert len(set(shared_pool(2).run(save, folder))) == 1, (
                "ranks name different checkpoints"
            )
            target = _state_of_rank(0, fill=-1.0)
            target["parts"].update(_state_of_rank(1, fill=-1.0)["parts"])
            loaded = self._at(folder).load(target)
        assert loaded["parts"]["rank_0"].tolist() == [0.0, 0.0]
        assert loaded["parts"]["rank_1"].tolist() == [1.0, 1.0]
        assert loaded["shared"].tolist() == [7.0]

    # -- how it is done ---------------------------------------------------------------------------

    def _error_of_finding(self, folder: Path, resume: str) -> ConfigError | None:
        try:
            self._at(folder).find(resume)
        except ConfigError as error:
            return error
        return None

    def _at(self, folder: Path, **knobs: Any) -> Checkpointer:
        return _make(self.checkpointer, folder, LocalCommunicator(), **knobs)


def _make(kind: Any, folder: Path, comm: Communicator, **knobs: Any) -> Checkpointer:
    made: Checkpointer = kind(folder, comm, CheckpointOptions(**knobs), facts={}, run=None)
    return made


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name) / "checkpoints"


def _state(*, seed: int, step: int) -> State:
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, 2, generator=random)
    return {
        "engine": {
            "model": {
                "weight": weight,
                "bias": torch.randn(3, generator=random),
                "scale": torch.randn((), generator=random).to(torch.bfloat16),
                "count": torch.tensor(seed),
            },
            "optimizer": {
                "main": {
                    "state": {"weight": {"exp_avg": torch.randn(3, 2, generator=random)}},
                    "groups": [{"lr": 0.1 * seed, "betas": (0.9, 0.999), "params": ["weight"]}],
                }
            },
        },
        "position": {"step": step, "samples": step * 16},
        "rng": {"rank_0": torch.arange(seed + 1, dtype=torch.uint8)},
        "callbacks": {"best": {"loss": 1.5, "at": None, "done": False, "name": "a"}},
    }


def _state_of_rank(rank: int, fill: float | None = None) -> State:
    value = float(rank) if fill is None else fill
    return {
        "parts": {f"rank_{rank}": torch.full((2,), value)},
        "shared": torch.full((1,), 7.0 if fill is None else fill),
    }


def _differences(found: Any, expected: Any, at: str = "state") -> list[str]:
    if isinstance(expected, Mapping):
        if not isinstance(found, Mapping) or {*found} != {*expected}:
            return [f"{at} has other keys"]
        return [
            text
            for key in expected
            for text in _differences(found[key], expected[key], f"{at}.{key}")
        ]
    if isinstance(expected, torch.Tensor):
        same = (
            isinstance(found, torch.Tensor)
            and found.dtype == expected.dtype
            and torch.equal(found, expected)
        )
        return [] if same else [f"{at} is {found}, and {expected} was saved"]
    return [] if found == expected else [f"{at} is {found!r}, and {expected!r} was saved"]
