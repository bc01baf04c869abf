"""Base of the environment wrappers."""

from typing import Any

from jaxtyping import PRNGKeyArray


class Wrapper:
    """Passes everything on to `env`; subclasses change `reset` and `step`."""

    def __init__(self, env: Any):
        self.env = env

    def reset(self, rng: PRNGKeyArray) -> Any:
        """A fresh initial state."""
        return self.env.reset(rng)

    def step(self, state: Any, action: Any) -> Any:
        """The state one control step later."""
        return self.env.step(state, action)

    def __getattr__(self, name: str) -> Any:
        # Called only for what the wrapper itself does not have: sizes, render, the model.
        if name.startswith("__") or name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)
