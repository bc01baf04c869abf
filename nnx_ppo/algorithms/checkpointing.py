"""Checkpoints: the whole training state on disk, whole or not at all.

A checkpoint is a directory `step_0000512000` with

- `arrays/`: every array of the state under the name of its place, written by Orbax;
- `metadata.json`: format, step, configuration, and shape and dtype of every array.

It is written under a temporary name and renamed when complete. Nothing is ever unpickled: structure comes from the
network, the optimizer and the environment that are there when it is loaded, and only arrays come from the file.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_ppo.algorithms.config import TrainConfig, from_plain, to_plain
from nnx_ppo.algorithms.tree_paths import flatten
from nnx_ppo.algorithms.types import TrainingState
from nnx_ppo.networks import functional
from nnx_ppo.networks.types import StatefulModule

FORMAT = 1


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or does not fit what it is loaded into."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SavedLeaves:
    """Arrays of a part of the state whose structure is not known yet: name -> array.

    `load_checkpoint` is not told the environment, so it leaves the environment states like this; `train_ppo` gives
    them their structure.
    """

    leaves: dict[str, jax.Array]


def make_checkpoint_fn(
    directory: str | os.PathLike,
    config: TrainConfig | None = None,
    *,
    keep: int | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Callable[[TrainingState, int], None]:
    """A `checkpoint_fn` for `train_ppo` that writes `directory/step_{step:010d}`.

    Args:
      directory: made if it does not exist.
      config: kept with each checkpoint and returned by `load_checkpoint`.
      keep: how many of the newest checkpoints stay; None keeps all.
      metadata: more plain data to keep, such as the name of the task.

    Raises:
      ValueError: `keep` is less than 1.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"make_checkpoint_fn got keep={keep}; keep at least 1 checkpoint, or None for all.")
    directory = Path(directory).absolute()
    plain_config = None if config is None else to_plain(config)

    def checkpoint_fn(training_state: TrainingState, step: int) -> None:
        save_checkpoint(directory, training_state, step, {"config": plain_config, **(metadata or {})})
        if keep is not None:
            for old in checkpoints(directory)[:-keep]:
                _remove(old)

    return checkpoint_fn


def save_checkpoint(directory: Path, state: TrainingState, step: int, metadata: Mapping[str, Any]) -> Path:
    """Write one checkpoint and return its path; an existing one of the same step is replaced."""
    import orbax.checkpoint as ocp

    final = directory / f"step_{step:010d}"
    # Not to be taken for a checkpoint: `checkpoints` looks for names that start with "step_".
    unfinished = directory / f".unfinished_{final.name}_{os.getpid()}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    leaves = flatten_state(state)
    # Orbax refuses empty arrays; their shape in the metadata says all about them.
    full = {name: leaf for name, leaf in leaves.items() if leaf.size}
    arrays = {name: jax.random.key_data(leaf) if is_key(leaf) else leaf for name, leaf in full.items()}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(unfinished / "arrays", jax.tree.map(np.asarray, arrays))
    described = {
        name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
        | ({"key": str(jax.random.key_impl(leaf))} if is_key(leaf) else {})
        for name, leaf in leaves.items()
    }
    (unfinished / "metadata.json").write_text(
        json.dumps({"format": FORMAT, "step": step, **metadata, "leaves": described}, indent=1)
    )
    if final.exists():
        _remove(final)
    unfinished.rename(final)
    return final


def _remove(checkpoint: Path) -> None:
    """Delete a checkpoint; one that is half deleted no longer has the name of one."""
    doomed = checkpoint.with_name(f".removed_{checkpoint.name}_{os.getpid()}")
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def checkpoints(directory: str | os.PathLike) -> list[Path]:
    """The complete checkpoints in a directory, oldest first."""
    found = [path for path in Path(directory).glob("step_*") if (path / "metadata.json").is_file()]
    # By number: past ten digits the names no longer sort.
    return sorted(
        (path for path in found if path.name[5:].isdecimal()), key=lambda path: int(path.name.removeprefix("step_"))
    )


def latest_checkpoint(directory: str | os.PathLike) -> Path | None:
    """The newest complete checkpoint in a directory, or None."""
    found = checkpoints(directory)
    return found[-1] if found else None


