"""Dense: a linear layer with an activation."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnx_ppo.networks.types import ModuleState, StatefulModule, StatefulModuleOutput


class Dense(StatefulModule):
    """`activation(x @ kernel + bias)`.

    Args:
      in_features: size of the last axis of the input.
      out_features: size of the last axis of the output.
      rngs: stream that the initial parameters are drawn from.
      activation: applied to the result; None leaves it linear.
      **linear_kwargs: passed on to `nnx.Linear`, such as `kernel_init`, `use_bias`, or `dtype=jnp.bfloat16`, in
        which it then computes, with float32 parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rngs: nnx.Rngs,
        activation: Callable[[jax.Array], jax.Array] | None = None,
        **linear_kwargs: Any,
    ):
        self.in_features = in_features
        self.out_features = out_features
        self.linear = nnx.Linear(in_features, out_features, rngs=rngs, **linear_kwargs)
        self.activation = activation

    def __call__(
        self, state: ModuleState, obs: Float[Array, "*batch in"], rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """[*batch, in_features] -> [*batch, out_features].

        Raises:
          ValueError: the input is not an array with `in_features` as its last axis.
        """
        shape = getattr(obs, "shape", None)
        if not shape or shape[-1] != self.in_features:
            given = f"shape {shape}" if shape is not None else f"a {type(obs).__name__} with {_keys(obs)}"
            raise ValueError(
                f"Dense({self.in_features} -> {self.out_features}) got an input of {given}; its last axis must be "
                f"{self.in_features}. Build the network with the observation size of the environment "
                "(env.observation_size), or select the part of the observation that it should see."
            )
        y = self.linear(obs)
        if self.activation is not None:
            y = self.activation(y)
        return StatefulModuleOutput(state, y, jnp.zeros(()), {})


def _keys(obs: Any) -> str:
    return f"keys {sorted(map(str, obs))}" if isinstance(obs, dict) else "no shape"
