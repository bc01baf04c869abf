"""Cartpole: hold a pole upright on a cart. dm_control's tasks ``swingup`` and ``balance``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from envs.base import MjxEnv
from envs.physics import Data
from envs.rewards import quadratic, tolerance

MODEL = Path(__file__).parent / "xmls" / "cartpole.xml"


class Cartpole(MjxEnv):
    """A pole on a cart, rewarded for standing in the middle of the rail, still and without effort.

    Dynamics, reward and initial states are those of dm_control's ``cartpole`` (Tassa et al. 2018, "DeepMind
    Control Suite"). It never terminates; there an episode lasts 1000 steps of 0.01 s.

    Action (1): force on the cart, -1 to 1 for -10 N to 10 N.

    Observation (5): cart position (m), cosine and sine of the pole's angle from upright, cart velocity
    (m/s), angular velocity (rad/s).

    Reward, one term ``smooth`` in [0, 1]: the product of ``upright``, ``centered``, ``small_control`` and
    ``small_velocity``, which are among the metrics.
    """

    def __init__(
        self,
        *,
        control_timestep: float = 0.01,
        simulation_timestep: float = 0.01,
        physics: str | None = None,
        n_threads: int | None = None,
    ):
        """Set up the task; for the arguments see ``MjxEnv``."""
        super().__init__(
            MODEL,
            control_timestep=control_timestep,
            simulation_timestep=simulation_timestep,
            physics=physics,
            n_threads=n_threads,
        )

    def observe(self, data: Data) -> jax.Array:
        """Cart position, the pole's cosine and sine, and both velocities, (5,)."""
        position, angle = data.qpos
        return jnp.concatenate([jnp.stack([position, jnp.cos(angle), jnp.sin(angle)]), data.qvel])

    def rewards(self, before: Data, data: Data, ctrl: jax.Array) -> Mapping[str, jax.Array]:
        """The one term ``smooth``, a product of factors in [0, 1]."""
        return {"smooth": jnp.prod(jnp.stack(list(self._factors(data, ctrl).values())))}

    def measurements(self, before: Data, data: Data, ctrl: jax.Array) -> Mapping[str, jax.Array]:
        """The factors of the reward, and where cart (m) and pole are."""
        return {**self._factors(data, ctrl), "cart_position": data.qpos[0], "pole_cosine": jnp.cos(data.qpos[1])}

    def _factors(self, data: Data, ctrl: jax.Array) -> dict[str, jax.Array]:
        position, angle = data.qpos
        return {
            "upright": (jnp.cos(angle) + 1) / 2,
            "centered": (tolerance(position, margin=2.0) + 1) / 2,
            "small_control": (tolerance(ctrl[0], margin=1.0, value_at_margin=0.0, sigmoid=quadratic) + 4) / 5,
            "small_velocity": (tolerance(data.qvel[1], margin=5.0) + 1) / 2,
        }


class CartpoleSwingup(Cartpole):
    """``Cartpole`` that starts in the middle with the pole hanging down."""

    def initial_state(self, rng: jax.Array) -> Mapping[str, Any]:
        """Cart and pole near (0, pi) and at rest, with normal noise of 0.01."""
        position_rng, velocity_rng = jax.random.split(rng)
        hanging = jnp.array([0.0, jnp.pi])
        return {
            "qpos": hanging + 0.01 * jax.random.normal(position_rng, (2,)),
            "qvel": 0.01 * jax.random.normal(velocity_rng, (2,)),
        }


class CartpoleBalance(Cartpole):
    """``Cartpole`` that starts near the middle with the pole almost upright."""

    def initial_state(self, rng: jax.Array) -> Mapping[str, Any]:
        """Cart within 0.1 m of the middle, pole within 0.034 rad of upright, at rest but for noise of 0.01."""
        position_rng, velocity_rng = jax.random.split(rng)
        spread = jnp.array([0.1, 0.034])
        return {
            "qpos": jax.random.uniform(position_rng, (2,), minval=-spread, maxval=spread),
            "qvel": 0.01 * jax.random.normal(velocity_rng, (2,)),
        }
