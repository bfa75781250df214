"""Which dimension of what a forward draws counts samples: a rule on its shape alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple


class Layout(NamedTuple):
    """A draw of ``shape`` for each of ``samples`` samples; of 0 samples: one for them all.

    ``time_first`` says that the first dimension of ``shape`` lies before that of samples.
    """

    samples: int
    shape: tuple[int, ...]
    time_first: bool = False


def recurrent_layout_of(shape: Sequence[int], samples: int) -> Layout | None:
    """How a recurrent layer's (time, sequences, width) is cut, as many sequences a sample.

    None: packed sequences, or others than samples.
    """
    if len(shape) != 3 or shape[1] % samples:
        return None
    time, sequences, width = shape
    return Layout(samples, (time, sequences // samples, width), time_first=True)


def layout_of(
    shape: Sequence[int],
    samples: int,
    *,
    time_major: bool = False,
    parameters: Collection[tuple[int, ...]] = (),
) -> Layout | None:
    """How a draw of ``shape`` in a forward of ``samples`` samples is cut; None: nobody can tell.

    The first dimension of a batch is its samples', as in ``Task.predict``. A multiple of them is so
    many rows a sample, as (batch * tokens, ...); another size that does not hold them is of no
    sample, and drawn once for all. Under ``time_major`` samples may come second, behind a number
    of others. What could be read in two ways is left: a multiple in one
    dimension, beside another one of as many as there are samples, or in the shape of one of
    ``parameters``; samples in a later dimension; under ``time_major`` a second dimension of as
    many; and one number alone, where there is one sample.
    """
    shape = tuple(shape)
    if not shape:
        return Layout(0, (1,))
    first, *others = shape
    holds = samples > 1 and samples in others
    if first == samples:
        doubtful = (samples == 1 and not others) or (
            time_major and bool(others) and others[0] == samples
        )
        return None if doubtful else Layout(samples, tuple(others) or (1,))
    if first % samples == 0:
        doubtful = holds or not others or shape in parameters
        return None if doubtful else Layout(samples, (first // samples, *others))
    if time_major and holds and others[0] == samples and samples not in others[1:]:
        return Layout(samples, (first, 1, *others[1:]), time_first=True)
    return None if holds else Layout(0, shape)
