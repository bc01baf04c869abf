"""Normalizer: standardises its input by running statistics of everything seen in training."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_ppo.networks.types import ModuleState, StatefulModule, StatefulModuleOutput

RELATIVE_RESOLUTION = 1e-5
"""A feature that varies by less than this, relative to 1 + |mean|, is rounding noise and is not scaled up."""


class NormalizerStatistics(nnx.Variable):
    """A running statistic; not a parameter, so no gradient moves it."""


class Normalizer(StatefulModule):
    """`(x - mean) / std`, feature by feature.

    The statistics are read in a call and written only by `update_statistics`, once per iteration and from all that
    the rollout saw, so a replay in the loss sees what the rollout saw. Before the first update it is the identity.

    Args:
      shape: shape of one input without the batch axis (an int, a tuple or a list of ints), or a pytree of such
        shapes (dicts of tuples, as an environment's `observation_size` may be).
      clip: if given, the output is clipped to [-clip, clip] standard deviations; 5 to 10 are usual.
    """

    def __init__(self, shape: Any, clip: float | None = None):
        if clip is not None and not clip > 0:
            raise ValueError(f"Normalizer got clip={clip!r}; a number above 0, or None for no clipping, is accepted.")
        self.clip = clip
        shapes = plain_containers(shape)
        self.mean = NormalizerStatistics(map_shapes(jnp.zeros, shapes))
        self.variance = NormalizerStatistics(map_shapes(jnp.ones, shapes))
        self.counter = NormalizerStatistics(jnp.zeros(()))

    def __call__(self, state: ModuleState, obs: Any, rollout_extras: Any = None) -> StatefulModuleOutput:
        """Standardise; the extras are the raw inputs, which `update_statistics` needs."""
        obs = plain_containers(obs)
        mean, variance = self.mean.get_value(), self.variance.get_value()
        _check_fits(obs, mean)
        output = jax.tree.map(standardize, obs, mean, variance)
        clip = self.clip
        if clip is not None:
            output = jax.tree.map(lambda x: jnp.clip(x, -clip, clip), output)
        return StatefulModuleOutput(state, output, jnp.zeros(()), {}, obs)

    def update_statistics(self, rollout_extras: Any) -> None:
        """Merge the inputs of a rollout, leaves [time, batch, *feature], into the running statistics."""
        leaves = jax.tree.leaves(rollout_extras)
        n = leaves[0].shape[0] * leaves[0].shape[1]
        count = self.counter.get_value() + n
        weight = n / count

        def merge(mean: jax.Array, variance: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
            return merge_moments(mean, variance, batch.mean((0, 1)), batch.var((0, 1)), weight)

        merged = jax.tree.map(merge, self.mean.get_value(), self.variance.get_value(), rollout_extras)
        is_pair = lambda node: isinstance(node, tuple) and len(node) == 2 and all(map(_is_array, node))
        self.mean.set_value(jax.tree.map(lambda pair: pair[0], merged, is_leaf=is_pair))
        self.variance.set_value(jax.tree.map(lambda pair: pair[1], merged, is_leaf=is_pair))
        self.counter.set_value(count)


def standardize(x: jax.Array, mean: jax.Array, variance: jax.Array) -> jax.Array:
    """Zero mean and unit variance, but a constant feature is only centred, not amplified."""
    std = jnp.sqrt(variance)
    std = jnp.where(std > RELATIVE_RESOLUTION * (1.0 + jnp.abs(mean)), std, 1.0)
    return (x - mean) / std


def merge_moments(
    mean: jax.Array, variance: jax.Array, new_mean: jax.Array, new_variance: jax.Array, weight: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of two samples together, where `weight` is the share of the second in the whole.

    Chan, Golub, LeVeque (1979), written with variances instead of sums of squares, so that float32 keeps its
    precision however many samples there are.
    """
    delta = new_mean - mean
    merged = variance + weight * (new_variance - variance) + weight * (1 - weight) * delta**2
    return mean + weight * delta, merged


def _is_array(node: Any) -> bool:
    return hasattr(node, "shape")


def plain_containers(tree: Any) -> Any:
    """The same tree of dicts and tuples only."""
    # JAX holds dict, OrderedDict and FrozenDict for different tree nodes; environments use all of them.
    if isinstance(tree, Mapping):
        return {key: plain_containers(value) for key, value in tree.items()}
    if isinstance(tree, list):
        # A list of numbers is a shape, as it is for jnp.zeros.
        numbers = bool(tree) and all(isinstance(n, int) for n in tree)
        return tuple(tree) if numbers else [plain_containers(value) for value in tree]
    if isinstance(tree, tuple) and not all(isinstance(n, int) for n in tree):
        return tuple(plain_containers(value) for value in tree)
    return tree


def map_shapes(make: Any, shapes: Any) -> Any:
    """`make(shape)` for every shape in a tree of them."""
    is_shape = lambda node: isinstance(node, int) or (isinstance(node, tuple) and all(isinstance(n, int) for n in node))
    return jax.tree.map(make, shapes, is_leaf=is_shape)


def _check_fits(obs: Any, mean: Any) -> None:
    given, expected = jax.tree.structure(obs), jax.tree.structure(mean)
    sizes = (
        None
        if given != expected
        else [(o.shape, m.shape) for o, m in zip(jax.tree.leaves(obs), jax.tree.leaves(mean), strict=True)]
    )
    if sizes is None or any(o[len(o) - len(m) :] != m for o, m in sizes):
        shapes = lambda tree: jax.tree.map(lambda leaf: tuple(leaf.shape), tree)
        raise ValueError(
            f"Normalizer was built for inputs of shape {shapes(mean)} (without the batch axis) and got {shapes(obs)}. "
            "Build it with the observation size of the environment: Normalizer(env.observation_size)."
        )
