"""The humanoid is Brax's: same observation, reward and done for the same state and action."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs import Humanoid
from envs.physics import Data, make_physics

STEPS = 40  # upright, touching down, fallen: the torso passes 1 m on the way


def as_data(layout, brax_state):
    """Brax's physics state, an mjx.Data, as ours: the same numbers under the same names."""

    def pack(slots):
        fields = [vars(brax_state).get(name) for name, slot in slots if slot.size]
        names = [name for name, slot in slots if slot.size]
        fields = [vars(brax_state._impl)[n] if f is None else f for n, f in zip(names, fields, strict=True)]
        return jnp.concatenate([jnp.ravel(jnp.asarray(f, jnp.float32)) for f in fields])

    return Data(pack(layout.state), pack(layout.derived), layout)


@pytest.fixture(scope="module")
def recorded():
    """A rollout of Brax's environment: data before, actions, and what came after, each (STEPS, ...)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Brax says that it is no longer developed
        from brax import envs as brax_envs

        env = brax_envs.get_environment("humanoid", backend="mjx")
        layout = Humanoid(physics="native").physics.layout
        actions = jax.random.uniform(jax.random.key(1), (STEPS, 17), minval=-1.0, maxval=1.0)

        @jax.jit
        def roll(key):
            def step(state, action):
                after = env.step(state, action)
                return after, (as_data(layout, state.pipeline_state), after.obs, after.reward, after.done)

            first = env.reset(key)
            return first.obs, jax.lax.scan(step, first, actions)[1]

        first_obs, (before, obs, reward, done) = roll(jax.random.key(3))
    return {"first_obs": first_obs, "before": before, "action": actions, "obs": obs, "reward": reward, "done": done}


@pytest.fixture(scope="module")
def native():
    return Humanoid(physics="native")


def step_from(env, recorded):
    blank = jax.eval_shape(env.reset, jax.random.key(0))
    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), blank)
    return jax.jit(jax.vmap(lambda d, a: env.step(blank.replace(data=d), a)))(recorded["before"], recorded["action"])


def test_the_first_observation_is_brax_s(native, recorded):
    first = jax.tree.map(lambda x: x[0], recorded["before"])
    obs = native.observe(native.physics.init(qpos=first.qpos, qvel=first.qvel))
    # The same formulas in float32 here and there, from quantities up to 10.
    np.testing.assert_allclose(obs, recorded["first_obs"], atol=2e-5)


@pytest.mark.parametrize("impl", ["jax", pytest.param("warp", marks=pytest.mark.warp), "native"])
def test_a_step_is_brax_s(impl, recorded):
    """From each state of the rollout, one control step (five of physics).

    ``jax`` runs the very same MJX, so only the order of float32 sums differs: 1e-3 on accelerations of 100 m/s^2.
    The others solve contacts by their own line search, and Brax stops the solver after one iteration, before the
    searches have met; hence wide bounds on velocities in contact and narrow ones on the median, and the next
    test, which lets the solvers finish.
    """
    if impl == "warp":
        pytest.importorskip("warp")
    state = step_from(Humanoid(physics=impl), recorded)
    assert 0 < np.sum(recorded["done"]) < STEPS
    np.testing.assert_array_equal(state.done, recorded["done"])
    error = np.abs(np.asarray(state.obs) - np.asarray(recorded["obs"]))
    assert error.shape == (STEPS, 244)
    reward_error = np.abs(np.asarray(state.reward) - np.asarray(recorded["reward"]))
    if impl == "jax":
        assert error.max() < 2e-3
        assert reward_error.max() < 1e-4
        return
    positions, velocities = error[:, :22], np.concatenate([error[:, 22:45], error[:, 155:221]], axis=1)
    inertia, forces = error[:, 45:155], error[:, 221:]
    assert np.median(error.max(axis=1)) < 1e-2
    assert np.median(reward_error) < 1e-4
    assert positions.max() < 0.05  # m, rad
    assert velocities.max() < 3.0  # m/s, rad/s, where feet touch
    assert inertia.max() < 0.02
    assert forces.max() < 1e-4
    assert reward_error.max() < 0.1


def test_engines_agree_when_their_solvers_may_finish(native):
    """100 ms of landing on both feet, with iterations enough to converge. Float32 against float64."""
    model = native.mj_model.__copy__()
    model.opt.iterations = model.opt.ls_iterations = 30
    engines = [make_physics(model, impl, ("cvel", "subtree_com")) for impl in ("native", "jax")]
    speed = 0.5 * jax.random.normal(jax.random.key(0), (4, model.nv))
    qpos = jnp.asarray(model.qpos0, jnp.float32).at[2].set(1.25)
    start = jax.vmap(lambda v: engines[0].init(qpos=qpos, qvel=v))(speed)

    def land(physics):
        step = lambda d, _: (jax.vmap(lambda d: physics.step(d, jnp.full(model.nu, 0.1), 5))(d), None)
        return jax.jit(lambda d: jax.lax.scan(step, d, None, length=7)[0])(start)

    ours, mjx = (land(physics) for physics in engines)
    free_fall = speed[:, 2] - 9.81 * 7 * native.dt
    assert (ours.qvel[:, 2] - free_fall > 0.1).all()  # the ground has pushed back
    np.testing.assert_allclose(ours.qpos, mjx.qpos, atol=2e-5)
    np.testing.assert_allclose(ours.qvel, mjx.qvel, atol=2e-3)


def test_the_model_is_brax_s_with_five_substeps(native):
    assert (native.dt, native.n_substeps) == (pytest.approx(0.015), 5)
    assert (native.observation_size, native.action_size) == (244, 17)
    assert native.mj_model.nbody == 12  # hands and feet fused to forearms and shins, as in Brax


def test_standing_still_earns_the_alive_reward(native):
    state = native.step(native.reset(jax.random.key(0)), jnp.zeros(17))
    assert float(state.metrics["reward/alive"]) == 5.0
    assert float(state.metrics["reward/control"]) == 0.0
    assert abs(float(state.metrics["reward/forward"])) < 0.1


def test_full_torque_costs_a_tenth_of_the_squared_controls(native):
    state = native.step(native.reset(jax.random.key(0)), jnp.ones(17))
    assert float(state.metrics["reward/control"]) == pytest.approx(
        -0.1 * 17 * 0.4**2, rel=1e-5
    )  # each motor's range is 0.4


def test_forward_reward_is_the_speed_of_the_centre_of_mass(native):
    """Thrown forward at 2 m/s out of reach of the ground, every part of the body moves at 2 m/s."""
    state = native.reset(jax.random.key(0))
    qpos = jnp.asarray(native.mj_model.qpos0, jnp.float32).at[2].set(1.6)
    data = native.physics.init(qpos=qpos, qvel=jnp.zeros(23).at[0].set(2.0))
    state = jax.jit(native.step)(state.replace(data=data), jnp.zeros(17))
    # The derived fields lag: of the five substeps between them, four lie within this control step.
    assert float(state.metrics["x_velocity"]) == pytest.approx(2.0 * 4 / 5, abs=0.02)
    state = jax.jit(native.step)(state, jnp.zeros(17))
    assert float(state.metrics["x_velocity"]) == pytest.approx(2.0, abs=0.02)
    assert float(state.metrics["reward/forward"]) == pytest.approx(1.25 * 2.0, abs=0.03)


@pytest.mark.parametrize(("height", "done"), [(0.99, 1.0), (1.01, 0.0), (1.99, 0.0), (2.01, 1.0)])
def test_it_terminates_below_one_and_above_two_metres(native, height, done):
    qpos = jnp.asarray(native.mj_model.qpos0, jnp.float32).at[2].set(height)
    assert float(native.terminated(native.physics.init(qpos=qpos))) == done


def test_initial_states_are_within_the_noise_of_the_upright_pose(native):
    initial = jax.vmap(native.initial_state)(jax.random.split(jax.random.key(0), 200))
    offset = np.asarray(initial["qpos"]) - native.mj_model.qpos0
    assert 0.009 < np.abs(offset).max() <= 0.01 + 1e-6
    assert 0.009 < np.abs(np.asarray(initial["qvel"])).max() <= 0.01 + 1e-6
    assert np.std(offset, axis=0).min() > 0.004  # every joint has noise of its own
