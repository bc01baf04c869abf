"""Environments over several devices and in chunks: the same numbers, and each device steps only its share."""

import dataclasses
import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from probe_envs import (
    Counter,
    Readout,
    assert_same_bits,
    assert_same_up_to_rounding,
    recurrent_actor_critic,
    two_arm_network,
)
from probe_envs import TwoArms as TwoArmsEnv

from envs import physics
from envs.cartpole import CartpoleSwingup
from nnx_ppo.algorithms import ppo, rollout
from nnx_ppo.algorithms import vectorize as vectorize_module
from nnx_ppo.algorithms.checkpointing import load_checkpoint, make_checkpoint_fn
from nnx_ppo.algorithms.config import EvalConfig, PPOConfig, TrainConfig
from nnx_ppo.algorithms.devices import spread, use_devices
from nnx_ppo.algorithms.jaxprs import equations, has_open_loop
from nnx_ppo.algorithms.optimizer import new_optimizer_state
from nnx_ppo.algorithms.ppo import default_devices, initial_training_state, ppo_step, train_ppo
from nnx_ppo.algorithms.seeds import train_ppo_seeds
from nnx_ppo.algorithms.vectorize import in_chunks, vectorize
from nnx_ppo.networks import functional
from nnx_ppo.networks.factories import make_mlp_actor_critic
from nnx_ppo.wrappers.episode_wrapper import EpisodeWrapper
from tasks.registry import load_task

PPO = PPOConfig(n_envs=8, rollout_length=5, n_minibatches=2, n_epochs=2, total_steps=120, learning_rate=1e-3)
CONFIG = TrainConfig(ppo=PPO, eval=EvalConfig(n_envs=4, every_steps=40, max_episode_length=9), checkpoint_every_steps=0)


def mlp(env):
    return make_mlp_actor_critic(env.observation_size, env.action_size, [8], [8], nnx.Rngs(0), normalize_obs=True)


def recurrent(env):
    return recurrent_actor_critic(env.observation_size, env.action_size, nnx.Rngs(0))


class Remembering(Readout):
    """Keeps a moving mean of what it sees, in the loss too."""

    def __init__(self, rngs=None):
        super().__init__(0.5)
        self.seen = nnx.BatchStat(jnp.zeros(2))

    def __call__(self, state, obs, rollout_extras=None):
        mean = jnp.mean(obs.reshape(-1, obs.shape[-1]), axis=0)
        self.seen.set_value(0.9 * self.seen.get_value() + 0.1 * mean)
        return super().__call__(state, obs, rollout_extras)


CASES = {
    "statistics of rows": (lambda: EpisodeWrapper(Counter(4, random_length=True), 3), lambda env: Remembering()),
    "native physics": (lambda: EpisodeWrapper(CartpoleSwingup(physics="native"), 7), mlp),
    "restarts": (lambda: EpisodeWrapper(Counter(4, random_length=True), 3), mlp),
    "recurrent": (lambda: EpisodeWrapper(Counter(4, random_length=True), 3), recurrent),
    "several rewards": (lambda: EpisodeWrapper(TwoArmsEnv(), 7), lambda env: two_arm_network(nnx.Rngs(0))),
}


