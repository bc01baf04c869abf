#!/usr/bin/env python
"""Where the time goes, measured side by side in one process. docs/performance.md explains the numbers.

    python scripts/benchmark.py iteration --env humanoid --physics native
    python scripts/benchmark.py iteration --env reach --n-envs 2048
    python scripts/benchmark.py iteration --env brax:ant --n-envs 128
    python scripts/benchmark.py seeds --env cartpole_balance --seeds 4
    python scripts/benchmark.py devices --env humanoid --physics jax --n-envs 256 --devices 2
    python scripts/benchmark.py memory --env humanoid

Rounds alternate between what is compared, so that whatever else the machine does meets all of it alike; printed are
medians over rounds. ENV is a task's name, `hopper` (Brax's model on this project's engines), `brax:NAME` (one of
Brax's environments, on MJX), or `reach`, a point in eight dimensions without physics, on which a trainer's own overhead
shows.
"""

import argparse
import dataclasses
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import tasks
from envs.base import MjxEnv
from envs.physics import Data
from nnx_ppo.algorithms import ppo, rollout
from nnx_ppo.algorithms.compilation import compile_program
from nnx_ppo.algorithms.config import EvalConfig, PPOConfig, TrainConfig
from nnx_ppo.algorithms.devices import split_cpu, use_devices
from nnx_ppo.algorithms.loop import train_and_pack
from nnx_ppo.algorithms.seeds import train_ppo_seeds
from nnx_ppo.algorithms.vectorize import vectorize
from nnx_ppo.loggers.provenance import versions
from nnx_ppo.networks.factories import make_mlp_actor_critic
from nnx_ppo.wrappers.episode_wrapper import EpisodeWrapper
from tasks.task import Task

# --- an environment without physics -----------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PointState:
    """What `Reach` returns."""

    obs: jax.Array
    reward: jax.Array
    done: jax.Array
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)

    def replace(self, **changes: Any) -> "PointState":
        """A copy with the given fields changed."""
        return dataclasses.replace(self, **changes)


class Reach:
    """A damped point that is pushed towards a random goal."""

    observation_size, action_size = 24, 8

    def reset(self, rng: jax.Array) -> PointState:
        """Point and goal at random."""
        point, goal = jax.random.normal(rng, (2, 8))
        return PointState(jnp.concatenate([point, jnp.zeros(8), goal]), jnp.zeros(()), jnp.zeros(()))

    def step(self, state: PointState, action: jax.Array) -> PointState:
        """Reward: minus the squared distance before the step. The episode ends ten units from the origin."""
        point, velocity, goal = jnp.split(state.obs, 3)
        velocity = 0.9 * velocity + 0.1 * action
        new = point + 0.1 * velocity
        far = jnp.any(jnp.abs(new) > 10).astype(jnp.float32)
        return state.replace(obs=jnp.concatenate([new, velocity, goal]), reward=-jnp.sum((point - goal) ** 2), done=far)


REACH = Task(
    name="reach",
    summary="A point in eight dimensions, without physics",
    make_env=lambda physics=None: EpisodeWrapper(Reach(), 1000),
    make_networks=lambda env, rngs: make_mlp_actor_critic(24, 8, [256, 256], [256, 256], rngs, activation="swish"),
    config=TrainConfig(ppo=PPOConfig(n_envs=256, rollout_length=20, n_epochs=4, n_minibatches=4, learning_rate=3e-4)),
)


