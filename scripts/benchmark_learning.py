#!/usr/bin/env python
"""Seconds from process start until a policy is good, here and with Brax's PPO, on the same environment of Brax's.

    python scripts/benchmark_learning.py --env inverted_pendulum --target 900

Networks, batches and hyperparameters are alike, evaluations come equally often and are of as many episodes. Each run is
a process of its own with nothing cached; runs alternate.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

EPISODE, HIDDEN, EVALUATED = 1000, [64, 64], 64
N_ENVS, ROLLOUT, EPOCHS, MINIBATCHES = 64, 20, 4, 4
LEARNING_RATE, DISCOUNT, ENTROPY, REWARD_SCALE = 1e-3, 0.99, 1e-3, 0.1
EVERY = 10 * N_ENVS * ROLLOUT


class Solved(Exception):
    """The target has been reached."""


def seconds_since_process_start() -> float:
    """Imports included."""
    with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
        started = float(stat.read().split(")")[1].split()[19]) / os.sysconf("SC_CLK_TCK")
        return float(uptime.read().split()[0]) - started


def train_here(env: Any, observation: int, seed: int, steps: int, report: Callable[[int, float], None]) -> None:
    """This project's PPO."""
    from flax import nnx

    from nnx_ppo.algorithms.config import EvalConfig, PPOConfig, TrainConfig
    from nnx_ppo.algorithms.ppo import train_ppo
    from nnx_ppo.networks.factories import make_mlp_actor_critic
    from nnx_ppo.wrappers.episode_wrapper import EpisodeWrapper

    networks = make_mlp_actor_critic(
        observation, env.action_size, HIDDEN, HIDDEN, nnx.Rngs(seed), activation="swish", entropy_weight=ENTROPY
    )
    config = TrainConfig(
        ppo=PPOConfig(
            n_envs=N_ENVS,
            rollout_length=ROLLOUT,
            total_steps=steps,
            n_epochs=EPOCHS,
            n_minibatches=MINIBATCHES,
            learning_rate=LEARNING_RATE,
            discounting_factor=DISCOUNT,
            reward_scaling=REWARD_SCALE,
        ),
        eval=EvalConfig(every_steps=EVERY, n_envs=EVALUATED, max_episode_length=EPISODE),
        seed=seed,
        checkpoint_every_steps=0,
    )

    def log_fn(metrics: dict[str, Any], steps: int) -> None:
        if "eval/episode_reward/mean" in metrics:
            report(steps, metrics["eval/episode_reward/mean"])

    train_ppo(EpisodeWrapper(env, EPISODE), networks, config, log_fn=log_fn)


def train_brax(env: Any, observation: int, seed: int, steps: int, report: Callable[[int, float], None]) -> None:
    """Brax's PPO."""
    import jax
    import jax.numpy as jnp
    from brax.training.agents.ppo import networks, train

    if not hasattr(jax, "device_put_replicated"):  # Brax 0.14.2 calls it, JAX has dropped it.
        jax.device_put_replicated = lambda tree, devices: jax.tree.map(  # type: ignore[attr-defined]
            lambda leaf: jnp.stack([leaf] * len(devices)), tree
        )
    train.train(
        env,
        num_timesteps=steps,
        num_envs=N_ENVS,
        num_eval_envs=EVALUATED,
        episode_length=EPISODE,
        learning_rate=LEARNING_RATE,
        entropy_cost=ENTROPY,
        discounting=DISCOUNT,
        reward_scaling=REWARD_SCALE,
        unroll_length=ROLLOUT,
        batch_size=N_ENVS // MINIBATCHES,
        num_minibatches=MINIBATCHES,
        num_updates_per_batch=EPOCHS,
        normalize_observations=True,
        deterministic_eval=True,
        seed=seed,
        num_evals=steps // EVERY + 1,
        progress_fn=lambda steps, metrics: report(steps, float(metrics["eval/episode_reward"])),
        network_factory=functools.partial(
            networks.make_ppo_networks, policy_hidden_layer_sizes=HIDDEN, value_hidden_layer_sizes=HIDDEN
        ),
    )


TRAINERS = {"here": train_here, "brax": train_brax}


def run(options: argparse.Namespace) -> None:
    """One run in this process; prints what it took as JSON."""
    import jax
    from brax import envs

    env = envs.get_environment(options.env, backend="mjx")
    # Brax's own property runs a reset without compiling it.
    observation = jax.eval_shape(env.reset, jax.random.key(0)).obs.shape[-1]
    seen: list[tuple[int, float, float]] = []

    def report(steps: int, episode_return: float) -> None:
        seen.append((steps, episode_return, seconds_since_process_start()))
        print(f"{options.who} {steps:>9,} {episode_return:>9.1f} {seen[-1][2]:>7.1f} s", file=sys.stderr, flush=True)
        if episode_return >= options.target:
            raise Solved

    solved = False
    try:
        TRAINERS[options.who](env, observation, options.seed, options.steps, report)
    except Solved:
        solved = True
    steps, episode_return, seconds = seen[-1]
    print(json.dumps({"solved": solved, "steps": steps, "return": episode_return, "seconds": seconds}))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="inverted_pendulum", help="the name of one of Brax's environments")
    parser.add_argument("--target", type=float, default=900.0, help="the evaluation return to reach")
    parser.add_argument("--steps", type=int, default=1_024_000, help="environment steps at most")
    parser.add_argument("--rounds", type=int, default=3, help="seeds 0, 1, ...")
    parser.add_argument("--who", choices=TRAINERS, default=None, help="only this one, in this process")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.who:
        run(options)
        return 0
    found: dict[str, list[dict[str, Any]]] = {who: [] for who in TRAINERS}
    for seed in range(options.rounds):
        for who in TRAINERS:
            command = [sys.executable, __file__, "--who", who, "--seed", str(seed), "--env", options.env]
            command += ["--target", str(options.target), "--steps", str(options.steps)]
            started = time.perf_counter()
            output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            result = json.loads(output.splitlines()[-1])
            found[who].append(result)
            print(f"{who:<6} seed {seed}  {result}  ({time.perf_counter() - started:.1f} s)", flush=True)
    for who, results in found.items():
        solved = [result["seconds"] for result in results if result["solved"]]
        middle = f"{statistics.median(solved):.1f} s in the middle" if solved else ""
        print(f"{who:<6} {len(solved)} of {len(results)} reached {options.target:g}  {middle}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
