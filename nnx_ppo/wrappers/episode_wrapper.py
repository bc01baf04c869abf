"""EpisodeWrapper: a time limit, told apart from termination."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from nnx_ppo.wrappers.wrapper import Wrapper


class EpisodeWrapper(Wrapper):
    """Ends an episode after `max_len` steps and marks that end in `info["truncated"]`.

    `info["step_counter"]` counts the steps of the episode. A state that is terminal in its own right is not
    truncated, even at the time limit.

    Args:
      env: any environment.
      max_len: steps in a full episode.
    """

    def __init__(self, env: Any, max_len: int):
        super().__init__(env)
        if max_len < 1:
            raise ValueError(f"EpisodeWrapper got max_len={max_len}; an episode has at least 1 step.")
        self.max_len = max_len

    def reset(self, rng: PRNGKeyArray) -> Any:
        """A fresh initial state, at the start of its episode."""
        state = self.env.reset(rng)
        return _with_info(state, step_counter=jnp.zeros((), jnp.int32), truncated=jnp.zeros((), bool))

    def step(self, state: Any, action: Any) -> Any:
        """One step; `done` is also set at the time limit."""
        step_counter = state.info["step_counter"] + 1
        # The inner environment may set a limit of its own; what it leaves untouched must not look like one.
        next_state = self.env.step(_with_info(state, truncated=jnp.zeros((), bool)), action)
        terminated = next_state.done.astype(bool)
        inner = jnp.asarray(next_state.info.get("truncated", False), bool)
        inner |= jnp.asarray(next_state.info.get("truncation", False), bool)
        terminated &= ~inner
        truncated = inner | ((step_counter >= self.max_len) & ~terminated)
        done = (terminated | truncated).astype(next_state.done.dtype)
        return _with_info(next_state, step_counter=step_counter, truncated=truncated).replace(done=done)

    def randomize_phase(self, state: Any, rng: PRNGKeyArray) -> Any:
        """Start somewhere within the time limit.

        Training asks for it once, at its very first reset: otherwise all environments would meet their time limit in
        the same iteration.
        """
        # As even as randint for any sensible time limit, and a third of its compile time.
        step_counter = (jax.random.uniform(rng) * self.max_len).astype(jnp.int32)
        return _with_info(state, step_counter=step_counter)


def _with_info(state: Any, **entries: Any) -> Any:
    return state.replace(info={**state.info, **entries})
