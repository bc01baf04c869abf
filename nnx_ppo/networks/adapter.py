"""PPOAdapter: the outermost module, which turns an action port and a value port into a `PPONetworkOutput`."""

from typing import Any

import jax
import jax.numpy as jnp

from nnx_ppo.networks.types import ModuleState, PPONetworkOutput, StatefulModule, StatefulModuleOutput


class PPOAdapter(StatefulModule):
    """Runs both ports on the same input.

    Args:
      action: its output is what a sampler returns, a dict with `action`, `log_likelihood` and maybe `entropy` and
        `std`, or a tree of such dicts.
      value: its output is the value estimate, or a dict of them by reward term; a trailing axis of size 1 is dropped.
    """

    def __init__(self, action: StatefulModule, value: StatefulModule):
        self.action = action
        self.value = value

    def __call__(self, state: dict[str, ModuleState], obs: Any, rollout_extras: Any = None) -> StatefulModuleOutput:
        """Carry and extras are dicts with the keys `action` and `value`."""
        replay = rollout_extras if rollout_extras is not None else {"action": None, "value": None}
        action = self.action(state["action"], obs, replay["action"])
        value = self.value(state["value"], obs, replay["value"])
        return StatefulModuleOutput(
            next_state={"action": action.next_state, "value": value.next_state},
            output=PPONetworkOutput(
                actions=_of_samplers(action.output, "action"),
                loglikelihoods=_of_samplers(action.output, "log_likelihood"),
                value_estimates=jax.tree.map(_drop_trailing_one, value.output),
                entropies=_of_samplers(action.output, "entropy") if _all_tell(action.output, "entropy") else None,
                stds=_of_samplers(action.output, "std") if _all_tell(action.output, "std") else None,
            ),
            regularization_loss=action.regularization_loss + value.regularization_loss,
            metrics={"action": action.metrics, "value": value.metrics},
            rollout_extras={"action": action.rollout_extras, "value": value.rollout_extras},
        )

    def initialize_state(self, batch_size: int) -> dict[str, ModuleState]:
        """The carries of both ports."""
        return {
            "action": self.action.initialize_state(batch_size),
            "value": self.value.initialize_state(batch_size),
        }

    def reset_state(self, prev_state: dict[str, ModuleState]) -> dict[str, ModuleState]:
        """Each port's own reset."""
        return {
            "action": self.action.reset_state(prev_state["action"]),
            "value": self.value.reset_state(prev_state["value"]),
        }

    def update_statistics(self, rollout_extras: Any) -> None:
        """Pass each port its own extras."""
        self.action.update_statistics(rollout_extras["action"])
        self.value.update_statistics(rollout_extras["value"])


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


def _drop_trailing_one(value: jax.Array) -> jax.Array:
    return jnp.squeeze(value, -1) if value.ndim > 1 and value.shape[-1] == 1 else value
