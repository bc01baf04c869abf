"""What every environment keeps to on every engine, and the base class that makes it so."""

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

import envs
from envs.base import MjxEnv, State, count_substeps, load_model

N = 3
ENVS = sorted(envs.ENVIRONMENTS)
ENGINES = ["native", "jax", pytest.param("warp", marks=pytest.mark.warp)]


@pytest.fixture(params=ENGINES)
def impl(request):
    if request.param == "warp":
        pytest.importorskip("warp")
    return request.param


@pytest.fixture(params=ENVS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def native():
    """Environments on the native engine by name, with their compiled reset and step over a batch."""
    made = {}
    for name in ENVS:
        env = envs.make(name, physics="native")
        made[name] = env, jax.jit(jax.vmap(env.reset)), jax.jit(jax.vmap(env.step))
    return made


def keys(seed=0, n=N):
    return jax.random.split(jax.random.key(seed), n)


def random_actions(env, seed, *shape):
    return jax.random.uniform(jax.random.key(seed), (*shape, env.action_size), minval=-1.0, maxval=1.0)


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_reset_and_step_give_the_same_shapes_types_and_keys(name, impl):
    """Found by tracing alone: nothing is compiled, so every engine can be asked."""
    env = envs.make(name, physics=impl)
    first = jax.eval_shape(env.reset, jax.random.key(0))
    # float64 actions and Python numbers must not leak in either.
    later = jax.eval_shape(env.step, first, jax.ShapeDtypeStruct((env.action_size,), jnp.float32))
    assert jax.tree.structure(first) == jax.tree.structure(later)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(later), strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
        assert a.dtype == jnp.float32
        assert not a.weak_type
    assert first.reward.shape == first.done.shape == ()
    assert first.obs.shape == (env.observation_size,)
    assert env.impl == impl
    assert env.dt == pytest.approx(env.n_substeps * env.mj_model.opt.timestep)
    assert any(key.startswith("reward/") for key in first.metrics)
    assert all(value.shape == () for value in first.metrics.values())


def test_data_are_the_same_tree_on_every_engine(name, impl):
    shapes = lambda engine: jax.eval_shape(envs.make(name, physics=engine).reset, jax.random.key(0)).data
    assert shapes(impl) == shapes("native")


def test_reset_is_random_by_key_and_deterministic(name, native):
    _, reset, _ = native[name]
    state = reset(keys(0))
    assert_same(state, reset(keys(0)))
    assert len(np.unique(np.asarray(state.data.qpos), axis=0)) == N
    assert not np.array_equal(state.data.qpos, reset(keys(1)).data.qpos)
    assert not np.any(state.reward)
    assert not np.any(state.done)


def test_the_reward_is_the_sum_of_its_terms(name, native):
    env, reset, step = native[name]
    state = reset(keys())
    for k in range(5):
        state = step(state, random_actions(env, k, N))
        terms = [value for key, value in state.metrics.items() if key.startswith("reward/")]
        np.testing.assert_allclose(state.reward, np.sum(terms, axis=0), rtol=1e-6)


def test_a_batch_is_its_members_and_a_scan_its_steps(name, native):
    env, reset, step = native[name]
    actions = random_actions(env, 0, 4, N)
    looped = reset(keys())
    for action in actions:
        looped = step(looped, action)
    scan = lambda s, a: jax.lax.scan(lambda s, a: (jax.vmap(env.step)(s, a), None), s, a)[0]
    scanned = jax.jit(scan)(reset(keys()), actions)
    np.testing.assert_array_equal(scanned.data.state, looped.data.state)
    alone = jax.jit(env.reset)(keys()[1])
    for action in actions:
        alone = jax.jit(env.step)(alone, action[1])
    # The physics are the same to the bit; XLA may round the observation differently for another batch size.
    np.testing.assert_allclose(alone.data.state, looped.data.state[1], atol=1e-6)
    np.testing.assert_allclose(alone.obs, looped.obs[1], rtol=1e-5, atol=1e-5)


def test_random_actions_keep_everything_finite(name, native):
    env, reset, step = native[name]
    state = reset(keys())
    for k in range(100):
        state = step(state, random_actions(env, k, N))
    for leaf in jax.tree.leaves(state):
        assert np.isfinite(np.asarray(leaf)).all()


def test_a_nan_action_breaks_one_environment_only(name, native):
    env, reset, step = native[name]
    state, actions = reset(keys()), random_actions(env, 0, N)
    good, bad = step(state, actions), step(state, actions.at[1].set(jnp.nan))
    assert np.isnan(bad.obs[1]).any()
    assert_same(jax.tree.map(lambda x: x[np.array([0, 2])], good), jax.tree.map(lambda x: x[np.array([0, 2])], bad))


def test_what_wrappers_keep_with_the_state_survives_a_step(name, native):
    env, _, _ = native[name]
    state = env.reset(jax.random.key(0))
    state = state.replace(info={"steps": jnp.ones(())}, metrics={**state.metrics, "mine": jnp.ones(())})
    after = env.step(state, jnp.zeros(env.action_size))
    assert after.info == {"steps": 1.0}
    assert after.metrics["mine"] == 1.0


def test_render_state_keeps_only_the_pose_and_can_be_recorded_in_a_scan(name, native):
    env, reset, _ = native[name]

    def step(state, action):
        after = jax.vmap(env.step)(state, action)
        return after, jax.vmap(env.render_state)(after)

    _, recorded = jax.jit(lambda s, a: jax.lax.scan(step, s, a))(reset(keys()), random_actions(env, 0, 4, N))
    assert recorded.data.qpos.shape == (4, N, env.mj_model.nq)
    assert recorded.data.time.shape == (4, N)
    model = env.mj_model
    assert sum(leaf.size for leaf in jax.tree.leaves(recorded)) == 4 * N * (model.nq + 7 * model.nmocap + 1)


def test_rendering_hands_poses_and_settings_on(native, monkeypatch):
    env, _, _ = native["cartpole_balance"]
    import envs.rendering

    seen = {}

    def render_frames(model, qpos, **settings):
        seen.update(settings, model=model, qpos=qpos)
        return list(np.zeros((len(qpos), settings["height"], settings["width"], 3), np.uint8))

    monkeypatch.setattr(envs.rendering, "render_frames", render_frames)
    states = [env.reset(key) for key in keys()]
    frames = env.render([env.render_state(states[0]), states[1], states[2]], height=48, width=64, camera="side")
    assert [frame.shape for frame in frames] == [(48, 64, 3)] * 3
    assert seen["camera"] == "side"
    np.testing.assert_array_equal(seen["qpos"], [s.data.qpos for s in states])
    assert env.render([]) == []


def test_environments_are_static_arguments_hashed_by_identity(native):
    env = native["cartpole_balance"][0]
    other = envs.make("cartpole_balance", physics="native")
    assert env != other
    traces = []

    def reset(env, key):
        traces.append(env)
        return env.reset(key).obs

    compiled = jax.jit(reset, static_argnums=0)
    compiled(env, jax.random.key(0)), compiled(env, jax.random.key(1)), compiled(other, jax.random.key(0))
    assert traces == [env, other]


def test_mjx_model_is_there_whatever_the_engine(native):
    env = native["cartpole_balance"][0]
    assert env.mjx_model is env.mjx_model
    assert env.mjx_model.nq == env.mj_model.nq == 2


def test_an_unknown_environment_gets_a_did_you_mean():
    with pytest.raises(ValueError, match=r"unknown environment 'humanoit' \(did you mean 'humanoid'\?\): there are"):
        envs.make("humanoit")


# The base class.

PENDULUM = """
<mujoco>
  <option timestep="0.005"/>
  <worldbody>
    <body><joint name="j" axis="0 1 0"/><geom type="capsule" size=".05" fromto="0 0 0 0 0 1"/></body>
  </worldbody>
  <actuator><motor joint="j" ctrllimited="true" ctrlrange="-1 3"/><motor joint="j"/></actuator>
</mujoco>
"""


class Pendulum(MjxEnv):
    """The least that an environment can be."""

    def __init__(self, model=PENDULUM, **settings):
        super().__init__(model, **{"control_timestep": 0.02, "physics": "native", **settings})

    def observe(self, data):
        return {"joint": data.qpos, "speed": data.qvel}

    def rewards(self, before, data, ctrl):
        return {"upright": jnp.cos(data.qpos[0]), "torque": -0.1 * jnp.sum(ctrl**2)}


def test_a_small_environment_needs_only_an_observation_and_rewards():
    env = Pendulum()
    assert env.observation_size == {"joint": (1,), "speed": (1,)}
    assert env.n_substeps == 4
    state = env.step(env.reset(jax.random.key(0)), jnp.array([0.0, 0.5]))
    # Half of [-1, 3] is 1; the second motor has no range, so its action is its control.
    np.testing.assert_allclose(state.data.ctrl, [1.0, 0.5])
    assert float(state.metrics["reward/torque"]) == pytest.approx(-0.125)
    assert float(state.reward) == pytest.approx(float(state.metrics["reward/upright"]) - 0.125)
    assert float(state.done) == 0.0


def test_what_an_environment_must_define_is_said():
    with pytest.raises(NotImplementedError, match=r"MjxEnv must define rewards"):
        MjxEnv(PENDULUM, control_timestep=0.005).reset(jax.random.key(0))


def test_a_model_comes_from_a_string_a_file_a_spec_a_model_or_a_package(tmp_path):
    path = tmp_path / "pendulum.xml"
    path.write_text(PENDULUM)
    compiled = mujoco.MjModel.from_xml_string(PENDULUM)
    spec = mujoco.MjSpec.from_string(PENDULUM)
    for model in (PENDULUM, path, str(path), spec, compiled):
        assert Pendulum(model).mj_model.nu == 2
    env = Pendulum(compiled, simulation_timestep=0.01)
    assert (env.n_substeps, env.mj_model.opt.timestep, compiled.opt.timestep) == (2, 0.01, 0.005)
    assert load_model(("brax", "envs/assets/ant.xml")).nu == 8


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nowhere.xml", "no model file 'nowhere.xml'"),
        (("no_such_package", "a.xml"), "package 'no_such_package' is not installed"),
        (("brax", "no.xml"), "package 'brax' has no file 'no.xml'"),
        ("<mujoco><worldbody><boddy/></worldbody></mujoco>", "boddy"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_refused(model, message):
    with pytest.raises(ValueError, match=message):
        Pendulum(model)


@pytest.mark.parametrize(
    ("control", "simulation", "expected"), [(0.02, 0.005, 4), (0.015, 0.003, 5), (0.1, 0.1, 1), (0.3, 0.1, 3)]
)
def test_substeps_are_the_ratio_of_the_time_steps(control, simulation, expected):
    assert count_substeps(control, simulation) == expected


@pytest.mark.parametrize(
    ("control", "simulation", "message"),
    [
        (0.02, 0.003, r"6.66667 times simulation_timestep=0.003: it must be a whole multiple; the nearest is .*=0.021"),
        (0.001, 0.003, "must be a whole multiple; the nearest is control_timestep=0.003"),
        (0.0, 0.003, "time steps must be positive"),
        (0.02, -0.003, "time steps must be positive"),
    ],
)
def test_time_steps_that_do_not_divide_are_refused(control, simulation, message):
    with pytest.raises(ValueError, match=message):
        Pendulum(control_timestep=control, simulation_timestep=simulation)


def test_reading_a_field_that_was_not_named_says_how_to_add_it():
    class Forgetful(Pendulum):
        def observe(self, data):
            return data.site_xpos

    with pytest.raises(AttributeError, match="add it to the `fields`"):
        Forgetful().reset(jax.random.key(0))


def test_state_is_a_frozen_pytree():
    state = State(data=1.0, obs=2.0, reward=3.0, done=4.0, metrics={}, info={})
    assert jax.tree.leaves(state.replace(obs=5.0)) == [1.0, 5.0, 3.0, 4.0]
    with pytest.raises(AttributeError):
        state.obs = 6.0
