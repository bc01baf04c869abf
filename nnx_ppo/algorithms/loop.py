"""The host loop that every algorithm shares: step, due actions, log, stop.

The loop never waits for the device to learn what it can compute itself, such as the step count. An iteration's
metrics come in one transfer, after the next iteration has been dispatched (unless a `stop_fn` must see them first, or
a checkpoint was written).
"""

import contextlib
import functools
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_ppo.algorithms import rollout
from nnx_ppo.algorithms.compilation import compile_programs
from nnx_ppo.algorithms.config import EvalConfig, LoggingLevel, TrainConfig
from nnx_ppo.algorithms.devices import (
    any_process,
    copy_arrays,
    gather,
    replicate,
    spans_processes,
    spread_state,
    to_default_device,
)
from nnx_ppo.algorithms.keys import Stream, stream_key
from nnx_ppo.algorithms.metrics import Packed, Part, evaluation_metrics, merged, pack, throughput, unpack
from nnx_ppo.algorithms.types import LogFn, NonFiniteEpisode, StopFn, TrainingState, TrainResult, VideoData
from nnx_ppo.algorithms.video_recorder import VideoRecorder
from nnx_ppo.networks import functional
from nnx_ppo.networks.types import StatefulModule


class NonFiniteError(FloatingPointError):
    """Training met non-finite gradients too often in a row; the parameters are the last good ones."""


@dataclass(frozen=True)
class Programs:
    """What an algorithm brings to the loop."""

    train: Callable[[TrainingState], tuple[TrainingState, dict[str, Any]]]
    """One iteration, pure: compiled here, with its argument donated."""
    eval_env: Any
    steps_per_iteration: int
    total_steps: int
    max_skipped_updates: int
    nonfinite_names: tuple[str, ...]
    """What `TrainingState.nonfinite_source` counts."""


@dataclass
class Action:
    """Something the loop does now and then: evaluate, record, save."""

    name: str
    every_steps: int
    run: Callable[[TrainingState, int], "list[Part]"]
    at_end: bool = True
    """Whether it always happens after the last iteration too."""
    last_steps: int = -1
    """The step count it last ran at."""

    def __call__(self, state: TrainingState, steps: int) -> "list[Part]":
        """Run it; returns its metrics."""
        self.last_steps = steps
        return self.run(state, steps)

    def due(self, steps: int, before: int) -> bool:
        """Whether the step count crossed a multiple of `every_steps`."""
        return self.every_steps > 0 and steps // self.every_steps > before // self.every_steps


def run_training(
    programs: Programs,
    config: TrainConfig,
    state: TrainingState,
    networks: StatefulModule,
    *,
    resumed: bool,
    log_fn: LogFn | None,
    video_fn: Callable[[VideoData], object] | None,
    checkpoint_fn: Callable[[TrainingState, int], object] | None,
    stop_fn: StopFn | None,
    first_state: Callable[[], TrainingState] | None = None,
    nonfinite_fn: Callable[[NonFiniteEpisode], object] | None = None,
) -> TrainResult:
    """Train to the end; whatever happens, `networks` holds the latest parameters afterwards.

    With `first_state` the state is what that returns, worked out while the programs are being compiled; `state` then
    only describes its shapes.
    """
    loop = TrainingLoop(programs, config, state, log_fn, video_fn, checkpoint_fn, stop_fn, first_state, nonfinite_fn)
    try:
        return loop.run(resumed)
    except BaseException:
        # The iteration before the failure was finished, or all but: its record is not to be lost with the failed one.
        with contextlib.suppress(Exception):
            loop.flush()
        if hasattr(checkpoint_fn, "abandon"):
            checkpoint_fn.abandon()  # type: ignore[union-attr]
        raise
    finally:
        # An iteration that failed on the device has consumed its state: what the caller has is all there is then.
        if not any(leaf.is_deleted() for leaf in jax.tree.leaves((loop.state.params, loop.state.variables))):
            nnx.update(networks, *to_default_device((loop.state.params, loop.state.variables)))
        if hasattr(checkpoint_fn, "wait"):
            checkpoint_fn.wait()  # type: ignore[union-attr]
        loop.close()


