"""What a failure to communicate looks like, whoever raises it; without torch."""

from __future__ import annotations

import re

from torsh_trainer.errors import ConfigError

_TORCH_COMMUNICATION = {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}
_COMMUNICATION = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (timeout|closed)"
    r"|\bgloo\b|\bnccl\b|\bTCPStore\b|process group|ranks? .* failed to (join|pass)",
    re.IGNORECASE,
)


def is_communication(error: BaseException) -> bool:
    """Whether ``error`` is one, or was caused by one, such as another process's end leads to."""
    if isinstance(error, ConfigError):  # a wrong option, whatever it led to
        return False
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        names = {kind.__name__ for kind in type(link).__mro__}
        if isinstance(link, ConnectionError) or names & _TORCH_COMMUNICATION:
            return True
        if type(link) is RuntimeError and _COMMUNICATION.search(str(link)):
            return True
        link = link.__cause__ or link.__context__
    return False
