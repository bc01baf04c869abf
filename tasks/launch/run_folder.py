"""The run folder, the source of truth about a run: what lies where, and `config.json`. Imports no JAX.

runs/<task>/<time>-<seed>/
  lock             held while a process writes to the run
  config.json      everything needed to build the environment, the network and the configuration again
  git_diff.patch   uncommitted changes of the code, if there were any
  task_file.py     a copy of the task, if it came from a file of yours
  metrics.jsonl    one line per iteration
  tensorboard/     the same for TensorBoard
  videos/          step_0000000000.mp4, ...
  checkpoints/     step_0000000000/, ...
  nonfinite/       the last steps of environments that went non-finite, if any did: scripts/replay.py repeats them
  plots/           learning_curve.png
"""

import contextlib
import dataclasses
import datetime
import itertools
import json
import logging
import math
import operator
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nnx_ppo.algorithms.config import TrainConfig, from_plain, to_plain

FREE_BYTES_NEEDED = 200 * 2**20
"""A run does not start with less free disk space; checkpoints and videos of a run take about this much."""
_FORMAT = 1

log = logging.getLogger(__name__)


class RunFolderError(ValueError):
    """A run folder cannot be used as asked; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """The content of `config.json`."""

    task: str
    """Name of the task."""
    task_file: Path | None
    """The file it came from, unless it is one of the toolkit's."""
    physics: str | None
    """The physics engine that was used; None if the environment does not say."""
    config: TrainConfig
    command: tuple[str, ...]
    versions: Mapping[str, str]
    git: Mapping[str, Any]
    """`commit` and whether it was `dirty`; empty outside a repository."""
    device: str
    started: str
    """Local time, ISO 8601."""
    wandb_id: str | None = None
    """The Weights & Biases run that it is logged to."""
    observation_size: Any = None
    """As the environment has it, an integer or a tree of shapes: what it takes to build the network again."""
    action_size: Any = None
    """As the environment has it."""
    keep_checkpoints: int | None = 3
    """How many of the newest checkpoints stay; None for all."""
    devices: int = 1
    """How many devices the run is spread over: on another number it would go on with other roundings."""
    format: int = _FORMAT
    """Version of this file's layout."""


