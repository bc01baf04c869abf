"""What every environment shares: the ``State`` it steps and the ``MjxEnv`` base class.

A new environment names its model and its time steps in ``__init__`` and writes what is its own:

    class Reacher(MjxEnv):
        def __init__(self, physics=None):
            super().__init__("reacher.xml", control_timestep=0.02, physics=physics, fields=("site_xpos",))

        def initial_state(self, rng):                     # -> dict of MuJoCo state fields
            return {"qpos": jax.random.uniform(rng, (2,), minval=-1.0, maxval=1.0)}

        def observe(self, data):                          # -> observation
            return jnp.concatenate([data.qpos, data.qvel, data.site_xpos[0]])

        def rewards(self, before, data, ctrl):            # -> named terms; the reward is their sum
            return {"distance": -jnp.linalg.norm(data.site_xpos[0] - data.site_xpos[1])}

``terminated`` and ``measurements`` are optional. Whoever needs more overrides ``reset`` and ``step``.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import mujoco
import numpy as np

from envs.physics import Data, Impl, Physics, make_physics

Model: TypeAlias = "str | os.PathLike[str] | tuple[str, str] | mujoco.MjSpec | mujoco.MjModel"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """An environment's state after ``reset`` or ``step``; one environment, or a batch under ``vmap``.

    Attributes:
      data: the physics state.
      obs: the observation, an array or a pytree of arrays.
      reward: float32 scalar, reward of the step that led here (0 after reset).
      done: float32 scalar, 1.0 if the task terminated here, else 0.0. Time limits are a wrapper's.
      metrics: float32 scalars by name, the same names from reset on.
      info: what wrappers keep with the state.
    """

    data: Any
    obs: Any
    reward: Any
    done: Any
    metrics: Any
    info: Any

    def replace(self, **changes: Any) -> State:
        """A copy with the given attributes changed."""
        return dataclasses.replace(self, **changes)


class Pose(NamedTuple):
    """The part of the physics state that a picture shows."""

    qpos: Any
    mocap_pos: Any
    mocap_quat: Any
    time: Any


class MjxEnv:
    """Base class of the environments. See the module's docstring for how to write one.

    Environments are plain objects, hashed by identity, so that they can be static arguments of
    compiled functions.
    """

    def __init__(
        self,
        model: Model,
        *,
        control_timestep: float,
        simulation_timestep: float | None = None,
        physics: str | None = None,
        fields: Sequence[str] = (),
        n_threads: int | None = None,
    ):
        """Load the model and set up its physics.

        Args:
          model: an MJCF file, an MJCF string, ``(package, file)`` for a file of an installed Python
            package, e.g. ``("brax", "envs/assets/humanoid.xml")``, a ``mujoco.MjSpec``, or a compiled
            ``mujoco.MjModel``, which is left unchanged.
          control_timestep: seconds between actions.
          simulation_timestep: seconds of one physics step; None keeps the model's.
          physics: ``"jax"``, ``"warp"``, ``"native"``, or None to choose by device.
          fields: fields of MuJoCo's data that the environment reads, besides the state.
          n_threads: threads of the native physics; None means every CPU.

        Raises:
          ValueError: the model cannot be loaded or simulated, a field or the physics is unknown, or
            ``control_timestep`` is not a whole multiple of ``simulation_timestep``.
        """
        mj_model = load_model(model)
        if simulation_timestep is not None:
            mj_model.opt.timestep = simulation_timestep
        self._n_substeps = count_substeps(control_timestep, mj_model.opt.timestep)
        self._mj_model = mj_model
        self._physics = make_physics(mj_model, physics, fields, n_threads)
        limited = mj_model.actuator_ctrllimited.astype(bool)
        low, high = mj_model.actuator_ctrlrange.T
        # An actuator without limits takes the action as it is.
        self._ctrl_center = np.where(limited, (high + low) / 2, 0.0).astype(np.float32)
        self._ctrl_half_range = np.where(limited, (high - low) / 2, 1.0).astype(np.float32)

    # What an environment defines.

    def initial_state(self, rng: jax.Array) -> Mapping[str, Any]:
        """State fields at the start of an episode, e.g. ``{"qpos": ..., "qvel": ...}``."""
        del rng
        return {}

    def observe(self, data: Data) -> Any:
        """The observation, an array or a pytree of arrays."""
        raise NotImplementedError(f"{type(self).__name__} must define observe(data)")

    def rewards(self, before: Data, data: Data, ctrl: jax.Array) -> Mapping[str, jax.Array]:
        """Named reward terms (scalars) of a step from ``before`` to ``data``; the reward is their sum."""
        raise NotImplementedError(f"{type(self).__name__} must define rewards(before, data, ctrl)")

    def terminated(self, data: Data) -> jax.Array:
        """Whether the task ends here, a boolean scalar."""
        del data
        return jnp.zeros((), bool)

    def measurements(self, before: Data, data: Data, ctrl: jax.Array) -> Mapping[str, jax.Array]:
        """Scalars to plot beside the reward terms, e.g. ``x_velocity``."""
        del before, data, ctrl
        return {}

    def control(self, action: jax.Array) -> jax.Array:
        """Actuator controls (nu,) for an action in [-1, 1]: -1 and 1 are the ends of each actuator's range."""
        return jnp.asarray(action, jnp.float32) * self._ctrl_half_range + self._ctrl_center

    # What those who use an environment call.

    def reset(self, rng: jax.Array) -> State:
        """A fresh initial state; ``rng`` decides which."""
        data = self.physics.init(**self.initial_state(rng))
        ctrl = jnp.zeros(self.action_size, jnp.float32)
        terms = jax.eval_shape(self.rewards, data, data, ctrl)
        metrics = {f"reward/{name}": jnp.zeros((), jnp.float32) for name in terms}
        metrics |= _scalars(self.measurements(data, data, ctrl))
        zero = jnp.zeros((), jnp.float32)
        return State(data, self.observe(data), zero, zero, metrics, {})

    def step(self, state: State, action: jax.Array) -> State:
        """Apply ``action`` (action_size,) for one control time step."""
        before, ctrl = state.data, self.control(action)
        data = self.physics.step(before, ctrl, self._n_substeps)
        terms = _scalars(self.rewards(before, data, ctrl))
        metrics = {f"reward/{name}": value for name, value in terms.items()}
        metrics |= _scalars(self.measurements(before, data, ctrl))
        return state.replace(
            data=data,
            obs=self.observe(data),
            reward=sum(terms.values(), start=jnp.zeros((), jnp.float32)),
            done=jnp.asarray(self.terminated(data), jnp.float32),
            # What wrappers added stays.
            metrics={**state.metrics, **metrics},
        )

    @property
    def observation_size(self) -> Any:
        """Length of the observation; for a pytree of arrays, the tree of their shapes."""
        obs = jax.eval_shape(self.reset, jax.random.key(0)).obs
        if hasattr(obs, "shape") and len(obs.shape) == 1:
            return obs.shape[0]
        return jax.tree.map(lambda leaf: leaf.shape, obs)

    @property
    def action_size(self) -> int:
        """Number of actuators."""
        return int(self._mj_model.nu)

    @property
    def dt(self) -> float:
        """Seconds between actions."""
        return self._n_substeps * float(self._mj_model.opt.timestep)

    @property
    def n_substeps(self) -> int:
        """Physics steps per action."""
        return self._n_substeps

    @property
    def physics(self) -> Physics:
        """The physics engine."""
        return self._physics

    @property
    def impl(self) -> Impl:
        """Name of the physics engine."""
        return self._physics.impl

    @property
    def mj_model(self) -> mujoco.MjModel:
        """The MuJoCo model."""
        return self._mj_model

    @property
    def mjx_model(self) -> Any:
        """The model as an ``mjx.Model``, for those who call MJX's functions; built on first use."""
        if not hasattr(self, "_mjx_model"):
            from envs.physics import put_model

            self._mjx_model = put_model(self._mj_model, "warp" if self.impl == "warp" else "jax")
        return self._mjx_model

    # Repeating what happened.

    def replay_record(self, state: State) -> jax.Array:
        """The physics of ``state`` as one vector, to keep the last steps before something went wrong."""
        return state.data.state

    def replay_fields(self, records: np.ndarray) -> dict[str, np.ndarray]:
        """Records (time, ...) as MuJoCo's state fields by name, each (time, ...): what ``MjData`` takes."""
        return {
            name: records[:, slot.start : slot.start + slot.size].reshape(-1, *slot.shape)
            for name, slot in self.physics.layout.state
            if slot.size
        }

    # Pictures.

    def render_state(self, state: State) -> State:
        """``state`` reduced to what ``render`` looks at, to record an episode in little memory."""
        data = state.data
        pose = Pose(data.qpos, data.mocap_pos, data.mocap_quat, data.time)
        return State(pose, obs=None, reward=None, done=None, metrics=None, info=None)

    def render(
        self,
        trajectory: Sequence[State],
        height: int = 480,
        width: int = 640,
        camera: str | int | None = None,
        **scene_options: Any,
    ) -> list[np.ndarray]:
        """Pictures of a trajectory.

        Args:
          trajectory: states, or what ``render_state`` made of them.
          height: of a picture, pixels.
          width: of a picture, pixels.
          camera: name or number of a camera of the model; None for the default view.
          **scene_options: passed on to ``envs.rendering.render_frames``.

        Returns:
          One (height, width, 3) uint8 RGB array per state.
        """
        from envs.rendering import render_frames

        if not trajectory:
            return []
        poses = [state.data for state in trajectory]
        stacked = {
            name: np.stack([np.asarray(getattr(pose, name)) for pose in poses])
            for name in ("qpos", "mocap_pos", "mocap_quat")
        }
        return render_frames(
            self._mj_model,
            stacked["qpos"],
            mocap_pos=stacked["mocap_pos"],
            mocap_quat=stacked["mocap_quat"],
            height=height,
            width=width,
            camera=camera,
            **scene_options,
        )


