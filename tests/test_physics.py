"""The physics engines: exactness of the native one, agreement between them, containment, errors."""

import logging
import os
import re
import subprocess
import sys
import threading
import warnings

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

from envs.physics import available_cpus, default_impl, make_physics

# A body that slides, spins and pushes on others: free joint, hinges with damping, an activation
# state, a mocap body on an equality, a sensor of each stage, contacts with the floor.
MODEL = """
<mujoco>
  <option timestep="0.004"/>
  <worldbody>
    <geom name="floor" type="plane" size="5 5 .1"/>
    <body name="crate" pos="0 0 .3">
      <freejoint/><geom type="sphere" size=".1" mass="1"/><site name="top" pos="0 0 .1"/>
    </body>
    <body name="arm" pos="1 0 1">
      <joint name="shoulder" axis="0 1 0" damping=".1"/><geom type="capsule" size=".03" fromto="0 0 0 .3 0 0"/>
      <body pos=".3 0 0">
        <joint name="elbow" axis="0 1 0" damping=".1"/><geom type="capsule" size=".03" fromto="0 0 0 .3 0 0"/>
      </body>
    </body>
    <body name="hand" mocap="true" pos="-1 0 1"><geom type="sphere" size=".02" contype="0" conaffinity="0"/></body>
    <body name="held" pos="-1 0 .8"><freejoint/><geom type="sphere" size=".05" mass=".2"/></body>
  </worldbody>
  <equality><connect body1="hand" body2="held" anchor="0 0 -.2"/></equality>
  <actuator>
    <motor joint="shoulder" gear="2" ctrllimited="true" ctrlrange="-1 1"/>
    <general joint="elbow" dyntype="filter" dynprm=".05" gainprm="3" ctrllimited="true" ctrlrange="-1 1"/>
  </actuator>
  <sensor><framepos objtype="site" objname="top"/><jointvel joint="elbow"/><accelerometer site="top"/></sensor>
</mujoco>
"""
FIELDS = ("xpos", "xmat", "cvel", "sensordata", "qacc", "actuator_force", "subtree_com", "site_xpos")
N = 7


@pytest.fixture(scope="module")
def mj_model():
    return mujoco.MjModel.from_xml_string(MODEL)


@pytest.fixture(scope="module")
def physics(mj_model):
    return make_physics(mj_model, "native", FIELDS)


@pytest.fixture(scope="module")
def batch(mj_model, physics):
    """N different states in motion, and controls for them."""
    rng = np.random.default_rng(0)
    qvel = rng.normal(0, 0.5, (N, mj_model.nv)).astype(np.float32)
    data = jax.vmap(lambda v: physics.init(qvel=v))(qvel)
    ctrl = jnp.asarray(rng.uniform(-1, 1, (N, mj_model.nu)), jnp.float32)
    return jax.vmap(lambda d, u: physics.step(d, u, 3))(data, ctrl), ctrl


def mujoco_loop(mj_model, data, ctrl, n_substeps):
    """The same by mj_step on one MjData; a list of MjData, one per simulation."""
    out = []
    for i in range(len(ctrl)):
        one = mujoco.MjData(mj_model)
        for name in ("time", "qpos", "qvel", "act", "qacc_warmstart", "mocap_pos", "mocap_quat"):
            value = np.asarray(getattr(data, name)[i], np.float64)
            if name == "time":
                one.time = float(value)
            else:
                getattr(one, name)[:] = value
        one.ctrl[:] = np.asarray(ctrl[i], np.float64)
        for _ in range(n_substeps):
            mujoco.mj_step(mj_model, one)
        out.append(one)
    return out


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("n_substeps", [1, 5])
def test_native_steps_are_mj_steps_to_the_bit(mj_model, physics, batch, n_substeps):
    data, ctrl = batch
    stepped = jax.jit(jax.vmap(lambda d, u: physics.step(d, u, n_substeps)))(data, ctrl)
    for i, expected in enumerate(mujoco_loop(mj_model, data, ctrl, n_substeps)):
        for name in ("time", "qpos", "qvel", "act", "qacc_warmstart", "ctrl", *FIELDS):
            want = np.asarray(getattr(expected, name), np.float32)
            got = np.asarray(getattr(stepped, name)[i])
            np.testing.assert_array_equal(got.reshape(want.shape), want, err_msg=f"{name} of {i}")


