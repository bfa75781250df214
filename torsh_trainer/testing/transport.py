"""The contract of a transport as a test suite, with real workers that do without torch."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError
from torsh_trainer.launchers.inside import Payload
from torsh_trainer.launchers.sending import pickle_call
from torsh_trainer.launchers.transport import Transport, WorkerHandle, WorkerStart

_FOREVER_S = 3600.0
_PATIENCE_S = 240.0
_WORLDS = tuple(World(rank=rank, size=2, local_rank=rank, local_size=2) for rank in range(2))


class TransportContract:
    """What every transport must do; a plugin's test is one class that inherits this one.

    Folders that the suite makes must be visible to the workers.
    """

    def transport(self, payload: Payload) -> Transport:
        """The transport under test: what a launcher's ``TransportFactory`` makes."""
        raise NotImplementedError

    # -- a worker that ends well ------------------------------------------------------------------

    def test_a_worker_starts_tells_its_answer_and_ends_with_0(self) -> None:
        factor = 3  # closures travel as well

        def entry(world: World, number: int) -> tuple[int, int]:
            return world.size, number * factor

        with self._open(entry, 14) as start, start(0) as worker:
            messages, code = _hear(worker)
        assert [name for name, *_ in messages] == ["ready", "answer"]
        assert pickle.loads(messages[-1][1]) == (2, 42)
        assert code == 0

    def test_each_worker_has_its_own_place_and_the_variables_that_it_was_given(self) -> None:
        def entry(world: World, folder: Path) -> None:
            told = (world.rank, os.environ["OF_A_TEST"], os.environ.get("HOME_OF_NOBODY"))
            (folder / f"rank-{world.rank}").write_text(repr(told))

        os.environ["HOME_OF_NOBODY"] = "of this process alone"
        try:
            with self._folder() as folder, self._open(entry, folder) as start:
                with start(0, OF_A_TEST="zero") as first, start(1, OF_A_TEST="one") as second:
                    assert [_hear(worker)[1] for worker in (first, second)] == [0, 0]
                told = [(folder / f"rank-{rank}").read_text() for rank in range(2)]
        finally:
            del os.environ["HOME_OF_NOBODY"]
        assert told == [repr((0, "zero", None)), repr((1, "one", None))]

    def test_output_is_appended_where_it_was_asked_for(self) -> None:
        def entry(world: World) -> None:
            print("to the one", flush=True)
            print("and the other", file=sys.stderr, flush=True)
            os.system("echo from a child")

        with self._folder() as folder:
            log = folder / "rank-0.log"
            log.write_text("from before\n")
            with self._open(entry) as start, start(0, output=log) as worker:
                assert _hear(worker)[1] == 0
            lines = log.read_text().splitlines()
        assert lines == ["from before", "to the one", "and the other", "from a child"]

    # -- a worker that fails ----------------------------------------------------------------------

    def test_a_failure_is_told_with_its_words_and_its_exit_code(self) -> None:
        def entry(world: World) -> None:
            raise ConfigError("data.batch_size=7 is odd", fix="make it even")

        with self._open(entry) as start, start(1) as worker:
            messages, code = _hear(worker)
        (failure,) = [message[1] for message in messages if message[0] == "failure"]
        assert (failure.rank, failure.sentence) == (1, "data.batch_size=7 is odd")
        assert "raise ConfigError" in failure.traceback
        assert code == 2

    def test_the_code_of_a_worker_that_a_signal_ended_is_below_0(self) -> None:
        def entry(world: World) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        with self._open(entry) as start, start(0) as worker:
            messages, code = _hear(worker)
        assert [name for name, *_ in messages] == ["ready"]
        assert code == -signal.SIGKILL

    # -- ending a worker --------------------------------------------------------------------------

    def test_a_signal_reaches_the_worker(self) -> None:
        def entry(world: World, folder: Path) -> str:
            asked: list[int] = []
            signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
            (folder / "waits").touch()
            _until(lambda: bool(asked))
            return signal.Signals(asked[0]).name

        with self._folder() as folder, self._open(entry, folder) as start, start(0) as worker:
            _until((folder / "waits").exists)
            assert worker.exit_code() is None
            worker.send_signal(signal.SIGTERM)
            messages, code = _hear(worker)
            worker.send_signal(signal.SIGTERM)  # it has ended: nothing happens
        assert pickle.loads(messages[-1][1]) == "SIGTERM"
        assert code == 0

    def test_a_kill_ends_the_worker_and_what_it_has_started(self) -> None:
        with (
            self._folder() as folder,
            self._open(_starts_a_child, folder) as start,
            start(0) as worker,
        ):
            pids = _pids_in(folder)
            worker.kill()
            assert worker.exit_code() == -signal.SIGKILL
            _until(lambda: not any(map(_alive, pids)))

    def test_a_kill_after_the_end_ends_what_the_worker_has_left_behind(self) -> None:
        with (
            self._folder() as folder,
            self._open(_leaves_a_child, folder) as start,
            start(0) as worker,
        ):
            assert _hear(worker)[1] == 0
            worker.kill()
            _until(lambda: not any(map(_alive, _pids_in(folder))))

    def test_a_worker_does_not_outlive_the_connection(self) -> None:
        transport = self.transport(_payload(_sleeps, ()))
        worker = transport.start(WorkerStart(0, _WORLDS[0], _environment()))
        try:
            transport.all_started()
            _until(lambda: ("ready",) in list(worker.receive()))
            transport.close()
            _until(lambda: worker.exit_code() is not None)
        finally:
            worker.kill()
            worker.close()

    # -- how it is done ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def _folder(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as name:
            yield Path(name)

    @contextlib.contextmanager
    def _open(self, entry: Callable[..., Any], *args: Any) -> Iterator[Callable[..., Any]]:
        """Gives ``start(index, output=..., **variables)``, a block with the worker."""
        transport = self.transport(_payload(entry, args))

        @contextlib.contextmanager
        def start(
            index: int, output: Path | None = None, **variables: str
        ) -> Iterator[WorkerHandle]:
            env = {**_environment(), **variables}
            worker = transport.start(WorkerStart(index, _WORLDS[index], env, output))
            try:
                yield worker
            finally:
                worker.kill()
                worker.close()

        try:
            yield start
        finally:
            transport.close()


