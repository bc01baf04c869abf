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
from jaxtyping import Array, Float, Int

from nnx_ppo.networks.routing import shape_of
from nnx_ppo.networks.shares import normal_rows
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
        mean, scale = jnp.split(at_least_float32(obs), 2, axis=-1)
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
        noise = 0.0 if self.deterministic else normal_rows(self.rng(), mean.shape)
        return jnp.sum(normal_entropy(std) + log_tanh_slope(mean + std * noise), -1)


class NormalSampler(ActionSampler):
    """A diagonal Gaussian whose standard deviation is a parameter, the same in every state; actions are unbounded.

    The input is the means, [*batch, action]. Metrics: `mu` and `sigma`. The regularization loss is the entropy bonus
    `-entropy_weight * entropy`, exact.

    Args:
      action_size: size of the action.
      rng: the random stream to draw from.
      entropy_weight: weight of the entropy bonus.
      initial_std: standard deviation at the start.
      min_std: least standard deviation.
    """

    def __init__(
        self,
        action_size: int,
        rng: nnx.Rngs,
        entropy_weight: float,
        initial_std: float = 1.0,
        min_std: float = 1e-3,
    ):
        if not initial_std > 0 or not min_std > 0:
            raise ValueError(f"NormalSampler got initial_std={initial_std}, min_std={min_std}; both are above 0.")
        self.action_size = action_size
        self.rng = rng
        self.entropy_weight = entropy_weight
        self.min_std = min_std
        self.log_std = nnx.Param(jnp.full(action_size, jnp.log(initial_std)))
        self.deterministic = False

    def __call__(
        self,
        state: ModuleState,
        obs: Float[Array, "*batch action"],
        rollout_extras: Float[Array, "*batch action"] | None = None,
    ) -> StatefulModuleOutput:
        """Sample or replay; the log-likelihood and the loss are [*batch].

        Raises:
          ValueError: the input has not one feature per action.
        """
        if getattr(obs, "shape", ())[-1:] != (self.action_size,):
            raise ValueError(
                f"NormalSampler({self.action_size}) takes one mean per action and got {shape_of(obs)}: give the layer "
                f"before it {self.action_size} outputs."
            )
        obs = at_least_float32(obs)
        std = jnp.broadcast_to(jnp.maximum(jnp.exp(self.log_std.get_value()), self.min_std), obs.shape)
        if rollout_extras is not None:
            action = rollout_extras
        elif self.deterministic:
            action = obs
        else:
            action = obs + std * jax.random.normal(self.rng(), obs.shape)
        action = jax.lax.stop_gradient(action)
        entropy = jnp.sum(normal_entropy(std), -1)
        return StatefulModuleOutput(
            next_state=state,
            output={
                "action": action,
                "log_likelihood": jnp.sum(normal_log_density(action, obs, std), -1),
                "entropy": entropy,
                "std": std,
            },
            regularization_loss=-self.entropy_weight * entropy,
            metrics={"mu": obs, "sigma": std},
            rollout_extras=action,
        )


class CategoricalSampler(ActionSampler):
    """A choice among n actions; the input is unnormalised log-probabilities, [*batch, n], the action [*batch] int32.

    The mode is the likeliest action. Metric: `probabilities`. The regularization loss is the entropy bonus
    `-entropy_weight * entropy`, exact.

    Args:
      rng: the random stream to draw from.
      entropy_weight: weight of the entropy bonus.
    """

    def __init__(self, rng: nnx.Rngs, entropy_weight: float):
        self.rng = rng
        self.entropy_weight = entropy_weight
        self.deterministic = False

    def __call__(
        self,
        state: ModuleState,
        obs: Float[Array, "*batch n"],
        rollout_extras: Int[Array, "*batch"] | None = None,
    ) -> StatefulModuleOutput:
        """Sample or replay; the log-likelihood and the loss are [*batch]."""
        log_p = jax.nn.log_softmax(at_least_float32(obs))
        if rollout_extras is not None:
            action = rollout_extras
        elif self.deterministic:
            action = jnp.argmax(log_p, -1).astype(jnp.int32)
        else:
            action = jax.random.categorical(self.rng(), log_p).astype(jnp.int32)
        # A logit of -inf forbids an action: its share of the entropy is 0, not NaN.
        possible = jnp.isfinite(log_p)
        p = jnp.exp(log_p)
        entropy = -jnp.sum(jnp.where(possible, p * jnp.where(possible, log_p, 0.0), 0.0), -1)
        return StatefulModuleOutput(
            next_state=state,
            output={
                "action": action,
                "log_likelihood": jnp.take_along_axis(log_p, action[..., None], -1)[..., 0],
                "entropy": entropy,
            },
            regularization_loss=-self.entropy_weight * entropy,
            metrics={"probabilities": p},
            rollout_extras=action,
        )


def at_least_float32(x: jax.Array) -> jax.Array:
    """Layers may compute in bfloat16; a likelihood or a value needs more digits than its eight bits."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def normal_log_density(x: jax.Array, mean: jax.Array, std: jax.Array) -> jax.Array:
    """Log-density of a normal distribution, element by element."""
    return -0.5 * ((x - mean) / std) ** 2 - jnp.log(std) - 0.5 * jnp.log(2 * jnp.pi)


def normal_entropy(std: jax.Array) -> jax.Array:
    """Differential entropy of a normal distribution, nats, element by element."""
    return 0.5 * jnp.log(2 * jnp.pi * jnp.e) + jnp.log(std)


def log_tanh_slope(x: jax.Array) -> jax.Array:
    """`log(1 - tanh(x)^2)`, element by element, finite for large |x|: 2 (log 2 - x - softplus(-2 x))."""
    return 2.0 * (jnp.log(2.0) - x - jax.nn.softplus(-2.0 * x))