def test_derived_fields_lag_one_substep_after_step_and_are_current_after_init(mj_model, physics):
    data = physics.init(qvel=jnp.ones(mj_model.nv))
    one = mujoco.MjData(mj_model)
    one.qvel[:] = 1
    mujoco.mj_forward(mj_model, one)
    np.testing.assert_array_equal(data.xpos, one.xpos.astype(np.float32))
    stepped = physics.step(data, jnp.zeros(mj_model.nu), 1)
    np.testing.assert_array_equal(stepped.xpos, data.xpos)  # where the body was before the step
    assert np.abs(np.asarray(stepped.qpos - data.qpos)).max() > 1e-3
    current = physics.forward(stepped)
    np.testing.assert_allclose(current.xpos[1], stepped.qpos[:3], atol=1e-7)


def test_shapes_and_types_are_those_of_mjx(mj_model, physics, batch):
    data, _ = batch
    assert data.xmat.shape == (N, mj_model.nbody, 3, 3)
    assert data.time.shape == (N,)
    assert data.sensordata.shape == (N, 7)
    assert data.eq_active.dtype == bool
    assert all(getattr(data, name).dtype == jnp.float32 for name in FIELDS)
    assert {"qpos", "xpos"} <= set(dir(data))


def test_vmap_is_a_loop_and_nested_vmap_is_vmap(physics, batch):
    data, ctrl = batch
    step = lambda d, u: physics.step(d, u, 2)
    flat = jax.vmap(step)(data, ctrl)
    for i in range(N):
        assert_same(jax.tree.map(lambda x, i=i: x[i], flat), step(jax.tree.map(lambda x, i=i: x[i], data), ctrl[i]))
    nested_data, nested_ctrl = jax.tree.map(lambda x: x[:6].reshape(2, 3, *x.shape[1:]), (data, ctrl))
    nested = jax.jit(jax.vmap(jax.vmap(step)))(nested_data, nested_ctrl)
    assert_same(jax.tree.map(lambda x: x.reshape(6, *x.shape[2:]), nested), jax.tree.map(lambda x: x[:6], flat))


def test_state_or_control_alone_may_be_batched(physics, batch):
    data, ctrl = batch
    one = jax.tree.map(lambda x: x[0], data)
    by_ctrl = jax.jit(jax.vmap(lambda u: physics.step(one, u)))(ctrl)
    by_state = jax.jit(jax.vmap(lambda d: physics.step(d, ctrl[0])))(data)
    assert_same(jax.tree.map(lambda x: x[0], by_ctrl), physics.step(one, ctrl[0]))
    assert_same(jax.tree.map(lambda x: x[0], by_state), physics.step(one, ctrl[0]))
    assert by_ctrl.qpos.shape[0] == by_state.qpos.shape[0] == N


def test_scan_and_while_loop_are_python_loops(physics, batch):
    data, ctrl = batch
    step = jax.vmap(physics.step)
    looped = data
    for _ in range(4):
        looped = step(looped, ctrl)
    scanned, _ = jax.jit(lambda d: jax.lax.scan(lambda c, _: (step(c, ctrl), None), d, None, length=4))(data)
    counted = jax.jit(lambda d: jax.lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, step(c[1], ctrl)), (0, d)))
    assert_same(scanned, looped)
    assert_same(counted(data)[1], looped)