@pytest.mark.parametrize(
    "case",
    [
        "statistics of rows",
        "native physics",
        "restarts",
        pytest.param("recurrent", marks=pytest.mark.slow),
        "several rewards",
    ],
)
def test_two_devices_train_to_the_same_numbers_as_one(case):
    make_env, make_network = CASES[case]
    env, records = make_env(), {}
    results = {}
    for n_devices in (1, 2):
        records[n_devices] = []
        results[n_devices] = train_ppo(
            env,
            make_network(env),
            CONFIG,
            log_fn=lambda metrics, steps, n=n_devices: records[n].append(metrics),
            devices=jax.devices()[:n_devices],
        )
    one, two = (results[n].training_state for n in (1, 2))
    assert_same_up_to_rounding((two.params, two.variables), (one.params, one.variables))
    for a, b in zip(jax.tree.leaves(one.env_states.obs), jax.tree.leaves(two.env_states.obs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=2e-3)
    assert len(records[1]) == len(records[2]) == 4
    for before, after in zip(records[1], records[2], strict=True):
        assert before.keys() == after.keys()
        for name in before:
            np.testing.assert_allclose(after[name], before[name], rtol=1e-2, atol=1e-4, err_msg=name)


def test_each_device_holds_its_share_of_the_environments_and_all_of_the_parameters():
    env = EpisodeWrapper(Counter(4), 3)
    state = train_ppo(env, mlp(env), CONFIG, devices=jax.devices()).training_state
    for leaf in jax.tree.leaves((state.params, state.optimizer)):
        assert [shard.data.shape for shard in leaf.addressable_shards] == [leaf.shape] * 2
    for leaf in jax.tree.leaves(state.env_states):
        assert [shard.data.shape for shard in leaf.addressable_shards] == [(4, *leaf.shape[1:])] * 2


def test_each_device_asks_the_native_engine_for_its_share_only(monkeypatch):
    rows = []
    run = physics._Engine.run

    def counted(self, n_substeps, state, ctrl, new_state, derived):
        rows.append(len(new_state))
        run(self, n_substeps, state, ctrl, new_state, derived)

    monkeypatch.setattr(physics._Engine, "run", counted)
    env = EpisodeWrapper(CartpoleSwingup(physics="native"), 1000)
    config = TrainConfig(ppo=PPO, eval=EvalConfig(enabled=False), checkpoint_every_steps=0)
    train_ppo(env, mlp(env), config, devices=jax.devices())
    assert set(rows) == {4}
    steps_and_reset = PPO.total_steps // PPO.n_envs + 1
    assert len(rows) >= 2 * steps_and_reset


def test_a_run_on_two_devices_continues_to_the_bit():
    env = EpisodeWrapper(Counter(4, random_length=True), 3)
    whole = train_ppo(env, mlp(env), CONFIG, devices=jax.devices())
    half = train_ppo(env, mlp(env), CONFIG, devices=jax.devices(), total_steps=80).training_state
    rest = train_ppo(env, mlp(env), CONFIG, devices=jax.devices(), initial_state=half)
    assert_same_bits(rest.training_state, whole.training_state)


def test_a_checkpoint_of_two_devices_is_read_and_continued_to_the_bit(tmp_path):
    env, config = (
        EpisodeWrapper(Counter(4, random_length=True), 3),
        dataclasses.replace(CONFIG, checkpoint_every_steps=40),
    )
    save = make_checkpoint_fn(tmp_path, config, keep=None)
    whole = train_ppo(env, mlp(env), config, devices=jax.devices(), checkpoint_fn=save)
    network = mlp(env)
    empty = new_optimizer_state(PPO, functional.split(network)[1])
    state = load_checkpoint(tmp_path / "step_0000000080", network, empty)["training_state"]
    rest = train_ppo(env, network, config, devices=jax.devices(), initial_state=state)
    assert_same_bits(rest.training_state, whole.training_state)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((0, 1), None),
        ((1,), (0, 1)),
        pytest.param((0, 1), (1,), marks=pytest.mark.slow),
        pytest.param((0,), (0, 1), marks=pytest.mark.slow),
        pytest.param((1,), None, marks=pytest.mark.slow),
    ],
)
def test_network_and_state_of_a_run_go_on_on_other_devices(first, second):
    env, network = EpisodeWrapper(CartpoleSwingup(physics="native"), 7), None
    network = mlp(env)
    devices = lambda numbers: None if numbers is None else [jax.devices()[n] for n in numbers]
    half = train_ppo(env, network, CONFIG, devices=devices(first), total_steps=80)
    expected = [jax.devices()[n] for n in second or (0,)]
    for options in ({"initial_state": half.training_state}, {"total_steps": 40}):
        on = train_ppo(env, network, CONFIG, devices=devices(second), **options)
        for leaf in jax.tree.leaves((on.training_state.params, on.training_state.env_states.obs)):
            assert leaf.devices() == set(expected)
    assert all(leaf.devices() == {expected[0]} for leaf in jax.tree.leaves(functional.split(network)[1]))


def test_environments_that_cannot_be_shared_out_are_refused_with_a_number_that_can():
    env = EpisodeWrapper(Counter(4), 3)
    config = TrainConfig(ppo=PPOConfig(n_envs=7, n_minibatches=1))
    with pytest.raises(ValueError, match=r"n_envs=7 .* among 2 devices.*n_envs=8"):
        train_ppo(env, mlp(env), config, devices=jax.devices())
    with pytest.raises(ValueError, match=r"devices=\[\]: give at least one"):
        train_ppo(env, mlp(env), config, devices=[])