class TrainingLoop:
    """Holds the latest state and what is due when."""

    def __init__(
        self,
        programs: Programs,
        config: TrainConfig,
        state: TrainingState,
        log_fn: LogFn | None,
        video_fn: Callable[[VideoData], object] | None,
        checkpoint_fn: Callable[[TrainingState, int], object] | None,
        stop_fn: StopFn | None,
        first_state: Callable[[], TrainingState] | None = None,
        nonfinite_fn: Callable[[NonFiniteEpisode], object] | None = None,
    ):
        self.nonfinite_fn = nonfinite_fn
        self.programs, self.config = programs, config
        self.log_fn, self.video_fn, self.checkpoint_fn, self.stop_fn = log_fn, video_fn, checkpoint_fn, stop_fn
        # Of several processes each computes the same, and one of them tells.
        self.tells = jax.process_index() == 0 or not spans_processes()
        self.timed = LoggingLevel.THROUGHPUT in config.ppo.logging_level
        self.eval_history: list[dict[str, Any]] = []
        self.final_metrics: dict[str, Any] = {}
        self.pending: Pending | None = None
        self.video_recorder = self._make_video_recorder(state)
        self.actions = self._make_actions()
        self.compiling_since: float | None = time.perf_counter()
        self.compiled = compile_programs(self._programs(state))
        # An iteration consumes its argument; what the caller holds (a state, a network) must outlive it.
        self.state = copy_arrays(first_state() if first_state else state)
        self.steps = self.state.steps_taken
        self.first_iteration = self.iteration = int(self.state.iteration)
        self.nonfinite_steps = int(self.state.nonfinite_steps)

    def run(self, resumed: bool) -> TrainResult:
        """The start, the iterations, the end."""
        if not resumed:
            self._start()
        while self.steps < self.programs.total_steps:
            self._iterate()
            if self._asked_to_stop():
                self.flush()
                self._end_early()
                break
        self._record_start()
        self.flush()
        return TrainResult(
            self.state, self.final_metrics, self.eval_history, self.steps, self.iteration - self.first_iteration
        )

    def close(self) -> None:
        """Finish the videos that are being drawn."""
        if self.video_recorder is not None:
            self.video_recorder.close()

    def _asked_to_stop(self) -> bool:
        if self.stop_fn is None:
            return False
        # What it answers may depend on what log_fn is about to see, unless it says that it does not.
        if getattr(self.stop_fn, "reads_metrics", True):
            self.flush()
        return any_process(self.stop_fn(self.steps))

    def _start(self) -> None:
        parts: list[Part] = []
        for action in self.actions:
            if action.every_steps > 0:
                parts += action(self.state, self.steps)
        if any(action.name in ("evaluation", "video") and action.every_steps > 0 for action in self.actions):
            self.pending = Pending(self.steps, None, parts)
            self.flush()
        self._commit_checkpoint()

    def _commit_checkpoint(self) -> None:
        """A run that is killed and resumed does not repeat what came before: its records are out, it may be used."""
        if self.tells and hasattr(self.checkpoint_fn, "commit"):
            self.checkpoint_fn.commit()  # type: ignore[union-attr]

    def _iterate(self) -> None:
        self._record_start(wait=False)
        compile_time = self._compile_time() if self.timed else {}
        started = time.perf_counter()
        self.state, packed = self.compiled["training"].result()(self.state)
        self.flush()
        if self.video_recorder is not None and self.iteration > self.first_iteration:
            self.video_recorder.compile()
        before, self.steps = self.steps, self.steps + self.programs.steps_per_iteration
        self.iteration += 1
        self.pending = Pending(self.steps, packed, [compile_time])
        if self.timed:
            jax.block_until_ready(packed)
            seconds = time.perf_counter() - started
            self.pending.parts.append(throughput("train", self.programs.steps_per_iteration, seconds))
        last = self.steps >= self.programs.total_steps
        saved = False
        for action in self.actions:
            if action.due(self.steps, before) or (last and action.at_end and action.every_steps > 0):
                self.pending.parts += action(self.state, self.steps)
                saved |= action.name == "checkpoint"
        if saved:
            self.flush()
            self._commit_checkpoint()

    def _compile_time(self) -> dict[str, float]:
        """Seconds until every program was there; told once."""
        if self.compiling_since is None:
            return {}
        for compiled in self.compiled.values():
            compiled.result()
        seconds, self.compiling_since = time.perf_counter() - self.compiling_since, None
        return {"time/compile_s": seconds}

    def _end_early(self) -> None:
        """A stop was asked for: save first, because whoever asked may not wait; then evaluate once more."""
        for action in reversed(self.actions):
            if action.at_end and action.every_steps > 0 and action.last_steps != self.steps:
                metrics = merged(jax.device_get(action(self.state, self.steps)))
                self._commit_checkpoint()
                self.final_metrics |= metrics
                if action.name == "evaluation":
                    self.eval_history.append({"step": self.steps, **metrics})

    def flush(self) -> None:
        """Hand on the metrics of the iteration before, in one transfer."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        training, parts = jax.device_get((pending.training, pending.parts))
        metrics, health = unpack(training) if training is not None else ({}, {})
        metrics = merged([metrics, *parts])
        self.final_metrics = metrics
        if "eval/episode_reward/mean" in metrics:
            evaluation = {name: value for name, value in metrics.items() if name.startswith("eval/")}
            self.eval_history.append({"step": pending.steps, **evaluation})
        if self.log_fn is not None and self.tells:
            self.log_fn(dict(metrics), pending.steps)
        self._check_health(health, pending.steps)

    def _check_health(self, health: dict[str, Any], steps: int) -> None:
        if not health:
            return
        new, self.nonfinite_steps = (
            int(health["nonfinite_steps"]) - self.nonfinite_steps,
            int(health["nonfinite_steps"]),
        )
        if new:
            warnings.warn(
                f"{new} environment step(s) or reset(s) before step {steps:,} were not finite (NaN or infinity in "
                "observation, reward or state). Each such step counted as terminated with reward 0 and was restarted, "
                "each such initial state was replaced; the others are untouched. If this goes on, look at the "
                "environment: actions too strong, time step too long?",
                RuntimeWarning,
                stacklevel=2,
            )
            self._tell_of_nonfinite(health.get("replay"), steps)
        skipped = int(health["skipped_updates"])
        if skipped >= self.programs.max_skipped_updates:
            raise NonFiniteError(
                f"{skipped} updates in a row were skipped up to step {steps:,} because they were not finite; the first "
                f"such quantity was {self.programs.nonfinite_names[int(health['nonfinite_source'])]}. "
                "The parameters are the last good ones. A lower learning_rate, gradient_clipping or reward_scaling "
                "usually helps."
            )

    def _tell_of_nonfinite(self, replay: dict[str, Any] | None, steps: int) -> None:
        # A reset that was not finite counts too, but has no steps before it.
        if self.nonfinite_fn is None or replay is None or not replay["found"] or not self.tells:
            return
        when = int(replay["when"])
        begun = int(np.max(np.flatnonzero(replay["done"][:when]), initial=-1)) + 1
        of_episode = lambda tree: jax.tree.map(lambda x: np.asarray(x)[begun : when + 1], tree)
        episode = NonFiniteEpisode(
            steps, int(replay["env"]), of_episode(replay["records"]), of_episode(replay["actions"])
        )
        try:
            self.nonfinite_fn(episode)
        except Exception as error:
            warnings.warn(f"the non-finite episode was not kept: {type(error).__name__}: {error}", stacklevel=2)

    # --- actions ----------------------------------------------------------------------------------------------

    def _make_actions(self) -> list[Action]:
        config = self.config
        actions = []
        if config.eval.enabled:
            actions.append(Action("evaluation", config.eval.every_steps, self._evaluate))
        if self.video_recorder is not None:
            actions.append(Action("video", config.video.every_steps, self._record, at_end=False))
        if self.checkpoint_fn is not None:
            actions.append(Action("checkpoint", config.checkpoint_every_steps, self._save))
        return actions

    def _make_video_recorder(self, state: TrainingState) -> VideoRecorder | None:
        env, config = self.programs.eval_env, self.config.video
        if not config.enabled or config.every_steps <= 0:
            return None
        if self.video_fn is None:
            missing = "no video_fn was given (file_video_fn writes mp4 files, wandb_video_fn logs to W&B)"
        elif not callable(getattr(env, "render", None)):
            missing = f"{type(env).__name__} has no render method"
        else:
            graphdef = functional.evaluation_graphdef(state.graphdef, state.params, state.variables)
            network = (state.params, state.variables, state.rng_key)
            return VideoRecorder(env, config, graphdef, network, self.video_fn, self.tells, self.timed)
        print(f"No videos: video.enabled is set, but {missing}.", file=sys.stderr)
        return None

    def _programs(self, state: TrainingState) -> dict[str, Any]:
        """What to compile: name -> (jitted function, arguments or their shapes)."""
        programs: dict[str, Any] = {
            "training": (jax.jit(functools.partial(train_and_pack, self.programs.train), donate_argnums=0), (state,))
        }
        if any(action.name == "evaluation" and action.every_steps > 0 for action in self.actions):
            graphdef = functional.evaluation_graphdef(state.graphdef, state.params, state.variables)
            program = functools.partial(evaluate_and_pack, self.programs.eval_env, self.config.eval, graphdef)
            programs["evaluation"] = (jax.jit(program), (state.params, state.variables, state.rng_key))
        return programs

    def _key(self, stream: Stream) -> jax.Array:
        return stream_key(self.state.rng_key, stream, self.iteration)

    def _evaluate(self, state: TrainingState, steps: int) -> "list[Part]":
        program = self.compiled["evaluation"].result()  # May still be compiling, which is not evaluation's time.
        started = time.perf_counter()
        packed, env_steps = program(state.params, state.variables, self._key(Stream.EVALUATION))
        if not self.timed:
            return [packed]
        env_steps = int(env_steps)
        return [packed, throughput("eval", env_steps, time.perf_counter() - started)]

    def _record(self, state: TrainingState, steps: int) -> "list[Part]":
        assert self.video_recorder is not None
        network = (state.params, state.variables, self._key(Stream.VIDEO))
        # The first iteration does not wait for a video's program.
        if steps < self.programs.total_steps and self.iteration == self.first_iteration:
            self.video_recorder.postpone(network, steps)
            return []
        return self.video_recorder.record(network, steps)

    def _record_start(self, wait: bool = True) -> None:
        """The video that waits for its program since the start."""
        if self.video_recorder is not None:
            parts = self.video_recorder.record_postponed(wait)
            if self.pending is not None:
                self.pending.parts += parts

    def _save(self, state: TrainingState, steps: int) -> "list[Part]":
        assert self.checkpoint_fn is not None
        started = time.perf_counter()
        # A copy, because the next iteration consumes the state and the callback may keep what it was given.
        copy = copy_arrays(gather(state))
        if self.tells:
            self.checkpoint_fn(copy, steps)
        return [{"time/checkpoint_s": time.perf_counter() - started}] if self.timed else []


@dataclass
class Pending:
    """An iteration whose metrics have not been handed on yet."""

    steps: int
    training: Packed | None
    """Of metrics and health; None at the start."""
    parts: list[Part]
    """What else happened in it."""


def train_and_pack(
    step: Callable[[TrainingState], tuple[TrainingState, dict[str, Any]]], state: TrainingState
) -> tuple[TrainingState, Packed]:
    """An iteration; what the host is to know of it, metrics and health, comes as little as possible to transfer."""
    state, metrics = step(state)
    replay = {"replay": metrics.pop("replay")} if "replay" in metrics else {}
    health = replay | {
        "nonfinite_steps": state.nonfinite_steps,
        "skipped_updates": state.skipped_updates,
        "nonfinite_source": state.nonfinite_source,
    }
    return spread_state(state), replicate(pack((metrics, health)))


def evaluate_and_pack(
    env: Any, config: EvalConfig, graphdef: nnx.GraphDef, params: nnx.State, variables: nnx.State, key: jax.Array
) -> tuple[Packed, jax.Array]:
    """The metrics of an evaluation, and the environment steps that it took."""
    episodes = rollout.evaluate(env, config, graphdef, params, variables, key)
    return replicate((pack(evaluation_metrics(episodes, config.logging_percentiles)), jnp.sum(episodes.lifespan)))
