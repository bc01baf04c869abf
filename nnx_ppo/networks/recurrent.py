"""Recurrent layers: LSTM, GRU and SimpleRNN. Their carry is reset with the episode of its environment."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnx_ppo.networks.routing import shape_of
from nnx_ppo.networks.types import ModuleState, StatefulModule, StatefulModuleOutput

LSTMCarry = tuple[Float[Array, "*batch hidden"], Float[Array, "*batch hidden"]]
"""(h, c): what the layer puts out, and its memory cell."""


class _Recurrent(StatefulModule):
    """A cell of flax, its initial carry zeros or learned."""

    cell: Any
    initial: Any

    def __init__(self, in_features: int, hidden_features: int, trainable_initial_state: bool, carry_names: str):
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.carry_names = tuple(carry_names)
        if trainable_initial_state:
            self.initial = nnx.Dict({name: nnx.Param(jnp.zeros(hidden_features)) for name in carry_names})
        self.trainable_initial_state = trainable_initial_state

    def step(self, state: Any, obs: jax.Array) -> tuple[Any, jax.Array]:
        """(next carry, output)."""
        return self.cell(state, obs)

    def __call__(self, state: Any, obs: Float[Array, "*batch in"], rollout_extras: Any = None) -> StatefulModuleOutput:
        """[*batch, in_features] -> [*batch, hidden_features].

        Raises:
          ValueError: the input or the carry has another size than the layer was built for.
        """
        name = f"{type(self).__name__}({self.in_features} -> {self.hidden_features})"
        if getattr(obs, "shape", ())[-1:] != (self.in_features,):
            raise ValueError(f"{name} takes {self.in_features} features in the last axis and got {shape_of(obs)}.")
        expected = (*obs.shape[:-1], self.hidden_features)
        given = [getattr(leaf, "shape", None) for leaf in jax.tree.leaves(state)]
        if given != [expected] * len(self.carry_names):
            raise ValueError(
                f"{name} takes a carry of {len(self.carry_names)} array(s) of shape {expected} and got {given}; pass "
                "what its initialize_state returned."
            )
        next_state, output = self.step(state, obs)
        return StatefulModuleOutput(next_state, output, jnp.zeros(()), {})

    def initialize_state(self, batch_size: int) -> ModuleState:
        """Arrays of shape [batch_size, hidden_features]."""
        if self.trainable_initial_state:
            vectors = [self.initial[name].get_value() for name in self.carry_names]
        else:
            vectors = [jnp.zeros(self.hidden_features)] * len(self.carry_names)
        carry: Any = tuple(jnp.broadcast_to(vector, (batch_size, self.hidden_features)) for vector in vectors)
        return carry if len(carry) > 1 else carry[0]


class LSTM(_Recurrent):
    """Long short-term memory (Hochreiter and Schmidhuber 1997); carry (h, c), each [batch, hidden_features].

    Args:
      in_features: size of the last axis of the input.
      hidden_features: size of the output and of the carry.
      rngs: stream that the initial parameters are drawn from.
      gate_fn: activation of the gates.
      activation_fn: activation of cell and output.
      kernel_init: initialiser of the weights from the input; None takes flax's.
      recurrent_kernel_init: initialiser of the weights from the carry; None takes flax's (orthogonal).
      bias_init: initialiser of the biases; None takes flax's (zeros).
      use_optimized: one matrix product for the four gates instead of four.
      trainable_initial_state: learn the carry at the start of an episode instead of taking zeros.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        rngs: nnx.Rngs,
        *,
        gate_fn: Callable[..., Any] = nnx.sigmoid,
        activation_fn: Callable[..., Any] = nnx.tanh,
        kernel_init: Callable[..., Any] | None = None,
        recurrent_kernel_init: Callable[..., Any] | None = None,
        bias_init: Callable[..., Any] | None = None,
        use_optimized: bool = True,
        trainable_initial_state: bool = False,
    ):
        super().__init__(in_features, hidden_features, trainable_initial_state, "hc")
        cell = nnx.OptimizedLSTMCell if use_optimized else nnx.LSTMCell
        inits = _given(kernel_init=kernel_init, recurrent_kernel_init=recurrent_kernel_init, bias_init=bias_init)
        self.cell = cell(in_features, hidden_features, gate_fn=gate_fn, activation_fn=activation_fn, rngs=rngs, **inits)

    def step(self, state: LSTMCarry, obs: jax.Array) -> tuple[LSTMCarry, jax.Array]:
        """(next carry, output)."""
        # flax keeps (c, h); the published order here is (h, c).
        h, c = state
        (c, h), output = self.cell((c, h), obs)
        return (h, c), output


class GRU(_Recurrent):
    """Gated recurrent unit (Cho et al. 2014); carry [batch, hidden_features], which is also its output.

    Args:
      in_features: size of the last axis of the input.
      hidden_features: size of the output and of the carry.
      rngs: stream that the initial parameters are drawn from.
      trainable_initial_state: learn the carry at the start of an episode instead of taking zeros.
      **cell_kwargs: passed on to `nnx.GRUCell`, such as `gate_fn` or `kernel_init`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        rngs: nnx.Rngs,
        *,
        trainable_initial_state: bool = False,
        **cell_kwargs: Any,
    ):
        super().__init__(in_features, hidden_features, trainable_initial_state, "h")
        self.cell = nnx.GRUCell(in_features, hidden_features, rngs=rngs, **cell_kwargs)


class SimpleRNN(_Recurrent):
    """`h' = activation(W x + U h + b)` (Elman 1990); carry [batch, hidden_features], which is also its output.

    Args:
      in_features: size of the last axis of the input.
      hidden_features: size of the output and of the carry.
      rngs: stream that the initial parameters are drawn from.
      trainable_initial_state: learn the carry at the start of an episode instead of taking zeros.
      **cell_kwargs: passed on to `nnx.SimpleCell`, such as `activation_fn` or `kernel_init`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        rngs: nnx.Rngs,
        *,
        trainable_initial_state: bool = False,
        **cell_kwargs: Any,
    ):
        super().__init__(in_features, hidden_features, trainable_initial_state, "h")
        self.cell = nnx.SimpleCell(in_features, hidden_features, rngs=rngs, **cell_kwargs)


def _given(**kwargs: Any) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if value is not None}
