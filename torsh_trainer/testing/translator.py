"""The contract of a translator as a test suite: every key of a source gets a verdict."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.base import TranslationRequest, Translator
from torsh_trainer.translate.engines import work_of
from torsh_trainer.translate.plan import VERDICTS, Plan
from torsh_trainer.translate.recipe import recipe_of


@dataclass(frozen=True)
class Sample:
    """A source: the name of its file, its text, the keys in it, and what it becomes."""

    file: str
    text: str
    keys: tuple[str, ...]
    choices: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)


class TranslatorContract:
    """What every translator must do; a plugin's test is one class that inherits this one.

    ``samples`` are sources of its own, by name; ``foreign`` and ``invalid`` are (file, text): those
    of others, and its own that its engine would refuse.
    """

    translator: ClassVar[Translator]
    samples: ClassVar[Mapping[str, Sample]]
    foreign: ClassVar[Mapping[str, tuple[str, str]]] = {}
    invalid: ClassVar[Mapping[str, tuple[str, str]]] = {}

    @classmethod
    def pytest_generate_tests(cls, metafunc: Any) -> None:
        """pytest's hook: one test for each source."""
        for fixture, known in (
            ("sample", metafunc.cls.samples),
            ("stranger", metafunc.cls.foreign),
            ("mistake", metafunc.cls.invalid),
        ):
            if fixture in metafunc.fixturenames:
                metafunc.parametrize(fixture, list(known))

    def test_its_own_sources_are_recognised_before_anybody_elses(self, sample: str) -> None:
        with _write(self.samples[sample].file, self.samples[sample].text) as path:
            assert self.translator.recognises(path, None)
            assert work_of(path, TranslationRequest()).translator.name == self.translator.name

    def test_a_source_of_others_is_not_taken(self, stranger: str) -> None:
        with _write(*self.foreign[stranger]) as path:
            assert not self.translator.recognises(path, None)
            assert not self.translator.identifies(path)

    def test_what_cannot_be_read_is_no_error_before_it_is_translated(self, tmp_path: Path) -> None:
        assert self.translator.recognises(tmp_path / "nowhere", None) in (True, False)
        assert self.translator.recognises(tmp_path, None) in (True, False)

    def test_every_key_gets_a_verdict_with_its_reason_and_its_line(self, sample: str) -> None:
        plan = self._plan(sample)
        given = [finding for finding in plan.findings if finding.given]
        assert sorted(finding.key for finding in given) == sorted(self.samples[sample].keys)
        for finding in plan.findings:
            assert finding.verdict in VERDICTS
            assert finding.why, f"{finding.key} has no reason"
            assert finding.rule, f"{finding.key} names no rule"
            assert finding.line > 0 or not finding.given, f"{finding.key} has no line"

    def test_it_becomes_what_it_should(self, sample: str) -> None:
        plan = self._plan(sample)
        wanted = self.samples[sample]
        assert {name: plan.choices.get(name) for name in wanted.choices} == wanted.choices
        assert {name: plan.values.get(name) for name in wanted.values} == wanted.values
        assert plan.engine == self.translator.name

    def test_the_recipe_is_yaml_that_holds_every_value(self, sample: str) -> None:
        plan = self._plan(sample)
        recipe = yaml.safe_load(recipe_of(plan))
        for dotted, value in plan.values.items():
            node = recipe
            for part in dotted.split("."):
                node = node[part]
            assert node == (list(value) if isinstance(value, tuple) else value)

    def test_translating_twice_gives_the_same(self, sample: str) -> None:
        assert self._plan(sample) == self._plan(sample)

    def test_a_mistake_is_told_with_its_place_and_a_next_move(self, mistake: str) -> None:
        file, text = self.invalid[mistake]
        error = self._error(file, text)
        assert error is not None, "no ConfigError was raised"
        assert file in error.sentence, "the error does not name the file"
        assert error.fix, "the error names no next move"

    def _error(self, file: str, text: str) -> ConfigError | None:
        with _write(file, text) as path:
            try:
                self.translator.translate(path, TranslationRequest())
            except ConfigError as error:
                return error
        return None

    def _plan(self, sample: str) -> Plan:
        with _write(self.samples[sample].file, self.samples[sample].text) as path:
            plan = self.translator.translate(path, TranslationRequest())
        return Plan(**{**vars(plan), "source": sample})


@contextmanager
def _write(file: str, text: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / file
        path.write_text(text)
        yield path
