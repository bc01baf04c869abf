"""Named random keys: each use of randomness has a stream of its own, so no key is ever used twice.

A stream's key depends on the seed, the stream and its counters only. So evaluation or video cannot shift the
numbers that training draws, and a resumed run draws what it would have drawn.
"""

import enum

import jax
from jaxtyping import PRNGKeyArray


class Stream(enum.IntEnum):
    """What a random key is for. The numbers are part of what makes a run reproducible: never change one."""

    INITIAL_RESET = 0
    EPISODE_PHASE = 1
    RESET_POOL = 2
    SHUFFLE = 3
    EVALUATION = 4
    VIDEO = 5


_RUN = 0x70706F
"""`nnx.Rngs(seed)`, usually with the same seed, folds small numbers into the same root key; this keeps us apart."""


def run_key(seed: int) -> PRNGKeyArray:
    """The key that every other key of a run derives from."""
    return jax.random.fold_in(jax.random.key(seed), _RUN)


def stream_key(key: PRNGKeyArray, stream: Stream, *counters: int | jax.Array) -> PRNGKeyArray:
    """The key of `stream` at the given counters, such as the iteration."""
    key = jax.random.fold_in(key, stream)
    for counter in counters:
        key = jax.random.fold_in(key, counter)
    return key
