"""What is written and printed holds no secrets, and loses nothing else."""

from __future__ import annotations

import pytest

from torsh_trainer.utils.masking import MASK, is_secret, mask_override, mask_text, mask_tree


@pytest.mark.parametrize(
    "name",
    [
        *("key", "secret", "token", "password", "api_key", "apiKey", "account_key", "hf_token"),
        *("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "aws_access_key_id", "client_secret", "sasToken"),
        *("wandb_api_key", "connection_string", "credentials", "private-key", "db_password"),
    ],
)
def test_a_name_tells_a_secret(name):
    assert is_secret(name)
    assert mask_tree({"a": [{name: "hush"}]}) == {"a": [{name: MASK}]}
    assert mask_override(f"+vars.{name}=hush hush") == f"+vars.{name}={MASK}"
    assert mask_text(f"with {{{name}: hush, b: 2}}") == f"with {{{name}: {MASK}, b: 2}}"
    assert mask_tree({name: {"user": "me", "on": True}}) == {name: {"user": MASK, "on": True}}


@pytest.mark.parametrize(
    "name",
    [
        *("tokens", "tokenizer", "max_tokens", "pad_token", "eos_token", "sort_key", "keys"),
        *("num_key_value_heads", "monkey", "label_key", "seed", "context", "tokens_per_s"),
    ],
)
def test_a_name_that_only_sounds_like_one_is_left_alone(name):
    assert not is_secret(name)
    assert mask_tree({name: "value"}) == {name: "value"}
    assert mask_override(f"task.{name}=value") == f"task.{name}=value"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://me:hush@bucket/x", "s3://me:***@bucket/x"),
        ("postgresql+psycopg://me:hu/sh@host/db", "postgresql+psycopg://me:hu/sh@host/db"),
        ("https://ghp_hush@github.com/a/b.git", "https://***@github.com/a/b.git"),
        ("ssh://git@github.com/a", "ssh://git@github.com/a"),
        ("https://h/b?sv=1&sig=hush%3D&se=2", "https://h/b?sv=1&sig=***&se=2"),
        ("http://host:8080/path", "http://host:8080/path"),
        ("loss 0.5  token = 3", "loss 0.5  token = ***"),
    ],
)
def test_a_url_is_shown_without_its_password(text, shown):
    assert mask_text(text) == shown


def test_a_long_text_is_no_override():
    text = "the password:\nlearning rate = 3"
    assert mask_override(text) == text


def test_a_reference_and_a_switch_stay():
    tree = {"token": "${oc.env:HF_TOKEN}", "password": None, "use_auth_token": True}
    assert mask_tree(tree) == tree
    assert mask_override("+vars.token=${oc.env:HF_TOKEN}") == "+vars.token=${oc.env:HF_TOKEN}"
    assert mask_text("token: ${oc.env:HF_TOKEN}") == "token: ${oc.env:HF_TOKEN}"
    assert mask_override("checkpoint.token=null") == "checkpoint.token=null"
