"""Remembering the step before, for losses that compare two steps; over a sequence that is a shift, not a scan."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool


def nothing_yet(batch_size: int, like: Any) -> dict[str, Any]:
    """The carry at the start of an episode.

    Args:
      batch_size: number of environments.
      like: zeros of what will be remembered, leaves without the batch axis.
    """
    last = jax.tree.map(lambda x: jnp.zeros((batch_size, *x.shape), x.dtype), like)
    return {"last": last, "valid": jnp.zeros(batch_size, bool)}


def remember(this: Any, batch_size: int) -> dict[str, Any]:
    """The carry after a step that had `this`, leaves [batch, ...]."""
    return {"last": this, "valid": jnp.ones(batch_size, bool)}


def step_before(
    carry: dict[str, Any], sequence: Any, done: Bool[Array, "time batch"]
) -> tuple[Any, Bool[Array, "time batch"]]:
    """For each step of a sequence what the step before had, and whether that was in the same episode.

    Args:
      carry: as at the first step.
      sequence: what each step has, leaves [time, batch, ...].
      done: the episode ended with this step.
    """
    last = jax.tree.map(lambda first, xs: jnp.concatenate([first[None], xs[:-1]]), carry["last"], sequence)
    return last, jnp.concatenate([carry["valid"][None], ~done[:-1]])
