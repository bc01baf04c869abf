"""Which devices a run is spread over."""

from typing import Any

from nnx_ppo.algorithms.config import PPOConfig
from tasks.launch.command_line import UsageError


def devices_of_run(asked: int | None, env: Any, networks: Any, config: PPOConfig) -> list[Any]:
    """The devices to train on; without a wish those that `train_ppo` would take.

    Raises:
      UsageError: there are not so many, or the environments cannot be shared out among them.
    """
    import jax

    from nnx_ppo.algorithms.devices import nearest_n_envs
    from nnx_ppo.algorithms.ppo import default_devices

    found, n_envs = jax.devices(), config.n_envs
    if asked is None:
        # The native engine has threads of its own: not even worth looking.
        native = getattr(env, "impl", None) == "native"
        return (None if native else default_devices(env, networks, config)) or found[:1]
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