def test_a_single_device_that_is_not_the_default_one_is_used():
    env = EpisodeWrapper(Counter(4), 3)
    state = train_ppo(env, mlp(env), CONFIG, devices=jax.devices()[1:]).training_state
    assert {device for leaf in jax.tree.leaves(state) for device in leaf.devices()} == {jax.devices()[1]}


# --- chunks ---------------------------------------------------------------------------------------------------


def newton_root(x):
    """The square root of x, by a loop that runs until it has converged."""
    step = lambda loop: (0.5 * (loop[0] + x / loop[0]), loop[0])
    return jax.lax.while_loop(lambda loop: jnp.abs(loop[0] - loop[1]) > 1e-6 * loop[0], step, (x, 2 * x))[0]


@pytest.mark.parametrize(("n_envs", "lanes", "widths"), [(12, 4, {4}), (11, 4, {4}), (9, 4, {3}), (3, 2, {2})])
def test_chunks_are_equal_not_wider_than_asked_and_give_what_all_at_once_gives(n_envs, lanes, widths):
    seen = set()

    def function(tree, y):
        seen.add(y.shape[0])
        return {"root": jax.vmap(newton_root)(tree["x"]), "sum": tree["x"] + y.sum(1)}

    x, y = jnp.arange(1.0, n_envs + 1), jnp.arange(2.0 * n_envs).reshape(n_envs, 2)
    found = in_chunks(function, ({"x": x}, y), n_envs, lanes)
    assert seen == widths
    np.testing.assert_allclose(found["root"], np.sqrt(np.arange(1.0, n_envs + 1)), rtol=1e-6)
    np.testing.assert_allclose(found["sum"], x + y.sum(1))


def test_only_a_loop_with_an_open_end_counts_also_inside_of_other_functions():
    scanned = lambda x: jax.lax.fori_loop(0, 5, lambda i, y: y + x, x)
    nested = jax.jit(lambda x: jax.lax.cond(x > 0, newton_root, lambda x: x, x))
    x = jnp.ones(())
    assert has_open_loop(newton_root, x)
    assert has_open_loop(nested, x)
    assert not has_open_loop(scanned, x)
    assert not has_open_loop(jnp.sin, x)


class Rooted(Counter):
    """A `Counter` whose step has an open-ended loop, as MJX's have."""

    def step(self, state, action):
        state = super().step(state, action)
        return state.replace(reward=newton_root(state.reward))


class Looped(Counter):
    """A `Counter` whose step has a loop of a fixed length over so many operations."""

    def __init__(self, length, operations):
        super().__init__(length)
        self.operations = operations

    def step(self, state, action):
        def substep(reward, _):
            for _ in range(self.operations):
                reward = reward + action[0]
            return reward, None

        state = super().step(state, action)
        return state.replace(reward=jax.lax.scan(substep, state.reward, None, length=2)[0])


@pytest.mark.parametrize(
    ("env", "n_envs", "cores"),
    [
        (Rooted(4), 32, 2),
        (Rooted(4), 33, None),
        (Rooted(4), 30, None),
        (Counter(4), 32, None),
        (Looped(4, 5), 32, None),
        (Looped(4, 2000), 32, 2),
    ],
)
def test_without_a_wish_the_cores_of_a_cpu_share_out_steps_with_loops_that_are_enough(env, n_envs, cores):
    config = dataclasses.replace(PPO, n_envs=n_envs, n_minibatches=1)
    env = EpisodeWrapper(env, 3)
    found = default_devices(env, mlp(env), config)
    assert found == (jax.devices()[:cores] if cores else None)
    with jax.default_device(jax.devices()[1]):
        assert default_devices(env, mlp(env), config) is None


def test_training_takes_the_cores_by_itself_and_looking_for_loops_costs_no_trace_of_the_environment():
    config = dataclasses.replace(CONFIG, ppo=dataclasses.replace(PPO, n_envs=32, total_steps=320))
    states, traces = {}, {}
    for devices in (None, tuple(jax.devices())):
        inner = Rooted(4)
        env = EpisodeWrapper(inner, 3)
        states[devices] = train_ppo(env, mlp(env), config, devices=devices).training_state
        traces[devices] = inner.reset_traces, inner.step_traces
    by_itself, told = states.values()
    assert {len(leaf.addressable_shards) for leaf in jax.tree.leaves(by_itself)} == {2}
    assert_same_bits(by_itself, told)
    assert len(set(traces.values())) == 1, traces


