"""PPOAdapter: the outermost module, which turns an action port and a value port into a `PPONetworkOutput`."""

from typing import Any

import jax
import jax.numpy as jnp

from nnx_ppo.networks.routing import KeyedContainer, check_modules
from nnx_ppo.networks.sampling_layers import at_least_float32
from nnx_ppo.networks.types import PPONetworkOutput, StatefulModule


class PPOAdapter(KeyedContainer):
    """Runs both ports on the same input. Carry, extras and metrics are dicts with the keys `action` and `value`.

    Args:
      action: its output is what a sampler returns, a dict with `action`, `log_likelihood` and maybe `entropy` and
        `std`, or a tree of such dicts.
      value: its output is the value estimate, or a dict of them by reward term; a trailing axis of size 1 is dropped.
    """

    def __init__(self, action: StatefulModule, value: StatefulModule):
        check_modules("PPOAdapter", {"action": action, "value": value})
        self.action = action
        self.value = value

    def children_by_name(self) -> dict[str, StatefulModule]:
        """The two ports."""
        return {"action": self.action, "value": self.value}

    def combine(self, outputs: dict[str, Any]) -> PPONetworkOutput:
        """Take the samplers' dicts apart.

        Raises:
          TypeError: the action port does not end with samplers.
        """
        action, value = outputs["action"], outputs["value"]
        loglikelihoods = _of_samplers(action, "log_likelihood")
        # Leading axes are those of a log-likelihood: [batch], or [time, batch].
        leading = jax.tree.leaves(loglikelihoods)[0].ndim
        value = jax.tree.map(at_least_float32, value)
        return PPONetworkOutput(
            actions=_of_samplers(action, "action"),
            loglikelihoods=loglikelihoods,
            value_estimates=jax.tree.map(lambda v: jnp.squeeze(v, -1) if v.shape[leading:] == (1,) else v, value),
            entropies=_of_samplers(action, "entropy") if _all_tell(action, "entropy") else None,
            stds=_of_samplers(action, "std") if _all_tell(action, "std") else None,
        )


def _is_sample(node: Any) -> bool:
    return isinstance(node, dict) and {"action", "log_likelihood"} <= node.keys()


def _all_tell(output: Any, entry: str) -> bool:
    return all(_is_sample(sample) and entry in sample for sample in jax.tree.leaves(output, is_leaf=_is_sample))


def _of_samplers(output: Any, entry: str) -> Any:
    def pick(node: Any) -> Any:
        if not _is_sample(node):
            raise TypeError(
                f"PPOAdapter's action port returned {type(node).__name__} where a sampler's output, a dict with "
                "'action' and 'log_likelihood', is accepted: end the port with a sampler such as NormalTanhSampler."
            )
        return node[entry]

    return jax.tree.map(pick, output, is_leaf=_is_sample)
