"""Metrics: reductions on the device, and what every key means.

A metric is a flat dict entry; trees are flattened with `/`. Everything here but `unpack` runs inside the compiled
iteration and returns scalars, which `pack` makes one array of, so that an iteration's metrics are one small transfer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Shaped, UInt32

from nnx_ppo.algorithms.config import LoggingLevel, PPOConfig
from nnx_ppo.algorithms.rollout import Episodes
from nnx_ppo.algorithms.tree_paths import flatten
from nnx_ppo.algorithms.types import Transition

GLOSSARY: dict[LoggingLevel, dict[str, str]] = {
    LoggingLevel.LOSSES: {
        "losses/actor_loss": "clipped surrogate loss of the policy, summed over its parts",
        "losses/actor_loss/<head>": "the same for one action head, or one reward term of a joint policy, if several",
        "losses/critic_loss": "half the mean squared error of the value estimates, summed over reward terms",
        "losses/critic_loss/<term>": "the same for one reward term, if several",
        "losses/entropy": "entropy of the policy, nats, summed over action heads",
        "losses/regularization": "what modules add to the loss (entropy bonus, KL terms); absent where none adds any",
        "losses/total": "actor_loss + critic_loss_weight * critic_loss + regularization",
        "rollout_batch/reward/mean": "mean reward per environment step, summed over reward terms",
    },
    LoggingLevel.CRITIC_EXTRA: {
        "losses/predicted_value/<statistic>": "value estimates of the rollout (scaled rewards)",
        "losses/predicted_value/<term>/<statistic>": "the same for one reward term, if several",
        "losses/advantages/<statistic>": "advantages of the rollout, before normalisation",
        "losses/advantages/<term>/<statistic>": "the same for one reward term, if several",
        "losses/explained_variance": "1 - Var[target - value] / Var[target], of the sums over reward terms; NaN if "
        "targets do not vary",
    },
    LoggingLevel.ACTOR_EXTRA: {
        "loglikelihood/<statistic>": "log-likelihood of the rollout's actions when they were taken, nats",
        "loglikelihood/<head>/<statistic>": "the same for one action head, if several",
        "losses/clipping_fraction": "share of samples (and heads) whose likelihood ratio is outside 1 ± clip_range",
        "losses/approx_kl": "mean of (r - 1) - log r over samples (and heads): divergence from the rollout's policy, "
        "nats",
        "losses/policy_std": "mean standard deviation of the policy's action dimensions before squashing; absent for "
        "discrete policies",
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
        "env/<metric>/<statistic>": "what the environment puts into state.metrics, per step (0 where not finite)",
        "env/nonfinite": "environment steps and resets of the iteration that were NaN or infinite",
    },
    LoggingLevel.NETWORK_METRICS: {
        "net/<module>/<metric>/<statistic>": "what modules put into StatefulModuleOutput.metrics, per step",
    },
    LoggingLevel.GRAD_NORM: {
        "grad_norm": "Euclidean norm of the gradient of all parameters before clipping",
        "grad_norm/actor": "the same over the parameters that only the actor has, if actor and critic have such",
        "grad_norm/critic": "the same over the parameters that only the critic has, likewise",
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
        "time/compile_s": "seconds until training and evaluation were compiled; with the first iteration only",
    },
}
"""Every training key by level.

