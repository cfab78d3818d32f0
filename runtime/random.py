"""Counter-based random numbers: the same for a request whatever else runs beside it.

A number is a pure function of (seed, position, purpose, index), so batching, slot reuse and
preemption cannot change a seeded request's output.
"""

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """What a random number decides; each purpose is a stream of its own."""

    DRAFT = 0
    ACCEPT = 1
    OUTPUT = 2
    CHOICE = 3


def uniform(seed: int, position: int, purpose: Purpose, index: int = 0) -> float:
    """A float in [0, 1) from Philox, keyed by seed and purpose, counted by position and index.

    `index` tells apart several numbers at one position, such as those of the nodes of a tree.
    """
    return float(raw(seed, position, purpose, index) >> 11) * 2.0**-53


def choice_seed(seed: int, index: int) -> int:
    """The seed of one of several outputs of a request; the first has the request's own."""
    return seed if index == 0 else raw(seed, 0, Purpose.CHOICE, index)


def raw(seed: int, position: int, purpose: Purpose, index: int) -> int:
    """64 random bits."""
    key = np.array([seed, purpose], dtype=np.uint64)
    counter = np.array([position, index, 0, 0], dtype=np.uint64)
    return int(np.random.Philox(key=key, counter=counter).random_raw())