class Hopper(MjxEnv):
    """Brax's hopper: a leg of three joints that hops along x, four physics steps to each of its own."""

    def __init__(self, physics: str | None = None):
        super().__init__(
            ("brax", "envs/assets/hopper.xml"),
            control_timestep=0.008,
            simulation_timestep=0.002,
            physics=physics,
            fields=("xpos",),
        )

    def initial_state(self, rng: jax.Array) -> Mapping[str, Any]:
        """Upright, a little disturbed."""
        model = self.mj_model
        noise = jax.random.uniform(rng, (model.nq + model.nv,), minval=-5e-3, maxval=5e-3)
        return {"qpos": model.qpos0 + noise[: model.nq], "qvel": noise[model.nq :]}

    def observe(self, data: Data) -> jax.Array:
        """Positions but for x, and velocities."""
        return jnp.concatenate([data.xpos[1, 2:], data.qpos[2:], jnp.clip(data.qvel, -10, 10)])

    def rewards(self, before: Data, data: Data, ctrl: jax.Array) -> Mapping[str, jax.Array]:
        """Speed, staying upright, effort."""
        speed = (data.xpos[1, 0] - before.xpos[1, 0]) / self.dt
        return {"forward": speed, "alive": jnp.ones(()), "control": -1e-3 * jnp.sum(ctrl**2)}

    def terminated(self, data: Data) -> jax.Array:
        """Too low, or leaning too far."""
        return (data.xpos[1, 2] < 0.7) | (jnp.abs(data.qpos[2]) > 0.2)


HOPPER = dataclasses.replace(
    REACH,
    name="hopper",
    summary="Brax's hopper on any of this project's engines",
    make_env=lambda physics=None: EpisodeWrapper(Hopper(physics), 1000),
    make_networks=lambda env, rngs: make_mlp_actor_critic(
        env.observation_size, env.action_size, [256, 256], [256, 256], rngs, activation="swish"
    ),
)


def brax_task(name: str) -> Task:
    """One of Brax's environments on MJX, with the networks and batches of `reach`."""
    from brax import envs

    env = EpisodeWrapper(envs.get_environment(name, backend="mjx"), 1000)
    # Brax's own property runs a reset without compiling it.
    size = jax.eval_shape(env.reset, jax.random.key(0)).obs.shape[-1]
    networks = lambda env, rngs: make_mlp_actor_critic(
        size, env.action_size, [256, 256], [256, 256], rngs, activation="swish"
    )
    return dataclasses.replace(REACH, name=name, make_env=lambda physics=None: env, make_networks=networks)


def load(options: argparse.Namespace) -> tuple[Task, Any, TrainConfig]:
    """The task, its environment, and a configuration that does nothing but train."""
    if options.env.startswith("brax:"):
        task = brax_task(options.env.removeprefix("brax:"))
    else:
        task = {"reach": REACH, "hopper": HOPPER}.get(options.env) or tasks.load_task(options.env)
    changes = {"n_envs": options.n_envs} if options.n_envs else {}
    config = TrainConfig(
        ppo=dataclasses.replace(task.config.ppo, **changes), eval=EvalConfig(enabled=False), checkpoint_every_steps=0
    )
    return task, task.make_env(options.physics), config


# --- parts of an iteration ------------------------------------------------------------------------------------


def iteration(options: argparse.Namespace) -> None:
    """What an iteration is made of, and what bounds it."""
    task, env, config = load(options)
    networks = task.make_networks(env, nnx.Rngs(0))
    describe(options, f"{task.name}, {config.ppo.n_envs} environments x {config.ppo.rollout_length}")
    with use_devices(ppo.default_devices(env, networks, config.ppo), config.ppo):
        seconds = seconds_of_parts(env, networks, config, options)
    seconds["in the training loop"] = seconds_of_loop(env, networks, config, options.rounds)
    batch = config.ppo.n_envs * config.ppo.rollout_length
    print(f"{'':<22}{'ms':>9}{'share':>9}{'steps/s if this were all':>27}")
    for name, value in seconds.items():
        alone = f"{batch / value:,.0f}" if value > 0 else ""
        print(f"{name:<22}{1e3 * value:>9.1f}{value / seconds['iteration']:>9.0%}{alone:>27}")


