"""Calling the host from compiled code: the arrays arrive, errors come out, and programs with it are cached."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

from envs import host_call, physics
from envs.physics import make_physics

PENDULUM = """
<mujoco>
  <worldbody>
    <body>
      <joint name="hinge" type="hinge" axis="0 1 0"/>
      <geom type="capsule" size="0.02" fromto="0 0 0 0 0 -0.5"/>
    </body>
  </worldbody>
  <actuator><motor joint="hinge"/></actuator>
</mujoco>
"""

shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)


@pytest.fixture(autouse=True)
def registered():
    """Functions of a test are gone after it."""
    before = dict(host_call._FUNCTIONS)
    assert host_call.available()
    yield
    host_call._FUNCTIONS.clear()
    host_call._FUNCTIONS.update(before)


def test_arrays_of_every_rank_and_size_arrive_and_come_back():
    seen = []

    def function(argument, arrays, results):
        seen.append((argument, [array.copy() for array in arrays]))
        results[0][...] = arrays[0].sum() + argument
        results[1][...] = 2 * arrays[1]

    host_call.register(11, function)
    call = jax.jit(lambda *arrays: host_call.host_call(11, -7, [shape(), shape(2, 3), shape(4, 0)], *arrays))
    arrays = [np.float32(5), np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((0, 2), np.float32)]
    total, doubled, nothing = call(*arrays)
    ((argument, given),) = seen
    assert argument == -7
    for got, wanted in zip(given, arrays, strict=True):
        np.testing.assert_array_equal(got, wanted)
        assert got.shape == np.shape(wanted)
    assert total == -2
    np.testing.assert_array_equal(doubled, 2 * arrays[1])
    assert nothing.shape == (4, 0)


def test_many_are_one_call_and_what_is_not_mapped_has_a_leading_one():
    shapes = []

    def function(argument, arrays, results):
        shapes.append([array.shape for array in arrays])
        results[0][...] = arrays[0] + arrays[1]

    host_call.register(12, function)
    one = lambda x, y: host_call.host_call(12, 0, [shape(3)], x, y)[0]
    x, y = jnp.arange(12.0).reshape(4, 3), jnp.ones(3)
    np.testing.assert_array_equal(jax.jit(jax.vmap(one, in_axes=(0, None)))(x, y), x + 1)
    assert shapes == [[(4, 3), (1, 3)]]


def test_an_error_on_the_host_comes_out_with_its_name_and_the_process_lives():
    def function(argument, arrays, results):
        raise ValueError("there is no tomorrow")

    host_call.register(13, function)
    call = jax.jit(lambda x: host_call.host_call(13, 0, [shape(2)], x)[0])
    for _ in range(2):
        with pytest.raises(Exception, match="ValueError: there is no tomorrow"):
            jax.block_until_ready(call(jnp.ones(2)))


def test_a_function_that_nobody_registered_is_an_error():
    with pytest.raises(Exception, match="not registered"):
        jax.block_until_ready(jax.jit(lambda x: host_call.host_call(99, 0, [shape(2)], x)[0])(jnp.ones(2)))


def test_other_types_than_float32_are_an_error():
    host_call.register(14, lambda argument, arrays, results: None)
    with pytest.raises(Exception, match="dtype"):
        jax.block_until_ready(jax.jit(lambda x: host_call.host_call(14, 0, [shape(2)], x)[0])(jnp.ones(2, jnp.int32)))


# --- the native engine ----------------------------------------------------------------------------------------


def stepped(engine):
    data = jax.vmap(lambda v: engine.init(qvel=v[None]))(jnp.arange(3.0))
    return jax.jit(jax.vmap(lambda data: engine.step(data, jnp.ones(1), 4)))(data)


def test_the_native_engine_gives_the_same_bits_where_jax_does_not_take_the_handler(monkeypatch):
    model = mujoco.MjModel.from_xml_string(PENDULUM)
    here = stepped(make_physics(model, "native"))
    monkeypatch.setattr(host_call, "available", lambda: False)
    np.testing.assert_array_equal(stepped(make_physics(model, "native")).state, here.state)


def test_a_compiled_program_goes_on_after_the_engine_it_was_made_with_is_gone():
    engine = make_physics(mujoco.MjModel.from_xml_string(PENDULUM), "native", ("xpos",))
    data = engine.init(qvel=jnp.ones(1))
    step = jax.jit(lambda data: engine.step(data, jnp.ones(1), 2)).lower(data).compile()
    before = step(data)
    del engine
    np.testing.assert_array_equal(step(data).state, before.state)


def test_what_changes_a_simulation_changes_its_number():
    model = mujoco.MjModel.from_xml_string(PENDULUM)
    heavier = mujoco.MjModel.from_xml_string(PENDULUM.replace("0.02", "0.03"))
    finer = mujoco.MjModel.from_xml_string(PENDULUM)
    finer.opt.timestep = 0.001
    number = lambda model, fields=(), threads=1: physics.NativePhysics(model, fields, threads)._engine.number
    assert number(model) == number(mujoco.MjModel.from_xml_string(PENDULUM))
    others = [number(heavier), number(finer), number(model, ("xpos",)), number(model, (), 2)]
    assert len({number(model), *others}) == 5


CACHED = """
    import sys
    import jax, jax.numpy as jnp, mujoco
    from jax import monitoring
    from envs.physics import make_physics
    hits = []
    monitoring.register_event_listener(lambda event, **_: hits.append(event) if "cache_hits" in event else None)
    engine = make_physics(mujoco.MjModel.from_xml_string(sys.argv[1]), "native")
    data = jax.vmap(lambda v: engine.init(qvel=v[None]))(jnp.arange(3.0))
    before = len(hits)
    state = jax.jit(jax.vmap(lambda data: engine.step(data, jnp.ones(1), 4)))(data).state
    found = len(hits) - before
    print(state.sum(), found)
"""


def test_the_next_process_finds_a_native_program_in_the_cache(tmp_path):
    def run():
        out = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(CACHED), PENDULUM],
            env={
                **os.environ,
                "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            },
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            check=False,
        )
        assert out.returncode == 0, out.stderr[-2000:]
        return out.stdout.split()

    first, second = run(), run()
    assert first[0] == second[0]
    assert (first[1], second[1]) == ("0", "1")
