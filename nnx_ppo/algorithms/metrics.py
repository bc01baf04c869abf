"""Metrics: reductions on the device, and what every key means.

A metric is a flat dict entry; trees are flattened with `/`. Everything here runs inside the compiled iteration
and returns scalars, so that an iteration's metrics are one small transfer.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Shaped

from nnx_ppo.algorithms.config import LoggingLevel, PPOConfig
from nnx_ppo.algorithms.rollout import Episodes
from nnx_ppo.algorithms.tree_paths import flatten
from nnx_ppo.algorithms.types import Transition

GLOSSARY: dict[LoggingLevel, dict[str, str]] = {
    LoggingLevel.LOSSES: {
        "losses/actor_loss": "clipped surrogate loss of the policy, summed over its parts",
        "losses/actor_loss/<part>": "the same for one action head, or one reward term of a joint policy, if several",
        "losses/critic_loss": "half the mean squared error of the value estimates, summed over reward terms",
        "losses/critic_loss/<term>": "the same for one reward term, if several",
        "losses/entropy": "entropy of the policy, nats, summed over action heads",
        "losses/regularization": "what modules add to the loss (entropy bonus, KL terms, auxiliary losses)",
        "losses/total": "actor_loss + critic_loss_weight * critic_loss + regularization",
        "rollout_batch/reward/mean": "mean reward per environment step, summed over reward terms",
    },
    LoggingLevel.CRITIC_EXTRA: {
        "losses/predicted_value/<statistic>": "value estimates of the rollout (scaled rewards)",
        "losses/predicted_value/<term>/<statistic>": "the same for one reward term, if several",
        "losses/advantages/<statistic>": "advantages of the rollout, before normalisation",
        "losses/advantages/<term>/<statistic>": "the same for one reward term, if several",
        "losses/explained_variance": "1 - Var[target - value] / Var[target]; NaN if targets do not vary",
    },
    LoggingLevel.ACTOR_EXTRA: {
        "loglikelihood/<statistic>": "log-likelihood of the rollout's actions when they were taken, nats",
        "loglikelihood/<head>/<statistic>": "the same for one action head, if several",
        "losses/clipping_fraction": "share of samples whose likelihood ratio is outside 1 ± clip_range",
        "losses/approx_kl": "mean of (r - 1) - log r: divergence from the policy of the rollout, nats",
        "losses/policy_std": "mean standard deviation of the policy before squashing; absent for discrete policies",
    },
    LoggingLevel.ROLLOUT_STATS: {
        "rollout_batch/reward/<statistic>": "reward per environment step, summed over reward terms",
        "rollout_batch/reward/<term>/<statistic>": "the same for one reward term, if several",
        "rollout_batch/action/<statistic>": "actions of the rollout, all dimensions together",
        "rollout_batch/action/<head>/<statistic>": "the same for one action head, if several",
        "rollout_batch/done_rate": "share of steps that ended an episode",
        "rollout_batch/truncation_rate": "share of steps that met a time limit",
    },
    LoggingLevel.ROLLOUT_OBS: {
        "rollout_batch/obs/<statistic>": "observations, all elements together",
        "rollout_batch/obs/<leaf>/<statistic>": "the same for each leaf of a structured observation",
    },
    LoggingLevel.ENV_METRICS: {
        "env/<metric>/<statistic>": "what the environment puts into state.metrics, per step",
        "env/nonfinite": "environment steps of the iteration that were NaN or infinite",
    },
    LoggingLevel.NETWORK_METRICS: {
        "net/<module>/<metric>/<statistic>": "what modules put into StatefulModuleOutput.metrics, per step",
    },
    LoggingLevel.GRAD_NORM: {
        "grad_norm": "Euclidean norm of the gradient before clipping",
        "grad_norm/actor": "the same over the parameters of the action port, where it has any of its own",
        "grad_norm/critic": "the same over the parameters of the value port, where it has any of its own",
    },
    LoggingLevel.WEIGHTS: {
        "weights/<layer>/<statistic>": "elements of each parameter array, named by its place in the network",
    },
    LoggingLevel.THROUGHPUT: {
        "throughput/train_sps": "environment steps per second of the training phase",
        "throughput/eval_sps": "environment steps per second of evaluation",
        "throughput/video_sps": "environment steps per second of recording a video, without rendering",
        "time/train_s": "seconds of the training phase of this iteration",
        "time/eval_s": "seconds of the evaluation",
        "time/video_s": "seconds of recording the video, without rendering",
        "time/checkpoint_s": "seconds of writing the checkpoint",
        "time/compile_s": "seconds until every program was compiled; with the first iteration only",
    },
}
"""Every training key by level. `<statistic>` is mean and std, or p0, p25, ... where percentiles are asked for."""

EVALUATION_GLOSSARY: dict[str, str] = {
    "eval/episode_reward/mean": "mean over episodes of the sum of rewards, summed over reward terms; always there",
    "eval/episode_reward/std": "its standard deviation over episodes; always there",
    "eval/episode_reward/<percentile>": "its percentiles over episodes",
    "eval/episode_reward/<term>/<statistic>": "the same for one reward term, if several",
    "eval/lifespan/<statistic>": "steps of the episode, the ending step included",
    "eval/env/<metric>/<statistic>": "the environment's metrics, averaged over each episode (ENV_METRICS)",
    "eval/net/<module>/<metric>/<statistic>": "the modules' metrics, averaged over each episode (NETWORK_METRICS)",
}
"""Every key of an evaluation."""


def iteration_metrics(
    config: PPOConfig,
    transitions: Transition,
    advantages: Any,
    targets: Any,
    update_metrics: dict[str, Array],
    params: nnx.State,
) -> dict[str, Array]:
    """The metrics of one iteration that `config.logging_level` asks for.

    Args:
      config: level and percentiles.
      transitions: the rollout.
      advantages: per reward term, [time, batch].
      targets: value targets, likewise.
      update_metrics: scalars averaged over the updates.
      params: the parameters after the updates.
    """
    level, percentiles = config.logging_level, config.logging_percentiles
    output = transitions.network_output
    metrics = dict(update_metrics)

    def add(name: str, tree: Any, total: bool = False) -> None:
        leaves = flatten(name, tree)
        if total and len(leaves) > 1:
            metrics.update(reduce(name, sum(leaves.values()), percentiles))  # type: ignore[arg-type]
        for leaf_name, values in leaves.items():
            metrics.update(reduce(leaf_name, values, percentiles))

    if LoggingLevel.CRITIC_EXTRA in level:
        add("losses/predicted_value", output.value_estimates, total=True)
        add("losses/advantages", advantages, total=True)
        metrics["losses/explained_variance"] = explained_variance(
            sum(jax.tree.leaves(output.value_estimates)), sum(jax.tree.leaves(targets))
        )
    if LoggingLevel.ACTOR_EXTRA in level:
        add("loglikelihood", output.loglikelihoods, total=True)
    if LoggingLevel.ROLLOUT_STATS in level:
        add("rollout_batch/reward", transitions.rewards, total=True)
        add("rollout_batch/action", output.actions)
        metrics["rollout_batch/done_rate"] = jnp.mean(transitions.done, dtype=jnp.float32)
        metrics["rollout_batch/truncation_rate"] = jnp.mean(transitions.truncated, dtype=jnp.float32)
    if LoggingLevel.ROLLOUT_OBS in level:
        add("rollout_batch/obs", transitions.obs)
    if LoggingLevel.ENV_METRICS in level:
        add("env", transitions.metrics["env"])
        metrics["env/nonfinite"] = jnp.sum(transitions.nonfinite, dtype=jnp.int32)
    if LoggingLevel.NETWORK_METRICS in level:
        add("net", transitions.metrics["net"])
    if LoggingLevel.WEIGHTS in level:
        add("weights", nnx.to_pure_dict(params))
    if LoggingLevel.LOSSES in level:
        metrics["rollout_batch/reward/mean"] = jnp.mean(sum(jax.tree.leaves(transitions.rewards)))
    return metrics


def metrics_of_level(level: LoggingLevel, metrics: dict[str, Array]) -> dict[str, Array]:
    """Of the scalars that an update computes, those that the level asks for."""
    elsewhere = {
        "losses/clipping_fraction": LoggingLevel.ACTOR_EXTRA,
        "losses/approx_kl": LoggingLevel.ACTOR_EXTRA,
        "losses/policy_std": LoggingLevel.ACTOR_EXTRA,
        "grad_norm": LoggingLevel.GRAD_NORM,
        "grad_norm/actor": LoggingLevel.GRAD_NORM,
        "grad_norm/critic": LoggingLevel.GRAD_NORM,
    }
    return {name: value for name, value in metrics.items() if elsewhere.get(name, LoggingLevel.LOSSES) in level}


def explained_variance(values: Any, targets: Any) -> Array:
    """1 - Var[target - value] / Var[target] of two arrays; NaN where the targets do not vary."""
    variance = jnp.var(targets)
    return jnp.where(variance > 0, 1 - jnp.var(targets - values) / variance, jnp.nan)


def grad_norms(gradient: nnx.State) -> dict[str, Array]:
    """`grad_norm`, and its parts over the action and the value port of a `PPOAdapter`, where both have parameters."""
    squares = {name: jnp.sum(leaf**2) for name, leaf in flatten("", nnx.to_pure_dict(gradient)).items()}
    norm = lambda names: jnp.sqrt(sum(squares[name] for name in names))
    metrics = {"grad_norm": norm(squares)}
    ports = {port: [name for name in squares if f"/{port}/" in name] for port in ("action", "value")}
    if all(ports.values()):
        metrics |= {"grad_norm/actor": norm(ports["action"]), "grad_norm/critic": norm(ports["value"])}
    return metrics


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
