"""Texts as samples for transformers: documents to continue, and documents with a label."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from torsh_trainer.errors import ConfigError
from torsh_trainer.tasks.huggingface.records import columns_of
from torsh_trainer.tasks.huggingface.tokenizer import FolderTokenizer
from torsh_trainer.tasks.language_model import IGNORED
from torsh_trainer.tasks.sources import LoadedOnUse, Splits, balance_classes, check_fractions, split
from torsh_trainer.utils.lookup import list_first

Sample = dict[str, Tensor]

log = logging.getLogger(__name__)


class Rows(Dataset[Sample]):
    """Samples of different lengths, cut out of streams (tokens,) from ``edges[i]`` to the next.

    A sample has a part (length,) int64 of every stream, and its number in each of ``singles``.
    """

    def __init__(
        self,
        streams: Mapping[str, Tensor],
        edges: Sequence[int],
        singles: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.streams, self.edges, self.singles = dict(streams), edges, dict(singles or {})

    def __len__(self) -> int:
        return len(self.edges) - 1

    def __getitem__(self, index: int) -> Sample:
        start, stop = self.edges[index], self.edges[index + 1]
        sample = {name: stream[start:stop].long() for name, stream in self.streams.items()}
        return sample | {name: values[index] for name, values in self.singles.items()}

    def __getitems__(self, indices: Sequence[int] | Tensor) -> list[Sample]:
        rows = indices.tolist() if isinstance(indices, Tensor) else indices
        return [self[index] for index in rows]

    def take(self, rows: Sequence[int]) -> Rows | None:
        """The samples at ``rows``, as a dataset; None when there are none."""
        if not rows:
            return None
        streams = {
            name: torch.cat([stream[self.edges[i] : self.edges[i + 1]] for i in rows])
            for name, stream in self.streams.items()
        }
        lengths = (self.edges[i + 1] - self.edges[i] for i in rows)
        singles = {name: values[list(rows)] for name, values in self.singles.items()}
        return Rows(streams, [0, *accumulate(lengths)], singles)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return max(stop - start for start, stop in pairwise(self.edges))


def pad_samples(samples: Sequence[Sample], fill: Mapping[str, int]) -> Sample:
    """A batch out of samples of different lengths: (batch, longest), filled on the right.

    ``fill`` says by what, for each part. What has no length is stacked.
    """
    return {
        name: pad_sequence([s[name] for s in samples], batch_first=True, padding_value=fill[name])
        if name in fill
        else torch.stack([s[name] for s in samples])
        for name in samples[0]
    }


def mask_of(samples: Sequence[Sample], name: str) -> Tensor:
    """1 where a padded batch holds a token, 0 where it is filled: (batch, longest) int64."""
    return pad_sequence([torch.ones_like(s[name]) for s in samples], batch_first=True)


@dataclass(frozen=True, kw_only=True)
class _Texts(LoadedOnUse):
    """What the two sources share: a file, a tokenizer, the splits."""

    path: str
    tokenizer: str | None = None
    text: str = "text"
    max_length: int | None = None
    eval_path: str | None = None
    test_path: str | None = None
    predict_path: str | None = None
    eval_fraction: float = 0.1
    test_fraction: float = 0.1
    split_seed: int = 0

    def __post_init__(self) -> None:
        check_fractions(eval_fraction=self.eval_fraction, test_fraction=self.test_fraction)
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(
                f"data.max_length={self.max_length} is not a positive number", fix="give 1 or more"
            )
        FolderTokenizer(self.tokenizer)  # refuses a folder that is not there, now

    @cached_property
    def _tokenizer(self) -> FolderTokenizer:
        return FolderTokenizer(self.tokenizer)

    @property
    def _shares(self) -> list[float]:
        return [
            0.0 if self.eval_path else self.eval_fraction,
            0.0 if self.test_path else self.test_fraction,
        ]

    @property
    def pad_token_id(self) -> int:
        """The token that fills a batch."""
        return self._tokenizer.pad

    @property
    def special_tokens(self) -> dict[str, int | None]:
        """Numbers of the tokens around a text, as a configuration names them."""
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        return {name: getattr(self._tokenizer.library, name) for name in names}

    def tokenizer_files(self) -> dict[str, str | bytes]:
        """The tokenizer's files by name, for whoever exports the model."""
        return self._tokenizer.files

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sample of all splits."""
        return max(rows.longest for rows in self._all)

    @cached_property
    def largest_token(self) -> int:
        """The largest token number of all splits."""
        return max(int(rows.streams[self.tokens].max()) for rows in self._all)

    tokens: ClassVar[str] = "tokens"
    """What the streams of tokens are called."""

    @property
    def _all(self) -> Iterator[Rows]:
        return (rows for rows in self.splits if rows is not None)


class _Document(NamedTuple):
    """Token numbers; the first ``given`` of them are not to be learned."""

    tokens: list[int]
    given: int = 0


@dataclass(frozen=True, kw_only=True)
class Documents(_Texts):
    """Texts to continue, through the tokenizer of a folder.

    ``path`` is a .csv, .tsv or .jsonl file with a column ``text``, or any other file, whose every
    line is a text. ``prompt`` names a column that stands before the text and whose tokens do not
    count in the loss. Each text ends with the tokenizer's token for the end, where it has one.

    A text of more than ``max_length`` tokens to predict is cut into several samples, and nothing
    is dropped; null cuts none. With ``packing``, samples hold as many texts in a row as fit into
    ``max_length``: positions begin anew with each, and none attends to another.

    Held out are the texts of ``eval_path`` and ``test_path`` where they are given, else
    ``eval_fraction`` and ``test_fraction`` of those of ``path``, drawn by ``split_seed``.

    A batch is padded on the right: ``tokens`` and ``targets`` (batch, longest) int64, where a
    target of -100 does not count, with ``attention_mask`` or, packed, ``position_ids``.

    Raises:
        ConfigError: a file, a column or the tokenizer is missing, or there is too little text.
        ResourceError: transformers is not installed.
    """

    prompt: str | None = None
    packing: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing and self.max_length is None:
            raise ConfigError(
                "data.packing=true does not know how long a sample is",
                fix="give data.max_length=NUMBER of tokens",
            )

    def load(self) -> Splits:
        texts = self._documents(self.path)
        parts = split(len(texts), fractions=self._shares, seed=self.split_seed)
        made = [
            self._rows([texts[i] for i in part.tolist()], self.path) if len(part) else None
            for part in parts
        ]
        evaluation = self._file(self.eval_path) or made[1]
        test = self._file(self.test_path) or made[2]
        predict = self._file(self.predict_path) or test or evaluation
        return Splits(made[0], evaluation, test, predict)

    @cached_property
    def mean_length(self) -> float:
        """Tokens of a training sample, on average."""
        return self.train.edges[-1] / len(self.train)

    def collate(self, samples: Any) -> Any:
        """Samples as a batch; one that was made already stays as it is."""
        if not isinstance(samples, list):
            return samples
        # A filled place is at position 0: a text of its own, which nobody looks at.
        batch = pad_samples(samples, {"tokens": 0, "targets": IGNORED, "position_ids": 0})
        return batch if self.packing else {**batch, "attention_mask": mask_of(samples, "tokens")}

    def _file(self, path: str | None) -> Rows | None:
        return None if path is None else self._rows(self._documents(path), path)

    def _documents(self, path: str) -> list[_Document]:
        encode, end = self._tokenizer.batch, self._tokenizer.end
        tail = [] if end is None else [end]
        if self.prompt is None:
            (texts,) = columns_of(path, [self.text])
            return [_Document(_end_with(tokens, tail)) for tokens in encode(texts)["input_ids"]]
        prompts, texts = columns_of(path, [self.prompt, self.text])
        given = encode(prompts)["input_ids"]
        own = encode(texts, special=False)["input_ids"]
        if tail:  # some tokenizers end whatever they read
            given = [tokens[:-1] if tokens[-1:] == tail else tokens for tokens in given]
        return [
            _Document([*before, *_end_with(after, tail)], given=len(before))
            for before, after in zip(given, own, strict=True)
        ]

    def _rows(self, texts: Sequence[_Document], path: str) -> Rows:
        tokens, targets, positions = array("i"), array("i"), array("i")
        edges = [0]
        for text in texts:
            # A target inside the given part is not to be learned.
            wanted = [IGNORED] * text.given + text.tokens[text.given :]
            for start, stop in self._cuts(len(text.tokens) - 1):
                if len(tokens) > edges[-1] and not self._joins(
                    len(tokens) - edges[-1], stop - start
                ):
                    edges.append(len(tokens))
                tokens.extend(text.tokens[start:stop])
                targets.extend(wanted[start + 1 : stop + 1])
                positions.extend(range(stop - start))
        if all(target == IGNORED for target in targets):
            raise ConfigError(f"{path}: no text has a token to predict", fix="bring longer texts")
        edges.append(len(tokens))
        streams = {"tokens": _tensor(tokens), "targets": _tensor(targets)}
        if self.packing:
            streams["position_ids"] = _tensor(positions)
        return Rows(streams, edges)

    def _cuts(self, targets: int) -> Iterator[tuple[int, int]]:
        """Where a text is cut; pieces of one text share the token at the cut."""
        size = self.max_length or max(targets, 1)
        return pairwise([*range(0, targets, size), targets] if targets > 0 else [])

    def _joins(self, before: int, more: int) -> bool:
        """Whether a piece goes into the sample that has ``before`` tokens."""
        return self.packing and before + more <= (self.max_length or 0)


def _end_with(tokens: list[int], tail: list[int]) -> list[int]:
    return tokens if tokens[-1:] == tail else [*tokens, *tail]


def _tensor(numbers: array[int]) -> Tensor:
    return torch.frombuffer(numbers, dtype=torch.int32).clone()


@dataclass(frozen=True, kw_only=True)
class LabelledTexts(_Texts):
    """Texts with a label each, through the tokenizer of a folder.

    ``path`` is a .csv, .tsv or .jsonl file with the columns ``text``, ``label`` and, for pairs of
    texts, ``text_pair``. ``max_length`` truncates longer ones; null does not.

    ``classes`` are the labels by their numbers; null takes those of ``path``: whole numbers stand
    for themselves, any other text is numbered in sorted order.

    Held out are the rows of ``eval_path`` and ``test_path`` where they are given, else
    ``eval_fraction`` and ``test_fraction`` of those of ``path``, drawn by ``split_seed`` (each
    class alike). ``predict_path`` needs no label.

    A batch is padded on the right to its longest: ``input_ids`` and ``attention_mask`` (batch,
    longest) int64, ``token_type_ids`` where the tokenizer gives them, ``labels`` (batch,).

    Raises:
        ConfigError: a file, a column, a class or the tokenizer is missing.
        ResourceError: transformers is not installed.
    """

    label: str = "label"
    text_pair: str | None = None
    classes: Sequence[str] | None = None

    tokens: ClassVar[str] = "input_ids"
    all_count: ClassVar[bool] = True
    """No label is -100."""

    @cached_property
    def class_names(self) -> list[str]:
        """The labels by their numbers."""
        if self.classes is not None:
            return list(self.classes)
        (labels,) = columns_of(self.path, [self.label])
        found = set(labels)
        if all(text.isascii() and text.isdigit() for text in found):
            return [str(number) for number in range(max(map(int, found)) + 1)]
        return sorted(found)

    def load(self) -> Splits:
        whole = self._read_labelled(self.path)
        labels = whole.singles["labels"]
        parts = split(len(whole), fractions=self._shares, seed=self.split_seed, labels=labels)
        train, evaluation, test = (whole.take(part.tolist()) for part in parts)
        if self.eval_path is not None:
            evaluation = self._read_labelled(self.eval_path)
        if self.test_path is not None:
            test = self._read_labelled(self.test_path)
        predict = test
        if self.predict_path is not None:
            predict = self._encode_file(self.predict_path)
        return Splits(train, evaluation, test, predict)

    def collate(self, samples: Any) -> Any:
        """Samples as a batch; one that was made already stays as it is."""
        if not isinstance(samples, list):
            return samples
        fill = {"input_ids": self.pad_token_id, "token_type_ids": 0}
        return {**pad_samples(samples, fill), "attention_mask": mask_of(samples, "input_ids")}

    def sample_weights(self) -> Tensor | None:
        """Every class equally often."""
        return balance_classes(self.train.singles["labels"])

    def _read_labelled(self, path: str) -> Rows:
        (labels,) = columns_of(path, [self.label])
        numbers = {name: number for number, name in enumerate(self.class_names)}
        for row, label in enumerate(labels, start=1):
            if label not in numbers:
                raise ConfigError(
                    f"{path}: row {row} has the label {label!r}, which is none of the classes "
                    + list_first(self.class_names),
                    fix=f"correct it, or list all: data.classes=[{label}, ...]",
                )
        rows = self._encode_file(path)
        rows.singles["labels"] = torch.tensor([numbers[label] for label in labels])
        return rows

    def _tell_truncated(
        self, path: str, columns: Sequence[Sequence[str]], lengths: Sequence[int]
    ) -> None:
        rows = [row for row, length in enumerate(lengths) if length == self.max_length]
        if not rows:
            return
        whole = self._tokenizer.batch(*([column[row] for row in rows] for column in columns))
        count = sum(len(tokens) > (self.max_length or 0) for tokens in whole["input_ids"])
        if count:
            log.warning(
                "%s: %d of %d texts are truncated to data.max_length=%d tokens",
                *(path, count, len(lengths), self.max_length),
            )

    def _encode_file(self, path: str) -> Rows:
        names = [self.text] if self.text_pair is None else [self.text, self.text_pair]
        columns = columns_of(path, names)
        encoded = self._tokenizer.batch(*columns, max_length=self.max_length)
        lengths = [len(tokens) for tokens in encoded["input_ids"]]
        self._tell_truncated(path, columns, lengths)
        if not all(lengths):
            raise ConfigError(
                f"{path}: text {lengths.index(0) + 1} has no token", fix="leave it out"
            )
        streams = {
            name: _tensor(array("i", chain.from_iterable(encoded[name])))
            for name in ("input_ids", "token_type_ids")
            if name in encoded
        }
        return Rows(streams, [0, *accumulate(lengths)])
