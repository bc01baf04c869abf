"""What is kept of an environment that went non-finite repeats it, step for step, in MuJoCo."""

import functools
import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.algorithms import rollout
from nnx_ppo.algorithms.config import EvalConfig, PPOConfig, TrainConfig
from nnx_ppo.algorithms.ppo import initial_training_state, train_ppo
from nnx_ppo.networks.factories import make_mlp_actor_critic
from tasks import load_task
from tasks.launch.nonfinite import KEPT, NonFiniteEpisodes
from tasks.launch.run_folder import RunFolder, RunRecord

REPLAY = Path(__file__).parents[1] / "scripts" / "replay.py"
TASK = '''
import jax, jax.numpy as jnp
from envs import MjxEnv
from nnx_ppo.networks.factories import make_mlp_actor_critic
from nnx_ppo.wrappers.episode_wrapper import EpisodeWrapper
from tasks import Task

MODEL = """
<mujoco>
  <option timestep="0.01"/>
  <worldbody>
    <body pos="0 0 1">
      <joint name="hinge" axis="0 1 0" damping="0.1"/>
      <geom type="capsule" fromto="0 0 0 0 0 0.5" size="0.03" mass="1"/>
    </body>
  </worldbody>
  <actuator><motor joint="hinge"/></actuator>
</mujoco>
"""


class Fuse(MjxEnv):
    """A pendulum whose motor explodes at a strong action."""

    def __init__(self, physics=None):
        super().__init__(MODEL, control_timestep=0.02, physics=physics)

    def control(self, action):
        return jnp.stack([jnp.where(action[0] > 0.9, 1e30, action[0])])

    def initial_state(self, rng):
        return {"qpos": jax.random.uniform(rng, (1,))}

    def observe(self, data):
        return jnp.concatenate([data.qpos, data.qvel])

    def rewards(self, before, data, ctrl):
        return {"alive": jnp.ones(())}


TASK = Task(
    "fuse", "Do not overdo it", lambda physics: EpisodeWrapper(Fuse(physics), 7),
    lambda env, rngs: make_mlp_actor_critic(2, 1, [4], [4], rngs),
)
'''
CONFIG = TrainConfig(
    ppo=PPOConfig(n_envs=8, n_minibatches=1, n_epochs=1, rollout_length=10, total_steps=160),
    eval=EvalConfig(enabled=False),
    checkpoint_every_steps=0,
)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    file = tmp_path_factory.mktemp("task") / "fuse.py"
    file.write_text(TASK)
    return load_task(str(file))


def train(task, nonfinite_fn, physics="native"):
    network = task.make_networks(None, nnx.Rngs(0))
    env = task.make_env(physics)
    with pytest.warns(RuntimeWarning, match="were not finite"):
        result = train_ppo(env, network, CONFIG, nonfinite_fn=nonfinite_fn)
    return env, result


@pytest.fixture(scope="module")
def episodes(task):
    found = []
    env, result = train(task, found.append)
    return env, result, found


def mujoco_from(env, fields, i):
    model, data = env.mj_model, mujoco.MjData(env.mj_model)
    model.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_AUTORESET)
    for name, values in fields.items():
        setattr(data, name, values[i])
    return model, data


@pytest.mark.parametrize("physics", ["native", pytest.param("jax", marks=pytest.mark.slow)])
def test_the_kept_steps_are_those_that_led_there(task, physics):
    found = []
    env, _ = train(task, found.append, physics)
    assert found
    for episode in found:
        fields, controls = env.replay_fields(episode.records), np.asarray(jax.vmap(env.control)(episode.actions))
        assert len(controls) == len(episode.records) <= CONFIG.ppo.rollout_length
        assert (controls[:-1] < 1).all()
        assert controls[-1] > 1e29
        for i in range(len(controls) - 1):
            model, data = mujoco_from(env, fields, i)
            data.ctrl[:] = controls[i]
            mujoco.mj_step(model, data, env.n_substeps)
            np.testing.assert_allclose(data.qpos, fields["qpos"][i + 1], atol=1e-5)
            np.testing.assert_allclose(data.time, fields["time"][i + 1], atol=1e-5)
        assert 0 <= episode.env < 8
        assert episode.step in (80, 160)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize(
    "physics", ["native", pytest.param("jax", marks=pytest.mark.slow), pytest.param("warp", marks=pytest.mark.warp)]
)
def test_a_poisoned_state_of_one_environment_restarts_it_and_leaves_the_others_alone_to_the_bit(task, physics, poison):
    if physics == "warp":
        pytest.importorskip("warp")
    env = task.make_env(physics)
    state = initial_training_state(env, task.make_networks(env, nnx.Rngs(0)), CONFIG)
    data = state.env_states.data
    spoiled = data.replace(qvel=data.qvel.at[2].set(poison))
    broken = state.replace(env_states=state.env_states.replace(data=spoiled))
    roll = jax.jit(functools.partial(rollout.unroll, env, CONFIG.ppo))
    (_, good), (after_broken, bad) = roll(state), roll(broken)
    others = np.arange(8) != 2
    for given, wanted in zip(
        jax.tree.leaves((bad.obs, bad.rewards, bad.done)),
        jax.tree.leaves((good.obs, good.rewards, good.done)),
        strict=True,
    ):
        assert np.isfinite(given).all()
        np.testing.assert_array_equal(given[:, others], wanted[:, others])
    assert bad.nonfinite[0, 2]
    assert bad.done[0, 2]
    assert bad.rewards[0, 2] == 0
    new = int(jnp.sum(bad.nonfinite)) - int(jnp.sum(good.nonfinite[:, others]))
    assert new >= 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after_broken.env_states))


