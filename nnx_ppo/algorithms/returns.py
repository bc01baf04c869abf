"""Return estimators: pure functions of arrays."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def gae(
    rewards: Float[Array, "time batch"],
    values: Float[Array, "time batch"],
    last_values: Float[Array, " batch"],
    done: Bool[Array, "time batch"],
    truncated: Bool[Array, "time batch"],
    final_values: Float[Array, "time batch"],
    gamma: float,
    lambda_: float,
) -> Float[Array, "time batch"]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16) with episode ends inside the rollout.

        delta_t = r_t + gamma * V(s_{t+1}) - V(s_t)
        A_t     = delta_t + gamma * lambda * A_{t+1}

    V(s_{t+1}) is 0 where the episode terminated and `final_values` where it was truncated: a time limit says
    nothing about what would have come next. At both the trace is cut, because step t+1 is another episode's.

    Args:
      rewards: r_t.
      values: V(s_t).
      last_values: V of the state after the last step.
      done: the episode ended with step t.
      truncated: it ended at a time limit.
      final_values: V of the final, pre-reset state; read where `truncated` only.
      gamma: discount per step.
      lambda_: decay of the trace.

    Returns:
      The advantages A_t; `A_t + values` are the value targets (TD(lambda) returns).
    """
    next_values = jnp.concatenate([values[1:], last_values[None]])
    next_values = jnp.where(truncated, final_values, jnp.where(done, 0.0, next_values))
    deltas = rewards + gamma * next_values - values
    decays = jnp.where(done, 0.0, gamma * lambda_)

    def backwards(advantage: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        delta, decay = step
        advantage = delta + decay * advantage
        return advantage, advantage

    _, advantages = jax.lax.scan(backwards, jnp.zeros_like(last_values), (deltas, decays), reverse=True)
    return advantages
