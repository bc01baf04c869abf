"""The contract between a network and the algorithm. Read this first.

A network is a `StatefulModule`, usually made of others. It is called once per environment step on a batch and
returns a `StatefulModuleOutput`; the outermost one's `output` is a `PPONetworkOutput`.

Two kinds of state are kept apart:

- the **carry** (`state` in, `next_state` out): one row per environment, reset with its episode, such as the
  hidden activation of a recurrent layer;
- **nnx variables**: parameters, statistics and random streams, shared by all environments. A call may advance a
  random stream but must not change anything else; statistics change in `update_statistics` only.

The same call serves three phases. In a rollout and in evaluation `rollout_extras` is None: the module samples
afresh and returns in `rollout_extras` what it would need to do the same again. In the loss that value comes back:
the module replays instead of sampling.
"""

import abc
import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float, PyTree

ModuleState = PyTree
"""The carry of a module: any pytree; `()` for a module without one."""


class _Replaceable:
    def replace(self, **changes: Any) -> Any:
        """A copy with the given fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PPONetworkOutput(_Replaceable):
    """What PPO needs of a network; made by `PPOAdapter`."""

    actions: PyTree[Float[Array, "*batch action"]]
    loglikelihoods: PyTree[Float[Array, "*batch"]]
    """Of `actions` under the current policy; one entry per action head."""
    value_estimates: PyTree[Float[Array, "*batch"]]
    """One entry per reward term."""
    entropies: PyTree[Float[Array, "*batch"]] | None = None
    """Of the policy, nats, one entry per action head; None where a sampler does not tell."""
    stds: PyTree[Float[Array, "*batch action"]] | None = None
    """Standard deviations of the policy before squashing, likewise; None for discrete policies."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StatefulModuleOutput(_Replaceable):
    """What every module returns."""

    next_state: ModuleState
    output: Any
    regularization_loss: Float[Array, "*batch"]
    """Added to the loss, averaged over time and batch: an entropy bonus, a KL term."""
    metrics: dict[Any, Any]
    """For logging, under `net/...`; nested like the modules."""
    rollout_extras: Any = None


class StatefulModule(nnx.Module, abc.ABC):
    """Base of every network module. See the top of this file for the contract."""

    @abc.abstractmethod
    def __call__(self, state: ModuleState, obs: Any, rollout_extras: Any = None) -> StatefulModuleOutput:
        """Advance by one step.

        Args:
          state: carry, leading axis batch.
          obs: input, leading axis batch.
          rollout_extras: None to sample afresh, else what this module returned for the same step.
        """

    def initialize_state(self, batch_size: int) -> ModuleState:
        """The carry at the start of an episode, for `batch_size` environments."""
        del batch_size
        return ()

    def reset_state(self, prev_state: ModuleState) -> ModuleState:
        """The carry that follows `prev_state` when an episode starts; by default that of `initialize_state`."""
        leaves = jax.tree.leaves(prev_state)
        return self.initialize_state(leaves[0].shape[0]) if leaves else prev_state

    def update_statistics(self, rollout_extras: Any) -> None:
        """Fold a rollout's extras, [time, batch, ...], into running statistics; called once per iteration."""
        del rollout_extras


class SequenceModule(StatefulModule):
    """A module that can take a whole sequence in one call; `functional.over_time` is how it is asked to."""

    @abc.abstractmethod
    def over_time(
        self, state: ModuleState, obs: Any, rollout_extras: Any, done: Bool[Array, "time batch"]
    ) -> StatefulModuleOutput:
        """What calling step by step would give, with the carry reset after each step that is `done`.

        Args:
          state: carry at the first step, leading axis batch.
          obs: inputs, leading axes [time, batch].
          rollout_extras: extras of these steps, likewise.
          done: the episode ended with this step.

        Returns:
          Output and loss with leading axes [time, batch] (a loss may be one number for all). Only these two are read.
        """
