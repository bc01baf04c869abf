"""The optimizer: from a configuration to an optax chain, and its learning rate over a run."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.tree_utils
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int

from nnx_ppo.algorithms.config import PPOConfig

ADAPTIVE_FACTOR = 1.2
"""Change of an adaptive learning rate from one iteration to the next."""
ADAPTIVE_RANGE = (1e-6, 1e-2)
"""Bounds of an adaptive learning rate."""


def make_optimizer(config: PPOConfig) -> optax.GradientTransformation:
    """Global-norm clipping if asked for, then Adam or AdamW; the learning rate is part of the state."""

    def adam(learning_rate: Any) -> optax.GradientTransformation:
        if config.weight_decay is None:
            return optax.adam(learning_rate)
        return optax.adamw(learning_rate, weight_decay=config.weight_decay)

    clip = optax.identity() if config.gradient_clipping is None else optax.clip_by_global_norm(config.gradient_clipping)
    return optax.chain(clip, optax.inject_hyperparams(adam)(learning_rate=config.learning_rate))


def new_optimizer_state(config: PPOConfig, params: Any) -> optax.OptState:
    """The state before the first update. It is over all parameters as one vector."""
    return make_optimizer(config).init(ravel_pytree(params)[0])


WIDTH = 512
"""Columns of `as_matrix`."""


def as_matrix(params: Any) -> tuple[Float[Array, "rows columns"], Callable[[Array], Any]]:
    """All parameters as one matrix, filled up with zeros, and the function that makes them of such a matrix again.

    So an update is a few large operations instead of several for every array. A CPU's cores share out the rows of a
    matrix; a vector XLA leaves to one of them.
    """
    size = sum(x.size for x in jax.tree.leaves(params))
    flat, unravel = ravel_pytree((params, jnp.zeros(-size % WIDTH)))
    return flat.reshape(-1, WIDTH), lambda matrix: unravel(matrix.reshape(-1))[0]


def state_as_matrices(optimizer_state: optax.OptState) -> optax.OptState:
    """The optimizer's state for updates of `as_matrix`."""
    return jax.tree.map(lambda x: as_matrix(x)[0] if x.ndim == 1 else x, optimizer_state)


def state_as_vectors(optimizer_state: optax.OptState, params: Any) -> optax.OptState:
    """Undoes `state_as_matrices`."""
    size = sum(x.size for x in jax.tree.leaves(params))
    return jax.tree.map(lambda x: x.reshape(-1)[:size] if x.ndim == 2 else x, optimizer_state)


def learning_rate(optimizer_state: optax.OptState) -> Float[Array, ""]:
    """The learning rate of the next update."""
    return optax.tree_utils.tree_get(optimizer_state, "learning_rate")


def schedule_learning_rate(
    config: PPOConfig, optimizer_state: optax.OptState, iteration: Int[Array, ""]
) -> optax.OptState:
    """The optimizer state at the start of an iteration: a linear schedule goes from full to zero at total_steps."""
    if config.learning_rate_schedule != "linear":
        return optimizer_state
    rate = config.learning_rate * scheduled_share(config, iteration)
    return optax.tree_utils.tree_set(optimizer_state, learning_rate=rate)


def scheduled_share(config: PPOConfig, iteration: Int[Array, ""]) -> Float[Array, ""]:
    """What is left of a linear schedule at an iteration, from 1 to 0."""
    iterations = max(1, -(-config.total_steps // (config.n_envs * config.rollout_length)))
    return jnp.clip(1.0 - iteration / iterations, 0.0, 1.0)


def adapt_learning_rate(config: PPOConfig, optimizer_state: optax.OptState, kl: Float[Array, ""]) -> optax.OptState:
    """The optimizer state after an iteration that ended at a divergence `kl` from the policy it began with.

    The rule of Schulman et al. 2017 (section 4) for the KL penalty, on the step size instead: a smaller one when the
    policy moved 1.5 times as far as target_kl, a larger one when it moved less than two thirds as far.
    """
    if config.target_kl is None:
        return optimizer_state
    rate = learning_rate(optimizer_state)
    factor = jnp.where(kl > 1.5 * config.target_kl, 1 / ADAPTIVE_FACTOR, 1.0)
    factor = jnp.where(kl < config.target_kl / 1.5, ADAPTIVE_FACTOR, factor)
    return optax.tree_utils.tree_set(optimizer_state, learning_rate=jnp.clip(rate * factor, *ADAPTIVE_RANGE))