def test_each_device_computes_its_share_of_a_minibatchs_gradient():
    env = EpisodeWrapper(Counter(4), 3)
    networks = make_mlp_actor_critic(env.observation_size, env.action_size, [24], [24], nnx.Rngs(0))
    with use_devices(jax.devices(), PPO):
        state = initial_training_state(env, networks, CONFIG)
        program = jax.jit(lambda state: ppo_step(env, PPO, state)).lower(state).compile().as_text()
    # Two minibatches of 8 environments x 5 steps: 20 rows for the first layer, and each device takes 10 of them.
    rows = {int(n) for n in re.findall(r"f32\[(\d+),24\]\S* dot\(", program)}
    assert 10 in rows
    assert 20 not in rows


def test_no_device_waits_for_another_during_a_rollout():
    env = EpisodeWrapper(Counter(4, random_length=True), 3)
    with use_devices(jax.devices(), PPO):
        state = initial_training_state(env, mlp(env), CONFIG)
        program = jax.jit(lambda state: rollout.unroll(env, PPO, state)).lower(state).compile().as_text()
    # One sum at the end: how many initial states were not finite.
    assert len(re.findall(r" (?:all-reduce|all-gather|all-to-all|collective-permute)\S*\(", program)) <= 1


def test_devices_wait_for_each_other_once_in_an_update():
    env = EpisodeWrapper(Counter(4, random_length=True), 3)
    with use_devices(jax.devices(), PPO):
        state = initial_training_state(env, mlp(env), CONFIG)
        _, transitions = jax.eval_shape(lambda state: rollout.unroll(env, PPO, state), state)

        def update(state, transitions, advantages):
            transitions = spread(transitions, axis=1)
            return ppo.update(PPO, state, state.network_states, transitions, *spread((advantages, advantages), axis=1))

        arguments = (state, transitions, transitions.rewards)
        program = jax.jit(update).lower(*arguments).compile().as_text()
    assert len(re.findall(r" all-reduce\S*\(", program)) == 1
    # Once for all updates the devices tell each other what they have seen.
    seen = len(jax.tree.leaves((transitions.obs, transitions.rollout_extras))) + 4
    assert len(re.findall(r" all-gather\S*\(", program)) <= seen


@pytest.mark.parametrize(
    ("before", "flags", "expected"),
    [
        ("", "", physics.available_cpus()),
        ("jax.config.update('jax_num_cpu_devices', 3)", "", 3),
        ("jax.numpy.ones(1)", "", 1),
        ("", "--xla_force_host_platform_device_count=3", 3),
    ],
)
def test_importing_makes_a_device_of_each_core_unless_somebody_chose_a_number_or_jax_has_started(
    before, flags, expected
):
    code = f"import jax; {before}\nimport nnx_ppo.algorithms.devices\nprint(len(jax.devices()))"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.stdout.split() == [str(expected)], found.stderr


@pytest.mark.parametrize(("function", "chunked"), [(newton_root, True), (jnp.sin, False)])
def test_more_environments_than_lanes_are_chunked_where_that_pays(function, chunked, monkeypatch):
    calls = []
    monkeypatch.setattr(vectorize_module, "in_chunks", lambda *args: calls.append(args[2:]) or args[0](*args[1]))
    vectorize(function, jnp.arange(1.0, 101.0))
    assert calls == ([(100, vectorize_module.LANES)] if chunked else [])
    calls.clear()
    vectorize(function, jnp.arange(1.0, 101.0), lanes=10)
    assert calls == ([(100, 10)] if chunked else [])
    calls.clear()
    vectorize(function, jnp.arange(1.0, vectorize_module.LANES + 1))
    assert not calls


AFFECTED = (0, 10, 2)
"""A jaxlib whose large batches of factorizations may hang."""


def cholesky_of(x):
    """Of a matrix with 23 rows, as the humanoid's is."""
    return jnp.linalg.cholesky(x * jnp.eye(23))[0, 0]


