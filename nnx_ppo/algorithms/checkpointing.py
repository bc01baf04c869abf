"""Checkpoints: the whole training state on disk, whole or not at all.

A checkpoint is a directory `step_0000512000` with

- `arrays/`: every array of the state under the name of its place, written by Orbax;
- `metadata.json`: format, step, configuration, score, and shape and dtype of every array.

It is written under a temporary name and renamed when complete. Nothing is ever unpickled: structure comes from the
network, the optimizer and the environment that are there when it is loaded, and only arrays come from the file.
"""

import contextlib
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
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

log = logging.getLogger(__name__)


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or does not fit what it is loaded into."""


class CheckpointDamaged(CheckpointError):
    """Something of a checkpoint is missing or unreadable; an older one of the run may be whole."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SavedLeaves:
    """Arrays of a part of the state whose structure is not known yet: name -> array.

    `load_checkpoint` is not told the environment, so it leaves the environment states like this; `train_ppo` gives
    them their structure, or makes fresh ones (and a fresh carry) if none were saved.
    """

    leaves: dict[str, jax.Array]


def make_checkpoint_fn(
    directory: str | os.PathLike,
    config: TrainConfig | None = None,
    *,
    keep: int | None = None,
    score: Callable[[int], float | None] | None = None,
    metadata: Mapping[str, Any] | Callable[[int], Mapping[str, Any]] | None = None,
    env_states: bool = True,
    asynchronous: bool = False,
) -> "CheckpointWriter":
    """A `checkpoint_fn` for `train_ppo` that writes `directory/step_{step:010d}`.

    Args:
      directory: made if it does not exist.
      config: kept with each checkpoint and returned by `load_checkpoint`.
      keep: how many of the newest checkpoints stay; None keeps all.
      score: how good the run was at a step, if that is known (a return); the best checkpoint stays too.
      metadata: more plain data to keep, such as the name of the task, or a function that returns it for a step.
      env_states: whether to keep the environments' states and the network's carry. Without, a checkpoint is small, and
        training goes on from it with fresh episodes: well, but not bit for bit.
      asynchronous: write on a thread while training goes on. A checkpoint that cannot be written (a full disk) then
        costs a warning, not the run; only the first one raises, so that what can never be saved is known at once.

    Raises:
      ValueError: `keep` is less than 1.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"make_checkpoint_fn got keep={keep}; keep at least 1 checkpoint, or None for all.")
    return CheckpointWriter(Path(directory).absolute(), config, keep, score, metadata, env_states, asynchronous)


class CheckpointWriter:
    """Writes checkpoints, if need be on a thread; made by `make_checkpoint_fn`, which explains the arguments.

    Calling it begins a checkpoint. An asynchronous one appears under its name after `commit`, which `train_ppo` calls
    once the metrics of that step are with `log_fn`: so whoever resumes from it finds no gap in the metrics. `wait`
    commits, and returns when everything is on disk.
    """

    def __init__(
        self,
        directory: Path,
        config: TrainConfig | None,
        keep: int | None,
        score: Callable[[int], float | None] | None,
        metadata: Mapping[str, Any] | Callable[[int], Mapping[str, Any]] | None,
        env_states: bool,
        asynchronous: bool,
    ):
        self.directory = directory
        self._config = None if config is None else to_plain(config)
        self._keep, self._score, self._metadata, self._env_states = keep, score, metadata, env_states
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if asynchronous else None
        self._begun: tuple[int, Future[_Unfinished]] | None = None
        self._committed: tuple[int, Future[None]] | None = None
        # A run that is resumed has shown that it can be saved.
        self._rehearsed = latest_checkpoint(directory) is not None

    def __call__(self, training_state: TrainingState, step: int) -> None:
        """Begin a checkpoint; `training_state` must stay valid until it is written."""
        self.wait()
        if self._thread is None:
            self._finish(self._write(training_state, step))
            return
        writing = self._thread.submit(self._write, training_state, step)
        self._begun = (step, writing)
        if not self._rehearsed:
            try:
                writing.result()
                json.dumps(self._about(step))
            except Exception as error:
                self.abandon()
                raise CheckpointError(
                    f"the first checkpoint cannot be written to {self.directory} ({type(error).__name__}: {error}), so "
                    "nothing that is learned could be kept."
                ) from error
            self._rehearsed = True

    def commit(self) -> None:
        """Let the checkpoint that was begun appear under its name as soon as it is written; does not wait."""
        if self._begun is None or self._thread is None:
            return
        (step, writing), self._begun = self._begun, None
        self._committed = (step, self._thread.submit(lambda: self._finish(writing.result())))

    def abandon(self) -> None:
        """Give up the checkpoint that was begun and not committed: the metrics of its step never got out."""
        if self._begun is None or self._thread is None:
            return
        (_, writing), self._begun = self._begun, None
        self._thread.submit(lambda: shutil.rmtree(writing.result().folder, ignore_errors=True)).exception()

    def wait(self) -> None:
        """Commit, and wait until it is on disk; a failure is a warning."""
        self.commit()
        if self._committed is None:
            return
        (step, committed), self._committed = self._committed, None
        try:
            committed.result()
        except Exception as error:
            latest = latest_checkpoint(self.directory)
            log.warning(
                "The checkpoint at step %s could not be written (%s: %s). Training goes on; %s.",
                f"{step:,}",
                type(error).__name__,
                error,
                f"{latest.name} stands" if latest else "there is none yet",
            )

    def _about(self, step: int) -> dict[str, Any]:
        """What the metadata says besides what describes the arrays."""
        more = self._metadata(step) if callable(self._metadata) else self._metadata or {}
        score = self._score(step) if self._score else None
        scored = {} if score is None or not math.isfinite(score) else {"score": float(score)}
        return {"config": self._config, **scored, **more}

    def _write(self, state: TrainingState, step: int) -> "_Unfinished":
        leaves = flatten_state(state)
        if not self._env_states:
            leaves = {name: leaf for name, leaf in leaves.items() if not name.startswith(_OF_EPISODES)}
        return _Unfinished(write_arrays(self.directory, leaves, step), leaves, step)

    def _finish(self, unfinished: "_Unfinished") -> None:
        step = unfinished.step
        finish_checkpoint(self.directory, unfinished.folder, unfinished.leaves, step, self._about(step))
        try:
            self._remove_old(step)
        except OSError as error:
            log.warning("Old checkpoints could not be deleted: %s", error)

    def _remove_old(self, step: int) -> None:
        if self._keep is None:
            return
        best = best_checkpoint(self.directory)
        # Those of a later step are of another branch, which went on from where this one did.
        for old in [path for path in checkpoints(self.directory) if step_of(path) <= step][: -self._keep]:
            if old != best:
                _remove(old)


@dataclass(frozen=True)
class _Unfinished:
    """A checkpoint whose arrays are written, without its name."""

    folder: Path
    leaves: Mapping[str, jax.Array]
    step: int


def _checkpointer() -> Any:
    """Orbax's writer and reader, for this process alone: by itself it would wait for all others of the run."""
    import orbax.checkpoint as ocp

    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process_{me}"
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def write_arrays(directory: Path, leaves: Mapping[str, jax.Array], step: int) -> Path:
    """Write arrays into a folder that cannot be taken for a checkpoint, and return it."""
    # `checkpoints` looks for names that start with "step_".
    unfinished = directory / f".unfinished_step_{step:010d}_{os.getpid()}"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        # Orbax refuses empty arrays; their shape in the metadata says all about them.
        full = {name: leaf for name, leaf in leaves.items() if leaf.size}
        arrays = {name: jax.random.key_data(leaf) if is_key(leaf) else leaf for name, leaf in full.items()}
        with _checkpointer() as checkpointer:
            checkpointer.save(unfinished / "arrays", jax.tree.map(np.asarray, arrays))
    except BaseException:
        # What a full disk needs most is room.
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return unfinished