def load_model(model: Model) -> mujoco.MjModel:
    """Compile a model from any of the forms that ``MjxEnv`` takes.

    Raises:
      ValueError: no such file or package, or MuJoCo refuses the MJCF (its message is passed on).
    """
    if isinstance(model, mujoco.MjModel):
        return copy.copy(model)
    return load_spec(model).compile()


def load_spec(model: str | os.PathLike[str] | tuple[str, str] | mujoco.MjSpec) -> mujoco.MjSpec:
    """The editable form of a model, for an environment that adapts one before compiling it.

    Raises:
      ValueError: no such file or package, or MuJoCo refuses the MJCF (its message is passed on).
    """
    if isinstance(model, mujoco.MjSpec):
        return model.copy()  # type: ignore[union-attr]
    if isinstance(model, tuple):
        model = package_file(*model)
    elif isinstance(model, str) and model.lstrip().startswith("<"):
        return mujoco.MjSpec.from_string(model)
    path = Path(os.fspath(model))
    if not path.is_file():
        raise ValueError(
            f"no model file {str(path)!r} (looked in {str(Path.cwd())!r}): give the path of an MJCF file, an MJCF "
            "string, (package, file), a mujoco.MjSpec or a mujoco.MjModel"
        )
    return mujoco.MjSpec.from_file(str(path))


