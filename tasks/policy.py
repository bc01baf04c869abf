"""A trained run as a function: `load_policy("runs/humanoid/...")(observation)` is the action."""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_ppo.algorithms.checkpointing import best_checkpoint, checkpoints, latest_checkpoint, load_network, step_of
from nnx_ppo.networks import functional
from nnx_ppo.networks.functional import is_stateless
from nnx_ppo.networks.types import ModuleState, StatefulModule
from tasks.launch.run_folder import RunFolder, RunFolderError, RunRecord
from tasks.registry import load_task
from tasks.task import Task


def load_policy(run: str | os.PathLike[str], checkpoint: str | int = "best") -> "Policy":
    """The policy of a run folder, with the normalizer it was trained with.

    Builds no environment, unless the task's network asks it for more than `observation_size` and `action_size`.

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
    return Policy(networks, record.observation_size, step_of(path))


class Policy:
    """The mode of a trained actor, compiled; observations are as the environment gives them, one or a batch."""

    def __init__(self, networks: StatefulModule, observation_size: Any, step: int):
        """`observation_size` is the environment's; None if it is not known, and observations are always a batch."""
        self.networks = networks
        self.training_step = step
        """Environment steps that it was trained for."""
        self._observation_size = observation_size
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
        """The number of observations; None for one that is no batch.

        Raises:
          ValueError: it is neither an observation nor a batch of them.
        """
        given = [jnp.shape(leaf) for leaf in jax.tree.leaves(obs)]
        if self._observation_size is None:
            return given[0][0]
        is_shape = lambda node: isinstance(node, tuple) and all(isinstance(size, int) for size in node)
        leaves = jax.tree.leaves(self._observation_size, is_leaf=is_shape)
        expected = [leaf if isinstance(leaf, tuple) else (leaf,) for leaf in leaves]
        if given == expected:
            return None
        if [shape[1:] for shape in given] == expected and len({shape[0] for shape in given}) == 1:
            return given[0][0]
        raise ValueError(
            f"the policy takes observations of shape {expected}, or a batch of them with one more axis in front, and "
            f"got {given}."
        )


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
    there = {step_of(path): path for path in checkpoints(folder.checkpoints)}
    if wanted not in there:
        steps = ", ".join(map(str, there))
        raise RunFolderError(f"checkpoint={wanted!r}: accepted are 'best', 'latest' and the steps {steps}.")
    return there[wanted]  # type: ignore[index]


def _build_network(task: Task, record: RunRecord) -> StatefulModule:
    """The task's network, its arrays still to be filled in."""
    make = lambda env: nnx.eval_shape(lambda: task.make_networks(env, nnx.Rngs(record.config.seed)))
    if record.observation_size is not None:
        try:
            return make(_Sizes(record.observation_size, record.action_size))
        except _NotKept:
            pass
    return make(task.make_env(record.physics))


class _NotKept(Exception):
    """A network asks more of its environment than what the run folder tells. No AttributeError, which `hasattr` and
    `getattr` with a default would take for an answer."""


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Stands for an environment: most networks only ask for these."""

    observation_size: Any
    action_size: Any

    def __getattr__(self, name: str) -> Any:
        raise _NotKept(name)
