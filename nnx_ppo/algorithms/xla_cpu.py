"""How XLA compiles for a CPU, where its own choice is slow for what runs here. Results stay the same up to rounding."""

import os
import platform
from typing import Any

import jax
from jax.extend import core

from nnx_ppo.algorithms.jaxprs import equations, has_callback

SMALL_LOOP = 2**20
"""Bytes that a pass through a loop reads and writes, up to which the whole loop becomes a single function."""

PRODUCTS = "xla_cpu_experimental_ynn_fusion_type"
"""XLA's option for what it leaves to the library YNNPACK. The rest goes to Eigen or into XLA's own code."""


def is_x86() -> bool:
    """Whether this is the kind of CPU that these choices were measured on; others keep XLA's."""
    return platform.machine() in ("x86_64", "AMD64")


def fuse_small_loops() -> None:
    """Let XLA compile a small loop as one function; without effect once JAX has computed something.

    Otherwise every operation of every pass is a task that is scheduled on its own, which in the line search of MJX's
    solver takes about as long as the operation: iterations of Brax's hopper took a tenth longer, 256 environments on
    two cores with JAX 0.10.2. JAX 0.12 does so by itself; to earlier ones it can be said in this variable only.
    Earlier ones also multiply slowly in such a function, unless YNNPACK does it.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if not is_x86() or "xla_backend_extra_options" in flags:
        return
    if has_computed():
        # XLA has read its flags; to change them now would only mislead the cache of programs.
        return
    option = f"--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold={SMALL_LOOP}"
    os.environ["XLA_FLAGS"] = f"{flags} {option}".strip()


def has_computed() -> bool:
    """Whether JAX has started, so that it refuses to change its number of devices."""
    chosen = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    try:
        for number in (abs(chosen) + 1, chosen):
            jax.config.update("jax_num_cpu_devices", number)
    except RuntimeError:
        return True
    return False


fuse_small_loops()


def products_option(jaxpr: Any) -> dict[str, str] | None:
    """Which library multiplies a program's matrices: an option for `lowered.compile`, None for XLA's own choice.

    XLA gives matrix products, and sums with them, to YNNPACK. Eigen is faster with a network's large ones: on an AMD
    EPYC with JAX 0.10.2 updates of two networks [256, 256] took 220 ms instead of 236, rollouts 26 instead of 37. For
    the batches of small products that MJX has YNNPACK is the faster one.
    """
    if jax.default_backend() != "cpu" or not is_x86():
        return None
    return {PRODUCTS: ""} if has_large_products_only(jaxpr) else None


def has_large_products_only(jaxpr: Any) -> bool:
    """Whether a program has no batches of matrix products, and none in a loop that `fuse_small_loops` might fuse.

    There XLA's own code would multiply, which only YNNPACK keeps it from.
    """
    for equation in equations(jaxpr):
        if equation.primitive.name == "dot_general":
            (_, _), (batch, _) = equation.params["dimension_numbers"]
            if len(batch) > 0:
                return False
        if equation.primitive.name in ("while", "scan") and 0 < bytes_of_products(equation) < SMALL_LOOP:
            # XLA does not fuse a loop that calls something.
            calls = any(has_callback(body) for body in core.jaxprs_in_params(equation.params))
            if not calls:
                return False
    return True


def bytes_of_products(loop: Any) -> int:
    """What the matrix products in one pass through a loop read and write."""
    return sum(
        variable.aval.size * variable.aval.dtype.itemsize
        for body in core.jaxprs_in_params(loop.params)
        for equation in equations(body)
        if equation.primitive.name == "dot_general"
        for variable in (*equation.invars, *equation.outvars)
    )
