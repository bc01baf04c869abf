"""Training on several devices: each steps its share of the environments and holds all parameters.

`ppo_step` is written for all environments and compiled for all devices at once; this file says where arrays lie. XLA
puts in what the devices have to tell each other: the rollout once per iteration, a gradient at each update. The numbers
are those of a single device, except for the order in which sums are added up.

The devices may belong to several processes, also on several machines: each calls `jax.distributed.initialize()` and
then `train_ppo(devices=jax.devices())` with the same arguments.

A CPU is one device by default, on which XLA runs a loop such as MJX's on one core. Importing this module makes a device
of each core instead; `ppo.default_devices` says when they are used. `jax.config.update("jax_num_cpu_devices", 1)`,
before or after, keeps it one.
"""

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from nnx_ppo.algorithms.config import PPOConfig
from nnx_ppo.algorithms.types import TrainingState

ENVS = "envs"
"""The axis of the mesh that environments are spread over."""


LEAST_SHARE = 16
"""Environments that a CPU's core should have, at least: its vector registers hold several side by side."""


def split_cpu(n_devices: int | None = None) -> None:
    """Make so many JAX devices of a CPU; by default one of each core, unless somebody has chosen a number before.

    Without effect once JAX has computed something. A GPU stays what JAX computes on.
    """
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    if n_devices is None:
        if jax.config.jax_num_cpu_devices > 0:  # type: ignore[attr-defined]
            return
        n_devices = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", n_devices or 1)


split_cpu()


def cores_for(n_envs: int) -> list[Any]:
    """The CPU devices that share out `n_envs` environments best; none on other hardware, or if the user chose one."""
    devices = jax.local_devices()
    if devices[0].platform != "cpu" or jax.config.jax_default_device is not None:  # type: ignore[attr-defined]
        return []
    usable = [n for n in range(2, len(devices) + 1) if n_envs % n == 0 and n_envs >= n * LEAST_SHARE]
    return devices[: usable[-1]] if usable else []


def use_devices(devices: Sequence[Any] | None, config: PPOConfig) -> contextlib.AbstractContextManager[Any]:
    """Within this context programs are made for these devices; None or a single one leaves JAX's default.

    Raises:
      ValueError: there are no devices, or `n_envs` cannot be shared out evenly among them.
    """
    if devices is None or list(devices) == jax.local_devices()[:1]:
        return contextlib.nullcontext()
    if len(devices) == 0:
        raise ValueError("devices=[]: give at least one, such as jax.devices(), or None for JAX's default.")
    if len(devices) == 1:
        return jax.default_device(devices[0])
    if config.n_envs % len(devices):
        raise ValueError(
            f"n_envs={config.n_envs} environments cannot be shared out evenly among {len(devices)} devices. Use for "
            f"example n_envs={nearest_n_envs(config, len(devices))}."
        )
    return jax.set_mesh(Mesh(np.asarray(devices), (ENVS,)))


def nearest_n_envs(config: PPOConfig, n_devices: int) -> int:
    """A number of environments near the configured one that devices and minibatches divide."""
    step = math.lcm(n_devices, config.n_minibatches)
    return max(1, round(config.n_envs / step)) * step


