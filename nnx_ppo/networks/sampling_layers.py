"""Samplers: the last layer of an actor turns distribution parameters into an action and its log-likelihood.

The output is a dict with `action`, `log_likelihood` and, for logging, `entropy` and `std`; `PPOAdapter` takes it apart.
In a rollout the sampled raw action is emitted as `rollout_extras`; in the loss it comes back and only its
log-likelihood is computed anew. After `network.eval()` a sampler is deterministic and returns the mode.
"""

import abc
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnx_ppo.networks.types import ModuleState, StatefulModule, StatefulModuleOutput


class ActionSampler(StatefulModule):
    """Base of the samplers."""

    deterministic: bool = False
    """Set by `network.eval()` and `network.train()`."""

    @abc.abstractmethod
    def __call__(self, state: ModuleState, obs: Any, rollout_extras: Any = None) -> StatefulModuleOutput:
        """`obs` holds the parameters of the distribution; `rollout_extras` the raw action to replay, or None."""


class NormalTanhSampler(ActionSampler):
    """A diagonal Gaussian squashed by tanh to (-1, 1), as in soft actor-critic (Haarnoja et al. 2018, appendix C).

    The input is [*batch, 2 * action]: means, then unconstrained scales with
    `std = (softplus(scale) + min_std) * std_scale`. Metrics: `mu` and `sigma`, both before squashing. The
    regularization loss is the entropy bonus `-entropy_weight * entropy`, with the entropy of the squashed
    distribution estimated from one fresh sample.

    Args:
      rng: the random stream to draw from.
      entropy_weight: weight of the entropy bonus.
      min_std: least standard deviation, before `std_scale`.
      std_scale: factor on the standard deviation.
    """

    def __init__(self, rng: nnx.Rngs, entropy_weight: float, min_std: float = 1e-3, std_scale: float = 1.0):
        self.rng = rng
        self.entropy_weight = entropy_weight
        self.min_std = min_std
        self.std_scale = std_scale
        self.deterministic = False

    def __call__(
        self,
        state: ModuleState,
        obs: Float[Array, "*batch twice_action"],
        rollout_extras: Float[Array, "*batch action"] | None = None,
    ) -> StatefulModuleOutput:
        """Sample or replay; the log-likelihood and the loss are [*batch]."""
        if obs.shape[-1] % 2:
            raise ValueError(
                f"NormalTanhSampler got {obs.shape[-1]} features; it takes a mean and a scale per action, so an even "
                "number: give the layer before it 2 * action_size outputs."
            )
        mean, scale = jnp.split(obs, 2, axis=-1)
        std = (jax.nn.softplus(scale) + self.min_std) * self.std_scale
        if rollout_extras is not None:
            raw_action = rollout_extras
        elif self.deterministic:
            raw_action = mean
        else:
            raw_action = mean + std * jax.random.normal(self.rng(), mean.shape)
        raw_action = jax.lax.stop_gradient(raw_action)
        entropy = self._entropy(mean, std)
        return StatefulModuleOutput(
            next_state=state,
            output={
                "action": jnp.tanh(raw_action),
                "log_likelihood": jnp.sum(normal_log_density(raw_action, mean, std) - log_tanh_slope(raw_action), -1),
                "entropy": entropy,
                "std": std,
            },
            regularization_loss=-self.entropy_weight * entropy,
            metrics={"mu": mean, "sigma": std},
            rollout_extras=raw_action,
        )

    def _entropy(self, mean: jax.Array, std: jax.Array) -> jax.Array:
        # H[tanh(Z)] = H[Z] + E[log |d tanh(z)/dz|]; the sample is reparametrised, so its gradient reaches the mean
        # and keeps actions from saturating.
        gaussian = 0.5 * jnp.log(2 * jnp.pi * jnp.e) + jnp.log(std)
        noise = 0.0 if self.deterministic else jax.random.normal(self.rng(), mean.shape)
        return jnp.sum(gaussian + log_tanh_slope(mean + std * noise), -1)


def normal_log_density(x: jax.Array, mean: jax.Array, std: jax.Array) -> jax.Array:
    """Log-density of a normal distribution, element by element."""
    return -0.5 * ((x - mean) / std) ** 2 - jnp.log(std) - 0.5 * jnp.log(2 * jnp.pi)


def log_tanh_slope(x: jax.Array) -> jax.Array:
    """`log(1 - tanh(x)^2)`, element by element, finite for large |x|: 2 (log 2 - x - softplus(-2 x))."""
    return 2.0 * (jnp.log(2.0) - x - jax.nn.softplus(-2.0 * x))
