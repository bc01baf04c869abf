"""Robot environments in JAX on MuJoCo physics.

``envs.make("humanoid")`` makes one by name; ``ENVIRONMENTS`` lists them.
"""

import difflib
from typing import Any

from envs.base import MjxEnv, State
from envs.cartpole import CartpoleBalance, CartpoleSwingup
from envs.humanoid import Humanoid
from envs.physics import Data, Physics, default_impl, make_physics

ENVIRONMENTS: dict[str, type[MjxEnv]] = {
    "cartpole_balance": CartpoleBalance,
    "cartpole_swingup": CartpoleSwingup,
    "humanoid": Humanoid,
}


def make(name: str, **settings: Any) -> MjxEnv:
    """The environment called ``name`` with the given settings, e.g. ``make("humanoid", physics="jax")``.

    Raises:
      ValueError: no environment has that name.
    """
    if name not in ENVIRONMENTS:
        close = difflib.get_close_matches(name, ENVIRONMENTS, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"unknown environment {name!r}{hint}: there are {', '.join(ENVIRONMENTS)}")
    return ENVIRONMENTS[name](**settings)


__all__ = [
    "ENVIRONMENTS",
    "CartpoleBalance",
    "CartpoleSwingup",
    "Data",
    "Humanoid",
    "MjxEnv",
    "Physics",
    "State",
    "default_impl",
    "make",
    "make_physics",
]
