"""Humanoid: run forward without falling. Brax's task, on any of the physics engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import mujoco

from envs.base import MjxEnv, load_spec
from envs.physics import Data

TORSO = 1  # body 0 is the world


class Humanoid(MjxEnv):
    """A torso with arms and legs, 17 motors, rewarded for speed along x and for staying up.

    Task, numbers and observation layout are those of ``humanoid`` in Brax (``backend="mjx"``),
    itself after Gym's ``Humanoid-v3``.

    Action (17): motor torques, -1 to 1 for the ends of each motor's range.

    Observation (244), c the centre of mass of the whole body, m_i and M masses of one body and all:

    ====== ==========================================================================================
    0-21   joint positions without the torso's x and y
    22-44  joint velocities
    45-154 per body (11): inertia tensor about c in the world's axes, row by row (9), and m_i
    155-220 per body (11): m_i / M times the velocity of its centre of mass (3), angular velocity (3)
    221-243 generalised actuator forces
    ====== ==========================================================================================

    Reward terms: ``forward`` 1.25 times the velocity of c along x in m/s, ``alive`` 5, and ``control``
    minus 0.1 times the squared controls. The task terminates when the torso's height leaves [1, 2] m.
    As in Brax, everything but positions and velocities lags by one physics step (3 ms).
    """

    def __init__(
        self,
        *,
        forward_reward_weight: float = 1.25,
        ctrl_cost_weight: float = 0.1,
        healthy_reward: float = 5.0,
        healthy_z_range: tuple[float, float] = (1.0, 2.0),
        reset_noise_scale: float = 0.01,
        control_timestep: float = 0.015,
        simulation_timestep: float = 0.003,
        physics: str | None = None,
        n_threads: int | None = None,
    ):
        """Set up the task.

        Args:
          forward_reward_weight: reward per m/s of the centre of mass along x.
          ctrl_cost_weight: cost per squared control.
          healthy_reward: reward of each step.
          healthy_z_range: lowest and highest height of the torso, metres.
          reset_noise_scale: initial positions and velocities are uniform within this of the default.
          control_timestep: seconds between actions.
          simulation_timestep: seconds of a physics step.
          physics: see ``MjxEnv``.
          n_threads: see ``MjxEnv``.
        """
        spec = load_spec(("brax", "envs/assets/humanoid.xml"))
        # As Brax does: feet and hands, which no joint moves, become part of shins and forearms.
        spec.compiler.fusestatic = True
        mj_model = spec.compile()
        mj_model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
        mj_model.opt.disableflags = int(mujoco.mjtDisableBit.mjDSBL_EULERDAMP)
        mj_model.opt.iterations = 1
        mj_model.opt.ls_iterations = 4
        super().__init__(
            mj_model,
            control_timestep=control_timestep,
            simulation_timestep=simulation_timestep,
            physics=physics,
            fields=("xpos", "subtree_com", "cinert", "cvel", "qfrc_actuator"),
            n_threads=n_threads,
        )
        self._forward_reward_weight = forward_reward_weight
        self._ctrl_cost_weight = ctrl_cost_weight
        self._healthy_reward = healthy_reward
        self._healthy_z_range = healthy_z_range
        self._reset_noise_scale = reset_noise_scale

    def initial_state(self, rng: jax.Array) -> Mapping[str, Any]:
        """The model's upright pose at rest, with uniform noise on positions and velocities."""
        scale, model = self._reset_noise_scale, self.mj_model
        # One draw: each use of the random generator takes a quarter of a second to compile, in every program.
        noise = jax.random.uniform(rng, (model.nq + model.nv,), minval=-scale, maxval=scale)
        return {"qpos": model.qpos0 + noise[: model.nq], "qvel": noise[model.nq :]}

    def observe(self, data: Data) -> jax.Array:
        """The observation, (244,); see the class."""
        # MuJoCo's cinert is (Ixx Iyy Izz Ixy Ixz Iyz, m*offset, m) about the centre of mass c, and
        # cvel the (angular, linear) velocity of the point of the body that passes through c.
        inertia, spin, drift = data.cinert[1:], data.cvel[1:, :3], data.cvel[1:, 3:]
        mass_offset, mass = inertia[:, 6:9], inertia[:, 9:]
        tensor = inertia[:, jnp.array([0, 3, 4, 3, 1, 5, 4, 5, 2])]
        momentum = mass * drift + jnp.cross(spin, mass_offset)
        return jnp.concatenate(
            [
                data.qpos[2:],
                data.qvel,
                jnp.concatenate([tensor, mass], axis=1).ravel(),
                jnp.concatenate([momentum / mass.sum(), spin], axis=1).ravel(),
                data.qfrc_actuator,
            ]
        )

    def rewards(self, before: Data, data: Data, ctrl: jax.Array) -> Mapping[str, jax.Array]:
        """``forward``, ``alive`` and ``control``; see the class."""
        return {
            "forward": self._forward_reward_weight * self._velocity(before, data)[0],
            "alive": jnp.asarray(self._healthy_reward),
            "control": -self._ctrl_cost_weight * jnp.sum(jnp.square(ctrl)),
        }

    def terminated(self, data: Data) -> jax.Array:
        """Whether the torso is too low or too high."""
        low, high = self._healthy_z_range
        height = data.xpos[TORSO, 2]
        return (height < low) | (height > high)

    def measurements(self, before: Data, data: Data, ctrl: jax.Array) -> Mapping[str, jax.Array]:
        """Velocity (m/s) and position (m) of the centre of mass, height (m) of the torso."""
        velocity, com = self._velocity(before, data), data.subtree_com[TORSO]
        return {
            "x_velocity": velocity[0],
            "y_velocity": velocity[1],
            "x_position": com[0],
            "y_position": com[1],
            "height": data.xpos[TORSO, 2],
        }

    def _velocity(self, before: Data, data: Data) -> jax.Array:
        """Mean velocity of the centre of mass over the control step, m/s."""
        return (data.subtree_com[TORSO] - before.subtree_com[TORSO]) / self.dt
