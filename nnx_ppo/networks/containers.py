"""Containers: modules made of modules. They route carry, extras, metrics and losses to and from their children."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx

from nnx_ppo.networks.types import ModuleState, StatefulModule, StatefulModuleOutput


class Sequential(StatefulModule):
    """Layers one after another; each sees the output of the one before.

    Args:
      layers: the layers, or a dict from their names. Names are used in metrics (`net/<name>/...`), which go by
        position where a plain list is given.
    """

    def __init__(self, layers: Sequence[StatefulModule] | Mapping[str, StatefulModule]):
        names = list(layers) if isinstance(layers, Mapping) else list(range(len(layers)))
        if not names:
            raise ValueError("Sequential got no layers; give it at least one.")
        self.layers = nnx.List(list(layers.values()) if isinstance(layers, Mapping) else list(layers))
        self.names = tuple(names)

    def __call__(self, state: Sequence[ModuleState], obs: Any, rollout_extras: Any = None) -> StatefulModuleOutput:
        """Run the layers in order; carry and extras are lists with one entry per layer."""
        if len(state) != len(self.layers):
            raise ValueError(
                f"Sequential of {len(self.layers)} layers got a carry with {len(state)} entries; "
                "pass what its initialize_state returned."
            )
        replay = rollout_extras if rollout_extras is not None else [None] * len(self.layers)
        x, loss, metrics, next_state, extras = obs, jnp.zeros(()), {}, [], []
        for name, layer, layer_state, layer_replay in zip(self.names, self.layers, state, replay, strict=True):
            out = layer(layer_state, x, layer_replay)
            x = out.output
            loss = loss + out.regularization_loss
            metrics[name] = out.metrics
            next_state.append(out.next_state)
            extras.append(out.rollout_extras)
        return StatefulModuleOutput(next_state, x, loss, metrics, extras)

    def initialize_state(self, batch_size: int) -> list[ModuleState]:
        """One carry per layer."""
        return [layer.initialize_state(batch_size) for layer in self.layers]

    def reset_state(self, prev_state: Sequence[ModuleState]) -> list[ModuleState]:
        """Each layer's own reset."""
        return [layer.reset_state(state) for layer, state in zip(self.layers, prev_state, strict=True)]

    def update_statistics(self, rollout_extras: Any) -> None:
        """Pass each layer its own extras."""
        for layer, extras in zip(self.layers, rollout_extras, strict=True):
            layer.update_statistics(extras)

    def __getitem__(self, index: int) -> StatefulModule:
        """The layer at a position."""
        return self.layers[index]
