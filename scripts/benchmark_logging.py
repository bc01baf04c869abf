#!/usr/bin/env python
"""What logging costs: training throughput by level, with slow and with real sinks, side by side in one process.

    python scripts/benchmark_logging.py --task cartpole_balance

Every variant trains by itself; rounds of a few iterations alternate between them, so that whatever else the machine
does meets all of them alike. Printed are medians over rounds, and ratios within the same round.
"""

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

import tasks
from nnx_ppo.algorithms.config import LoggingLevel, TrainConfig
from nnx_ppo.algorithms.loop import Programs, TrainingLoop
from nnx_ppo.algorithms.ppo import NONFINITE_NAMES, initial_training_state, ppo_step
from nnx_ppo.loggers import JsonLines, Logger, TensorBoard
from nnx_ppo.loggers.provenance import versions

PERCENTILES = (0, 25, 50, 75, 100)


class Variant:
    """A training run that goes on for a few iterations at a time."""

    def __init__(self, env: Any, networks: Any, config: TrainConfig, log_fn: Any, stop_fn: Any, compiled: Any = None):
        ppo = config.ppo
        self.batch = ppo.n_envs * ppo.rollout_length
        self.programs = Programs(
            lambda state: ppo_step(env, ppo, state), env, self.batch, 0, ppo.max_skipped_updates, NONFINITE_NAMES
        )
        state = initial_training_state(env, networks, config)
        self.loop = TrainingLoop(self.programs, config, state, log_fn, None, None, stop_fn)
        if compiled is not None:
            self.loop.compiled = compiled

    def run(self, iterations: int) -> float:
        """Environment steps per second."""
        steps = iterations * self.batch
        self.loop.programs = dataclasses.replace(self.programs, total_steps=self.loop.steps + steps)
        started = time.perf_counter()
        self.loop.run(resumed=True)
        jax.block_until_ready(self.loop.state)
        return steps / (time.perf_counter() - started)


def slow_sink(metrics: Mapping[str, Any], steps: int) -> None:
    time.sleep(0.2)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="cartpole_balance")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--iterations", type=int, default=10, help="of each variant in each round")
    parser.add_argument("--n-envs", type=int, default=None, help="instead of the task's")
    options = parser.parse_args(arguments)
    task = tasks.load_task(options.task)
    env, networks = task.make_env(None), task.make_networks
    off = {
        "eval": dataclasses.replace(task.config.eval, enabled=False),
        "video": dataclasses.replace(task.config.video, enabled=False),
    }
    n_envs = options.n_envs or task.config.ppo.n_envs

    def config(level: LoggingLevel, percentiles: tuple[float, ...] | None = None) -> TrainConfig:
        ppo = dataclasses.replace(task.config.ppo, n_envs=n_envs, logging_level=level, logging_percentiles=percentiles)
        return dataclasses.replace(task.config, ppo=ppo, **off)

    losses = config(LoggingLevel.LOSSES)
    with (
        tempfile.TemporaryDirectory() as folder,
        Logger(slow_sink, close_timeout=0.1) as slow,
        Logger(JsonLines(f"{folder}/metrics.jsonl"), TensorBoard(folder)) as files,
    ):
        make = lambda config, log_fn=None, stop_fn=None, compiled=None: Variant(
            env, networks(env, nnx.Rngs(0)), config, log_fn, stop_fn, compiled
        )
        reference = make(losses)
        compiled = reference.loop.compiled
        variants = {
            "LOSSES": reference,
            "NONE": make(config(LoggingLevel.NONE)),
            "ALL": make(config(LoggingLevel.ALL)),
            "ALL, five percentiles": make(config(LoggingLevel.ALL, PERCENTILES)),
            "LOSSES, a sink that sleeps 200 ms": make(losses, slow, compiled=compiled),
            "LOSSES, JSON Lines and TensorBoard": make(losses, files, compiled=compiled),
            "LOSSES, with a stop_fn": make(losses, stop_fn=lambda steps: False, compiled=compiled),
        }
        for variant in variants.values():
            variant.run(2)
        rates: dict[str, list[float]] = {name: [] for name in variants}
        for number in range(options.rounds):
            names = list(variants)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                rates[name].append(variants[name].run(options.iterations))
    found = versions()
    print(
        f"{jax.devices()[0].device_kind}, " + ", ".join(f"{name} {found[name]}" for name in ("jax", "flax", "mujoco"))
    )
    print(f"{task.name}, {n_envs} environments x {losses.ppo.rollout_length} steps, {options.rounds} rounds")
    for name, values in rates.items():
        ratio = statistics.median(a / b for a, b in zip(values, rates["LOSSES"], strict=True))
        print(f"{name:<36} {statistics.median(values):>12,.0f} steps/s   {ratio:.3f} of LOSSES")
    return 0


if __name__ == "__main__":
    sys.exit(main())
