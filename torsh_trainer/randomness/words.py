"""Random words by counter: pure functions of a sample's key and of where in the sample they lie.

Integers of 64 bits wrap around, on every device alike. A word is made of two mixed ones, the key of
a sample and the constant of a place within it, that two more multiplications part: the finalizer of
splitmix64 (Steele, Lea and Flood 2014) on both sides, and one like it at the end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor


def _as_signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


_GAMMA = _as_signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _as_signed(0xBF58476D1CE4E5B9), _as_signed(0x94D049BB133111EB)
_DRAW = _as_signed(0xD1B54A32D192ED03)
_KEPT_WORDS = 1 << 18
"""Constants of a shape up to so many are kept, 2 MiB."""


def mix(words: Tensor) -> Tensor:
    """The finalizer of splitmix64, elementwise, of int64."""
    words = (words ^ _shift_right(words, 30)).mul_(_FIRST)
    words = words.bitwise_xor_(_shift_right(words, 27)).mul_(_SECOND)
    return words.bitwise_xor_(_shift_right(words, 31))


def _shift_right(words: Tensor, by: int) -> Tensor:
    """To the right, filled with zeros."""
    return (words >> by).bitwise_and_((1 << (64 - by)) - 1)


def keys_of(step_key: int, places: Tensor) -> Tensor:
    """int64 (draws, samples): the keys of a step for the places of ``places_of``."""
    keys = (places + _as_signed(step_key)).mul_(_FIRST)
    return keys.bitwise_xor_(keys >> 32).mul_(_SECOND)


def places_of(samples: range, draws: range, device: torch.device) -> Tensor:
    """int64 (draws, samples): random, of each draw in a step and each sample's place in it."""
    rows = torch.arange(draws.start, draws.stop, device=device) * _DRAW
    columns = torch.arange(samples.start, samples.stop, device=device) * _GAMMA
    return mix(rows.unsqueeze(1) + columns)


def words_of(keys: Tensor, shape: Sequence[int]) -> Tensor:
    """int32 (samples, *shape), uniform over all values; ``shape`` has one dimension or more.

    The word of a place depends on its coordinates: not on how long the dimensions are.
    """
    *rows, last = shape
    halves = (*rows, (last + 1) // 2)
    # In int64 of half the length: each gives two words.
    words = keys.view(-1, *[1] * len(halves)) ^ _constants(halves, keys.device)
    words = words.mul_(_FIRST)
    words = words.bitwise_xor_(words >> 32).mul_(_SECOND).view(torch.int32)
    return words[..., :last] if last % 2 else words


def pairs_of(keys: Tensor, shape: Sequence[int]) -> Tensor:
    """int32 (samples, *shape, 2): two words for every place."""
    return words_of(keys, (*shape, 2))


def _constants(shape: tuple[int, ...], device: torch.device) -> Tensor:
    kept = math.prod(shape) <= _KEPT_WORDS
    return (_compute_constants_once if kept else _compute_constants)(shape, device)


def _compute_constants(shape: tuple[int, ...], device: torch.device) -> Tensor:
    constants = torch.full((), _DRAW, dtype=torch.int64, device=device)
    for size in shape:
        places = torch.arange(1, size + 1, device=device)
        constants = mix(constants.unsqueeze(-1) + places * _GAMMA)
    return constants


@functools.lru_cache(maxsize=32)
def _compute_constants_once(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return _compute_constants(shape, device)


_DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24}
"""Binary digits that a number below 1 has in a dtype; others take all 32."""


def uniform_of(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers from 0 on and below 1, in ``dtype``, each a multiple of its resolution."""
    digits = _DIGITS.get(dtype, 32)
    whole = (words.long() >> (32 - digits)) + (1 << (digits - 1))
    return whole.to(dtype).mul_(2.0**-digits)


def normal_of(pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard normal numbers from (..., 2) words, by Box and Muller (1958)."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    radius, angle = (pairs.to(wide) * 2.0**-32 + 0.5).unbind(-1)
    radius = radius.clamp_min_(2.0**-33).log_().mul_(-2.0).sqrt_()
    return radius.mul_(angle.mul_(2.0 * torch.pi).cos_()).to(dtype)


def exponential_of(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers above 0 of mean 1, as -log of uniform ones."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    uniform = (words.to(wide) * 2.0**-32 + 0.5).clamp_min_(2.0**-33)
    # log(1) is 0, which the distribution does not hold.
    return uniform.log_().neg_().clamp_min_(2.0**-33).to(dtype)