def test_substeps_are_steps(physics, batch):
    data, ctrl = batch
    # Between control steps the state is rounded to float32, hence not to the bit.
    once = jax.vmap(lambda d, u: physics.step(d, u, 2))(data, ctrl)
    twice = jax.vmap(physics.step)(jax.vmap(physics.step)(data, ctrl), ctrl)
    np.testing.assert_allclose(once.qpos, twice.qpos, atol=1e-6)


@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_results_do_not_depend_on_the_number_of_threads(mj_model, physics, batch, n_threads):
    data, ctrl = batch
    other = make_physics(mj_model, "native", FIELDS, n_threads=n_threads)
    assert_same(jax.vmap(physics.step)(data, ctrl), jax.vmap(other.step)(data, ctrl))


def test_results_do_not_depend_on_the_rest_of_the_batch_or_on_what_ran_before(physics, batch):
    data, ctrl = batch
    step = jax.vmap(lambda d, u: physics.step(d, u, 2))
    whole = step(data, ctrl)
    order = np.array([4, 1, 6])
    part = step(*jax.tree.map(lambda x: x[order], (data, ctrl)))
    assert_same(part, jax.tree.map(lambda x: x[order], whole))
    saved = jax.tree.map(np.array, data)
    step(whole, -ctrl)  # the pool's batches now hold something else
    assert_same(step(jax.tree.map(jnp.asarray, saved), ctrl), whole)


def test_one_call_of_the_host_per_control_step_whatever_the_batch(mj_model):
    physics = make_physics(mj_model, "native")
    calls = []
    run = physics._engine.run
    physics._engine.run = lambda n_substeps, state, *rest: (
        calls.append((n_substeps, state.shape)),
        run(n_substeps, state, *rest),
    )
    data = jax.vmap(lambda v: physics.init(qvel=v))(jnp.zeros((N, mj_model.nv)))
    assert calls == [(0, (N, data.state.shape[-1]))]
    calls.clear()

    @jax.jit
    def roll(data):
        step = jax.vmap(lambda d: physics.step(d, jnp.zeros(mj_model.nu), 5))
        return jax.lax.scan(lambda d, _: (step(d), None), data, None, length=3)[0]

    jax.block_until_ready(roll(data))
    assert calls == [(5, (N, data.state.shape[-1]))] * 3


def test_on_another_device_the_host_gets_copies_with_the_same_result(physics, batch, monkeypatch):
    data, ctrl = batch
    step = lambda: jax.jit(jax.vmap(lambda d, u: physics.step(d, u, 2)))(data, ctrl)
    expected = step()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert_same(step(), expected)


def test_two_host_threads_may_step_at_once(physics, batch):
    data, ctrl = batch
    step = jax.jit(jax.vmap(lambda d, u: physics.step(d, u, 5)))
    expected = [step(data, ctrl), step(data, -ctrl)]
    wrong = []

    def work(which):
        for _ in range(20):
            got = step(data, ctrl if which == 0 else -ctrl)
            if not np.array_equal(np.asarray(got.state), np.asarray(expected[which].state)):
                wrong.append(which)

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


def poison_qpos(data, ctrl):
    return data.replace(qpos=data.qpos.at[2, 0].set(jnp.nan)), ctrl


def poison_ctrl(data, ctrl):
    return data, ctrl.at[2, 0].set(jnp.inf)


def explode(data, ctrl):  # finite, but beyond MuJoCo's 1e10 within the step
    return data.replace(qvel=data.qvel.at[2].set(1e12)), ctrl


