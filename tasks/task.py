"""Task: what a training run is made of. Importing this module (or a task) imports no JAX."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nnx_ppo.algorithms.config import TrainConfig

if TYPE_CHECKING:
    from flax import nnx

    from nnx_ppo.networks.types import StatefulModule


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What a task's configuration was seen to reach, and how to see it again."""

    scores: tuple[float, ...]
    """Final mean evaluation return, one per seed."""
    seeds: tuple[int, ...]
    """The seeds, in the same order."""
    steps: int
    """Environment steps of training."""
    minutes: float
    """Wall-clock time of the slowest seed."""
    device: str
    """What it ran on, and with which physics."""
    date: str
    """When, as YYYY-MM-DD."""
    versions: Mapping[str, str]
    """Versions of the packages that matter."""
    command: str
    """The command of one seed."""

    def __post_init__(self):
        if len(self.scores) != len(self.seeds) or not self.scores:
            raise ValueError(
                f"Evidence got {len(self.scores)} scores for {len(self.seeds)} seeds; give one score for each seed."
            )

    @property
    def score(self) -> float:
        """The mean over seeds."""
        return sum(self.scores) / len(self.scores)


@dataclasses.dataclass(frozen=True)
class Task:
    """An environment, a network and the configuration that trains it.

    The two functions import JAX, environments and networks inside, so that `--help` and `--list` stay instant.
    """

    name: str
    """Lower case with underscores; also the name of its run folders."""
    summary: str
    """One line: what the robot is to do."""
    make_env: "Callable[[str | None], Any]"
    """From the physics engine (`"jax"`, `"warp"`, `"native"`, or None to choose by device) to an environment with
    its time limit, that is, in an `EpisodeWrapper`. A task without MuJoCo may ignore the argument."""
    make_networks: "Callable[[Any, nnx.Rngs], StatefulModule]"
    """From that environment and a random stream to the network. It is traced, so constants in it are NumPy arrays."""
    config: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    """The tuned configuration."""
    evidence: Evidence | None = None
    """What it reached; None until it was measured."""

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ValueError(
                f"Task.name={self.name!r}: a name of letters, digits and underscores is accepted, since it names "
                "folders and commands; for example 'reach_target'."
            )
        for name in ("make_env", "make_networks"):
            if not callable(getattr(self, name)):
                raise ValueError(
                    f"Task.{name}={getattr(self, name)!r}: a function is accepted. Pass the function itself, so that "
                    "the environment and the network are built only when a run starts."
                )
        if not isinstance(self.config, TrainConfig):
            raise ValueError(f"Task.config={self.config!r}: a TrainConfig is accepted.")
