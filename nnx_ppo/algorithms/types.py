"""What flows through training: the environment protocol, the training state, rollouts and results."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, Shaped, UInt32

from nnx_ppo.algorithms.config import LoggingLevel as LoggingLevel
from nnx_ppo.networks import functional
from nnx_ppo.networks.types import ModuleState, PPONetworkOutput

LogFn = Callable[[dict[str, Any], int], None]
StopFn = Callable[[int], bool]


@runtime_checkable
class EnvState(Protocol):
    """What an environment returns; `obs` and `reward` may be pytrees, `done` bool or float."""

    @property
    def obs(self) -> Any: ...  # noqa: D102
    @property
    def reward(self) -> Any: ...  # noqa: D102
    @property
    def done(self) -> Shaped[Array, "..."]: ...  # noqa: D102
    @property
    def info(self) -> dict[str, Any]: ...  # noqa: D102
    @property
    def metrics(self) -> dict[str, Any]: ...  # noqa: D102


@runtime_checkable
class RLEnv(Protocol):
    """An environment: MuJoCo Playground's, Brax's and our own all fit. Its states also have `replace(...)`."""

    def reset(self, rng: PRNGKeyArray) -> Any:
        """A fresh initial state."""
        ...

    def step(self, state: Any, action: Any) -> Any:
        """The state one control step later."""
        ...


T = TypeVar("T")


class Replaceable:
    """Adds `replace(**changes)` to a frozen dataclass."""

    def replace(self: T, **changes: Any) -> T:
        """A copy with the given fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainingState(Replaceable):
    """Everything that training reads. A pytree, so it is donated, vmapped, sharded and saved as a whole.

    The network is kept as flax splits it: `graphdef` is static, `params` and `variables` are pytrees of arrays.
    """

    params: nnx.State
    """The `nnx.Param` variables: what the gradient moves."""
    variables: nnx.State
    """All other variables: statistics and random streams."""
    optimizer: optax.OptState
    """The state of the optax chain over `params`."""
    network_states: ModuleState
    """Carry of the network, one row per environment."""
    env_states: Any
    """State of the environments, batched."""
    rng_key: PRNGKeyArray
    """The key every random number of the run derives from; it never changes."""
    iteration: Int[Array, ""]
    """Iterations finished."""
    steps: UInt32[Array, "2"]
    """Environment steps taken, as (high, low) 32-bit words: float32 and int32 would not stay exact."""
    skipped_updates: Int[Array, ""]
    """Updates in a row that were skipped because something in them was not finite."""
    nonfinite_source: Int[Array, ""]
    """What was not finite in the last skipped update: an index into `ppo.NONFINITE_NAMES`."""
    nonfinite_steps: UInt32[Array, ""]
    """Environment steps that were not finite, in the whole run."""
    graphdef: nnx.GraphDef = dataclasses.field(metadata={"static": True})
    """The structure of the network."""

    @property
    def networks(self) -> Any:
        """The network, ready to call. Made anew at each access; it shares the arrays of this state."""
        return functional.merge(self.graphdef, self.params, self.variables)

    @property
    def steps_taken(self) -> int:
        """Environment steps taken (waits for the device)."""
        high, low = (int(word) for word in np.asarray(self.steps))
        return (high << 32) + low


def add_steps(steps: UInt32[Array, "2"], count: int) -> UInt32[Array, "2"]:
    """(high, low) + count, with carry."""
    low = steps[1] + jnp.uint32(count % 2**32)
    carry = (low < steps[1]).astype(jnp.uint32)
    return jnp.stack([steps[0] + jnp.uint32(count >> 32) + carry, low])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Transition(Replaceable):
    """What the rollout keeps of each step; leaves are [time, batch, ...]."""

    obs: PyTree[Float[Array, "time batch ..."]]
    """What the policy saw."""
    network_output: PPONetworkOutput
    """Actions, their log-likelihoods and the value estimates at `obs`."""
    rewards: PyTree[Float[Array, "time batch"]]
    done: Bool[Array, "time batch"]
    """The episode ended with this step, for whichever reason."""
    truncated: Bool[Array, "time batch"]
    """It ended at a time limit, not in a terminal state."""
    final_values: PyTree[Float[Array, "time batch"]]
    """The critic's value of the final, pre-reset observation where `truncated`; 0 elsewhere."""
    nonfinite: Bool[Array, "time batch"]
    """The environment produced a NaN or an infinity; the step counts as terminated with reward 0."""
    metrics: dict[str, Any]
    """`env` and `net` metrics, as far as the logging level asks for them."""
    rollout_extras: Any = None
    """What modules emitted for replay in the loss (sampled actions, noise, the normalizer's inputs)."""
    replay: Any = None
    """`env.replay_record` of the state before the step, if asked for: what it takes to repeat the step elsewhere."""


@dataclass
class VideoData:
    """One rendered evaluation episode."""

    frames: np.ndarray
    """RGB frames, [T, H, W, 3] uint8: the initial state and one frame per step."""
    step: int
    """Environment steps trained so far."""
    episode_reward: float
    episode_length: int


@dataclass
class NonFiniteEpisode:
    """The last steps of an environment up to the one that was not finite, as far as they lie in the same rollout."""

    step: int
    """Environment steps trained after the iteration in which it happened."""
    env: int
    """Which of the environments."""
    records: np.ndarray
    """`env.replay_record` of the state before each step, [time, ...]; later than the last reset."""
    actions: Any
    """The action of each step, leaves [time, ...]; with the last one it became non-finite."""


@dataclass
class TrainResult:
    """What `train_ppo` returns."""

    training_state: TrainingState
    final_metrics: dict[str, Any]
    """The metrics of the last iteration."""
    eval_history: list[dict[str, Any]]
    """One dict per evaluation: `step` and the `eval/...` metrics."""
    total_steps: int
    total_iterations: int