`<statistic>` is mean and std, or p0, p25, ... where percentiles are asked for. What is boolean (a flag among the
environment's metrics) or a single number (a scalar parameter) has no `/<statistic>`: one key, with the fraction true
or the number itself. Losses, `grad_norm` and what ACTOR_EXTRA adds to the losses are means over the iteration's
updates, and NaN in an iteration that skipped an update because something in it was not finite.
"""

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
    nonfinite: Array,
) -> dict[str, Array]:
    """The metrics of one iteration that `config.logging_level` asks for.

    Args:
      config: level and percentiles.
      transitions: the rollout.
      advantages: per reward term, [time, batch].
      targets: value targets, likewise.
      update_metrics: scalars averaged over the updates.
      params: the parameters after the updates.
      nonfinite: how many environment steps and resets were not finite.
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
        metrics["env/nonfinite"] = nonfinite
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
    # Equal targets that were computed along different paths still differ in their last bits.
    varies = jnp.sqrt(variance) > 1e-6 * jnp.max(jnp.abs(targets))
    return jnp.where(varies, 1 - jnp.var(targets - values) / variance, jnp.nan)


PORTS = {"action": "actor", "actor": "actor", "value": "critic", "critic": "critic"}
"""Names under which a network holds what only the actor, or only the critic, has; `PPOAdapter` has action and value."""


def grad_norms(gradient: nnx.State) -> dict[str, Array]:
    """`grad_norm`, and its parts over actor and critic, where both have parameters of their own.

    Those are found by name: an actor's and a critic's port side by side in one module.
    """
    squares = {name: jnp.sum(leaf**2) for name, leaf in flatten("", nnx.to_pure_dict(gradient)).items()}
    modules: dict[tuple[str, ...], dict[str, list[Array]]] = {}
    for name, square in squares.items():
        path = name.split("/")
        for depth, entry in enumerate(path):
            if entry in PORTS:
                ports = modules.setdefault(tuple(path[:depth]), {"actor": [], "critic": []})
                ports[PORTS[entry]].append(square)
    metrics = {"grad_norm": jnp.sqrt(sum(squares.values()))}
    # The outermost such module: within a port there may be others of these names.
    for ports in sorted((module for module in modules.items() if all(module[1].values())), key=lambda m: len(m[0]))[:1]:
        metrics |= {f"grad_norm/{port}": jnp.sqrt(sum(parts)) for port, parts in ports[1].items()}
    return metrics


def depends_on_input(function: Callable[..., Any], *args: Any) -> bool:
    """Whether the result of a function is computed from its arguments, rather than constant; it is traced once."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    needed = {id(var) for var in jaxpr.outvars}
    for equation in reversed(jaxpr.eqns):
        if any(id(var) in needed for var in equation.outvars):
            needed.update(id(var) for var in equation.invars)
    return any(id(var) in needed for var in jaxpr.invars)


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
        metrics |= {f"{name}/p{p:.15g}": value for p, value in zip(percentiles, found, strict=True)}
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


# --- one transfer ---------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packed:
    """A tree of arrays whose scalars lie in one array: a transfer of its own for each costs more than its bytes."""

    words: UInt32[Array, " n"]
    """The 32-bit scalars, as their bits."""
    others: list[Array]
    """All other leaves."""
    structure: Any = field(metadata={"static": True})
    dtypes: tuple[str | None, ...] = field(metadata={"static": True})
    """Of each leaf if it is among `words`, else None."""


def pack(tree: Any) -> Packed:
    """Put the scalars of a tree of arrays into one; exact, on the device."""
    leaves, structure = jax.tree.flatten(tree)
    fits = [leaf.ndim == 0 and leaf.dtype in (jnp.float32, jnp.int32, jnp.uint32) for leaf in leaves]
    words = [jax.lax.bitcast_convert_type(leaf, jnp.uint32) for leaf, fit in zip(leaves, fits, strict=True) if fit]
    return Packed(
        jnp.stack(words) if words else jnp.zeros(0, jnp.uint32),
        [leaf for leaf, fit in zip(leaves, fits, strict=True) if not fit],
        structure,
        tuple(str(leaf.dtype) if fit else None for leaf, fit in zip(leaves, fits, strict=True)),
    )


def unpack(packed: Packed) -> Any:
    """The tree that was packed, of a `Packed` on the host; leading axes (packed under `vmap`) come back too."""
    words, others = iter(np.moveaxis(np.asarray(packed.words), -1, 0)), iter(packed.others)
    leaves = [next(others) if dtype is None else next(words).view(dtype) for dtype in packed.dtypes]
    return jax.tree.unflatten(packed.structure, leaves)


# --- records --------------------------------------------------------------------------------------------------


Part = Packed | dict[str, float]
"""Some of an iteration's metrics: a program's, still on the device, or what the host measured."""


def merged(parts: list[Any]) -> dict[str, Any]:
    """One dict of Python numbers and NumPy arrays, of parts that are on the host."""
    metrics: dict[str, Any] = {}
    for part in parts:
        metrics |= unpack(part) if isinstance(part, Packed) else part
    return {name: np.asarray(value).item() if np.ndim(value) == 0 else value for name, value in metrics.items()}


def throughput(phase: str, env_steps: int, seconds: float) -> dict[str, float]:
    """Speed and duration of a phase."""
    return {f"throughput/{phase}_sps": env_steps / seconds, f"time/{phase}_s": seconds}