def seconds_of_parts(env: Any, networks: Any, config: TrainConfig, options: argparse.Namespace) -> dict[str, float]:
    """Median seconds of an iteration and of what it is made of, as programs of their own."""
    settings = config.ppo
    state = ppo.initial_training_state(env, networks, config)
    step = jax.jit(functools.partial(train_and_pack, functools.partial(ppo.ppo_step, env, settings)))
    step = compile_program(step, state)
    for _ in range(options.warm_up):
        state, _ = step(state)
    unroll = compile_program(jax.jit(functools.partial(rollout.unroll, env, settings)), state)
    after, transitions = unroll(state)
    estimate = compile_program(jax.jit(functools.partial(ppo.estimate_advantages, settings)), after, transitions)
    advantages, targets = estimate(after, transitions)
    batch = (after, state.network_states, transitions, advantages, targets)
    update = compile_program(jax.jit(functools.partial(ppo.update, settings)), *batch)
    actions = transitions.network_output.actions

    def environments(env_states: Any, actions: Any) -> Any:
        kept = rollout.kept_leaves(env, env_states, jax.tree.map(lambda x: x[0], actions))
        pool = rollout.empty_reset_pool(env_states, kept)

        def one_step(carry: Any, actions: Any) -> Any:
            env_states, pool = carry
            env_states = rollout.step(env, env_states, actions)
            outcome = rollout.read_outcome(env_states)
            return rollout.restart(env, pool, env_states, outcome.done, state.rng_key), outcome.rewards

        return jax.lax.scan(one_step, (env_states, pool), actions)

    physics = physics_alone(env, state.env_states, actions)
    parts: dict[str, Callable[[], Any]] = {
        "rollout": lambda: unroll(state),
        "  environments": functools.partial(
            compile_program(jax.jit(environments), state.env_states, actions), state.env_states, actions
        ),
        **({"    physics": physics} if physics else {}),
        "advantages": lambda: estimate(after, transitions),
        "updates": lambda: update(*batch),
        "iteration": lambda: step(state),
    }
    seconds = side_by_side(parts, options.rounds)
    whole = seconds.pop("iteration")
    seconds["statistics, metrics"] = whole - sum(seconds[name] for name in ("rollout", "advantages", "updates"))
    return seconds | {"iteration": whole}


def physics_alone(env: Any, env_states: Any, actions: jax.Array) -> Callable[[], Any] | None:
    """The steps of the physics engine of one of our environments, with nothing around it."""
    physics, substeps = getattr(env, "physics", None), getattr(env, "n_substeps", None)
    if physics is None or substeps is None:
        return None

    def one_step(data: Any, ctrl: jax.Array) -> Any:
        return vectorize(lambda data, ctrl: physics.step(data, ctrl, substeps), data, ctrl), None

    arguments = (env_states.data, actions)
    return functools.partial(
        compile_program(jax.jit(lambda *args: jax.lax.scan(one_step, *args)), *arguments), *arguments
    )


def seconds_of_loop(env: Any, networks: Any, config: TrainConfig, rounds: int) -> float:
    """Median seconds between the records of `train_ppo`."""
    marks: list[float] = []
    steps = (rounds + 4) * config.ppo.n_envs * config.ppo.rollout_length
    log_fn = lambda metrics, steps: marks.append(time.perf_counter())
    ppo.train_ppo(env, networks, config, total_steps=steps, log_fn=log_fn)
    return gap(marks[2:])


def gap(marks: list[float]) -> float:
    """Median seconds from one mark to the next."""
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(marks))