def load_checkpoint(path: str | os.PathLike, networks: StatefulModule, optimizer: Any) -> dict[str, Any]:
    """Read a checkpoint back.

    Args:
      path: a `step_...` directory.
      networks: a network of the same architecture; its parameters and statistics are overwritten.
      optimizer: the `optimizer` of a new `TrainingState` for this network; only its structure is used.

    Returns:
      `training_state` (pass it to `train_ppo` as `initial_state`), `step`, `config` (None if none was saved) and
      `metadata`, all of the metadata file.

    Raises:
      CheckpointError: it is not a checkpoint, is damaged, or belongs to another architecture (which parameter).
    """
    import orbax.checkpoint as ocp

    path = Path(path).absolute()
    metadata = read_metadata(path)
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            arrays = checkpointer.restore(path / "arrays")
        leaves = {name: _leaf(arrays, name, about) for name, about in metadata["leaves"].items()}
    except Exception as error:
        raise CheckpointError(
            f"the arrays of the checkpoint {path} cannot be read: {type(error).__name__}: {error}. Use an older "
            "checkpoint of the run."
        ) from error
    graphdef, params, variables = functional.split(networks)
    graphdef = functional.training_graphdef(graphdef, params, variables)
    batch = next(leaf.shape[0] for name, leaf in leaves.items() if name.startswith("env_states"))
    state = TrainingState(
        params=place(leaves, "params", params),
        variables=place(leaves, "variables", variables),
        optimizer=place(leaves, "optimizer", optimizer),
        network_states=place(leaves, "network_states", jax.eval_shape(lambda: networks.initialize_state(batch))),
        env_states=SavedLeaves({n: leaf for n, leaf in leaves.items() if n.startswith("env_states")}),
        **{name: leaves[name] for name in SCALARS},
        graphdef=graphdef,
    )
    nnx.update(networks, state.params, state.variables)
    config = metadata.get("config")
    return {
        "training_state": state,
        "step": metadata["step"],
        "config": None if config is None else from_plain(TrainConfig, config),
        "metadata": metadata,
    }


def _leaf(arrays: Mapping[str, Any], name: str, about: Mapping[str, Any]) -> jax.Array:
    if 0 in about["shape"]:
        return jnp.zeros(about["shape"], about["dtype"])
    if "key" in about:
        return jax.random.wrap_key_data(jnp.asarray(arrays[name]), impl=about["key"])
    return jnp.asarray(arrays[name])


SCALARS = ("rng_key", "iteration", "steps", "skipped_updates", "nonfinite_source", "nonfinite_steps")
"""Parts of the state that are single arrays."""
PARTS = ("params", "variables", "optimizer", "network_states", "env_states", *SCALARS)


def flatten_state(state: TrainingState) -> dict[str, jax.Array]:
    """Every array of a training state by name."""
    leaves: dict[str, jax.Array] = {}
    for part in PARTS:
        leaves |= flatten(part, getattr(state, part))
    return leaves


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata of a checkpoint.

    Raises:
      CheckpointError: there is none, or it is not ours.
    """
    try:
        metadata = json.loads((path / "metadata.json").read_text())
    except FileNotFoundError:
        found = latest_checkpoint(path)
        hint = f" Did you mean {found}?" if found else ""
        raise CheckpointError(
            f"{path} is not a checkpoint: it has no metadata.json. A checkpoint is a directory named "
            f"step_0000000000 with its number of steps.{hint}"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path / 'metadata.json'} is damaged: {error}. Use an older checkpoint.") from error
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {metadata.get('format') if isinstance(metadata, dict) else None!r}; this version reads "
            f"format {FORMAT}."
        )
    missing = [name for name in ("step", "leaves") if name not in metadata]
    missing += [name for name in SCALARS if name not in metadata.get("leaves", SCALARS)]
    if missing:
        raise CheckpointError(
            f"{path / 'metadata.json'} is damaged: it lacks {', '.join(missing)}. Use an older checkpoint."
        )
    return metadata


def place(leaves: Mapping[str, jax.Array], part: str, template: Any) -> Any:
    """The saved arrays of one part of the state, in the structure of `template`.

    Raises:
      CheckpointError: names, shapes or dtypes differ; the first difference is named.
    """
    expected = flatten(part, template)
    saved = {name: leaf for name, leaf in leaves.items() if name == part or name.startswith(part + "/")}
    for name in [*expected, *saved]:
        if name not in saved or name not in expected:
            where = "the checkpoint, but not in what it is loaded into" if name in saved else "what it is loaded into"
            raise CheckpointError(f"{name} is only in {where}: the checkpoint belongs to another architecture.")
        given, wanted = saved[name], expected[name]
        if given.shape != wanted.shape or given.dtype != wanted.dtype:
            raise CheckpointError(
                f"{name} is {given.dtype}{list(given.shape)} in the checkpoint and "
                f"{wanted.dtype}{list(wanted.shape)} in what it is loaded into: build both alike."
            )
    return jax.tree.unflatten(jax.tree.structure(template), [saved[name] for name in expected])


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed PRNG key."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
