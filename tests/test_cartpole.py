"""Cartpole: its reward by hand, its motion by the textbook's equations, its initial states by statistics."""

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

from envs import CartpoleBalance, CartpoleSwingup


@pytest.fixture(scope="module")
def env():
    return CartpoleSwingup(physics="native")


def reward_and_metrics(env, qpos, qvel, ctrl):
    data = env.physics.init(qpos=jnp.asarray(qpos, jnp.float32), qvel=jnp.asarray(qvel, jnp.float32))
    (term,) = env.rewards(data, data, jnp.array([ctrl])).values()
    return float(term), {k: float(v) for k, v in env.measurements(data, data, jnp.array([ctrl])).items()}


def test_upright_still_and_in_the_middle_earns_one(env):
    reward, metrics = reward_and_metrics(env, [0, 0], [0, 0], 0.0)
    assert reward == pytest.approx(1.0)
    assert metrics["pole_cosine"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("qpos", "qvel", "ctrl", "expected"),
    [
        ([0, np.pi], [0, 0], 0.0, 0.0),  # hanging
        ([0, np.pi / 2], [0, 0], 0.0, 0.5),  # level: (cos + 1) / 2
        ([2, 0], [0, 0], 0.0, 0.55),  # at the margin of 2 m: (0.1 + 1) / 2
        ([0, 0], [3, 5], 0.0, 0.55),  # the pole at the margin of 5 rad/s; the cart's speed is free
        ([0, 0], [0, 0], 1.0, 0.8),  # full force: (0 + 4) / 5
        ([0, 0], [0, 0], -0.5, 0.95),  # (0.75 + 4) / 5
        ([2, np.pi / 2], [0, -5], 1.0, 0.5 * 0.55 * 0.55 * 0.8),  # all together: the product
    ],
)
def test_each_factor_lowers_the_reward_by_its_formula(env, qpos, qvel, ctrl, expected):
    reward, metrics = reward_and_metrics(env, qpos, qvel, ctrl)
    assert reward == pytest.approx(expected, abs=1e-6)
    factors = [metrics[name] for name in ("upright", "centered", "small_control", "small_velocity")]
    assert np.prod(factors) == pytest.approx(reward, abs=1e-6)


def test_it_moves_as_the_textbook_says(env):
    """Lagrange's equations of cart and pole, integrated by the classic Runge-Kutta rule."""
    model = env.mj_model
    cart, pole, length = 1.0, 0.1, 0.5  # masses in kg, distance of the pole's centre from the hinge in m
    inertia = float(model.body_inertia[model.body("pole").id][0])  # about its centre, across the pole

    def slope(s, force):
        _, angle, speed, spin = s
        mass = np.array(
            [[cart + pole, pole * length * np.cos(angle)], [pole * length * np.cos(angle), inertia + pole * length**2]]
        )
        forces = [
            force - 5e-4 * speed + pole * length * np.sin(angle) * spin**2,
            pole * 9.81 * length * np.sin(angle) - 2e-6 * spin,
        ]
        return np.concatenate([s[2:], np.linalg.solve(mass, forces)])

    state = env.reset(jax.random.key(0))
    s = np.concatenate([state.data.qpos, state.data.qvel]).astype(np.float64)
    step, h = jax.jit(env.step), 0.01
    for k in range(100):
        action = np.sin(0.3 * k)
        state = step(state, jnp.array([action]))
        k1 = slope(s, 10 * action)
        k2 = slope(s + h / 2 * k1, 10 * action)
        k3 = slope(s + h / 2 * k2, 10 * action)
        s = s + h / 6 * (k1 + 2 * k2 + 2 * k3 + slope(s + h * k3, 10 * action))
    # The same rule in float64, so what remains is the rounding to float32 between control steps.
    np.testing.assert_allclose(np.concatenate([state.data.qpos, state.data.qvel]), s, atol=1e-4)
    want = [s[0], np.cos(s[1]), np.sin(s[1]), s[2], s[3]]
    np.testing.assert_allclose(state.obs, want, atol=1e-4)


def test_the_pole_is_a_uniform_capsule_of_a_tenth_of_a_kilogram(env):
    """Its inertia by integration over slices: a cylinder of 1 m with a half sphere at each end."""
    r, z = 0.045, np.linspace(-0.545, 0.545, 200_001)
    radius2 = np.where(np.abs(z) <= 0.5, r**2, r**2 - (np.abs(z) - 0.5) ** 2)
    inertia = 0.1 * np.sum(radius2 * (z**2 + radius2 / 4)) / np.sum(radius2)
    model = env.mj_model
    assert model.body_mass[model.body("pole").id] == pytest.approx(0.1)
    assert float(model.body_inertia[model.body("pole").id][0]) == pytest.approx(inertia, rel=1e-4)


def test_swingup_starts_hanging_and_balance_upright(env):
    keys = jax.random.split(jax.random.key(0), 4000)
    hanging = jax.vmap(env.initial_state)(keys)
    np.testing.assert_allclose(np.mean(hanging["qpos"], axis=0), [0, np.pi], atol=1e-3)
    np.testing.assert_allclose(np.std(hanging["qpos"], axis=0), 0.01, rtol=0.1)
    np.testing.assert_allclose(np.std(hanging["qvel"], axis=0), 0.01, rtol=0.1)
    upright = jax.vmap(CartpoleBalance(physics="native").initial_state)(keys)
    assert (np.abs(upright["qpos"]) <= [0.1, 0.034]).all()
    np.testing.assert_allclose(np.abs(upright["qpos"]).max(axis=0), [0.1, 0.034], rtol=0.01)
    np.testing.assert_allclose(np.std(upright["qvel"], axis=0), 0.01, rtol=0.1)


def test_it_never_terminates_and_stays_on_its_rail(env):
    def push(state, _):
        state = env.step(state, jnp.ones(1))
        return state, (state.done, state.data.qpos[0], state.reward)

    _, (done, position, reward) = jax.jit(lambda s: jax.lax.scan(push, s, None, length=1000))(
        env.reset(jax.random.key(0))
    )
    assert not done.any()
    assert position.max() < 2.0
    assert ((reward >= 0) & (reward <= 1)).all()


def test_dynamics_are_dm_controls(env):
    model = env.mj_model
    assert model.opt.integrator == mujoco.mjtIntegrator.mjINT_RK4
    assert model.opt.timestep == env.dt == 0.01
    assert model.opt.disableflags & mujoco.mjtDisableBit.mjDSBL_CONTACT
    np.testing.assert_allclose(model.dof_damping, [5e-4, 2e-6])
    np.testing.assert_allclose(model.jnt_range[0], [-1.8, 1.8])
    assert model.actuator_gear[0, 0] == 10
