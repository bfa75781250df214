"""Pipes and redirections of a shell file: which files it writes, and what."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from torsh_trainer.translate.shell.grammar import text_of_node
from torsh_trainer.translate.shell.reader import ShellReader
from torsh_trainer.translate.shell.state import ShellState
from torsh_trainer.translate.shell.words import Command, Text, Word, WrittenFile, merge_parts, plain

_WRITERS = ("cat", "echo", "printf", "tee")


class RedirectReader(ShellReader):
    """Reads what writes files."""

    def redirect(self, node: Any, state: ShellState) -> None:
        body = node.child_by_field_name("body")
        redirects = [c for c in node.children if c != body]
        here = _find_here(redirects)
        targets = list(_find_targets(redirects))
        extra = [word for c in redirects for word in self.after_redirect(c, state)]
        if body is None:
            return
        before = len(self.commands)
        if body.type == "command" and extra:
            self.start([*self.expander.words_of_command(body, state), *extra], {}, state)
        else:
            self.statement(body, state)
        made = self.commands[before:]
        last = next((c for c in reversed(made) if c.words), None)
        if last is not None:
            for sign, target in targets:
                self.write(target, sign, last, here, state)
            for child in redirects:
                self.pipe_here(child, last, here, state)
            if last.words[0].text == "tee" and here is not None:
                self.write_words(last.words[1:], last, here, state)

    def after_redirect(self, node: Any, state: ShellState) -> list[Word]:
        """Words that stand behind ``> file`` and belong to the command."""
        if node.type != "file_redirect":
            return []
        named = [c for c in node.children if c.is_named and c.type != "file_descriptor"]
        return [word for child in named[1:] for word in self.expander.words(child, state)]

    def pipe_here(self, node: Any, last: Command, here: Any, state: ShellState) -> None:
        """``cat <<EOF | tee file``."""
        for child in node.children:
            if child.type == "pipeline":
                words = self.expander.words_of_command(child.children[-1], state)
                if words and words[0].text == "tee":
                    self.write_words(words[1:], last, here, state)

    def write_words(
        self, words: Sequence[Word], last: Command, here: Any, state: ShellState
    ) -> None:
        for word in words:
            if not word.open and not word.text.startswith("-"):
                self.enter_file(word.text, self.content(last, here, state), last, adds=False)

    def write(self, target: Any, sign: str, last: Command, here: Any, state: ShellState) -> None:
        path = plain(self.expander.text(target, state))
        if path and not path.startswith("/dev/"):
            self.enter_file(path, self.content(last, here, state), last, adds=sign == ">>")

    def enter_file(self, path: str, text: Text | None, last: Command, *, adds: bool) -> None:
        earlier = self.files.get(path)
        if adds and earlier is not None and earlier.text is not None and text is not None:
            text = merge_parts((*earlier.text, *text))
        self.files[path] = WrittenFile(text, last.words[0].place, last.words[0].text)

    def content(self, last: Command, here: Any, state: ShellState) -> Text | None:
        """What a command writes that only repeats text."""
        head = last.words[0].text
        if head not in _WRITERS:
            return None
        if here is not None:
            return self.here_text(here, state)
        if head == "echo":
            words = [w for w in last.words[1:] if w.text not in ("-e", "-n")]
            return merge_parts(p for word in words for p in (*word.parts, " "))
        if head == "printf" and len(last.words) == 2:
            return (last.words[1].text.replace("\\n", "\n"),)
        return None

    def here_text(self, node: Any, state: ShellState) -> Text:
        start = next((c for c in node.children if c.type == "heredoc_start"), None)
        body = next((c for c in node.children if c.type == "heredoc_body"), None)
        if body is None:
            return ()
        if start is not None and re.search(r"['\"\\]", text_of_node(start)):
            return (text_of_node(body),)
        return self.expander.inside(body, state)

    def pipe(self, node: Any, state: ShellState) -> None:
        parts = [child for child in node.children if child.is_named]
        for part in parts:
            self.statement(part, state)
        if len(parts) == 2 and text_of_node(parts[1]).startswith("tee"):
            words = self.expander.words_of_command(parts[1], state)
            said = self.expander.words_of_command(parts[0], state)
            if said and said[0].text in ("echo", "printf"):
                self.write_words(words[1:], Command(tuple(said)), None, state)


def _find_here(redirects: Sequence[Any]) -> Any:
    return next((c for c in redirects if c.type == "heredoc_redirect"), None)


def _find_targets(redirects: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Files that output goes to: (``>`` or ``>>``, the node that names it)."""
    for child in redirects:
        if child.type == "heredoc_redirect":
            yield from _find_targets(child.children)
        if child.type != "file_redirect":
            continue
        sign = next((c.type for c in child.children if c.type in (">", ">>", "&>", ">|")), "")
        named = [c for c in child.children if c.is_named]
        if sign and named and named[0].type != "file_descriptor":
            yield sign, named[0]