def mesh_in_use() -> AbstractMesh | None:
    """The mesh of `use_devices`, if there is more than one device; also while a program is being traced.

    None within `on_each_device`: there every device is on its own.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if ENVS in mesh.axis_names and ENVS not in mesh.manual_axes else None


def spread(tree: Any, axis: int = 0) -> Any:
    """Within a program: spread an axis of every leaf over the devices. Where it cannot be, each device has it all."""
    mesh = mesh_in_use()
    if mesh is None:
        return tree

    def constrain(x: jax.Array) -> jax.Array:
        even = x.ndim > axis and x.shape[axis] % mesh.size == 0
        spec = PartitionSpec(*[None] * axis, ENVS) if even else PartitionSpec()
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return jax.tree.map(constrain, tree)


def on_each_device(function: Callable[..., Any], *rows: Any, everywhere: Any = ()) -> Any:
    """Within a program: `function(*rows, *everywhere)`, each device for its share of the rows, waiting for no other.

    Args:
      function: of batches; row i of its result depends on row i of its arguments only.
      *rows: arguments with a leading axis [batch].
      everywhere: further arguments, whole on every device.
    """
    mesh = mesh_in_use()
    if mesh is None or jax.tree.leaves(rows)[0].shape[0] % mesh.size:
        return function(*rows, *everywhere)
    specs = (PartitionSpec(ENVS),) * len(rows) + (PartitionSpec(),) * len(everywhere)
    share = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(ENVS), check_vma=False)
    return share(*rows, *everywhere)


def mean_of_shares(
    function: Callable[..., tuple[Any, Any]], shared: Any, specs: Any, n_rows: int, *everywhere: Any
) -> tuple[Any, Any]:
    """Within a program: `function(shared, *everywhere)`, each device for its share, waiting once for the others.

    Args:
      function: returns means over the rows of its share, and what does not depend on the rows.
      shared: what the devices share out.
      specs: along which axes; a `PartitionSpec` for each leaf or subtree of `shared`.
      n_rows: how many rows there are. Where devices cannot share them out evenly each has them all.
      everywhere: further arguments, whole on every device.
    """
    mesh = mesh_in_use()
    if mesh is None or n_rows % mesh.size:
        return function(shared, *everywhere)

    def of_share(share: Any, *everywhere: Any) -> tuple[Any, Any]:
        means, rest = function(share, *everywhere)
        # All in one array: CPU devices wait for each other in every single one.
        flat, unravel = ravel_pytree(means)
        return unravel(jax.lax.psum(flat, ENVS) / mesh.size), rest

    nowhere = PartitionSpec()
    share_out = jax.shard_map(
        of_share,
        mesh=mesh,
        in_specs=(specs, *[nowhere] * len(everywhere)),
        out_specs=nowhere,
        check_vma=False,
    )
    return share_out(shared, *everywhere)


def replicate(tree: Any) -> Any:
    """Within a program: let every device have all of it."""
    mesh = mesh_in_use()
    return tree if mesh is None else jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, PartitionSpec()))


def spread_state(state: TrainingState) -> TrainingState:
    """Within a program: environments and their carries spread, the rest everywhere."""
    return replicate(state.replace(env_states=(), network_states=())).replace(
        env_states=spread(state.env_states), network_states=spread(state.network_states)
    )


def spans_processes() -> bool:
    """Whether devices of other processes take part in this run."""
    if mesh_in_use() is None:
        return False
    return len({device.process_index for device in jax.sharding.get_mesh().devices.flat}) > 1


def gather(tree: Any) -> Any:
    """Outside a program: the same arrays, where other processes hold parts of them as a whole on every device."""
    if not spans_processes():
        return tree
    whole = NamedSharding(jax.sharding.get_mesh(), PartitionSpec())
    return jax.jit(lambda tree: tree, out_shardings=whole)(tree)


def any_process(answer: bool) -> bool:
    """Whether any process of the run says yes; all have to ask."""
    if not spans_processes():
        return answer
    from jax.experimental import multihost_utils

    return bool(np.any(multihost_utils.process_allgather(np.asarray(answer))))


def place_state(state: TrainingState) -> TrainingState:
    """Outside a program: `spread_state` for arrays, and for the shapes of arrays that are still to come."""
    if mesh_in_use() is None:
        return to_default_device(state)
    mesh = jax.sharding.get_mesh()

    def put(x: Any, spec: PartitionSpec) -> Any:
        # XLA does not share out an array of no values.
        sharding = NamedSharding(mesh, spec if x.size else PartitionSpec())
        if isinstance(x, jax.Array):
            return _put(x, sharding)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    everywhere = jax.tree.map(lambda x: put(x, PartitionSpec()), state.replace(env_states=(), network_states=()))
    rows = jax.tree.map(lambda x: put(x, PartitionSpec(ENVS)), (state.env_states, state.network_states))
    return everywhere.replace(env_states=rows[0], network_states=rows[1])


def place_network(tree: Any) -> Any:
    """Outside a program: parameters or variables where the run computes, from wherever an earlier run left them."""
    if mesh_in_use() is None:
        return to_default_device(tree)
    everywhere = NamedSharding(jax.sharding.get_mesh(), PartitionSpec())
    return jax.tree.map(lambda x: _put(x, everywhere), to_default_device(tree))


def _put(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    # Onto devices of other processes only what is on the host can be put, and each process puts its own.
    if sharding.is_fully_addressable or not x.is_fully_addressable:
        return jax.device_put(x, sharding)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_put(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    return jax.device_put(np.asarray(x), sharding)


def to_default_device(tree: Any) -> Any:
    """Arrays of any placement as arrays of JAX's default device; what is no array stays."""
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    device = chosen if isinstance(chosen, jax.Device) else jax.local_devices(backend=chosen)[0]

    def put(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.devices() == {device}:
            return x
        return jax.device_put(x.addressable_data(0) if x.is_fully_replicated else x, device)

    return jax.tree.map(put, tree)


def copy_arrays(tree: Any) -> Any:
    """The same arrays in memory of their own, on the same devices; compiles nothing."""

    def copy(array: jax.Array) -> jax.Array:
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(copy(jax.random.key_data(array)), impl=jax.random.key_impl(array))
        return jax.device_put(array, array.sharding if array.committed else None, may_alias=False)

    return jax.tree.map(copy, tree)