def side_by_side(parts: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each part; each is called once before, to compile."""
    for part in parts.values():
        jax.block_until_ready(part())
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    names = list(parts)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            started = time.perf_counter()
            jax.block_until_ready(parts[name]())
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


# --- many seeds, many devices ---------------------------------------------------------------------------------


def seeds(options: argparse.Namespace) -> None:
    """Several seeds in one program beside as many runs one after another; compiling counts."""
    task, env, config = load(options)
    iterations = options.rounds * options.iterations
    steps = iterations * config.ppo.n_envs * config.ppo.rollout_length
    config = dataclasses.replace(config, ppo=dataclasses.replace(config.ppo, total_steps=steps))
    numbers = range(options.seeds)

    def together(log_fn: Any) -> None:
        train_ppo_seeds(env, task.make_networks, config, numbers, log_fn=log_fn)

    def one_after_another(log_fn: Any) -> None:
        for seed in numbers:
            ppo.train_ppo(env, task.make_networks(env, nnx.Rngs(seed)), config, seed=seed, log_fn=log_fn)

    describe(options, f"{task.name}, {options.seeds} seeds, {iterations} iterations each")
    for name, run in (("one program", together), ("one after another", one_after_another)):
        marks: list[float] = []
        started = time.perf_counter()
        run(lambda metrics, steps, marks=marks: marks.append(time.perf_counter()))
        whole = time.perf_counter() - started
        done = options.seeds if run is together else 1
        rate = done * config.ppo.n_envs * config.ppo.rollout_length / gap(marks)
        first = marks[0] - started
        print(f"{name:<20}{whole:>8.1f} s in all{first:>8.1f} s to the first record{rate:>12,.0f} steps/s")


def devices(options: argparse.Namespace) -> None:
    """One device beside several."""
    if len(jax.devices()) < options.devices:
        raise SystemExit(f"--devices {options.devices}: JAX sees {len(jax.devices())}.")
    task, env, config = load(options)
    describe(options, f"{task.name}, {config.ppo.n_envs} environments x {config.ppo.rollout_length}")
    for count in (1, options.devices):
        marks: list[float] = []
        steps = (options.rounds + 3) * config.ppo.n_envs * config.ppo.rollout_length
        started = time.perf_counter()
        ppo.train_ppo(
            env,
            task.make_networks(env, nnx.Rngs(0)),
            config,
            total_steps=steps,
            log_fn=lambda metrics, steps, marks=marks: marks.append(time.perf_counter()),
            devices=jax.devices()[:count],
        )
        rate = config.ppo.n_envs * config.ppo.rollout_length / gap(marks[1:])
        print(f"{count} device(s){marks[0] - started:>8.1f} s to the first record{rate:>12,.0f} steps/s")


# --- memory ---------------------------------------------------------------------------------------------------


def memory(options: argparse.Namespace) -> None:
    """Bytes on the device: of the state, of a rollout, and at most at once in an iteration."""
    task, env, config = load(options)
    settings, batch = config.ppo, config.ppo.n_envs * config.ppo.rollout_length
    state = ppo.initial_training_state(env, task.make_networks(env, nnx.Rngs(0)), config)
    transitions = jax.eval_shape(functools.partial(rollout.unroll, env, settings), state)[1]
    step = functools.partial(train_and_pack, functools.partial(ppo.ppo_step, env, settings))
    found = jax.jit(step, donate_argnums=0).lower(state).compile().memory_analysis()
    describe(options, f"{task.name}, {settings.n_envs} environments x {settings.rollout_length}")
    size = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    for name, tree, count in (
        ("an environment's state", (state.env_states, state.network_states), settings.n_envs),
        ("parameters, optimizer", (state.params, state.optimizer), 1),
        ("a step of the rollout", transitions, batch),
    ):
        print(f"{name:<28}{size(tree) / count:>14,.0f} bytes")
    if found is not None:
        peak = found.temp_size_in_bytes + found.argument_size_in_bytes
        print(f"{'an iteration, at most':<28}{peak:>14,.0f} bytes")


# --- the command line -----------------------------------------------------------------------------------------


def describe(options: argparse.Namespace, what: str) -> None:
    """What the numbers below are of."""
    found = versions()
    names = ("jax", "flax", "mujoco", "mujoco-mjx")
    print(f"{jax.devices()[0].device_kind}, " + ", ".join(f"{name} {found[name]}" for name in names if name in found))
    physics = f", physics {options.physics}" if options.physics else ""
    print(f"{what}{physics}, {options.rounds} rounds")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = {"iteration": iteration, "seeds": seeds, "devices": devices, "memory": memory}
    parser.add_argument("mode", choices=modes, help="what is compared")
    parser.add_argument("--env", default="reach", help="a task's name, hopper, brax:NAME or reach")
    parser.add_argument("--physics", default=None, choices=("native", "jax", "warp"))
    parser.add_argument("--n-envs", type=int, default=None, help="instead of the task's")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--warm-up", type=int, default=20, help="iterations before parts are timed")
    parser.add_argument("--iterations", type=int, default=1, help="of each seed, times rounds")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--devices", type=int, default=2)
    options = parser.parse_args(arguments)
    if options.mode == "devices":
        split_cpu(options.devices)
    modes[options.mode](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
