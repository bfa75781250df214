"""docs/migrate/keys.md says what the rules say."""

from __future__ import annotations

import sys

from torsh_trainer.translate import keys_page
from torsh_trainer.translate.deepspeed import keys
from torsh_trainer.translate.deepspeed.rules import RULES


def test_the_page_is_what_the_rules_say(repository):
    assert (repository / keys_page.PAGE).read_text("utf-8") == keys_page.page(), "make keys"
    guide = (repository / keys_page.GUIDE).read_text("utf-8")
    assert guide == keys_page.guide(guide), "make keys"
    assert guide.count("| exact |") > 5


def test_it_names_every_key_and_every_rule():
    page = keys_page.page()
    assert all(f"| `{key.dotted}` |" in page for key in keys.schema().values())
    assert all(f"| `{name}` |" in page for name in RULES)


def test_a_page_that_says_something_else_is_found_out_and_written_anew(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["keys_page"])
    assert keys_page.main() == 0
    page = tmp_path / keys_page.PAGE
    page.write_text(page.read_text().replace("`bool`", "`int`", 1))
    monkeypatch.setattr(sys, "argv", ["keys_page", "--check"])
    assert keys_page.main() == 1
    assert "make keys writes it anew" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["keys_page"])
    assert keys_page.main() == 0
    assert page.read_text() == keys_page.page()
