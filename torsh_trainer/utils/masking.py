"""What is written and printed without the secrets in it: passwords, tokens, keys of an account.

A name tells a secret (``password``, ``api_key``, ``hf_token``), and so do a password in a URL and a
signature in its query. A reference such as ``${oc.env:HF_TOKEN}`` is none: it stays.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

MASK = "***"

_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_ALWAYS = frozenset(
    ("credential", "credentials", "passphrase", "passwd", "password", "pwd", "secret", "secrets")
)
_WHOLE = frozenset(("authorization", "connection_string", "apikey"))
_WHOSE = frozenset(
    (
        *("access", "account", "api", "auth", "bearer", "client", "encryption", "github"),
        *("gitlab", "hf", "hub", "id", "master", "oauth", "private", "refresh", "sas", "security"),
        *("service", "session", "shared", "signing", "ssh", "storage", "wandb"),
    )
)
"""Words before ``key`` or ``token``: ``pad_token`` and ``sort_key`` are no secrets."""

_REFERRING = frozenset(("image_pull_secrets", "env_from_secrets"))
"""Knobs that hold names of secrets of a cluster, and no secret."""

_REFERENCE = re.compile(r"\$\{.*\}", re.DOTALL)
_IN_A_URL = (
    (re.compile(r"\b([a-zA-Z][\w+.-]*://[^/\s:@\"']*):[^/\s@\"']+@"), rf"\1:{MASK}@"),
    (re.compile(r"\b(https?://)[^/\s:@\"']+@"), rf"\1{MASK}@"),
    (
        re.compile(
            r"([?&][\w-]*(?:token|secret|password|key|sig|signature|credential)=)[^&#\s\"']+", re.I
        ),
        rf"\1{MASK}",
    ),
)
_ASSIGNED = re.compile(
    r"(?P<name>[\w-]*[A-Za-z_])[\"']?[ \t]*[:=][ \t]*"
    r"(?P<value>\$\{[^}]*\}+|\"[^\"]*\"|'[^']*'|[^\s,{}\[\]()\"';][^\s,}\])\"';]*)"
)
_KEY = re.compile(r"[+~-]*[\w./@-]+")
_PLAIN = frozenset(("null", "none", "true", "false", "~", "???", MASK))


def is_secret(name: str) -> bool:
    """Whether a value of that name is a secret."""
    words = [word.lower() for word in _WORDS.findall(name)]
    joined = "_".join(words)
    if joined in _REFERRING:
        return False
    if _ALWAYS & {*words} or joined in _WHOLE or "access_key" in joined or "api_key" in joined:
        return True
    if not words or words[-1] not in ("key", "token"):
        return False
    return len(words) == 1 or words[-2] in _WHOSE


def mask_url(text: str) -> str:
    """``text`` without passwords, tokens and signatures in URLs."""
    for pattern, replacement in _IN_A_URL:
        text = pattern.sub(replacement, text)
    return text


def mask_text(text: str) -> str:
    """``text`` without what stands in URLs or behind the name of a secret: ``password=...``."""
    text = mask_url(text)
    pieces, done, at = [], 0, 0
    while found := _ASSIGNED.search(text, at):
        at = found.start("value")  # what stands there may itself be NAME=VALUE
        if is_secret(found["name"]) and not _is_open(found["value"]):
            pieces += [text[done:at], MASK]
            at = done = found.end()
    return "".join([*pieces, text[done:]])


def mask_override(text: str) -> str:
    """An override of the command line; all of its value where its key names a secret."""
    key, equals, value = text.partition("=")
    name = key.rpartition(".")[2].lstrip("+~-")
    if equals and _KEY.fullmatch(key) and is_secret(name):
        return text if _is_open(value) else f"{key}={MASK}"
    return mask_text(text)


def _is_open(value: str) -> bool:
    """A value that may be shown under any name: a reference, a switch, nothing."""
    shown = value.strip("\"'")
    return _REFERENCE.fullmatch(shown) is not None or shown.lower() in _PLAIN


def mask_tree(tree: Any, *, text: Callable[[str], str] = mask_url) -> Any:
    """Plain values without secrets; ``text`` says what becomes of strings under other names."""
    if isinstance(tree, Mapping):
        return {
            key: _hide(value) if is_secret(str(key)) else mask_tree(value, text=text)
            for key, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [mask_tree(item, text=text) for item in tree]
    return text(tree) if type(tree) is str else tree


def _hide(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _hide(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hide(item) for item in value]
    if value is None or isinstance(value, bool) or value == "":
        return value
    return value if isinstance(value, str) and _REFERENCE.fullmatch(value) else MASK
