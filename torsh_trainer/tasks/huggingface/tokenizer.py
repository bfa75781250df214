"""The tokenizer of a local folder."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torsh_trainer.errors import ConfigError
from torsh_trainer.tasks.huggingface.library import first_line, transformers


@dataclass(frozen=True)
class FolderTokenizer:
    """The tokenizer in ``folder``, read on first use; nothing is downloaded.

    Raises:
        ConfigError: there is no folder, or no tokenizer in it.
        ResourceError: transformers is not installed.
    """

    folder: str | None

    def __post_init__(self) -> None:
        if self.folder is None:
            raise ConfigError(
                "data.tokenizer has no value",
                fix="give data.tokenizer=FOLDER, or the model by model.pretrained=FOLDER, which it "
                "follows",
            )
        if not Path(self.folder).is_dir():
            raise ConfigError(
                f"data.tokenizer={self.folder}: there is no such folder, and nothing is downloaded",
                fix="give a local folder, such as `hf download NAME --local-dir FOLDER` writes; "
                "data.tokenizer follows model.pretrained where it is not given",
            )

    @cached_property
    def library(self) -> Any:
        """The tokenizer of transformers."""
        return self._read()

    def _read(self) -> Any:
        read = transformers().AutoTokenizer.from_pretrained
        try:
            found = read(self.folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            raise self._none(f" ({first_line(error)})") from error
        # Of a folder with a config.json alone, transformers makes one that knows no word.
        if len(found) <= len(set(found.all_special_tokens)):
            raise self._none("")
        return found

    def _none(self, why: str) -> ConfigError:
        return ConfigError(
            f"data.tokenizer={self.folder}: the folder has no tokenizer{why}",
            fix="put its tokenizer.json there, or name the folder that has it",
        )

    @cached_property
    def end(self) -> int | None:
        """The number of the token that ends a text; None where there is none."""
        number: int | None = self.library.eos_token_id
        return number

    @cached_property
    def pad(self) -> int:
        """The number of the token that fills a batch: the one for padding, else the one at the end.

        Raises:
            ConfigError: it has neither.
        """
        number = self.library.pad_token_id
        if number is None:
            number = self.end
        if number is None:
            raise ConfigError(
                f"data.tokenizer={self.folder}: it has no token for padding",
                fix="give it one: tokenizer.pad_token = ..., then save_pretrained",
            )
        return int(number)

    def batch(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        *,
        special: bool = True,
        max_length: int | None = None,
    ) -> Mapping[str, list[list[int]]]:
        """``texts`` (and what is paired with each) as token numbers, ``input_ids``.

        ``special`` adds the tokens that stand around a text; what is longer than ``max_length`` is
        truncated. Types of tokens (``token_type_ids``) come where the tokenizer gives them.

        Raises:
            ConfigError: ``max_length`` leaves no room.
        """
        try:
            encoded: Mapping[str, list[list[int]]] = self.library(
                texts,
                pairs,
                add_special_tokens=special,
                truncation=max_length is not None,
                max_length=max_length,
                return_attention_mask=False,
            )
        except Exception as error:
            raise ConfigError(
                f"data.tokenizer={self.folder} cannot encode the texts: {first_line(error)}",
                fix="correct data.max_length, or the tokenizer",
            ) from error
        return encoded

    @cached_property
    def files(self) -> dict[str, str | bytes]:
        """The tokenizer's files by name, as ``save_pretrained`` writes them."""
        with tempfile.TemporaryDirectory() as folder:
            self._read().save_pretrained(folder)  # one that has cut texts keeps at how many tokens
            paths = sorted(path for path in Path(folder).iterdir() if path.is_file())
            return {path.name: _content(path) for path in paths}


def _content(path: Path) -> str | bytes:
    content = path.read_bytes()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content
