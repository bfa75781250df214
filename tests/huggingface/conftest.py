"""A folder with a tokenizer that knows the words of a few films, and texts about them."""

from __future__ import annotations

import json
import random
import socket
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

WORDS = {
    "pos": ["good", "great", "fine", "lovely", "happy", "nice"],
    "neg": ["bad", "awful", "poor", "sad", "ugly", "nasty"],
}
NOISE = ["the", "a", "film", "was", "and", "very", "it", "of", "day"]


def write_texts(count: int, *, seed: int = 0) -> list[tuple[str, str]]:
    """Texts of 4 to 13 words, and the label of each."""
    drawn = random.Random(seed)
    found = []
    for number in range(count):
        label = ("pos", "neg")[number % 2]
        words = [
            drawn.choice(NOISE if drawn.random() < 0.5 else WORDS[label])
            for _ in range(drawn.randint(4, 13))
        ]
        found.append((" ".join(words), label))
    return found


def train_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<unk>", "<pad>", "<eos>"]
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=special)
    made.train_from_iterator([text for text, _ in write_texts(200)], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    )
    fast.save_pretrained(folder)
    return fast


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer alone."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def texts() -> list[tuple[str, str]]:
    """60 texts and their labels."""
    return write_texts(60)


@pytest.fixture
def files(tmp_path: Path, texts: list[tuple[str, str]]) -> dict[str, Path]:
    """The texts as lines, as a table and as objects."""
    rows = texts
    contents = {
        "txt": "".join(f"{text}\n" for text, _ in rows),
        "csv": "text,label\n" + "".join(f"{text},{label}\n" for text, label in rows),
        "jsonl": "".join(
            json.dumps({"text": text, "label": label, "prompt": "it was"}) + "\n"
            for text, label in rows
        ),
    }
    found = {}
    for suffix, content in contents.items():
        found[suffix] = tmp_path / f"data.{suffix}"
        found[suffix].write_text(content)
    return found


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is asked for, or a connection, is a failure."""

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refused)
    monkeypatch.setattr(socket.socket, "connect", refused)
