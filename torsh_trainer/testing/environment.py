"""The contract of an environment as a test suite: a pure function of a mapping."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

from torsh_trainer.environments.base import Environment
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError

_TOUCHES = ("open", "os.listdir", "os.putenv", "socket.", "subprocess.", "urllib.")
"""Beginnings of Python's audit events for files, variables, network and processes."""

UNRELATED = {
    "PATH": "/usr/bin",
    "HOSTNAME": "node07",
    "MY_RANK": "7",
    "RANKING": "first",
    "WORLD": "3",
    "WORLD_SIZES": "3",
}
"""Variables that belong to nobody, though they sound like it."""


class EnvironmentContract:
    """What every environment must do; a plugin's test is one class that inherits this one.

    ``samples`` are recorded variables of one process each, by name, with the world that they
    describe; ``foreign`` are those of other kinds of cluster, in which this environment must not
    recognise itself; ``contradictions`` are its own variables where they do not fit together.
    """

    environment: ClassVar[Environment]
    samples: ClassVar[Mapping[str, tuple[Mapping[str, str], World]]]
    foreign: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    contradictions: ClassVar[Mapping[str, Mapping[str, str]]] = {}

    @classmethod
    def pytest_generate_tests(cls, metafunc: Any) -> None:
        """pytest's hook: one test for each recorded set of variables."""
        for fixture, known in (
            ("sample", metafunc.cls.samples),
            ("stranger", metafunc.cls.foreign),
            ("contradiction", metafunc.cls.contradictions),
        ):
            if fixture in metafunc.fixturenames:
                metafunc.parametrize(fixture, list(known))

    def test_recorded_variables_give_the_place_that_they_describe(self, sample: str) -> None:
        env, world = self.samples[sample]
        assert self.environment.world(env) == world

    def test_it_reads_nothing_but_the_mapping_and_writes_nothing(self, sample: str) -> None:
        env = dict(self.samples[sample][0])
        before = dict(env)
        first = self.environment.world(env)  # imports what it needs
        with watch_outside() as seen:
            second = self.environment.world(env)
        assert seen == [], "it looked outside"
        assert first == second
        assert env == before, "it changed the mapping"

    def test_variables_that_are_not_its_own_change_nothing(self, sample: str) -> None:
        env, world = self.samples[sample]
        assert self.environment.world({**UNRELATED, **env}) == world

    def test_variables_names_everything_that_decides(self, sample: str) -> None:
        env, world = self.samples[sample]
        own = {name: env[name] for name in self.environment.variables if name in env}
        assert self.environment.world(own) == world, "it read more than it names in variables"

    def test_its_reasons_name_variables_that_were_set(self, sample: str) -> None:
        env, _ = self.samples[sample]
        world = self.environment.world(env)
        assert world is not None
        assert world.reasons, "it gives no reason"
        text = "\n".join(world.reasons)
        assert any(name in text for name in env), f"no variable stands in its reasons: {text}"

    def test_a_number_that_is_none_is_the_users_mistake_or_not_read(self, sample: str) -> None:
        env, _ = self.samples[sample]
        for name in self.environment.variables:
            if env.get(name, "").isdigit():
                error = self._error({**env, name: "many"})
                assert error is None or name in str(error), f"the error does not name {name}"

    def test_without_variables_it_is_not_here_and_says_why(self) -> None:
        assert self.environment.world({}) is None
        assert self.environment.world(UNRELATED) is None
        assert self.environment.absence({})

    def test_it_does_not_take_another_cluster_for_its_own(self, stranger: str) -> None:
        assert self.environment.world(self.foreign[stranger]) is None
        assert self.environment.absence(self.foreign[stranger])

    def test_a_contradiction_is_the_users_mistake_with_a_next_move(
        self, contradiction: str
    ) -> None:
        error = self._error(self.contradictions[contradiction])
        assert error is not None, "no ConfigError was raised"
        assert error.fix, "the error names no next move"

    def test_it_has_a_name_and_a_place_among_the_others(self) -> None:
        assert self.environment.name
        assert isinstance(self.environment.priority, int)

    def _error(self, env: Mapping[str, str]) -> ConfigError | None:
        try:
            self.environment.world(env)
        except ConfigError as error:
            return error
        return None


_watching: list[list[str]] = []


@contextmanager
def watch_outside() -> Iterator[list[str]]:
    """What is touched outside of this process meanwhile, as Python's own audit events."""
    _install()
    seen: list[str] = []
    _watching.append(seen)
    try:
        yield seen
    finally:
        _watching.pop()


@cache
def _install() -> None:
    # An audit hook stays for ever, so there is one, and it listens only within _watched.
    def hook(event: str, args: tuple[Any, ...]) -> None:
        if _watching and event.startswith(_TOUCHES):
            _watching[-1].append(f"{event}{args}")

    sys.addaudithook(hook)
