"""Tests for how programs are compiled for a CPU."""

import os
import platform
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from nnx_ppo.algorithms import compilation, xla_cpu
from nnx_ppo.algorithms.compilation import compile_program, compile_well
from nnx_ppo.algorithms.xla_cpu import SMALL_LOOP, bytes_of_products, has_large_products_only, products_option

x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other machines keep XLA's choice")


def layer(x, w):
    return jnp.tanh(x @ w)


def repeated(x, w):
    return jax.lax.fori_loop(0, 3, lambda _, x: layer(x, w), x)


def repeated_with_a_callback(x, w):
    def body(_, x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda x: x, shape, layer(x, w))

    return jax.lax.fori_loop(0, 3, body, x)


def trace(function, *shapes):
    return jax.jit(function).trace(*[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (layer, [(8, 4), (4, 4)], True),
        (lambda x, w: jnp.sin(x) + w, [(4, 4), (4, 4)], True),
        (jax.vmap(layer), [(64, 6, 6), (64, 6, 6)], False),
        (jax.vmap(layer, in_axes=(0, None)), [(64, 6, 6), (6, 6)], True),
        (repeated, [(8, 4), (4, 4)], False),
        (repeated, [(512, 512), (512, 512)], True),
        (repeated_with_a_callback, [(8, 4), (4, 4)], True),
        (lambda x, w: jax.lax.map(lambda x: repeated(x, w), x), [(2, 8, 4), (4, 4)], False),
    ],
)
def test_batches_of_products_and_products_in_a_small_loop_are_found(function, shapes, expected):
    assert has_large_products_only(trace(function, *shapes).jaxpr.jaxpr) is expected


def test_the_bytes_of_a_loops_products_are_those_that_a_pass_reads_and_writes():
    (loop,) = [e for e in trace(repeated, (8, 4), (4, 4)).jaxpr.jaxpr.eqns if e.primitive.name in ("while", "scan")]
    assert bytes_of_products(loop) == 4 * (8 * 4 + 4 * 4 + 8 * 4)


@x86
def test_large_products_are_left_to_eigen_and_batches_to_xla():
    plain = trace(layer, (512, 512), (512, 512)).jaxpr.jaxpr
    batches = trace(jax.vmap(layer), (64, 6, 6), (64, 6, 6)).jaxpr.jaxpr
    assert products_option(plain) == {xla_cpu.PRODUCTS: ""}
    assert products_option(batches) is None


@x86
def test_a_compiled_layer_multiplies_without_ynnpack_and_as_before():
    x, w = jax.random.normal(jax.random.key(0), (2, 512, 512))
    program = compile_program(jax.jit(layer), x, w)
    assert "__ynn_fusion" not in program.as_text()
    assert jnp.allclose(program(x, w), layer(x, w), atol=1e-4)


@pytest.mark.parametrize("machine", ["arm64", "aarch64", "riscv64"])
def test_machines_that_nobody_measured_keep_the_choice_of_xla(machine, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert products_option(trace(layer, (8, 4), (4, 4)).jaxpr.jaxpr) is None


def test_an_accelerator_keeps_the_choice_of_xla(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert products_option(trace(layer, (8, 4), (4, 4)).jaxpr.jaxpr) is None


def test_an_option_that_this_xla_lacks_is_left_out(monkeypatch):
    monkeypatch.setattr(compilation, "products_option", lambda jaxpr: {"xla_cpu_there_is_none": ""})
    assert compile_program(jax.jit(layer), jnp.ones((2, 3)), jnp.zeros((3, 4)))(
        jnp.ones((2, 3)), jnp.zeros((3, 4))
    ).shape == (2, 4)


def test_what_else_goes_wrong_while_compiling_is_told(monkeypatch):
    monkeypatch.setattr(compilation, "products_option", lambda jaxpr: {"xla_cpu_enable_fast_math": "perhaps"})
    traced = trace(layer, (2, 3), (3, 4))
    with pytest.raises(jax.errors.JaxRuntimeError, match="fast_math"):
        compile_well(traced.jaxpr, traced.lower())


# --- loops ------------------------------------------------------------------------------------------------------

LOOP = """
import os
{first}
import jax, jax.numpy as jnp
{before}
import nnx_ppo.algorithms.ppo

def converge(x):
    return jax.lax.while_loop(lambda x: jnp.any(x > 1), lambda x: jnp.where(x > 1, x / 2, x), x)

text = jax.jit(converge).lower(jnp.ones({size})).compile().as_text()
print("small_call" in text, os.environ.get("XLA_FLAGS", ""))
"""


def run_loop(size, first="", before="", flags=""):
    script = LOOP.format(size=size, first=first, before=before)
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu"} | ({"XLA_FLAGS": flags} if flags else {})
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    fused, _, flags = result.stdout.strip().partition(" ")
    return fused == "True", flags


@x86
def test_a_loop_with_a_chunk_of_environments_becomes_one_function():
    fused, flags = run_loop(size=64 * 40)
    assert fused
    assert flags.endswith(f"small_while_loop_byte_threshold={SMALL_LOOP}")


@x86
def test_what_the_user_tells_xla_stays():
    flags = "--xla_cpu_multi_thread_eigen=true --xla_backend_extra_options=xla_cpu_disable_loop_unrolling"
    assert run_loop(size=64, flags=flags)[1] == flags
    assert run_loop(size=64, flags="--xla_cpu_multi_thread_eigen=true")[1].startswith(
        "--xla_cpu_multi_thread_eigen=true -"
    )


def test_xla_is_told_nothing_once_it_has_read_its_flags():
    assert run_loop(size=64, before="jnp.ones(3).block_until_ready()")[1] == ""


def test_xla_is_told_nothing_about_loops_on_machines_that_nobody_measured():
    assert run_loop(size=64, first="import platform; platform.machine = lambda: 'arm64'")[1] == ""
