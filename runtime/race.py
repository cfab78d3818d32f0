"""Draws that are alike where distributions are alike: an exponential race.

Token i finishes after an exponential time of rate p(i), and the first one is drawn: it has
probability p(i). The times' randomness belongs to (seed, position, token) alone, so a drafter that
draws with the same one mostly draws the target's very token, nearly as often as rejection sampling
would accept one. Unlike rejection sampling, this leaves the output what it is without drafts,
whoever drafts and however much (Daliri, Musco and Suresh 2024, arXiv 2408.07978).

A race in two rounds, of blocks of ids and then within the block that won, takes far fewer random
numbers than there are tokens in a vocabulary, and is as alike. A token is named by its place in its
block, so that a position has few times in all: the decide graph is given them (`race_times`).
"""

import numpy as np
from numpy.typing import NDArray

from specexport.export.manifest import RACE_BLOCK
from specexport.runtime.distribution import Distribution
from specexport.runtime.random import Purpose, raw

Ids = NDArray[np.int64]
Times = NDArray[np.float64]
_GOLDEN, _MIX_1, _MIX_2 = (
    np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def draw(distribution: Distribution, seed: int, position: int) -> int:
    """The token that wins at a position of the text."""
    token_ids, probs = distribution.token_ids, distribution.probs
    if distribution.is_one_hot:  # no random number is needed
        return int(token_ids[0])
    blocks, places = np.divmod(token_ids, RACE_BLOCK)
    starts = np.flatnonzero(np.diff(blocks, prepend=-1))
    masses = np.add.reduceat(probs, starts)
    won = _first(blocks[starts], masses, raw(seed, position, Purpose.OUTPUT, 0))
    end = starts[won + 1] if won + 1 < len(starts) else len(probs)
    inside = slice(int(starts[won]), int(end))
    index = _first(places[inside], probs[inside], raw(seed, position, Purpose.OUTPUT, 1))
    return int(token_ids[inside][index])


def race_times(seed: int, position: int, num_blocks: int) -> tuple[Times, Times]:
    """The times of a draw at rate 1: of the blocks [n], and of the tokens in any of them [64]."""
    blocks, places = np.arange(num_blocks), np.arange(RACE_BLOCK)
    of_blocks = _exponentials(blocks, raw(seed, position, Purpose.OUTPUT, 0))
    return of_blocks, _exponentials(places, raw(seed, position, Purpose.OUTPUT, 1))


def _first(names: Ids, rates: NDArray[np.float64], key: int) -> int:
    """Index of the one that finishes first; its time depends on its name, rate and the key."""
    with np.errstate(divide="ignore"):  # a rate of 0 never finishes
        return int(np.argmin(_exponentials(names, key) / rates))


def _exponentials(names: Ids, key: int) -> Times:
    """Independent, of mean 1: SplitMix64 at the names, from where `key` starts it."""
    x = np.uint64(key) + (names.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    x ^= x >> np.uint64(31)
    uniforms = ((x >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    times: Times = -np.log(uniforms)
    return times
