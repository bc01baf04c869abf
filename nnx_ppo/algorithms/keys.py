"""Named random keys: each use of randomness has a stream of its own, so no key is ever used twice.

A stream's key depends on the seed, the stream and its counters only. So evaluation or video cannot shift the
numbers that training draws, and a resumed run draws what it would have drawn.
"""

import enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray


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


_COUNTER_BITS = 28


def stream_key(key: PRNGKeyArray, stream: Stream, counter: int | jax.Array = 0) -> PRNGKeyArray:
    """The key of `stream` at a counter, such as the iteration; distinct up to 2**28.

    Stream and counter make one number, because each fold_in takes as long to compile as ten matrix products.
    """
    return jax.random.fold_in(key, (stream << _COUNTER_BITS) + counter)


def numbered_keys(key: PRNGKeyArray, numbers: Int[Array, " n"]) -> PRNGKeyArray:
    """A key for each of some numbers, [n].

    The number is added to the key, with no fold_in: counter-based generators take keys that count up (Salmon et al.
    2011, "Parallel random numbers: as easy as 1, 2, 3"), and `key` itself is as good as random.
    """
    # The first word is a word of the key in all of JAX's generators, the last one may be a counter.
    words = jax.random.key_data(key)
    rows = jnp.broadcast_to(words, (*numbers.shape, *words.shape))
    return jax.random.wrap_key_data(rows.at[:, 0].add(numbers.astype(words.dtype)), impl=jax.random.key_impl(key))
