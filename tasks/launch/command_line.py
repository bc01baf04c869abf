"""The command line of `scripts/train.py`. Imports no JAX, so `--help` and `--list` are instant."""

import dataclasses
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from nnx_ppo.algorithms.config import LoggingLevel, TrainConfig
from tasks.launch.run_folder import RunFolder
from tasks.registry import load_task, task_names
from tasks.task import Task

Physics = Literal["jax", "warp", "native"]
WandbMode = Literal["online", "offline", "disabled"]

_PROGRAM = "train.py"
_CHANGES_ON_RESUME = ("ppo.total_steps", "ppo.logging", "eval.", "video.", "checkpoint_every_steps")


class UsageError(Exception):
    """The command cannot be carried out as given; the message says why and what to do. Shown without a traceback."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    task: Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE.py")] = None
    """A task's name (see --list), or a Python file that defines TASK = Task(...)."""
    list: tyro.conf.FlagCreatePairsOff[bool] = False
    """List the tasks and exit."""
    smoke: tyro.conf.FlagCreatePairsOff[bool] = False
    """A minute on a CPU: a few small iterations with an evaluation, a video and a checkpoint."""
    physics: Physics | None = None
    """Physics engine: native (MuJoCo in C, for CPUs), jax (MJX) or warp (MJX-Warp, NVIDIA GPUs). None: by device."""
    wandb: WandbMode | None = None
    """Weights & Biases. None: online if you are logged in and this is no smoke run, else disabled."""
    wandb_project: str = "nnx-ppo"
    """Project of the Weights & Biases run."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Run folder, which must not exist yet. None: runs/<task>/<time>-<seed>."""
    resume: Annotated[Path | None, tyro.conf.arg(metavar="RUN")] = None
    """Continue this run folder from its last checkpoint, with its task, seed and configuration."""
    devices: int | None = None
    """Share the environments out among so many GPUs or CPU cores. None: one GPU; with MJX on a CPU every core."""
    keep_checkpoints: int | None = 3
    """How many of the newest checkpoints stay, besides the one of the best evaluation return. None: all."""
    config: Annotated[TrainConfig, tyro.conf.arg(name="")] = dataclasses.field(default_factory=TrainConfig)


@dataclasses.dataclass(frozen=True)
class Command:
    """The parsed command line."""

    options: Options
    task: Task
    task_file: Path | None
    """Where the task comes from, unless it is one of ours."""
    argv: tuple[str, ...]
    resumed: RunFolder | None = None

    @property
    def config(self) -> TrainConfig:
        """The configuration of this run."""
        return self.options.config


def parse(argv: Sequence[str]) -> Command | None:
    """Parse the command line; None if it only asked for the list of tasks.

    The task is looked up first, so that its tuned configuration becomes the defaults that `--help` shows.

    Raises:
      UsageError: no task or an unknown one, or a run folder that cannot be resumed.
      SystemExit: `--help`, or a flag that does not exist or cannot have its value (after a message).
    """
    argv = list(argv)
    name, resume = _value_of("--task", argv), _value_of("--resume", argv)
    wants_help = "-h" in argv or "--help" in argv
    if "--list" in argv and not wants_help:
        return None
    if resume is not None:
        return _parse_resumed(argv, Path(resume))
    if name is None:
        if wants_help:
            _tyro(argv, Options(), "Without --task the defaults shown are the library's, with it the task's.")
        _tyro(argv, Options(), "")  # A mistyped --task is worth its own message.
        raise UsageError(
            "which task? Give --task NAME, where NAME is one of "
            f"{', '.join(task_names())}, or --task path/to/file.py. --list says what they are."
        )
    try:
        task = load_task(name)
    except ValueError as error:
        raise UsageError(str(error)) from error
    task_file = None if name in task_names() else Path(name).expanduser().resolve()
    config = smoke_config(task.config) if "--smoke" in argv else task.config
    defaults = Options(task=name, config=config)
    options = _tyro(argv, defaults, f"{task.name}: {task.summary}. The defaults shown are its tuned configuration.")
    return Command(options, task, task_file, tuple(argv))