class RunFolder:
    """Paths in a run folder, its creation and its record. See the top of this file."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def config_json(self) -> Path:
        """The record."""
        return self.path / "config.json"

    @property
    def metrics_jsonl(self) -> Path:
        """One line per iteration."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def videos(self) -> Path:
        """Folder of mp4 files."""
        return self.path / "videos"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def nonfinite(self) -> Path:
        """Folder of episodes in which an environment went non-finite."""
        return self.path / "nonfinite"

    @property
    def learning_curve(self) -> Path:
        """The plot made at the end."""
        return self.path / "plots" / "learning_curve.png"

    @property
    def task_copy(self) -> Path:
        """The copy of an outside task file."""
        return self.path / "task_file.py"

    @property
    def git_diff(self) -> Path:
        """Uncommitted changes of the code."""
        return self.path / "git_diff.patch"

    @classmethod
    def plan(cls, out: Path | None, task: str, seed: int) -> "RunFolder":
        """The folder of a new run, checked but not yet made.

        Raises:
          RunFolderError: it exists already, or the disk there is read-only or nearly full.
        """
        if out is None:
            time = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
            path = _unused(Path("runs") / task / f"{time}-{seed}")
        else:
            path = out.expanduser()
        if path.exists():
            advice = "Nothing is overwritten: give another --out, or none."
            if _is_run(path):
                advice = f"To continue that run, use --resume {path}; for a new one give another --out, or none."
            raise RunFolderError(f"the run folder {str(path)!r} exists already. {advice}")
        check_disk(path)
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """The folder of an earlier run, to go on with.

        Raises:
          RunFolderError: there is none, or the disk is read-only or nearly full.
        """
        run = cls.read(path)
        check_disk(run.path)
        return run

    @classmethod
    def read(cls, path: Path) -> "RunFolder":
        """The folder of an earlier run, to look at.

        Raises:
          RunFolderError: there is none.
        """
        path = path.expanduser()
        if not _is_run(path):
            what = "has no config.json" if path.is_dir() else "does not exist"
            raise RunFolderError(f"{str(path)!r} {what}, so it is no run folder. {_runs_nearby(path)}")
        return cls(path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """While entered, no other process can write to this run. The system unlocks it when a process dies.

        Raises:
          RunFolderError: another process is writing to it.
        """
        try:
            import fcntl
        except ImportError:  # Windows has no such lock; the folder's creation still excludes a second new run.
            yield
            return
        try:
            file = (self.path / "lock").open("a+")
        except OSError as error:
            raise RunFolderError(f"the run folder {str(self.path)!r} cannot be written: {error.strerror}.") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise RunFolderError(
                    f"process {file.read().strip() or 'unknown'} is writing to the run folder {str(self.path)!r}. "
                    "Wait until it has ended, or stop it."
                ) from None
            except OSError as error:  # Some network disks have no locks.
                log.warning(
                    "%s cannot be locked (%s): see to it that one process at a time writes to it.", self.path, error
                )
            file.truncate(0)
            file.write(f"{os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            yield

    def create(self, record: RunRecord, git_diff: str = "") -> None:
        """Make the folder with its record.

        Raises:
          RunFolderError: the folder has come to exist meanwhile, or cannot be written.
        """
        try:
            self.path.mkdir(parents=True)
            if git_diff:
                self.git_diff.write_text(git_diff)
            if record.task_file:
                shutil.copyfile(record.task_file, self.task_copy)
            self.write_record(record)
        except FileExistsError:
            raise RunFolderError(f"the run folder {str(self.path)!r} exists already; give another --out.") from None
        except OSError as error:
            raise RunFolderError(f"the run folder {str(self.path)!r} cannot be written: {error.strerror}.") from error

    def write_record(self, record: RunRecord) -> None:
        """Write `config.json`, whole or not at all."""
        plain = {**vars(record), "config": to_plain(record.config)}
        plain |= {name: plain_shapes(plain[name]) for name in ("observation_size", "action_size")}
        plain["task_file"] = str(record.task_file) if record.task_file else None
        unfinished = self.config_json.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(plain, indent=2) + "\n")
        os.replace(unfinished, self.config_json)

    def read_record(self) -> RunRecord:
        """Read `config.json`.

        Raises:
          RunFolderError: it is damaged, or of a newer toolkit.
        """
        try:
            plain = json.loads(self.config_json.read_text())
            if plain["format"] > _FORMAT:
                raise RunFolderError(f"{self.config_json} was written by a newer version of the toolkit; update.")
            for name, kinds in {"task": str, "physics": str | None, "wandb_id": str | None}.items():
                if not isinstance(plain.get(name), kinds):
                    raise TypeError(f"{name} is {plain.get(name)!r}")
            for name in ("versions", "git"):
                if not isinstance(plain.get(name), dict):
                    raise TypeError(f"{name} is {plain.get(name)!r}")
            plain["task_file"] = Path(plain["task_file"]) if plain["task_file"] else None
            plain["command"] = tuple(plain["command"])
            plain["config"] = from_plain(TrainConfig, plain["config"])
            plain["observation_size"] = _shapes(plain.get("observation_size"))
            plain["action_size"] = _shapes(plain.get("action_size"))
            return RunRecord(**plain)
        except RunFolderError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise RunFolderError(f"{self.config_json} is damaged ({type(error).__name__}: {error}).") from error

    def forget_metrics_after(self, step: int) -> None:
        """Drop the metrics of steps that a run killed after its last checkpoint will take once more."""
        if not self.metrics_jsonl.is_file():
            return
        kept = [line for line in self.metrics_jsonl.read_bytes().splitlines(keepends=True) if _step_of(line) <= step]
        unfinished = self.metrics_jsonl.with_suffix(".unfinished")
        try:
            unfinished.write_bytes(b"".join(kept))
            os.replace(unfinished, self.metrics_jsonl)
        except OSError as error:
            raise RunFolderError(f"{str(self.metrics_jsonl)!r} cannot be written: {error.strerror}.") from error

    def task_file(self, record: RunRecord) -> Path:
        """The file of an outside task: where it was, or else the copy in the folder.

        Raises:
          RunFolderError: the file has changed since, so that the run would not continue as it was.
        """
        original = record.task_file
        if original is None:
            raise RunFolderError(f"{self.path} is a run of the toolkit's own task {record.task!r}.")
        if not original.is_file():
            return self.task_copy
        if self.task_copy.is_file() and original.read_bytes() != self.task_copy.read_bytes():
            raise RunFolderError(
                f"{str(original)!r} has changed since the run started. Bring back the version in "
                f"{str(self.task_copy)!r} to resume it, or start a new run."
            )
        return original

    def videos_written(self) -> list[Path]:
        """Videos, oldest first."""
        return sorted(self.videos.glob("*.mp4"))


def check_disk(path: Path) -> None:
    """Check that files can be written at `path` (or in the nearest folder above it), and leave nothing there.

    Raises:
      RunFolderError: the disk is read-only or nearly full, or something on the way is not a folder.
    """
    advice = "Give another place with --out."
    folder = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    if not folder.is_dir():
        raise RunFolderError(f"{str(path)!r} cannot be made: {str(folder)!r} is a file. {advice}")
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".write_test_") as probe:
            (Path(probe) / "file").write_bytes(bytes(2**20))
    except OSError as error:
        raise RunFolderError(
            f"nothing can be written in {str(folder)!r}: {error.strerror or error}. {advice}"
        ) from error
    free = shutil.disk_usage(folder).free
    if free < FREE_BYTES_NEEDED:
        raise RunFolderError(
            f"the disk of {str(folder)!r} has {free / 2**20:.0f} MB left, and a run needs "
            f"{FREE_BYTES_NEEDED / 2**20:.0f} MB. Make room, or give another place with --out."
        )