def test_keeping_them_leaves_training_as_it_is_to_the_bit(task, episodes):
    _, expected, _ = episodes
    _, result = train(task, None)
    for given, wanted in zip(
        jax.tree.leaves(result.training_state.params), jax.tree.leaves(expected.training_state.params), strict=True
    ):
        np.testing.assert_array_equal(given, wanted)


def test_a_function_that_fails_costs_a_warning(task):
    def fail(episode):
        raise OSError("disk full")

    with pytest.warns(UserWarning, match="was not kept: OSError: disk full"):
        _, result = train(task, fail)
    assert result.total_steps == 160


def replay_script():
    spec = importlib.util.spec_from_file_location("replay_script", REPLAY)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_kept_file_is_repeated_by_the_command_that_the_message_names(task, episodes, tmp_path, caplog, capsys):
    env, _, found = episodes
    run = RunFolder(tmp_path / "run")
    file = Path(sys.modules[task.make_env.__module__].__file__)  # type: ignore[arg-type]
    run.create(RunRecord("fuse", file, "native", CONFIG, (), {}, {}, "cpu", ""))
    longest = max(found, key=lambda episode: len(episode.records))
    path = NonFiniteEpisodes(run.nonfinite, env, "python replay.py")(longest)
    assert path == run.nonfinite / f"step_{longest.step:010d}_env_{longest.env}.npz"
    assert f"python replay.py {path}" in caplog.text
    assert replay_script().main([str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    steps = lines[2:-1]
    assert len(steps) == len(longest.records)
    assert all(line.endswith("-") for line in steps[:-1])
    assert "mjWARN_BAD" in steps[-1]


def test_a_file_with_pickled_objects_is_refused_and_nothing_in_it_runs(task, tmp_path, capsys):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    run = RunFolder(tmp_path / "run")
    file = Path(sys.modules[task.make_env.__module__].__file__)  # type: ignore[arg-type]
    run.create(RunRecord("fuse", file, "native", CONFIG, (), {}, {}, "cpu", ""))
    run.nonfinite.mkdir()
    np.savez(run.nonfinite / "bomb.npz", ctrl_next=np.array([Bomb()], dtype=object))
    assert replay_script().main([str(run.nonfinite / "bomb.npz")]) == 2
    assert "allow_pickle=False" in capsys.readouterr().err
    assert not (tmp_path / "exploded").exists()


def test_a_file_that_is_not_there_is_named(task, tmp_path, capsys):
    assert replay_script().main([str(tmp_path / "nonfinite" / "x.npz")]) == 2
    assert "is no run folder" in capsys.readouterr().err


def test_only_the_first_episodes_are_kept(episodes, tmp_path):
    env, _, found = episodes
    keep = NonFiniteEpisodes(tmp_path / "nonfinite", env, "replay")
    for i in range(KEPT + 3):
        found[0].step = i
        assert (keep(found[0]) is not None) == (i < KEPT)
    assert len(list((tmp_path / "nonfinite").iterdir())) == KEPT


def test_an_environment_without_a_record_only_counts(task):
    class Bare:
        def __init__(self, env):
            self.env = env

        def reset(self, rng):
            return self.env.reset(rng)

        def step(self, state, action):
            return self.env.step(state, action)

    called = []
    with pytest.warns(RuntimeWarning, match="were not finite"):
        train_ppo(
            Bare(task.make_env("native")),
            make_mlp_actor_critic(2, 1, [4], [4], nnx.Rngs(0)),
            CONFIG,
            nonfinite_fn=called.append,
        )
    assert called == []
