"""Several seeds at once: one program trains them all, each as `train_ppo` would train it alone.

The curve of a single seed says little (Henderson et al. 2018); a handful, compiled once and stepped together, costs
less than as many runs one after another.
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_ppo.algorithms.compilation import compile_programs
from nnx_ppo.algorithms.config import TrainConfig
from nnx_ppo.algorithms.keys import Stream, run_key, stream_key
from nnx_ppo.algorithms.loop import evaluate_and_pack, train_and_pack
from nnx_ppo.algorithms.metrics import Packed, unpack
from nnx_ppo.algorithms.ppo import first_training_state, ppo_step
from nnx_ppo.algorithms.types import LogFn, RLEnv, StopFn, TrainingState
from nnx_ppo.algorithms.vectorize import many_seeds
from nnx_ppo.networks import functional
from nnx_ppo.networks.types import StatefulModule


@dataclass
class SeedsResult:
    """What `train_ppo_seeds` returns; every array has a leading axis [seed]."""

    seeds: tuple[int, ...]
    training_states: TrainingState
    final_metrics: dict[str, np.ndarray]
    """The metrics of the last iteration, each [seed]."""
    eval_steps: np.ndarray
    """Environment steps of a seed before each evaluation, [evaluation]."""
    eval_history: dict[str, np.ndarray]
    """The `eval/...` metrics, each [seed, evaluation]."""
    total_steps: int
    """Environment steps of each seed."""
    total_iterations: int

    def training_state(self, seed: int) -> TrainingState:
        """The state of one seed, as a run of its own would have left it.

        Raises:
          ValueError: that seed was not trained.
        """
        if seed not in self.seeds:
            raise ValueError(f"seed {seed} was not trained; these were: {', '.join(map(str, self.seeds))}.")
        row = self.seeds.index(seed)
        return jax.tree.map(lambda x: x[row], self.training_states)


def train_ppo_seeds(
    env: RLEnv,
    make_networks: Callable[[Any, nnx.Rngs], StatefulModule],
    config: TrainConfig | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    *,
    log_fn: LogFn | None = None,
    eval_env: RLEnv | None = None,
    stop_fn: StopFn | None = None,
) -> SeedsResult:
    """Train one network for each seed, all in one program.

    Seed `s` does what `train_ppo(env, make_networks(env, nnx.Rngs(s)), config, seed=s)` does, up to rounding. A seed
    whose updates are not finite keeps its last good parameters, with a warning; the others do not notice. Videos,
    checkpoints and times are for single runs: save what `SeedsResult.training_state` returns.

    Args:
      env: the environment.
      make_networks: builds a network for (environment, random streams), as `Task.make_networks` does.
      config: the configuration; its seed is not used. None takes every default.
      seeds: the seeds, all different.
      log_fn: called once per iteration with the metrics, each an array [seed], and the environment steps so far of
        each seed; once before the first iteration if there was an evaluation.
      eval_env: the environment for evaluation; None takes `env`.
      stop_fn: asked after each iteration with the environment steps; True ends all seeds.

    Raises:
      ValueError: no seeds, or one twice, or `make_networks` builds different networks for different seeds.
    """
    config, seeds = config or TrainConfig(), tuple(int(seed) for seed in seeds)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds={seeds}: at least one is accepted, and each only once.")
    evaluates = config.eval.enabled and config.eval.every_steps > 0
    with many_seeds(len(seeds)):
        state = _first_states(env, make_networks, config, seeds)
        programs = _programs(env, eval_env if eval_env is not None else env, config, state, evaluates)
        compiled = compile_programs(programs)
    return _Run(config, seeds, state, compiled, evaluates, log_fn, stop_fn).run()


def _first_states(
    env: RLEnv, make_networks: Callable[[Any, nnx.Rngs], StatefulModule], config: TrainConfig, seeds: tuple[int, ...]
) -> TrainingState:
    splits = [functional.split(functional.build(lambda s=s: make_networks(env, nnx.Rngs(s)))) for s in seeds]
    graphdefs = [functional.training_graphdef(*parts) for parts in splits]
    # Not by their graphdefs: a function that make_networks defines anew for each network makes those differ.
    shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(parts[1:])] for parts in splits]
    structures = [jax.tree.structure(parts[1:]) for parts in splits]
    if any(each != shapes[0] for each in shapes) or any(each != structures[0] for each in structures):
        raise ValueError("make_networks builds a different network for each seed; only its random numbers may differ.")
    params, variables = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(parts[1:] for parts in splits))
    keys = jnp.stack([run_key(seed) for seed in seeds])
    first = functools.partial(first_training_state, env, config.ppo, graphdefs[0])
    return jax.jit(jax.vmap(first))(keys, params, variables)


def _programs(env: RLEnv, eval_env: RLEnv, config: TrainConfig, state: TrainingState, evaluates: bool) -> dict:
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state)
    step = functools.partial(train_and_pack, functools.partial(ppo_step, env, config.ppo))
    programs: dict[str, Any] = {"training": (jax.jit(jax.vmap(step), donate_argnums=0), (state,))}
    if evaluates:
        graphdef = functional.evaluation_graphdef(state.graphdef, one.params, one.variables)
        evaluate = jax.vmap(functools.partial(evaluate_and_pack, eval_env, config.eval, graphdef))
        programs["evaluation"] = (jax.jit(evaluate), (state.params, state.variables, state.rng_key))
    return programs


class _Run:
    """The loop: step, evaluate when due, log; metrics come in one transfer, after the next iteration was dispatched."""

    def __init__(
        self,
        config: TrainConfig,
        seeds: tuple[int, ...],
        state: TrainingState,
        compiled: Mapping[str, Future],
        evaluates: bool,
        log_fn: LogFn | None,
        stop_fn: StopFn | None,
    ):
        self.config, self.seeds, self.state, self.compiled = config, seeds, state, compiled
        self.evaluates, self.log_fn, self.stop_fn = evaluates, log_fn, stop_fn
        self.iteration = self.steps = 0
        self.pending: tuple[int, list[Packed]] | None = None
        self.final_metrics: dict[str, np.ndarray] = {}
        self.evaluations: list[tuple[int, dict[str, np.ndarray]]] = []
        self.told: set[tuple[str, int]] = set()

    def run(self) -> SeedsResult:
        """Everything from the first evaluation to the result."""
        if self.evaluates:
            self.pending = (0, [self._evaluate()])
        while self.steps < self.config.ppo.total_steps:
            self._iterate()
            if self.stop_fn is not None:
                self._flush()
                if self.stop_fn(self.steps):
                    self._evaluate_once_more()
                    break
        self._flush()
        names = self.evaluations[0][1] if self.evaluations else ()
        return SeedsResult(
            self.seeds,
            self.state,
            self.final_metrics,
            np.array([steps for steps, _ in self.evaluations], np.int64),
            {name: np.stack([found[name] for _, found in self.evaluations], axis=1) for name in names},
            self.steps,
            self.iteration,
        )

    def _iterate(self) -> None:
        self.state, packed = self.compiled["training"].result()(self.state)
        self._flush()
        config = self.config
        before, self.steps = self.steps, self.steps + config.ppo.n_envs * config.ppo.rollout_length
        self.iteration += 1
        parts = [packed]
        if self.evaluates:
            due = self.steps // config.eval.every_steps > before // config.eval.every_steps
            parts += [self._evaluate()] if due or self.steps >= config.ppo.total_steps else []
        self.pending = (self.steps, parts)

    def _evaluate(self) -> Packed:
        key = jax.vmap(functools.partial(stream_key, stream=Stream.EVALUATION, counter=self.iteration))
        program = self.compiled["evaluation"].result()
        return program(self.state.params, self.state.variables, key(self.state.rng_key))[0]

    def _evaluate_once_more(self) -> None:
        """The last evaluation of a run that was stopped."""
        if self.evaluates and self.evaluations[-1][0] != self.steps:
            metrics = unpack(jax.device_get(self._evaluate()))
            self.final_metrics |= metrics
            self.evaluations.append((self.steps, metrics))

    def _flush(self) -> None:
        if self.pending is None:
            return
        (steps, parts), self.pending = self.pending, None
        metrics: dict[str, np.ndarray] = {}
        for tree in map(unpack, jax.device_get(parts)):
            found, health = tree if isinstance(tree, tuple) else (tree, {})
            metrics |= found
            self._tell_of(health, steps)
        self.final_metrics = metrics
        if "eval/episode_reward/mean" in metrics:
            found = {name: value for name, value in metrics.items() if name.startswith("eval/")}
            self.evaluations.append((steps, found))
        if self.log_fn is not None:
            self.log_fn(dict(metrics), steps)

    def _tell_of(self, health: dict[str, np.ndarray], steps: int) -> None:
        limits = {
            "nonfinite_steps": (1, "had environment steps or initial states that were not finite"),
            "skipped_updates": (self.config.ppo.max_skipped_updates, "skips its updates, because they are not finite"),
        }
        for name, (limit, trouble) in limits.items() if health else ():
            for seed, count in zip(self.seeds, health[name], strict=True):
                if count >= limit and (name, seed) not in self.told:
                    self.told.add((name, seed))
                    warnings.warn(f"seed {seed} {trouble}; seen at step {steps:,}, said once", RuntimeWarning, 2)
