"""Robot environments in JAX on MuJoCo physics."""

from envs.base import MjxEnv, State
from envs.humanoid import Humanoid
from envs.physics import Data, Physics, default_impl, make_physics

__all__ = ["Data", "Humanoid", "MjxEnv", "Physics", "State", "default_impl", "make_physics"]
