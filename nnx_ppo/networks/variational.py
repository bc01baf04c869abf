"""Variational bottlenecks: a noisy latent whose information about the input has a price.

The noise is drawn in the rollout and kept as `rollout_extras`. In the loss it comes back, so the latent is
`mean + std * noise` with the current parameters, and the gradient reaches both (Kingma and Welling 2014). After
`network.eval()` the latent is the mean.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from nnx_ppo.networks import last_step
from nnx_ppo.networks.routing import shape_of
from nnx_ppo.networks.types import ModuleState, SequenceModule, StatefulModule, StatefulModuleOutput


class VariationalBottleneck(StatefulModule):
    """Takes [*batch, 2 * latent_size], means and unconstrained scales, and puts out a sample [*batch, latent_size].

    `std = softplus(scale) + min_std`. The regularization loss is `kl_weight * KL(N(mean, std) || N(0, 1))`, summed over
    the latent. Metrics: `mu`, `sigma` and `kl_divergence` (nats, unweighted).

    Args:
      latent_size: size of the latent.
      rng: the random stream to draw from.
      kl_weight: price of a nat.
      min_std: least standard deviation.
    """

    def __init__(self, latent_size: int, rng: nnx.Rngs, kl_weight: float = 1.0, min_std: float = 1e-6):
        self.latent_size = latent_size
        self.rng = rng
        self.kl_weight = kl_weight
        self.min_std = min_std
        self.deterministic = False

    def __call__(
        self, state: ModuleState, obs: Float[Array, "*batch twice_latent"], rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """Sample, or replay the noise in `rollout_extras`.

        Raises:
          ValueError: the input has not 2 * latent_size features.
        """
        return self.sample(state, obs, rollout_extras)

    def sample(self, state: ModuleState, obs: Any, rollout_extras: Any) -> StatefulModuleOutput:
        """The latent and its price; the same for one step and for a sequence."""
        if getattr(obs, "shape", ())[-1:] != (2 * self.latent_size,):
            raise ValueError(
                f"{type(self).__name__}({self.latent_size}) takes a mean and a scale for each latent, "
                f"{2 * self.latent_size} features, and got {shape_of(obs)}."
            )
        mean, scale = jnp.split(obs, 2, axis=-1)
        std = jax.nn.softplus(scale) + self.min_std
        if rollout_extras is not None:
            noise = rollout_extras
        elif self.deterministic:
            noise = jnp.zeros(mean.shape)
        else:
            noise = jax.random.normal(self.rng(), mean.shape)
        kl_divergence = kl_from_standard_normal(mean, std)
        return StatefulModuleOutput(
            next_state=state,
            output=mean + std * noise,
            regularization_loss=self.kl_weight * kl_divergence,
            metrics={"mu": mean, "sigma": std, "kl_divergence": kl_divergence},
            rollout_extras=noise,
        )


class AR1VariationalBottleneck(VariationalBottleneck, SequenceModule):
    """A `VariationalBottleneck` that also pays for jumps: `ar1_weight * mean((z_t - z_{t-1})^2)`.

    Nothing is paid at the first step of an episode. Further metric: `l2_diff`, the unweighted mean square of the jump.

    Args:
      latent_size: size of the latent.
      rng: the random stream to draw from.
      kl_weight: price of a nat.
      min_std: least standard deviation.
      ar1_weight: price of a jump.
      backprop_through_time: whether the gradient also moves the earlier latent towards the later one.
    """

    def __init__(
        self,
        latent_size: int,
        rng: nnx.Rngs,
        kl_weight: float = 1.0,
        min_std: float = 1e-6,
        ar1_weight: float = 1.0,
        backprop_through_time: bool = True,
    ):
        super().__init__(latent_size, rng, kl_weight, min_std)
        self.ar1_weight = ar1_weight
        self.backprop_through_time = backprop_through_time

    def __call__(
        self, state: Any, obs: Float[Array, "batch twice_latent"], rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """Sample, or replay the noise in `rollout_extras`; the carry is the latent of the step before."""
        out = self.sample(state, obs, rollout_extras)
        next_state = last_step.remember(out.output, out.output.shape[0])
        return self._with_jump(out, state["last"], state["valid"]).replace(next_state=next_state)

    def over_time(
        self, state: Any, obs: Any, rollout_extras: Any, done: Bool[Array, "time batch"]
    ) -> StatefulModuleOutput:
        """The same for a sequence, all at once."""
        out = self.sample(state, obs, rollout_extras)
        return self._with_jump(out, *last_step.step_before(state, out.output, done))

    def _with_jump(self, out: StatefulModuleOutput, last: jax.Array, valid: jax.Array) -> StatefulModuleOutput:
        if not self.backprop_through_time:
            last = jax.lax.stop_gradient(last)
        l2_diff = jnp.where(valid, jnp.mean((out.output - last) ** 2, axis=-1), 0.0)
        return out.replace(
            regularization_loss=out.regularization_loss + self.ar1_weight * l2_diff,
            metrics=out.metrics | {"l2_diff": l2_diff},
        )

    def initialize_state(self, batch_size: int) -> ModuleState:
        """No latent yet."""
        return last_step.nothing_yet(batch_size, jnp.zeros(self.latent_size))


def kl_from_standard_normal(
    mean: Float[Array, "*batch latent"], std: Float[Array, "*batch latent"]
) -> Float[Array, "*batch"]:
    """KL(N(mean, std) || N(0, 1)) = sum (mean^2 + std^2 - 1) / 2 - log std, nats."""
    return jnp.sum(0.5 * (mean**2 + std**2 - 1.0) - jnp.log(std), axis=-1)