def package_file(package: str, file: str) -> Path:
    """Path of a data file of an installed package, found without importing the package.

    Importing a package for one of its XML files can take seconds (Brax: five).

    Raises:
      ValueError: the package is not installed or has no such file.
    """
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations or []) if spec else []
    if not folders:
        raise ValueError(f"package {package!r} is not installed: install it (uv pip install {package}) or give a path")
    for folder in folders:
        if (path := Path(folder) / file).is_file():
            return path
    raise ValueError(f"package {package!r} has no file {file!r} (looked in {', '.join(map(repr, folders))})")


def count_substeps(control_timestep: float, simulation_timestep: float) -> int:
    """Physics steps per action, ``control_timestep / simulation_timestep``.

    Raises:
      ValueError: that is not a whole number of at least 1, to one part in a million.
    """
    if not (control_timestep > 0 and simulation_timestep > 0):
        raise ValueError(
            f"time steps must be positive: control_timestep={control_timestep}, "
            f"simulation_timestep={simulation_timestep} (seconds)"
        )
    ratio = control_timestep / simulation_timestep
    count = round(ratio)
    if count < 1 or abs(ratio - count) > 1e-6 * count:
        nearest = max(1, count) * simulation_timestep
        raise ValueError(
            f"control_timestep={control_timestep} is {ratio:.6g} times simulation_timestep={simulation_timestep}: it "
            f"must be a whole multiple; the nearest is control_timestep={nearest:.6g}"
        )
    return count


def _scalars(values: Mapping[str, Any]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}