def _payload(entry: Callable[..., Any], args: tuple[Any, ...]) -> Payload:
    return Payload(
        worlds=_WORLDS,
        path=list(sys.path),
        argv=list(sys.argv),
        python_path=os.environ.get("PYTHONPATH"),
        call=pickle_call(entry, args),
    )


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "HOME_OF_NOBODY"}


def _hear(worker: WorkerHandle) -> tuple[list[tuple[Any, ...]], int]:
    """All messages of a worker, and its exit code."""
    messages: list[tuple[Any, ...]] = []

    def has_ended() -> bool:
        code = worker.exit_code()
        messages.extend(worker.receive())
        return code is not None

    _until(has_ended)
    code = worker.exit_code()
    assert code is not None
    return messages, code


def _starts_a_child(world: World, folder: Path) -> None:
    _leaves_a_child(world, folder)
    time.sleep(_FOREVER_S)


def _leaves_a_child(world: World, folder: Path) -> None:
    child = os.spawnvp(os.P_NOWAIT, "sleep", ["sleep", str(_FOREVER_S)])
    (folder / "pids.part").write_text(f"{os.getpid()} {child}")
    (folder / "pids.part").rename(folder / "pids")


def _sleeps(world: World) -> None:
    time.sleep(_FOREVER_S)


def _pids_in(folder: Path) -> list[int]:
    _until((folder / "pids").exists)
    return [int(word) for word in (folder / "pids").read_text().split()]


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it never came to it"
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