def plain_shapes(shapes: Any) -> Any:
    """A tree of shapes as JSON keeps it; None where it would not come back the same."""

    def plain(node: Any) -> Any:
        if isinstance(node, dict):
            return {str(name): plain(entry) for name, entry in node.items()}
        if type(node) in (list, tuple):
            return [plain(entry) for entry in node]
        return operator.index(node)

    try:
        return None if shapes is None else plain(shapes)
    except TypeError:
        return None


def _shapes(plain: Any) -> Any:
    """A tree of shapes, which JSON has turned into lists."""
    if isinstance(plain, dict):
        return {name: _shapes(entry) for name, entry in plain.items()}
    if isinstance(plain, list):
        return tuple(_shapes(entry) for entry in plain)
    return plain


def _step_of(line: bytes) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):
        return math.inf  # Cut off when the process died.


def _is_run(path: Path) -> bool:
    return (path / "config.json").is_file()


def _unused(path: Path) -> Path:
    numbered = (path.with_name(f"{path.name}-{i}") for i in itertools.count(2))
    return next(candidate for candidate in itertools.chain([path], numbered) if not candidate.exists())


def _runs_nearby(path: Path) -> str:
    for folder in (path, path.parent, Path("runs")):
        if runs := sorted(folder.glob("*/config.json")) + sorted(folder.glob("*/*/config.json")):
            latest = max(runs, key=lambda run: run.stat().st_mtime)
            return f"The latest run near it is {str(latest.parent)!r}."
    return "A run folder is what scripts/train.py made, by default runs/<task>/<time>-<seed>."