def finish_checkpoint(
    directory: Path, unfinished: Path, leaves: Mapping[str, jax.Array], step: int, metadata: Mapping[str, Any]
) -> Path:
    """Add the metadata and give a checkpoint its name; an existing one of the same step is replaced."""
    final = directory / f"step_{step:010d}"
    described = {
        name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
        | ({"key": str(jax.random.key_impl(leaf))} if is_key(leaf) else {})
        for name, leaf in leaves.items()
    }
    try:
        (unfinished / "metadata.json").write_text(
            json.dumps({"format": FORMAT, "step": step, **metadata, "leaves": described}, indent=1)
        )
        replaced = final.with_name(f".replaced_{final.name}_{os.getpid()}")
        if final.exists():
            final.rename(replaced)
        try:
            unfinished.rename(final)
        except BaseException:
            if replaced.exists():
                replaced.rename(final)
            raise
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return final


def _remove(checkpoint: Path) -> None:
    """Delete a checkpoint; one that is half deleted no longer has the name of one."""
    doomed = checkpoint.with_name(f".removed_{checkpoint.name}_{os.getpid()}")
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def remove_leftovers(directory: str | os.PathLike) -> None:
    """Tidy up what a process that was killed while writing, replacing or deleting has left."""
    for path in Path(directory).glob(".replaced_step_*"):
        final = path.with_name(path.name.removeprefix(".replaced_").rsplit("_", 1)[0])
        if final.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:  # Killed between the two renames.
            path.rename(final)
    for pattern in (".unfinished_step_*", ".removed_step_*"):
        for path in Path(directory).glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def checkpoints(directory: str | os.PathLike) -> list[Path]:
    """The complete checkpoints in a directory, oldest first."""
    found = [path for path in Path(directory).glob("step_*") if (path / "metadata.json").is_file()]
    # By number: past ten digits the names no longer sort.
    return sorted((path for path in found if path.name[5:].isdecimal()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The environment steps of a checkpoint, by its name."""
    return int(checkpoint.name.removeprefix("step_"))


def latest_checkpoint(directory: str | os.PathLike) -> Path | None:
    """The newest complete checkpoint in a directory, or None."""
    found = checkpoints(directory)
    return found[-1] if found else None


def best_checkpoint(directory: str | os.PathLike) -> Path | None:
    """The complete checkpoint with the highest score, the newest of equals, or None if none has a score."""
    scored = []
    for path in checkpoints(directory):
        with contextlib.suppress(CheckpointError):
            if (score := read_metadata(path).get("score")) is not None:
                scored.append((score, len(scored), path))
    return max(scored)[-1] if scored else None


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
    metadata, leaves = _read(path)
    graphdef, params, variables = functional.split(networks)
    graphdef = functional.training_graphdef(graphdef, params, variables)
    env_leaves = {name: leaf for name, leaf in leaves.items() if name.startswith("env_states")}
    carry = ()
    if env_leaves:
        batch = next(iter(env_leaves.values())).shape[0]
        carry = place(leaves, "network_states", jax.eval_shape(lambda: networks.initialize_state(batch)))
    config = metadata.get("config")
    try:
        config = None if config is None else from_plain(TrainConfig, config)
    except ValueError as error:
        raise CheckpointError(f"the configuration in {path} cannot be read: {error}") from error
    state = TrainingState(
        params=place(leaves, "params", params),
        variables=place(leaves, "variables", variables),
        optimizer=place(leaves, "optimizer", optimizer),
        network_states=carry,
        env_states=SavedLeaves(env_leaves),
        **{name: leaves[name] for name in SCALARS},
        graphdef=graphdef,
    )
    nnx.update(networks, state.params, state.variables)
    return {"training_state": state, "step": metadata["step"], "config": config, "metadata": metadata}


def load_network(path: str | os.PathLike, networks: StatefulModule) -> None:
    """Overwrite the parameters and statistics of `networks` by those of a checkpoint; nothing else of it is used.

    Raises:
      CheckpointError: as for `load_checkpoint`.
    """
    _, leaves = _read(path)
    _, params, variables = functional.split(networks)
    nnx.update(networks, place(leaves, "params", params), place(leaves, "variables", variables))


def read_arrays(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """Every array of a checkpoint by name, keys as their data; needs neither network nor environment.

    Raises:
      CheckpointError: it is not a checkpoint, or is damaged.
    """
    leaves = _read(path)[1]
    return {name: np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf) for name, leaf in leaves.items()}


def _read(path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """Metadata, and every array by name."""
    path = Path(path).absolute()
    metadata = read_metadata(path)
    try:
        with _checkpointer() as checkpointer:
            arrays = checkpointer.restore(path / "arrays")
        return metadata, {name: _leaf(arrays, name, about) for name, about in metadata["leaves"].items()}
    except Exception as error:
        raise CheckpointDamaged(
            f"the arrays of the checkpoint {path} cannot be read: {type(error).__name__}: {error}. Use an older "
            "checkpoint of the run."
        ) from error


def _leaf(arrays: Mapping[str, Any], name: str, about: Mapping[str, Any]) -> jax.Array:
    if 0 in about["shape"]:
        return jnp.zeros(about["shape"], about["dtype"])
    if "key" in about:
        return jax.random.wrap_key_data(jnp.asarray(arrays[name]), impl=about["key"])
    return jnp.asarray(arrays[name])


SCALARS = ("rng_key", "iteration", "steps", "skipped_updates", "nonfinite_source", "nonfinite_steps")
"""Parts of the state that are single arrays."""
_OF_EPISODES = ("network_states", "env_states")
PARTS = ("params", "variables", "optimizer", "network_states", "env_states", *SCALARS)


def flatten_state(state: TrainingState) -> dict[str, jax.Array]:
    """Every array of a training state by name."""
    leaves: dict[str, jax.Array] = {}
    for part in PARTS:
        leaves |= flatten(part, getattr(state, part))
    if len(leaves) != (there := len(jax.tree.leaves(state))):
        raise CheckpointError(
            f"the {there} arrays of the training state have {len(leaves)} names: two keys of a dict are alike but for "
            "a '/' in them. Rename one."
        )
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
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise CheckpointDamaged(f"{path / 'metadata.json'} is damaged: {error}. Use an older checkpoint.") from error
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {metadata.get('format') if isinstance(metadata, dict) else None!r}; this version reads "
            f"format {FORMAT}."
        )
    missing = [name for name, kind in {"step": int, "leaves": dict}.items() if not isinstance(metadata.get(name), kind)]
    missing += [name for name in SCALARS if "leaves" not in missing and name not in metadata["leaves"]]
    if missing:
        raise CheckpointDamaged(
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
