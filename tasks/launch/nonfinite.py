"""The last steps of environments that went non-finite, kept in a run folder and repeated in MuJoCo."""

import logging
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from nnx_ppo.algorithms.types import NonFiniteEpisode

KEPT = 10
"""Episodes kept of a run, one of an iteration: the first say what is wrong, and the disk is for better things."""

log = logging.getLogger(__name__)


class NonFiniteEpisodes:
    """A `nonfinite_fn` that writes each episode to a folder, and says how to repeat it.

    A file `step_{step:010d}_env_{env}.npz` holds MuJoCo's state fields before each step, `[time, ...]`, and
    `ctrl_next`, the control that the step then applied. NumPy's plain format; nothing in it is pickled.

    Args:
      folder: made when the first episode is written.
      env: the environment, which knows the fields.
      command: what repeats a file; its path is appended.
    """

    def __init__(self, folder: Path, env: Any, command: str):
        self._folder, self._env, self._command = folder, env, command

    def __call__(self, episode: "NonFiniteEpisode") -> Path | None:
        """Write an episode; returns the file, or None if there are enough."""
        if len(list(self._folder.glob("*.npz"))) >= KEPT:
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step_{episode.step:010d}_env_{episode.env}.npz"
        import jax

        fields = self._env.replay_fields(episode.records)
        controls = np.asarray(jax.vmap(self._env.control)(episode.actions))
        unfinished = path.with_suffix(".unfinished")
        with open(unfinished, "wb") as file:
            np.savez(file, ctrl_next=controls, **fields)
        os.replace(unfinished, path)
        command = f"{self._command} {shlex.quote(str(path))}"
        log.warning("The last %d steps are in %s. Repeat them: %s", len(controls), path, command)
        return path
