"""Modules without parameters that select, reshape and scale, and the containers Merge and Map."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from nnx_ppo.networks.routing import DispatchContainer, KeyedContainer, entry_of, shape_of
from nnx_ppo.networks.types import ModuleState, StatefulModule, StatefulModuleOutput

Extraction = str | tuple | Callable[[Any], Any]
"""A key, a path of keys and indices, or a function of the whole input."""


class Flattener(StatefulModule):
    """Joins the leaves of a tree into one array, each flattened to [batch, -1]; a leaf [batch] counts as one feature.

    The leaves are in the order of `jax.tree.leaves`: dict entries by sorted key.

    Args:
      preserve_levels: so many levels of dicts, lists and tuples stay, and what is below each entry is flattened.
    """

    def __init__(self, preserve_levels: int = 0):
        if not isinstance(preserve_levels, int) or preserve_levels < 0:
            raise ValueError(f"Flattener got preserve_levels={preserve_levels!r}; a whole number from 0 is accepted.")
        self.preserve_levels = preserve_levels

    def __call__(self, state: ModuleState, obs: Any, rollout_extras: Any = None) -> StatefulModuleOutput:
        """Leaves [batch, ...] -> [batch, n], or a tree of such.

        Raises:
          ValueError: there is nothing to flatten.
          TypeError: the tree has fewer levels than are to be preserved.
        """
        return StatefulModuleOutput(state, self._flatten(obs, self.preserve_levels), jnp.zeros(()), {})

    def _flatten(self, tree: Any, levels: int) -> Any:
        if levels == 0:
            leaves = jax.tree.leaves(tree)
            if not leaves:
                raise ValueError("Flattener got a tree without arrays; give it at least one.")
            return jnp.concatenate([leaf.reshape(leaf.shape[0], -1) for leaf in leaves], axis=-1)
        if isinstance(tree, Mapping):
            return {key: self._flatten(value, levels - 1) for key, value in tree.items()}
        if isinstance(tree, (list, tuple)):
            flat = [self._flatten(value, levels - 1) for value in tree]
            return type(tree)(*flat) if hasattr(tree, "_fields") else type(tree)(flat)
        raise TypeError(
            f"Flattener(preserve_levels={self.preserve_levels}) met {shape_of(tree)} with {levels} more levels to "
            "preserve; lower preserve_levels."
        )


class Filter(StatefulModule):
    """Picks parts of its input.

    Args:
      spec: a dict from output names to what is taken for them: a key (`"state"`), a path (`("arm", "joints", 0)`) or
        a function of the input. The output is a dict with these names. A single key, path or function gives that
        part alone.
    """

    def __init__(self, spec: Mapping[str, Extraction] | Extraction):
        for name, extraction in (spec if isinstance(spec, Mapping) else {"spec": spec}).items():
            if not isinstance(extraction, (str, tuple)) and not callable(extraction):
                raise TypeError(
                    f"Filter got {type(extraction).__name__} for {name!r}; a key, a tuple of keys and indices, or a "
                    "function is accepted."
                )
        # Tuples, because the structure of a network must be hashable.
        self.parts = tuple(spec.items()) if isinstance(spec, Mapping) else None
        self.part: Any = None if isinstance(spec, Mapping) else spec

    def __call__(self, state: ModuleState, obs: Any, rollout_extras: Any = None) -> StatefulModuleOutput:
        """Pick.

        Raises:
          ValueError: the input lacks a key.
        """
        if self.parts is not None:
            output = {name: _extract(extraction, obs) for name, extraction in self.parts}
        else:
            output = _extract(self.part, obs)
        return StatefulModuleOutput(state, output, jnp.zeros(()), {})


def _extract(extraction: Extraction, obs: Any) -> Any:
    if callable(extraction):
        return extraction(obs)
    for entry in (extraction,) if isinstance(extraction, str) else extraction:
        if isinstance(obs, (list, tuple)) and isinstance(entry, int):
            if not -len(obs) <= entry < len(obs):
                raise ValueError(f"Filter takes entry {entry} of a sequence of {len(obs)}.")
            obs = obs[entry]
        else:
            obs = entry_of("Filter", obs, entry)
    return obs


class Scale(StatefulModule):
    """Multiplies every array of its input by a constant.

    Args:
      factor: the constant.
    """

    def __init__(self, factor: float):
        self.factor = float(factor)

    def __call__(self, state: ModuleState, obs: Any, rollout_extras: Any = None) -> StatefulModuleOutput:
        """The same shapes."""
        return StatefulModuleOutput(state, jax.tree.map(lambda x: x * self.factor, obs), jnp.zeros(()), {})


class Merge(KeyedContainer):
    """Every child sees the same input and returns a dict; the output is one dict with all their entries.

    Args:
      modules: a dict from names to modules, for names that are not Python identifiers.
      **kwargs: or the modules by keyword.
    """

    def combine(self, outputs: dict[str, Any]) -> dict[str, Any]:
        """The union.

        Raises:
          TypeError: a child returned something else than a dict.
          ValueError: two children returned the same key.
        """
        merged: dict[str, Any] = {}
        for name, output in outputs.items():
            if not isinstance(output, Mapping):
                raise TypeError(f"Merge joins dicts, and its module {name!r} returned {shape_of(output)}.")
            for key in output:
                if key in merged:
                    owner = next(other for other in outputs if key in outputs[other])
                    raise ValueError(f"Merge got the key {key!r} from both {owner!r} and {name!r}; rename one of them.")
            merged |= output
        return merged


class Map(DispatchContainer):
    """Each child sees the entry of its own name in a dict input; the output is a dict of their outputs.

    Entries without a child are dropped. A bank of samplers for dict actions is a `Map`:

        Map(arm=NormalTanhSampler(rngs, 1e-2), gripper=CategoricalSampler(rngs, 1e-2))

    Args:
      modules: a dict from names to modules, for names that are not Python identifiers.
      **kwargs: or the modules by keyword.
    """

    def combine(self, outputs: dict[str, Any]) -> dict[str, Any]:
        """Each child's output under its name."""
        return outputs