@pytest.mark.parametrize(
    ("version", "widths"), [((0, 9, 2), {100}), ((0, 10, 0), {25}), ((0, 11, 0), {25}), ((0, 11, 1), {100})]
)
def test_jaxlibs_that_hang_in_large_batches_of_factorizations_get_small_ones(version, widths, monkeypatch):
    monkeypatch.setattr(vectorize_module.jaxlib.version, "__version_info__", version)
    x = jnp.arange(1.0, 101.0)
    np.testing.assert_allclose(vectorize(cholesky_of, x), np.sqrt(x), rtol=1e-6)
    program = jax.make_jaxpr(lambda x: vectorize(cholesky_of, x))(x).jaxpr
    assert factorized_together(program) == {(width, 23) for width in widths}


def test_several_seeds_together_do_not_factorize_more(monkeypatch):
    monkeypatch.setattr(vectorize_module.jaxlib.version, "__version_info__", AFFECTED)
    x = jnp.arange(1.0, 201.0).reshape(2, 100)
    with vectorize_module.many_seeds(2):
        program = jax.make_jaxpr(jax.vmap(lambda x: vectorize(cholesky_of, x)))(x).jaxpr
    assert factorized_together(program) == {(2 * 15, 23)}


def test_training_seeds_says_how_many_there_are(monkeypatch):
    said = []
    monkeypatch.setattr(vectorize_module, "safe_lanes", lambda *_: said.append(vectorize_module._SEEDS.get()) or 1000)
    env = EpisodeWrapper(Counter(4), 3)
    train_ppo_seeds(env, lambda env, rngs: mlp(env), CONFIG, seeds=(0, 1, 2))
    assert set(said) == {3}
    assert vectorize_module._SEEDS.get() == 1


def factorized_together(program):
    """How many matrices of what size a program factorizes in one operation."""
    matrices = [e.invars[0].aval.shape for e in equations(program) if e.primitive.name == "cholesky"]
    return {(math.prod(shape[:-2]), shape[-1]) for shape in matrices}


@pytest.mark.parametrize("n_devices", [1, 2])
def test_no_device_steps_so_many_humanoids_on_mjx_at_once_that_jaxlib_may_hang(n_devices, monkeypatch):
    monkeypatch.setattr(vectorize_module.jaxlib.version, "__version_info__", AFFECTED)
    env = load_task("humanoid").make_env("jax")
    config = PPOConfig(n_envs=512, n_minibatches=1)
    with use_devices(jax.devices()[:n_devices], config):
        states = jax.eval_shape(lambda key: rollout.reset(env, key, 512), jax.random.key(0))
        actions = jax.ShapeDtypeStruct((512, env.action_size), jnp.float32)
        program = jax.make_jaxpr(lambda *args: rollout.step(env, *args))(states, actions).jaxpr
    # jaxlib 0.10.2 was seen to use its threads from 54 such matrices on, and not for 44.
    assert factorized_together(program) == {(32, 23)}


class Chunked(Rooted):
    """A `Rooted` that asks for chunks of two."""

    lanes = 2


def test_an_environment_may_say_how_many_of_it_a_cpu_steps_together(monkeypatch):
    asked = []
    chunks = vectorize_module.in_chunks
    monkeypatch.setattr(vectorize_module, "in_chunks", lambda *args: asked.append(args[2:]) or chunks(*args))
    env = EpisodeWrapper(Chunked(4), 3)
    config = TrainConfig(ppo=PPO, eval=EvalConfig(enabled=False), checkpoint_every_steps=0)
    records = []
    train_ppo(env, mlp(env), config, log_fn=lambda metrics, steps: records.append(metrics))
    assert set(asked) == {(8, 2)}
    train_ppo(env, mlp(env), config, log_fn=lambda metrics, steps: records.append(metrics), devices=jax.devices())
    assert set(asked) == {(8, 2), (4, 2)}
    np.testing.assert_allclose(records[0]["losses/total"], records[3]["losses/total"], rtol=1e-4)


@pytest.mark.parametrize("n_devices", [1, 2])
@pytest.mark.parametrize("probe", [Counter, Rooted])
def test_an_environment_is_traced_once_for_a_run_with_chunks_and_without(probe, n_devices):
    env = probe(4)
    config = TrainConfig(ppo=PPO, eval=EvalConfig(enabled=False), checkpoint_every_steps=0)
    train_ppo(EpisodeWrapper(env, 3), mlp(env), config, devices=jax.devices()[:n_devices])
    assert (env.reset_traces, env.step_traces) == (1, 1)
