"""Containers: modules made of modules, one after another or side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx

from nnx_ppo.networks.routing import CallChild, Container, DispatchContainer, KeyedContainer, check_modules, shape_of
from nnx_ppo.networks.types import ModuleState, StatefulModule, StatefulModuleOutput


class Sequential(Container):
    """Layers one after another; each sees the output of the one before.

    Args:
      layers: the layers, or a dict from their names. Names are used in metrics (`net/<name>/...`), parameter paths and
        checkpoints, which go by position where a plain list is given.
    """

    def __init__(self, layers: Sequence[StatefulModule] | Mapping[str, StatefulModule]):
        named: Any = dict(layers) if isinstance(layers, Mapping) else dict(enumerate(layers))
        if not named:
            raise ValueError("Sequential got no layers; give it at least one.")
        check_modules("Sequential", named)
        self.layers: Any = nnx.Dict(named) if isinstance(layers, Mapping) else nnx.List(list(layers))
        self.names = tuple(named)

    def in_order(self) -> list[StatefulModule]:
        """The layers from first to last."""
        return [self.layers[name] for name in self.names]

    def route(self, state: Any, obs: Any, rollout_extras: Any, call: CallChild) -> StatefulModuleOutput:
        """Run the layers in order; carry and extras are lists with one entry per layer."""
        layers = self.in_order()
        if len(state) != len(layers):
            raise ValueError(
                f"Sequential of {len(layers)} layers got a carry with {len(state)} entries; "
                "pass what its initialize_state returned."
            )
        replay = rollout_extras if rollout_extras is not None else [None] * len(layers)
        x, loss, metrics, next_state, extras = obs, jnp.zeros(()), {}, [], []
        for name, layer, layer_state, layer_replay in zip(self.names, layers, state, replay, strict=True):
            out = call(name, layer, layer_state, x, layer_replay)
            x = out.output
            loss = loss + out.regularization_loss
            metrics[name] = out.metrics
            next_state.append(out.next_state)
            extras.append(out.rollout_extras)
        return StatefulModuleOutput(next_state, x, loss, metrics, extras)

    def initialize_state(self, batch_size: int) -> list[ModuleState]:
        """One carry per layer."""
        return [layer.initialize_state(batch_size) for layer in self.in_order()]

    def reset_state(self, prev_state: Sequence[ModuleState]) -> list[ModuleState]:
        """Each layer's own reset."""
        return [layer.reset_state(state) for layer, state in zip(self.in_order(), prev_state, strict=True)]

    def update_statistics(self, rollout_extras: Any) -> None:
        """Pass each layer its own extras."""
        for layer, extras in zip(self.in_order(), rollout_extras, strict=True):
            layer.update_statistics(extras)

    def __getitem__(self, index: int | str) -> StatefulModule:
        """The layer at a position, or of a name."""
        return self.layers[index] if isinstance(index, str) else self.in_order()[index]


class Parallel(KeyedContainer):
    """Every child sees the same input; the output is a dict of their outputs.

        Parallel(action=actor, value=critic)

    Args:
      modules: a dict from names to modules, for names that are not Python identifiers.
      **kwargs: or the modules by keyword.
    """

    def combine(self, outputs: dict[str, Any]) -> dict[str, Any]:
        """Each child's output under its name."""
        return outputs


class Concat(DispatchContainer):
    """Each child sees the entry of its own name in a dict input; their outputs are concatenated along the last axis.

    The order is the one in which the children are given. Entries without a child are dropped.

        Concat(image=CNNEncoder(...), proprioception=Dense(...))

    Args:
      modules: a dict from names to modules, for names that are not Python identifiers.
      **kwargs: or the modules by keyword.
    """

    def combine(self, outputs: dict[str, Any]) -> Any:
        """[..., sum of sizes].

        Raises:
          ValueError: an output is not an array, or they differ in another axis than the last.
        """
        leading = {getattr(output, "shape", (None, ()))[:-1] for output in outputs.values()}
        if len(leading) != 1:
            given = ", ".join(f"{name!r}: {shape_of(output)}" for name, output in outputs.items())
            raise ValueError(f"Concat joins arrays that differ in the last axis only, and its modules gave {given}.")
        return jnp.concatenate(list(outputs.values()), axis=-1)


class Splitter(StatefulModule):
    """Cuts the last axis into named slices, in the order given: [..., n] -> a dict of [..., size].

        Sequential([trunk, Dense(64, 7, rngs), Splitter(action=6, value=1)])

    The sizes may leave features over; those are dropped.

    Args:
      modules: a dict from names to sizes, for names that are not Python identifiers.
      **sizes: or the sizes by keyword.
    """

    def __init__(self, modules: Mapping[str, int] | None = None, /, **sizes: int):
        sizes = dict(modules or {}) | sizes
        if not sizes:
            raise ValueError("Splitter got no sizes; give it at least one, such as Splitter(action=6, value=1).")
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"Splitter got {name}={size!r}; a whole number of at least 1 is accepted.")
        self.sizes = tuple(sizes.items())

    def __call__(self, state: ModuleState, obs: Any, rollout_extras: Any = None) -> StatefulModuleOutput:
        """Cut.

        Raises:
          ValueError: the input is not an array, or has fewer features than the slices need.
        """
        needed = sum(size for _, size in self.sizes)
        shape = getattr(obs, "shape", ())
        if not shape or shape[-1] < needed:
            sizes = ", ".join(f"{name}={size}" for name, size in self.sizes)
            raise ValueError(f"Splitter({sizes}) takes at least {needed} features and got {shape_of(obs)}.")
        output, start = {}, 0
        for name, size in self.sizes:
            output[name] = obs[..., start : start + size]
            start += size
        return StatefulModuleOutput(state, output, jnp.zeros(()), {})
