"""`load_policy`: what it answers is what evaluation would have done, without the environment."""

import dataclasses
import textwrap
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.algorithms import ppo
from nnx_ppo.algorithms.checkpointing import CheckpointError, make_checkpoint_fn
from nnx_ppo.networks import functional
from tasks import load_task
from tasks.launch.run_folder import RunFolder, RunFolderError, RunRecord, plain_shapes
from tasks.policy import load_policy

TASK = """
import jax.numpy as jnp
from probe_envs import ProbeState, recurrent_actor_critic
from nnx_ppo.algorithms.config import PPOConfig, TrainConfig
from nnx_ppo.networks.factories import make_mlp_actor_critic
from tasks import Task

HIDDEN, ASKS_FOR = 5, "SIZES"


class Still:
    observation_size, action_size = SHAPE, 2
    extra = 3

    def reset(self, rng):
        obs = OBS
        return ProbeState(obs, jnp.zeros(()), jnp.zeros(()), {})

    def step(self, state, action):
        return state


def make_env(physics):
    if ASKS_FOR == "SIZES":
        assert physics != "none", "no environment is needed"
    return Still()


def make_networks(env, rngs):
    if ASKS_FOR == "MORE":
        assert env.extra == 3
    if HIDDEN is None:
        return recurrent_actor_critic(3, 2, rngs)
    return make_mlp_actor_critic(env.observation_size, env.action_size, [HIDDEN], [4], rngs)


TASK = Task("still", "Do nothing", make_env, make_networks, TrainConfig(PPOConfig(n_envs=4, n_minibatches=2)))
"""
FLAT = {"SHAPE": "3", "OBS": "jnp.zeros(3)"}
TREE = {"SHAPE": '{"a": (2,), "b": {"c": (1,)}}', "OBS": '{"a": jnp.zeros(2), "b": {"c": jnp.zeros(1)}}'}


def make_run(folder: Path, steps=(0, 40), scores=None, physics=None, sizes=True, **words: str) -> tuple[Path, dict]:
    """A run folder as training leaves it, and its networks by step."""
    text = TASK
    for word, value in {**FLAT, **words}.items():
        text = text.replace(word, value)
    file = folder / "still.py"
    file.write_text(textwrap.dedent(text))
    task = load_task(str(file))
    env = task.make_env(None)
    record = RunRecord(
        task="still",
        task_file=file,
        physics=physics,
        config=task.config,
        command=(),
        versions={},
        git={},
        device="cpu",
        started="",
        observation_size=env.observation_size if sizes else None,
        action_size=env.action_size if sizes else None,
    )
    run = RunFolder(folder / "run")
    run.create(record)
    write, networks = make_checkpoint_fn(run.checkpoints, task.config, score=(scores or {}).get), {}
    for step in steps:
        networks[step] = task.make_networks(env, nnx.Rngs(step + 1))
        write(ppo.initial_training_state(env, networks[step], task.config), step)
    return run.path, networks


def mode(network, obs, carry=None):
    """The action of a network in evaluation mode, computed the long way; leaves [batch, ...]."""
    graphdef, params, variables = functional.split(network)
    graphdef = functional.evaluation_graphdef(graphdef, params, variables)
    carry = network.initialize_state(4) if carry is None else carry
    out, _ = functional.apply(graphdef, params, variables, carry, obs)
    return out.output.actions, out.next_state


def test_a_batch_and_one_observation_get_the_actors_mode(tmp_path):
    run, networks = make_run(tmp_path)
    obs = jax.random.normal(jax.random.key(0), (4, 3))
    expected = mode(networks[40], obs)[0]
    policy = load_policy(run)
    np.testing.assert_allclose(policy(obs), expected, rtol=1e-6)
    one = policy(np.asarray(obs[2]))
    assert one.shape == (2,)
    np.testing.assert_allclose(one, expected[2], rtol=1e-5)
    assert policy.training_step == 40


def test_an_observation_may_be_a_tree(tmp_path):
    run, networks = make_run(tmp_path, **TREE)
    keys = jax.random.split(jax.random.key(0))
    obs = {"a": jax.random.normal(keys[0], (4, 2)), "b": {"c": jax.random.normal(keys[1], (4, 1))}}
    policy = load_policy(run)
    expected = mode(networks[40], obs)[0]
    np.testing.assert_allclose(policy(obs), expected, rtol=1e-6)
    np.testing.assert_allclose(policy(jax.tree.map(lambda x: x[1], obs)), expected[1], rtol=1e-5)


def test_an_observation_may_be_a_tuple_and_another_shape_is_refused_with_the_right_one(tmp_path):
    run, networks = make_run(tmp_path, SHAPE="((2,), (1,))", OBS="(jnp.zeros(2), jnp.zeros(1))")
    policy = load_policy(run)
    obs = (jnp.ones((4, 2)), jnp.ones((4, 1)))
    np.testing.assert_allclose(policy(obs), mode(networks[40], obs)[0], rtol=1e-6)
    assert policy((jnp.ones(2), jnp.ones(1))).shape == (2,)
    (tmp_path / "flat").mkdir()
    run, _ = make_run(tmp_path / "flat")
    with pytest.raises(ValueError, match=r"takes observations of shape \[\(3,\)\], or a batch .* got \[\(2,\)\]"):
        load_policy(run)(np.zeros(2))