@pytest.mark.parametrize("poison", [poison_qpos, poison_ctrl, explode])
def test_a_broken_simulation_is_nan_and_alone(physics, batch, poison, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    data, ctrl = batch
    step = jax.jit(jax.vmap(lambda d, u: physics.step(d, u, 5)))
    good, bad = step(data, ctrl), step(*poison(data, ctrl))
    others = np.arange(N) != 2
    for a, b in zip(jax.tree.leaves(good), jax.tree.leaves(bad), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[others], np.asarray(b)[others])
        assert np.isnan(np.asarray(b)[2]).all()
    assert os.listdir(tmp_path) == []
    assert capfd.readouterr() == ("", "")


def test_a_mujoco_error_in_one_simulation_is_nan_and_told_once(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    boxes = "".join('<body pos="0 0 9"><freejoint/><geom type="box" size=".2 .2 .2"/></body>' for _ in range(6))
    model = mujoco.MjModel.from_xml_string(
        '<mujoco><size memory="80K"/><option jacobian="dense"/><worldbody><geom type="plane" size="5 5 .1"/>'
        f"{boxes}</worldbody></mujoco>"
    )
    apart = np.tile(model.qpos0, (3, 1)).reshape(3, 6, 7)
    apart[:, :, 0] = np.arange(6)
    piled = apart.copy()
    piled[1, :, 0], piled[1, :, 2] = 0.25 * np.arange(6), 0.2  # more contacts than fit in 80 kB
    physics = make_physics(model, "native")
    initial = lambda qpos: jax.vmap(lambda q: physics.init(qpos=q))(jnp.asarray(qpos.reshape(3, -1)))
    with caplog.at_level(logging.WARNING, logger="envs.physics"):
        safe, broken = initial(apart), initial(piled)
        broken = jax.vmap(lambda d: physics.step(d, jnp.zeros(0)))(broken)
        safe = jax.vmap(lambda d: physics.step(d, jnp.zeros(0)))(safe)
    np.testing.assert_array_equal(np.asarray(safe.state)[[0, 2]], np.asarray(broken.state)[[0, 2]])
    assert np.isnan(np.asarray(broken.state)[1]).all()
    assert sum("out of memory" in record.getMessage() for record in caplog.records) == 1
    assert os.listdir(tmp_path) == []


def test_unstable_states_are_not_reset_behind_the_trainers_back(mj_model, physics):
    assert not mj_model.opt.disableflags & mujoco.mjtDisableBit.mjDSBL_AUTORESET  # the caller's model is untouched
    data = physics.init(qvel=jnp.full(mj_model.nv, 1e15))
    assert np.isnan(np.asarray(physics.step(data, jnp.zeros(mj_model.nu)).state)).all()


def test_an_applied_force_accelerates_by_force_over_mass():
    model = mujoco.MjModel.from_xml_string(
        '<mujoco><option gravity="0 0 0" timestep="0.01"/><worldbody><body><freejoint/><geom type="sphere" size=".1" '
        'mass="2"/></body></worldbody></mujoco>'
    )
    physics = make_physics(model, "native", fields=("xfrc_applied",))
    push = jnp.zeros((2, 6)).at[1, 0].set(3.0)  # 3 N along x on 2 kg
    data = physics.init(xfrc_applied=push)
    for _ in range(10):
        data = physics.step(data, jnp.zeros(0), 10)
    np.testing.assert_allclose(data.qvel[0], 1.5, rtol=1e-5)
    np.testing.assert_array_equal(data.xfrc_applied, push)
    np.testing.assert_allclose(data.time, 1.0, rtol=1e-6)


def test_a_mocap_body_leads_what_is_tied_to_it(mj_model, physics):
    data = physics.init(mocap_pos=jnp.array([[-1.0, 0.5, 1.0]]))
    for _ in range(50):
        data = physics.step(data, jnp.zeros(mj_model.nu), 5)
    np.testing.assert_allclose(data.mocap_pos, [[-1.0, 0.5, 1.0]])
    np.testing.assert_allclose(data.xpos[mj_model.body("held").id], [-1.0, 0.5, 0.8], atol=0.05)


AGREEMENT = [("jax", ()), pytest.param("warp", (), marks=pytest.mark.warp)]


@pytest.mark.parametrize(("impl", "_"), AGREEMENT)
def test_engines_agree_field_by_field(mj_model, physics, batch, impl, _):
    """Ten steps from the same states. MJX computes in float32 and MuJoCo in float64: differences of 1e-7 in
    each of some hundred operations, multiplied by stiff contacts (accelerations of 100 m/s^2), stay within 1e-3 of
    each field's largest value."""
    if impl == "warp":
        pytest.importorskip("warp")
    other = make_physics(mj_model, impl, FIELDS)
    data, ctrl = batch
    assert jax.eval_shape(other.init) == jax.eval_shape(physics.init)
    roll = lambda p: jax.jit(jax.vmap(lambda d, u: p.step(d, u, 10)))(data, ctrl)
    native, there = roll(physics), roll(other)
    for name in ("time", "qpos", "qvel", "act", "ctrl", "mocap_pos", "eq_active", *FIELDS):
        want, got = np.asarray(getattr(native, name), np.float64), np.asarray(getattr(there, name), np.float64)
        assert want.shape == got.shape
        np.testing.assert_allclose(got, want, atol=1e-3 * max(1.0, np.abs(want).max()), err_msg=name)


@pytest.mark.warp
def test_warp_gives_every_environment_of_a_batch_its_own_result(mj_model, batch):
    pytest.importorskip("warp")
    physics = make_physics(mj_model, "warp")
    data = jax.vmap(lambda q, v: physics.init(qpos=q, qvel=v))(batch[0].qpos, batch[0].qvel)
    ctrl = batch[1]
    step = lambda d, u: physics.step(d, u, 2)
    whole = jax.jit(jax.vmap(step))(data, ctrl)
    one = jax.jit(step)(jax.tree.map(lambda x: x[3], data), ctrl[3])
    np.testing.assert_allclose(one.state, whole.state[3], atol=1e-5)
    nested = jax.jit(jax.vmap(jax.vmap(step)))(*jax.tree.map(lambda x: x[:6].reshape(2, 3, -1), (data, ctrl)))
    np.testing.assert_allclose(nested.state.reshape(6, -1), whole.state[:6], atol=1e-5)
    # A partial reset is an ordinary selection: nothing in the data is shared between environments.
    fresh = jax.vmap(lambda q: physics.init(qpos=q))(batch[0].qpos)
    done = jnp.arange(N) % 2 == 0
    mixed = jax.tree.map(lambda a, b: jnp.where(done[:, None], a, b), fresh, whole)
    after = jax.jit(jax.vmap(step))(mixed, ctrl)
    np.testing.assert_allclose(
        after.state[0], jax.jit(step)(jax.tree.map(lambda x: x[0], fresh), ctrl[0]).state, atol=1e-5
    )


def test_environments_sharded_over_two_host_devices_step_as_on_one():
    program = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from envs import CartpoleSwingup
env = CartpoleSwingup(physics="native")
mesh = Mesh(jax.devices(), ("envs",))
assert mesh.size == 2
state = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 3000))
def roll(state):
    return jax.lax.scan(lambda s, _: (jax.vmap(env.step)(s, s.obs[:, :1]), None), state, None, length=30)[0]
