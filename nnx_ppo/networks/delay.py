"""Delay: what was put in comes out a number of steps later."""

from typing import Any

import jax
import jax.numpy as jnp

from nnx_ppo.networks.types import ModuleState, StatefulModule, StatefulModuleOutput


class Delay(StatefulModule):
    """The output at step t of an episode is the input at step t - k_steps; before that, `initial_value`.

        Sequential([Delay(env.reset(key).obs, k_steps=3), Dense(...)])

    Carry: `{"buffer": leaves [batch, k_steps, ...], "idx": [batch] int32, where the next input goes}`.

    Args:
      sample_input: one input without the batch axis, an array or a tree; only shapes and dtypes are used.
      k_steps: number of steps, at least 1.
      initial_value: what comes out before the first input does.
    """

    def __init__(self, sample_input: Any, k_steps: int, initial_value: float = 0.0):
        if not isinstance(k_steps, int) or k_steps < 1:
            raise ValueError(f"Delay got k_steps={k_steps!r}; a whole number of at least 1 is accepted.")
        self.k_steps = k_steps
        self.initial_value = initial_value
        leaves, self.structure = jax.tree.flatten(sample_input)
        if not leaves:
            raise ValueError("Delay got a sample_input without arrays; give it one input of the module.")
        self.shapes = tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)

    def __call__(self, state: Any, obs: Any, rollout_extras: Any = None) -> StatefulModuleOutput:
        """The input of k_steps ago.

        Raises:
          ValueError: the input has not the structure or the shapes of `sample_input`.
        """
        leaves, structure = jax.tree.flatten(obs)
        given = [tuple(leaf.shape[1:]) for leaf in leaves]
        expected = [tuple(shape) for shape, _ in self.shapes]
        if structure != self.structure or given != expected:
            raise ValueError(
                f"Delay was built for inputs {self.structure} of shapes {expected} (without the batch axis) and got "
                f"{structure} of shapes {given}. Build it with one observation of the environment."
            )
        idx = state["idx"]
        rows = jnp.arange(idx.shape[0])
        output = jax.tree.map(lambda buffer: buffer[rows, idx], state["buffer"])
        buffer = jax.tree.map(lambda buffer, x: buffer.at[rows, idx].set(x), state["buffer"], obs)
        next_state = {"buffer": buffer, "idx": (idx + 1) % self.k_steps}
        return StatefulModuleOutput(next_state, output, jnp.zeros(()), {})

    def initialize_state(self, batch_size: int) -> ModuleState:
        """A buffer full of `initial_value`."""
        leaves = [
            jnp.full((batch_size, self.k_steps, *shape), self.initial_value, dtype) for shape, dtype in self.shapes
        ]
        return {"buffer": jax.tree.unflatten(self.structure, leaves), "idx": jnp.zeros(batch_size, jnp.int32)}
