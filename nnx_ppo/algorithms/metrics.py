"""Metrics: reductions on the device, and what every key means.

A metric is a flat dict entry; trees are flattened with `/`. Everything here runs inside the compiled iteration
and returns scalars, so that an iteration's metrics are one small transfer.
"""

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from nnx_ppo.algorithms.rollout import Episodes
from nnx_ppo.algorithms.tree_paths import flatten

GLOSSARY: dict[str, str] = {
    "losses/actor_loss": "clipped surrogate loss of the policy, summed over action heads",
    "losses/actor_loss/<head>": "the same for one action head, where there are several",
    "losses/critic_loss": "half the mean squared error of the value estimates, summed over reward terms",
    "losses/critic_loss/<term>": "the same for one reward term, where there are several",
    "losses/entropy": "entropy of the policy, nats, summed over action heads",
    "losses/regularization": "what modules add to the loss (entropy bonus, KL terms, auxiliary losses)",
    "losses/total": "actor_loss + critic_loss_weight * critic_loss + regularization",
    "rollout_batch/reward/mean": "mean reward per environment step, summed over reward terms",
    "eval/episode_reward/<statistic>": "sum of rewards over an evaluation episode, summed over reward terms",
    "eval/episode_reward/<term>/<statistic>": "the same for one reward term, where there are several",
    "eval/lifespan/<statistic>": "steps of an evaluation episode, the ending step included",
}
"""What each key means. `<statistic>` is mean and std, or p0, p25, ... where percentiles are asked for."""


def reduce(
    name: str, values: Shaped[Array, "..."], percentiles: tuple[float, ...] | None = None, always_moments: bool = False
) -> dict[str, Array]:
    """A vector-valued metric as scalars.

    Args:
      name: the key they start with.
      values: any shape; all elements count alike. A scalar keeps the bare name; of booleans the fraction is taken.
      percentiles: if given, these instead of mean and standard deviation.
      always_moments: mean and standard deviation too, where percentiles are given.
    """
    if values.ndim == 0:
        return {name: values}
    if values.dtype == bool:
        return {name: jnp.mean(values, dtype=jnp.float32)}
    values = values.astype(jnp.float32).reshape(-1)
    metrics = {}
    if percentiles is None or always_moments:
        metrics |= {f"{name}/mean": jnp.mean(values), f"{name}/std": jnp.std(values)}
    if percentiles is not None:
        found = jnp.percentile(values, jnp.asarray(percentiles, jnp.float32))
        metrics |= {f"{name}/p{p:g}": value for p, value in zip(percentiles, found, strict=True)}
    return metrics


def evaluation_metrics(episodes: Episodes, percentiles: tuple[float, ...] | None) -> dict[str, Array]:
    """The `eval/...` keys. Mean and standard deviation of the return are always among them."""
    rewards = flatten("eval/episode_reward", episodes.rewards)
    metrics = reduce("eval/episode_reward", sum(rewards.values()), percentiles, always_moments=True)  # type: ignore[arg-type]
    if len(rewards) > 1:
        for name, values in rewards.items():
            metrics |= reduce(name, values, percentiles, always_moments=True)
    metrics |= reduce("eval/lifespan", episodes.lifespan, percentiles)
    for name, values in flatten("eval", episodes.metrics).items():
        metrics |= reduce(name, values, percentiles)
    return metrics