one = jax.jit(roll)(state)
auto = jax.jit(roll)(jax.device_put(state, NamedSharding(mesh, P("envs"))))
manual = jax.jit(jax.shard_map(roll, mesh=mesh, in_specs=P("envs"), out_specs=P("envs"), check_vma=False))(state)
for other in (auto, manual):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
        np.testing.assert_allclose(a, b, atol=1e-5)
print("same")
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **flags, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.stdout.strip() == "same", result.stderr[-2000:]


def test_the_default_engine_follows_the_device():
    assert jax.default_backend() != "cpu" or default_impl() == "native"
    assert make_physics(mujoco.MjModel.from_xml_string("<mujoco/>")).impl == default_impl()
    assert 1 <= available_cpus() <= os.cpu_count()


CYLINDER_ON_BOX = (
    '<mujoco><worldbody><geom name="table" type="box" size="1 1 1"/><body name="b" pos="0 0 2"><freejoint/>'
    '<geom name="can" type="cylinder" size=".1 .1"/></body></worldbody></mujoco>'
)
SLEEPING = '<mujoco><option><flag sleep="enable"/></option></mujoco>'
DAMPED_BY_USER = (
    '<mujoco><worldbody><body><joint name="j"/><geom size=".1"/></body></worldbody><actuator>'
    '<general name="odd" joint="j" biastype="user"/></actuator></mujoco>'
)