def smoke_config(config: TrainConfig) -> TrainConfig:
    """A configuration of the same kind that is through in a minute on a CPU and does everything once or twice."""
    ppo = config.ppo
    n_envs = ppo.n_minibatches * max(1, min(ppo.n_envs, 64) // ppo.n_minibatches)
    batch = n_envs * ppo.rollout_length
    sizes = {"height": 120, "width": 160}
    return dataclasses.replace(
        config,
        ppo=dataclasses.replace(ppo, n_envs=n_envs, total_steps=4 * batch),
        eval=dataclasses.replace(
            config.eval,
            every_steps=2 * batch,
            n_envs=min(config.eval.n_envs, 8),
            max_episode_length=min(config.eval.max_episode_length, 100),
        ),
        video=dataclasses.replace(
            config.video,
            every_steps=4 * batch,
            episode_length=min(config.video.episode_length, 50),
            render_kwargs={
                **config.video.render_kwargs,
                **{name: size for name, size in sizes.items() if name in config.video.render_kwargs},
            },
        ),
        checkpoint_every_steps=2 * batch,
    )


def changed_fields(tuned: Any, used: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted field names in which two configurations differ, with both values."""
    changes = {}
    for field in dataclasses.fields(tuned):
        before, after = getattr(tuned, field.name), getattr(used, field.name)
        if dataclasses.is_dataclass(before):
            changes |= changed_fields(before, after, f"{prefix}{field.name}.")
        elif before != after:
            changes[prefix + field.name] = (before, after)
    return changes


def kept_on_resume(changes: Mapping[str, Any]) -> list[str]:
    """Of changed fields those that a resumed run may not change."""
    return [name for name in changes if not name.startswith(_CHANGES_ON_RESUME)]


def list_of_tasks() -> list[tuple[str, str]]:
    """Names and summaries."""
    return [(name, load_task(name).summary) for name in task_names()]


def _parse_resumed(argv: list[str], path: Path) -> Command:
    try:
        run = RunFolder.open(path)
        record = run.read_record()
        task = load_task(str(run.task_file(record)) if record.task_file else record.task)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    if (name := _value_of("--task", argv)) not in (None, record.task):
        raise UsageError(f"--task {name} with --resume {path}, which is a run of {record.task}: leave --task out.")
    defaults = Options(task=record.task, physics=record.physics, config=record.config)  # type: ignore[arg-type]
    defaults = dataclasses.replace(defaults, keep_checkpoints=record.keep_checkpoints, devices=record.devices)
    options = _tyro(argv, defaults, f"Continue {path}. The defaults shown are its configuration.")
    refused = kept_on_resume(changed_fields(record.config, options.config))
    refused += ["out"] if options.out is not None else []
    if refused:
        raise UsageError(
            f"a resumed run keeps its {', '.join(refused)}: a run of two halves would be neither. "
            "ppo.total-steps, physics, logging, evaluation, video and checkpoint fields may change; for others start a "
            "new run."
        )
    return Command(options, task, record.task_file, tuple(argv), run)


def _value_of(flag: str, argv: list[str]) -> str | None:
    for i, word in enumerate(argv):
        if word == flag and i + 1 < len(argv):
            return argv[i + 1]
        if word.startswith(f"{flag}="):
            return word.removeprefix(f"{flag}=")
    return None


_RULES = tyro.constructors.ConstructorRegistry()


@_RULES.primitive_rule
def _logging_level(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
    if info.type is not LoggingLevel:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"{{{','.join(LoggingLevel.__members__)}}} ...",
        instance_from_str=LoggingLevel.from_names,
        is_instance=lambda value: isinstance(value, LoggingLevel),
        str_from_instance=lambda level: level.names or ["NONE"],
    )


def _tyro(argv: list[str], defaults: Options, description: str) -> Options:
    # An optional field is switched off by `none` in whatever case.
    words = ["None" if word.lower() == "none" else word for word in argv]
    with _RULES:
        options = tyro.cli(Options, prog=_PROGRAM, description=description, args=words, default=defaults)
    if options.keep_checkpoints is not None and options.keep_checkpoints < 1:
        raise UsageError(
            f"--keep-checkpoints {options.keep_checkpoints}: keep at least 1, or None for all. To write none at all, "
            "use --checkpoint-every-steps 0."
        )
    if options.devices is not None and options.devices < 1:
        raise UsageError(f"--devices {options.devices}: at least 1, or leave it out.")
    return options


def command_to_copy(script: str, *words: str) -> str:
    """A shell command that runs a script as this one was run: by `uv run` or by `python`."""
    runner = ["uv", "run"] if "UV_RUN_RECURSION_DEPTH" in os.environ else ["python"]
    return shlex.join([*runner, script, *words])
