"""A loss on several devices: each works on its share of the rows, with the numbers that they would get on one."""

import jax
from jaxtyping import Array, Float, PRNGKeyArray


def n_shares() -> int:
    """How many devices share the rows at hand; 1 unless each device is on its own here (`jax.shard_map`)."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return jax.lax.axis_size(axes) if axes else 1


def own_share(whole: jax.Array, axis: int = 0) -> jax.Array:
    """This device's part of what every device has as a whole."""
    if n_shares() == 1:
        return whole
    size = whole.shape[axis] // n_shares()
    index = jax.lax.axis_index(jax.sharding.get_abstract_mesh().manual_axes)
    return jax.lax.dynamic_slice_in_dim(whole, index * size, size, axis)


def normal_rows(key: PRNGKeyArray, shape: tuple[int, ...]) -> Float[Array, "batch ..."]:
    """Standard normal numbers for the rows of a batch, [batch, ...].

    Modules draw by this what they draw in the loss. `jax.random.normal` would give every device the same numbers for
    its rows, where there are several.
    """
    return own_share(jax.random.normal(key, (shape[0] * n_shares(), *shape[1:])))
