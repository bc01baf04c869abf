"""Recording activations: what each module put out, for analysis.

`with_recording` copies a network and wraps every module that has no children of its own. A wrapped module also puts
its output into its metrics; those travel up through the containers, and `extract_activations` finds them there. The
original network is never touched, and has no code for recording in it. To record whole episodes see
`nnx_ppo.algorithms.rollout.record_activations_rollout`.
"""

import fnmatch
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_ppo.networks import functional
from nnx_ppo.networks.module_paths import module_path
from nnx_ppo.networks.types import ModuleState, StatefulModule, StatefulModuleOutput

ACTIVATION_KEY = "__activation__"
"""Where in a module's metrics its output is."""


class Recorder(StatefulModule):
    """Runs a module and adds its output to its metrics; nothing else changes.

    Args:
      wrapped: the module.
      dtype: what floating-point outputs are stored as, such as `jnp.float16`; None keeps theirs.
    """

    def __init__(self, wrapped: StatefulModule, dtype: Any = None):
        self.wrapped = wrapped
        self.dtype = dtype

    def __call__(self, state: ModuleState, obs: Any, rollout_extras: Any = None) -> StatefulModuleOutput:
        """The wrapped module's output, with the activation in the metrics."""
        out = self.wrapped(state, obs, rollout_extras)
        return out.replace(metrics={**out.metrics, ACTIVATION_KEY: jax.tree.map(self._stored, out.output)})

    def _stored(self, x: jax.Array) -> jax.Array:
        return x if self.dtype is None or not jnp.issubdtype(x.dtype, jnp.floating) else x.astype(self.dtype)

    def initialize_state(self, batch_size: int) -> ModuleState:
        """The wrapped module's."""
        return self.wrapped.initialize_state(batch_size)

    def reset_state(self, prev_state: ModuleState) -> ModuleState:
        """The wrapped module's."""
        return self.wrapped.reset_state(prev_state)

    def update_statistics(self, rollout_extras: Any) -> None:
        """The wrapped module's."""
        self.wrapped.update_statistics(rollout_extras)


def with_recording(net: StatefulModule, layers: Sequence[str] | None = None, dtype: Any = None) -> StatefulModule:
    """A copy of a network that records; statistics and random streams are the copy's own.

    Args:
      net: the network; left alone.
      layers: which modules to record, as paths with wildcards (`"1/action/*"`); the paths are those in `describe(net)`
        and in `net/...` metrics. None records every module without children.
      dtype: what floating-point activations are stored as; None keeps theirs.

    Raises:
      ValueError: a pattern in `layers` fits no module.
    """
    if any(isinstance(module, Recorder) for _, module in nnx.iter_modules(net)):
        warnings.warn("with_recording got a network that records already; it is returned as it is.", stacklevel=2)
        return net
    copy = functional.merge(*functional.split(net))
    paths = [module_path(path) for path, module in nnx.iter_modules(copy) if is_leaf(module)]
    for pattern in layers or ():
        if not fnmatch.filter(paths, pattern):
            raise ValueError(f"layers={pattern!r} fits no module to record; there are {', '.join(paths)}.")

    def wrap(path: tuple[Any, ...], node: Any) -> Any:
        wanted = layers is None or any(fnmatch.fnmatch(module_path(path), pattern) for pattern in layers)
        return Recorder(node, dtype) if wanted and is_leaf(node) else node

    return nnx.recursive_map(wrap, copy)


def is_leaf(module: Any) -> bool:
    """Whether a node is a StatefulModule with no StatefulModule inside."""
    return isinstance(module, StatefulModule) and not any(
        path and isinstance(inner, StatefulModule) for path, inner in nnx.iter_modules(module)
    )


def extract_activations(metrics: Any) -> Any:
    """The activations in the metrics of a recording network, in nested dicts like the modules; None if there are none.

    Args:
      metrics: `StatefulModuleOutput.metrics` of the outermost module.
    """
    if not isinstance(metrics, Mapping):
        return None
    if ACTIVATION_KEY in metrics:
        return metrics[ACTIVATION_KEY]
    found = {key: extract_activations(value) for key, value in metrics.items()}
    return {key: value for key, value in found.items() if value is not None} or None