@pytest.mark.parametrize(
    ("xml", "settings", "message"),
    [
        ("<mujoco/>", {"impl": "nativ"}, "unknown physics 'nativ' (did you mean 'native'?): accepted are 'jax'"),
        ("<mujoco/>", {"impl": "native", "fields": ["xpoz"]}, "unknown data field 'xpoz' (did you mean"),
        ("<mujoco/>", {"impl": "native", "fields": ["contact"]}, "unknown data field 'contact'"),
        ("<mujoco/>", {"impl": "native", "n_threads": 0}, "n_threads is 0: give at least 1"),
        (CYLINDER_ON_BOX, {"impl": "jax"}, "<geom name='can'>, <geom name='table'>. Use physics='native'"),
        (DAMPED_BY_USER, {"impl": "jax"}, "<actuator name='odd'>"),
        (SLEEPING, {"impl": "native"}, "physics 'native' cannot simulate this model: sleep"),
        (MODEL, {"impl": "jax", "fields": ["geom_xquat"]}, "does not compute the data field 'geom_xquat'"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_a_way_out(xml, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_physics(mujoco.MjModel.from_xml_string(xml), **settings)


def test_native_takes_what_mjx_does_not():
    physics = make_physics(mujoco.MjModel.from_xml_string(CYLINDER_ON_BOX), "native")
    assert np.isfinite(np.asarray(physics.step(physics.init(), jnp.zeros(0)).state)).all()


def test_warp_without_the_extra_says_what_to_install(monkeypatch):
    monkeypatch.setattr("envs.physics.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"install the extra `warp`"):
        make_physics(mujoco.MjModel.from_xml_string("<mujoco/>"), "warp")


def test_a_field_that_was_not_named_says_how_to_add_it(physics):
    data = physics.init()
    with pytest.raises(AttributeError, match=r"does not hold 'cinert': add it to the `fields`"):
        _ = data.cinert
    with pytest.raises(AttributeError, match=r"no field 'qpoz' \(did you mean 'qpos'\?\)"):
        _ = data.qpoz
    with pytest.raises(ValueError, match=r"'xpos' is computed by the physics"):
        data.replace(xpos=data.xpos)
    with pytest.raises(ValueError, match=r"'xfrc_applied' is not part of this data's state: add it"):
        data.replace(xfrc_applied=0)
    with pytest.raises(ValueError, match=r"no field 'qpo' \(did you mean 'qpos'\?\)"):
        data.replace(qpo=0)
    with pytest.raises(ValueError, match=r"'qpos' has shape \(3,\): it must be \(16,\)"):
        physics.init(qpos=jnp.zeros(3))


def test_importing_envs_leaves_brax_and_mjx_alone():
    """Each takes seconds to import, which the native engine has no use for."""
    program = (
        "import sys, envs; envs.make('humanoid', physics='native'); "
        "print('brax' in sys.modules, 'mujoco.mjx' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.split() == ["False", "False"]


def test_differentiating_through_native_physics_says_no(physics, mj_model):
    with warnings.catch_warnings(), pytest.raises(ValueError, match=r"do not support JVP|cannot be differentiated"):
        jax.grad(lambda u: physics.step(physics.init(), u).qpos.sum())(jnp.zeros(mj_model.nu))