def test_a_network_that_asks_the_environment_carefully_gets_the_true_answer(tmp_path):
    words = {"assert env.extra == 3": "assert getattr(env, 'extra', 0) == 3", '"SIZES"\n': '"MORE"\n'}
    run, _ = make_run(tmp_path, physics="none", **words)
    assert load_policy(run)(jnp.zeros(3)).shape == (2,)


def test_sizes_that_json_cannot_keep_are_not_kept(tmp_path):
    assert plain_shapes(np.int64(3)) == 3
    assert plain_shapes({"a": (2, np.int32(3)), "b": [1]}) == {"a": [2, 3], "b": [1]}
    assert plain_shapes(np.zeros(2)) is None
    assert plain_shapes(Point(1, 2)) is None
    run, _ = make_run(tmp_path, SHAPE="__import__('numpy').int64(3)")
    assert load_policy(run)(jnp.zeros(3)).shape == (2,)


class Point(NamedTuple):
    x: int
    y: int


def test_a_policy_with_memory_hands_its_carry_on_and_says_so_if_it_is_forgotten(tmp_path):
    run, networks = make_run(tmp_path, **{"= 5,": "= None,"})
    policy = load_policy(run)
    obs = jax.random.normal(jax.random.key(0), (3, 4, 3))
    carry, expected_carry = policy.initial_carry(4), None
    single_carry = policy.initial_carry()
    for o in obs:
        action, carry = policy.step(o, carry)
        expected, expected_carry = mode(networks[40], o, expected_carry)
        single, single_carry = policy.step(o[1], single_carry)
        np.testing.assert_allclose(action, expected, rtol=1e-5)
        np.testing.assert_allclose(single, expected[1], rtol=1e-4)
    assert not np.allclose(policy.step(obs[0], policy.initial_carry(4))[0], policy.step(obs[0], carry)[0])
    with pytest.raises(ValueError, match=r"has a memory.*policy\.step\(obs, carry\)"):
        policy(obs[0])


def test_best_latest_or_any_step_that_is_there(tmp_path):
    run, _ = make_run(tmp_path, steps=(0, 40, 80), scores={0: 1.0, 40: 7.0, 80: 3.0})
    assert load_policy(run).training_step == 40
    assert load_policy(run, "latest").training_step == 80
    assert load_policy(run, 0).training_step == 0
    assert load_policy(run, np.int64(80)).training_step == 80  # type: ignore[arg-type]
    with pytest.raises(RunFolderError, match=r"checkpoint=41: accepted are 'best', 'latest' and the steps 0, 40, 80"):
        load_policy(run, 41)
    with pytest.raises(RunFolderError, match="checkpoint='newest': accepted"):
        load_policy(run, "newest")


def test_no_environment_is_built_unless_the_network_asks_for_more_than_sizes(tmp_path):
    run, _ = make_run(tmp_path, physics="none")
    assert load_policy(run)(jnp.zeros(3)).shape == (2,)
    (tmp_path / "more").mkdir()
    run, _ = make_run(tmp_path / "more", physics="none", **{'"SIZES"\n': '"MORE"\n'})
    assert load_policy(run)(jnp.zeros(3)).shape == (2,)


def test_a_run_that_kept_no_sizes_is_loaded_with_its_environment_and_takes_batches(tmp_path):
    run, _ = make_run(tmp_path, sizes=False)
    assert load_policy(run)(jnp.zeros((4, 3))).shape == (4, 2)


def test_what_cannot_be_loaded_says_why(tmp_path):
    with pytest.raises(RunFolderError, match="is no run folder"):
        load_policy(tmp_path)
    run, _ = make_run(tmp_path, steps=())
    with pytest.raises(RunFolderError, match="has no checkpoint yet"):
        load_policy(run)
    (tmp_path / "other").mkdir()
    run, _ = make_run(tmp_path / "other")
    folder = RunFolder.read(run)
    record = folder.read_record()
    assert record.task_file is not None
    for file in (record.task_file, folder.task_copy):
        file.write_text(file.read_text().replace("HIDDEN, ASKS_FOR = 5", "HIDDEN, ASKS_FOR = 6"))
    with pytest.raises(CheckpointError, match=r"params/\S+ is float32\[\S+\] in the checkpoint and .*build both alike"):
        load_policy(run)


def test_the_record_keeps_shapes_as_shapes(tmp_path):
    run, _ = make_run(tmp_path, **TREE)
    record = RunFolder.read(run).read_record()
    assert record.observation_size == {"a": (2,), "b": {"c": (1,)}}
    assert dataclasses.replace(record).action_size == 2
