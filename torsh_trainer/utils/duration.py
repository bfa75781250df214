"""Durations as users write them."""

from __future__ import annotations

import re

from torsh_trainer.errors import ConfigError

_UNITS_S = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([dhms])")


def seconds(value: str | float | None, *, option: str) -> float | None:
    """Seconds from a number, ``1h30m``, ``45s``, ``00:30:00`` or ``2-12:00:00`` (SLURM's form).

    Raises:
        ConfigError: it is none of these, or not positive; names ``option``.
    """
    if value is None:
        return None
    total = float(value) if isinstance(value, int | float) else _parse_seconds(value.strip())
    if total is None or total <= 0:
        raise ConfigError(
            f"{option}={value!r} is not a duration", fix="write 3600, 90m, 1h30m or 01:30:00"
        )
    return total


def _parse_seconds(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        pass
    if ":" in text:
        days, _, clock = text.rpartition("-")
        parts = clock.split(":")
        if (
            len(parts) > 3
            or not all(part.isdigit() for part in parts)
            or not (days or "0").isdigit()
        ):
            return None
        value = 0.0
        for part in parts:
            value = value * 60 + int(part)
        return value + 86400.0 * int(days or 0)
    if _PART.sub("", text).strip():
        return None
    found = _PART.findall(text)
    return sum(float(n) * _UNITS_S[unit] for n, unit in found) if found else None
