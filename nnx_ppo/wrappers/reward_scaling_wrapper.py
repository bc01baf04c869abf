"""RewardScalingWrapper: rewards times a constant."""

from typing import Any

import jax
from jaxtyping import PRNGKeyArray

from nnx_ppo.wrappers.wrapper import Wrapper


class RewardScalingWrapper(Wrapper):
    """Multiplies every reward term by `reward_scale`.

    It changes the reward that is logged and evaluated too; `PPOConfig.reward_scaling` scales for learning only.
    """

    def __init__(self, env: Any, reward_scale: float):
        super().__init__(env)
        self.reward_scale = reward_scale

    def reset(self, rng: PRNGKeyArray) -> Any:
        """A fresh initial state."""
        return self._scaled(self.env.reset(rng))

    def step(self, state: Any, action: Any) -> Any:
        """One step."""
        return self._scaled(self.env.step(state, action))

    def _scaled(self, state: Any) -> Any:
        return state.replace(reward=jax.tree.map(lambda reward: self.reward_scale * reward, state.reward))
