"""Which devices a run is spread over: what `--devices` asks for, and the cores of a CPU."""

import contextlib
import os
from typing import Any

from nnx_ppo.algorithms.config import PPOConfig
from tasks.launch.command_line import UsageError


def split_cpu(asked: int | None, physics: str | None) -> None:
    """Make one JAX device of each CPU core, or as many as asked for; only before JAX has done anything.

    XLA runs MJX on one core of a device, so without being asked this is done for MJX alone. The native engine has
    threads of its own. A machine with a GPU is not changed by it: JAX computes there.
    """
    import jax

    from envs.physics import available_cpus

    n_devices = asked or (available_cpus() if physics == "jax" else 1)
    if n_devices > 1 and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # A task file that computes when it is imported has started JAX already: then there is one device.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", n_devices)


def devices_of_run(asked: int | None, env: Any, config: PPOConfig) -> list[Any]:
    """The devices to train on.

    Without a wish: on a CPU as many as step MJX's environments in equal shares, else a single one.

    Raises:
      UsageError: there are not so many, or the environments cannot be shared out among them.
    """
    import jax

    from nnx_ppo.algorithms.devices import nearest_n_envs

    found, n_envs = jax.devices(), config.n_envs
    if asked is None:
        mjx_on_cpu = found[0].platform == "cpu" and getattr(env, "impl", None) == "jax"
        return found[: max(n for n in range(1, len(found) + 1) if n_envs % n == 0)] if mjx_on_cpu else found[:1]
    if asked > len(found):
        raise UsageError(
            f"--devices {asked}: JAX sees {len(found)} ({found[0].device_kind}). Give at most that, or leave it out."
        )
    if n_envs % asked:
        raise UsageError(
            f"--devices {asked} cannot share {n_envs} environments out evenly; add for example "
            f"--ppo.n-envs {nearest_n_envs(config, asked)}."
        )
    return found[:asked]
