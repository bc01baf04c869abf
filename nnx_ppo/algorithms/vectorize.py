"""Many environments from a function of one: `jax.vmap`, laid out for the hardware that runs it."""

import contextlib
import contextvars
import functools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
from jax.sharding import NamedSharding, PartitionSpec

from nnx_ppo.algorithms.devices import on_each_device
from nnx_ppo.algorithms.jaxprs import has_open_loop, largest_matrix

LANES = 64
"""Environments that a CPU steps together, where their step has a loop that runs until it has converged.

Such a loop runs as long as its slowest environment needs. Brax's hopper on MJX, 256 of them on one core of an AMD EPYC
with JAX 0.10.2: 5,239 steps/s in chunks of 64, 4,621 in chunks of 32, 2,903 all together.
"""


def vectorize(function: Callable[..., Any], *args: Any, lanes: int | None = None) -> Any:
    """`jax.vmap(function)(*args)`.

    On a CPU, a function with an open-ended loop (MJX's constraint solver has several) runs on chunks of `lanes`
    environments, and with some versions of jaxlib also one that factorizes large matrices (`safe_lanes`). Everything
    else, and every other kind of device, takes all environments at once. Several devices (`use_devices`) take an equal
    share each.

    Args:
      function: of one environment, pure.
      *args: its arguments with a leading axis [batch].
      lanes: environments in a chunk; None takes `LANES`.
    """
    # Left to itself, XLA lets every device call the native engine for all environments.
    return on_each_device(functools.partial(_on_one_device, function, lanes), *args)


def _on_one_device(function: Callable[..., Any], lanes: int | None, *args: Any) -> Any:
    batched = jax.vmap(function)
    n_envs = jax.tree.leaves(args)[0].shape[0]
    if jax.default_backend() != "cpu":
        return batched(*args)
    width = lanes or LANES
    if n_envs > width and not has_open_loop(function, *one_of(args)):
        width = n_envs
    width = min(width, safe_lanes(function, args))
    return batched(*args) if n_envs <= width else in_chunks(batched, args, n_envs, width)


def safe_lanes(function: Callable[..., Any], args: Any) -> int:
    """How many environments a CPU may step together without hanging where they factorize matrices.

    jaxlib 0.10.0 to 0.11.0 hands parts of a large batch of factorizations to the threads of XLA's pool, and waits for
    them in such a thread. When several devices do so at once all threads wait, for ever. Small batches are done in
    place: measured, of Cholesky's with 2 to 60 rows, all of those that this allows.
    """
    if not (0, 10) <= jaxlib.version.__version_info__ < (0, 11, 1):
        return sys.maxsize
    size = largest_matrix(function, *one_of(args))
    at_once = min(1000, 500_000 // (size**3 + 6 * size**2)) if size else sys.maxsize
    return max(1, at_once // _SEEDS.get())


_SEEDS: contextvars.ContextVar[int] = contextvars.ContextVar("seeds", default=1)


@contextlib.contextmanager
def many_seeds(n_seeds: int) -> Iterator[None]:
    """What is traced in this context is going to be vmapped over so many seeds."""
    token = _SEEDS.set(n_seeds)
    try:
        yield
    finally:
        _SEEDS.reset(token)


def in_chunks(function: Callable[..., Any], args: Any, n_envs: int, lanes: int) -> Any:
    """`function(*args)` for equal chunks of at most `lanes` rows, one after another.

    Rows that are missing from the last chunk are filled up with its last row.
    """
    n_chunks = math.ceil(n_envs / lanes)
    width = math.ceil(n_envs / n_chunks)

    def split(x: jax.Array) -> jax.Array:
        rows = x if n_chunks * width == n_envs else x[jnp.minimum(jnp.arange(n_chunks * width), n_envs - 1)]
        return rows.reshape(n_chunks, width, *x.shape[1:])

    results = jax.lax.map(lambda chunk: function(*chunk), jax.tree.map(split, args))
    return jax.tree.map(lambda x: x.reshape(n_chunks * width, *x.shape[2:])[:n_envs], results)


def one_of(batch: Any) -> Any:
    """The shapes of one environment's part of a batch, such that `jax.vmap` meets the trace of a function of them."""
    mesh = jax.sharding.get_abstract_mesh()
    # JAX knows a trace again by its types, and to these belongs the mesh that they are used in.
    sharding = None if mesh.empty else NamedSharding(mesh, PartitionSpec())

    def row(x: jax.Array) -> jax.ShapeDtypeStruct:
        weak_type = getattr(getattr(x, "aval", x), "weak_type", False)
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, weak_type=weak_type, sharding=sharding)

    return jax.tree.map(row, batch)
