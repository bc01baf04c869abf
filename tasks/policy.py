"""A trained run as a function: `load_policy("runs/humanoid/...")(observation)` is the action."""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_ppo.algorithms.checkpointing import best_checkpoint, latest_checkpoint, load_network, read_metadata
from nnx_ppo.networks import functional
from nnx_ppo.networks.functional import is_stateless
from nnx_ppo.networks.types import ModuleState, StatefulModule
from tasks.launch.run_folder import RunFolder, RunFolderError, RunRecord
from tasks.registry import load_task
from tasks.task import Task


def load_policy(run: str | os.PathLike[str], checkpoint: str | int = "best") -> "Policy":
    """The policy of a run folder, with the normalizer it was trained with. Builds no environment.

    Args:
      run: what `scripts/train.py` made.
      checkpoint: `"best"` (the highest evaluation return; the latest if there was no evaluation), `"latest"`, or the
        step of one that is there.

    Raises:
      RunFolderError: it is no run folder, or has no such checkpoint.
      CheckpointError: the checkpoint is damaged, or the task's network has changed since.
    """
    folder = RunFolder.read(Path(run))
    record = folder.read_record()
    task = load_task(str(folder.task_file(record)) if record.task_file else record.task)
    path = _find_checkpoint(folder, checkpoint)
    networks = _build_network(task, record)
    load_network(path, networks)
    networks.eval()
    return Policy(networks, _rank_of(record.observation_size), read_metadata(path)["step"])


class Policy:
    """The mode of a trained actor, compiled; observations are as the environment gives them, one or a batch."""

    def __init__(self, networks: StatefulModule, observation_rank: int | None, step: int):
        """`observation_rank` counts the axes of an observation's first array; None if an observation is a batch."""
        self.networks = networks
        self.training_step = step
        """Environment steps that it was trained for."""
        self._observation_rank = observation_rank
        self._graphdef, self._params, self._variables = functional.split(networks)

    def __call__(self, obs: Any) -> Any:
        """The action of a network without memory.

        Raises:
          ValueError: the network has a carry.
        """
        carry = self.initial_carry(self._batch_size(obs))
        if not is_stateless(carry):
            raise ValueError(
                "this policy has a memory. Hand it on from step to step: carry = policy.initial_carry(), then "
                "action, carry = policy.step(obs, carry)."
            )
        return self.step(obs, carry)[0]

    def initial_carry(self, batch_size: int | None = None) -> ModuleState:
        """The memory at the start of an episode; of a batch of episodes if its size is given."""
        return self.networks.initialize_state(batch_size or 1)

    def step(self, obs: Any, carry: ModuleState) -> tuple[Any, ModuleState]:
        """(action, carry for the next step)."""
        if self._batch_size(obs) is not None:
            return _act(self._graphdef, self._params, self._variables, obs, carry)
        batch = jax.tree.map(lambda x: jnp.asarray(x)[None], obs)
        actions, carry = _act(self._graphdef, self._params, self._variables, batch, carry)
        return jax.tree.map(lambda x: x[0], actions), carry

    def _batch_size(self, obs: Any) -> int | None:
        first = jnp.shape(jax.tree.leaves(obs)[0])
        return None if len(first) == self._observation_rank else first[0]


@functools.partial(jax.jit, static_argnums=0)
def _act(
    graphdef: nnx.GraphDef, params: nnx.State, variables: nnx.State, obs: Any, carry: ModuleState
) -> tuple[Any, ModuleState]:
    out, _ = functional.apply(graphdef, params, variables, carry, obs)
    return out.output.actions, out.next_state


def _find_checkpoint(folder: RunFolder, wanted: str | int) -> Path:
    latest = latest_checkpoint(folder.checkpoints)
    if latest is None:
        raise RunFolderError(f"{str(folder.path)!r} has no checkpoint yet.")
    if wanted == "latest":
        return latest
    if wanted == "best":
        return best_checkpoint(folder.checkpoints) or latest
    path = folder.checkpoints / f"step_{wanted:010d}" if isinstance(wanted, int) else None
    if path is None or not path.is_dir():
        there = ", ".join(str(int(p.name.removeprefix("step_"))) for p in sorted(folder.checkpoints.glob("step_*")))
        raise RunFolderError(f"checkpoint={wanted!r}: accepted are 'best', 'latest' and the steps {there}.")
    return path


def _build_network(task: Task, record: RunRecord) -> StatefulModule:
    """The task's network, its arrays still to be filled in."""
    make = lambda env: nnx.eval_shape(lambda: task.make_networks(env, nnx.Rngs(record.config.seed)))
    if record.observation_size is not None:
        try:
            return make(_Sizes(record.observation_size, record.action_size))
        except _NotKept:
            pass
    return make(task.make_env(record.physics))


class _NotKept(AttributeError):
    """A network asks more of its environment than what the run folder tells."""


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Stands for an environment: most networks only ask for these."""

    observation_size: Any
    action_size: Any

    def __getattr__(self, name: str) -> Any:
        raise _NotKept(name)


def _rank_of(observation_size: Any) -> int | None:
    if observation_size is None:
        return None
    first = jax.tree.leaves(observation_size, is_leaf=lambda x: isinstance(x, tuple))[0]
    return len(first) if isinstance(first, tuple) else 1
