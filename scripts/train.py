#!/usr/bin/env python
"""Train a task: `python scripts/train.py --task humanoid`. `--help` shows every flag, `--list` the tasks."""

import contextlib
import dataclasses
import datetime
import logging
import os
import secrets
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

# Nothing here may import JAX: --help and --list are to be instant. What needs it is imported where it is used.
import tasks
from tasks.launch import report
from tasks.launch.code_state import describe_code, git_diff
from tasks.launch.command_line import (
    Command,
    UsageError,
    changed_fields,
    command_to_copy,
    kept_on_resume,
    list_of_tasks,
    parse,
)
from tasks.launch.compilation_cache import use_compilation_cache
from tasks.launch.devices import devices_of_run
from tasks.launch.interrupt import StopOnSignal
from tasks.launch.nonfinite import NonFiniteEpisodes
from tasks.launch.run_folder import RunFolder, RunFolderError, RunRecord

if TYPE_CHECKING:
    from nnx_ppo.algorithms.checkpointing import CheckpointWriter
    from nnx_ppo.algorithms.types import TrainingState, TrainResult
    from nnx_ppo.loggers import Logger

FAILED, WRONG_USAGE = 1, 2
SHOWN_VERSIONS = ("python", "jax", "flax", "mujoco", "mujoco-mjx")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 finished, 1 training failed, 2 wrong usage, 130 or 143 interrupted and resumable."""
    started = time.monotonic()
    console = Console(highlight=False)
    try:
        command = parse(sys.argv[1:] if argv is None else argv)
        if command is None:
            for name, summary in list_of_tasks():
                console.print(f"{name:<18} {summary}", soft_wrap=True)
            return 0
        return train(command, console, started)
    except (UsageError, RunFolderError) as error:
        Console(stderr=True, highlight=False).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        return WRONG_USAGE


def train(command: Command, console: Console, started: float) -> int:
    """Carry out a parsed command; returns the exit code."""
    task, config = command.task, command.config
    run = command.resumed or RunFolder.plan(command.options.out, task.name, config.seed)
    show_warnings(console)

    with console.status("starting JAX"):
        from flax import nnx

        from nnx_ppo.algorithms.devices import split_cpu
        from nnx_ppo.networks.functional import build

        use_compilation_cache()
        split_cpu(command.options.devices)
        env = build_env(command)
        networks = build(lambda: task.make_networks(env, nnx.Rngs(config.seed)))
        devices = devices_of_run(command.options.devices, env, networks, config.ppo)
        if command.resumed:
            record = run.read_record()
        else:
            record = new_record(command, env, devices)
            run.create(record, git_diff(code_folder(command)))
    with run.locked():
        return train_in(run, command, env, networks, devices, record, console, started)


def train_in(
    run: RunFolder,
    command: Command,
    env: Any,
    networks: Any,
    devices: list[Any],
    record: RunRecord,
    console: Console,
    started: float,
) -> int:
    """Train in a run folder that no other process writes to; returns the exit code."""
    from nnx_ppo.algorithms.checkpointing import CheckpointError
    from nnx_ppo.networks.describe import describe

    task = command.task
    with console.status("reading the checkpoint"):
        initial_state, first_step = restore(command, networks)
    before, record = record, as_it_goes_on(record, command, env, devices)
    if command.resumed:
        run.write_record(record)
    wandb_mode = command.options.wandb or default_wandb_mode(command.options.smoke)
    rows = header(command, run, before, env, networks, report.device_line(devices), wandb_mode)
    report.show_header(console, task.name, task.summary, rows, describe(networks))

    stop = StopOnSignal()
    summary = report.RunSummary(console, started, first_step, evaluations(run) if first_step else [])
    with stop, make_logger(command, run, record, env, summary, wandb_mode) as logger, summary:
        try:
            checkpoint_fn = make_checkpoints(command, run, record, summary)
            nonfinite_fn = NonFiniteEpisodes(run.nonfinite, env, command_to_copy(script_beside("replay.py")))
            result = run_training(
                command, env, networks, devices, initial_state, logger, checkpoint_fn, nonfinite_fn, stop
            )
        except (FloatingPointError, CheckpointError) as error:  # The message says what became non-finite, and when.
            summary.__exit__()
            console.print(Text.assemble(("training failed: ", "bold red"), str(error)), soft_wrap=True)
            console.print(f"run folder  {report.relative(run.path)}", soft_wrap=True)
            return FAILED
    draw_learning_curve(run, task.name)
    # A signal in the last iteration leaves nothing to resume.
    interrupted = stop.received is not None and result.total_steps < command.config.ppo.total_steps
    title = f"interrupted by {stop.signal_name} at step {result.total_steps:,}" if interrupted else "finished"
    where = files(command, run, interrupted)
    report.show_footer(console, title, summary, evaluations(run, result.eval_history), where)
    return stop.exit_code if interrupted else 0


def build_env(command: Command) -> Any:
    """The task's environment. What one of our own cannot do (physics that is not installed) needs no traceback."""
    try:
        return command.task.make_env(command.options.physics)
    except (ValueError, ImportError) as error:
        if command.task_file is not None:
            raise
        raise UsageError(str(error)) from error


def run_training(
    command: Command,
    env: Any,
    networks: Any,
    devices: list[Any],
    initial_state: "TrainingState | None",
    logger: "Logger",
    checkpoint_fn: "CheckpointWriter",
    nonfinite_fn: NonFiniteEpisodes,
    stop: StopOnSignal,
) -> "TrainResult":
    from nnx_ppo.algorithms.ppo import train_ppo

    return train_ppo(
        env,
        networks,
        command.config,
        log_fn=logger,
        video_fn=logger.video_fn,
        checkpoint_fn=checkpoint_fn,
        initial_state=initial_state,
        stop_fn=stop,
        nonfinite_fn=nonfinite_fn,
        devices=devices,
    )


def make_checkpoints(
    command: Command, run: RunFolder, record: RunRecord, summary: report.RunSummary
) -> "CheckpointWriter":
    """What writes the run's checkpoints; the newest few and the one of the best return stay."""
    from nnx_ppo.algorithms.checkpointing import make_checkpoint_fn

    return make_checkpoint_fn(
        run.checkpoints,
        command.config,
        keep=command.options.keep_checkpoints,
        score=summary.returns.get,
        metadata=lambda step: {
            "task": record.task,
            "wandb_id": record.wandb_id,
            "returns": [[at, found] for at, found in sorted(summary.returns.items()) if at <= step],
        },
        asynchronous=True,
    )


def restore(command: Command, networks: Any) -> "tuple[TrainingState | None, int]":
    """The state of the last checkpoint and its step, if this command resumes a run."""
    if command.resumed is None:
        return None, 0

    from nnx_ppo.algorithms.checkpointing import (
        CheckpointDamaged,
        CheckpointError,
        checkpoints,
        load_checkpoint,
        remove_leftovers,
    )
    from nnx_ppo.algorithms.optimizer import new_optimizer_state
    from nnx_ppo.networks.functional import split

    run, loaded = command.resumed, None
    _, params, _ = split(networks)
    remove_leftovers(run.checkpoints)
    for path in reversed(checkpoints(run.checkpoints)):
        try:
            loaded = load_checkpoint(path, networks, new_optimizer_state(command.config.ppo, params))
            break
        except CheckpointDamaged as error:
            damaged = path.rename(path.with_name(f"damaged_{path.name}"))
            logging.getLogger(__name__).warning("%s It is now %s; an older one is tried.", error, damaged.name)
        except CheckpointError as error:
            raise UsageError(str(error)) from error
    if loaded is None:
        raise UsageError(
            f"{str(run.path)!r} has no checkpoint that can be read, so there is nothing to go on from: start a new run."
        )
    if loaded["config"] and (edited := kept_on_resume(changed_fields(loaded["config"], command.config))):
        raise UsageError(
            f"{run.config_json} is not what the checkpoint was trained with: {', '.join(edited)} differ. Bring it "
            "back, or start a new run."
        )
    if loaded["step"] >= command.config.ppo.total_steps:
        raise UsageError(
            f"{str(run.path)!r} is at step {loaded['step']:,}, the end of its training. "
            f"To train it on, add --ppo.total-steps {2 * loaded['step']}."
        )
    # From step 0 the start is repeated too, with its evaluation.
    run.forget_metrics_after(loaded["step"] if loaded["step"] > 0 else -1)
    return loaded["training_state"], loaded["step"]


def new_record(command: Command, env: Any, devices: list[Any]) -> RunRecord:
    """What `config.json` will say."""
    from nnx_ppo.loggers.provenance import git_state, versions

    return RunRecord(
        task=command.task.name,
        task_file=command.task_file,
        physics=getattr(env, "impl", None),
        config=command.config,
        command=tuple(sys.argv[:1]) + command.argv,
        versions=versions(),
        git=git_state(code_folder(command)),
        device=report.device_line(devices),
        started=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        wandb_id=secrets.token_hex(4),
        observation_size=getattr(env, "observation_size", None),
        action_size=getattr(env, "action_size", None),
        keep_checkpoints=command.options.keep_checkpoints,
        devices=len(devices),
    )


def as_it_goes_on(record: RunRecord, command: Command, env: Any, devices: list[Any]) -> RunRecord:
    """The record with what a resumed run may change, so that the next resume takes it from there."""
    return dataclasses.replace(
        record,
        config=command.config,
        physics=getattr(env, "impl", None),
        keep_checkpoints=command.options.keep_checkpoints,
        devices=len(devices),
    )


def code_folder(command: Command) -> Path:
    """Where the code of the task lies: the repository around it is the one whose commit counts."""
    return command.task_file.parent if command.task_file else Path(tasks.__file__).parent


def header(
    command: Command, run: RunFolder, record: RunRecord, env: Any, networks: Any, device: str, wandb_mode: str
) -> dict[str, str]:
    """Name and value of each line that a run starts with."""
    from nnx_ppo.loggers.provenance import git_state, versions

    config, found = command.config, versions()
    batch = config.ppo.n_envs * config.ppo.rollout_length
    rows = {
        "seed": str(config.seed),
        "device": device,
        "physics": report.physics_line(env),
        "network": report.parameter_line(networks),
        "training": f"{config.ppo.total_steps:,} steps, {batch:,} in each iteration "
        f"({config.ppo.n_envs} environments x {config.ppo.rollout_length})",
        "changed": report.changes_line(changed_fields(command.task.config, config)),
        "versions": ", ".join(
            f"{name} {found[name]}" for name in ("jax", "flax", "mujoco", "mujoco-mjx") if name in found
        ),
        "code": describe_code(code_folder(command)),
        "W&B": wandb_mode,
        "run folder": report.relative(run.path),
    }
    if command.resumed:
        commit = git_state(code_folder(command)).get("commit")
        now = {**found, "device": rows["device"], "physics": getattr(env, "impl", None), "commit": commit}
        then = {**record.versions, "device": record.device, "physics": record.physics}
        then["commit"] = record.git.get("commit")
        differ = {name: (then[name], now.get(name)) for name in then if then[name] != now.get(name)}
        kept = run.git_diff.read_text() if run.git_diff.is_file() else ""
        if (uncommitted := git_diff(code_folder(command))) != kept:
            differ["uncommitted changes"] = (f"{len(kept):,} characters", f"{len(uncommitted):,}")
        rows["since then"] = report.since_then_line(changed_fields(record.config, config), differ)
    if command.options.smoke:
        rows["changed"] = "all sizes, by --smoke: this only shows that everything works"
    return rows


def make_logger(
    command: Command, run: RunFolder, record: RunRecord, env: Any, summary: report.RunSummary, wandb_mode: str
) -> "Logger":
    """Everything that metrics and videos go to."""
    from nnx_ppo.algorithms.config import to_plain
    from nnx_ppo.loggers import Console as ConsoleSink
    from nnx_ppo.loggers import JsonLines, Logger, TensorBoard, Wandb

    sinks: list[Any] = [
        JsonLines(run.metrics_jsonl),
        summary,
        ConsoleSink(command.config.ppo.total_steps),
        TensorBoard(run.tensorboard),
    ]
    if wandb_mode != "disabled":
        sinks.append(
            Wandb(
                project=command.options.wandb_project,
                mode=wandb_mode,  # type: ignore[arg-type]
                directory=run.path,
                name=f"{command.task.name} {run.path.name}",
                group=command.task.name,
                run_id=record.wandb_id,
                config={"task": command.task.name, **to_plain(command.config)},
            )
        )
    return Logger(*sinks, video_directory=run.videos, fps=1 / getattr(env, "dt", 1 / 30))


def evaluations(run: RunFolder, more: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """All evaluations of the run, also those from before it was resumed, oldest first."""
    from nnx_ppo.loggers import read_records

    found = read_records(run.path) if run.metrics_jsonl.is_file() else []
    by_step = {record["step"]: record for record in [*found, *more] if report.RETURN in record}
    return [by_step[step] for step in sorted(by_step)]


def draw_learning_curve(run: RunFolder, title: str) -> None:
    from nnx_ppo.loggers import plot_learning_curve

    # A run without an evaluation has no learning curve.
    with contextlib.suppress(ValueError):
        try:
            plot_learning_curve(run.path, run.learning_curve, title=title)
        except OSError as error:
            logging.getLogger(__name__).warning("The learning curve could not be written: %s.", error)


def default_wandb_mode(smoke: bool) -> str:
    """`WANDB_MODE` if set, else online for those who are logged in, but not for a smoke run."""
    from nnx_ppo.loggers.wandb_sink import logged_in

    mode = os.environ.get("WANDB_MODE", "").lower()
    if mode in ("online", "offline", "disabled"):
        return mode
    return "online" if not smoke and logged_in() else "disabled"


def files(command: Command, run: RunFolder, interrupted: bool) -> dict[str, str]:
    """What the footer says about where everything is, and what to do with it."""
    rows = {"run folder": report.relative(run.path)}
    if videos := run.videos_written():
        rows["last video"] = report.relative(videos[-1])
    if run.learning_curve.is_file():
        rows["curve"] = report.relative(run.learning_curve)
    script = Path(sys.argv[0])
    if Path(script_beside("plot.py")).is_file():
        rows["plot with"] = command_to_copy(script_beside("plot.py"), report.relative(run.path))
    more = () if interrupted else ("--ppo.total-steps", str(2 * command.config.ppo.total_steps))
    rows["resume with" if interrupted else "train on with"] = command_to_copy(
        str(script), "--resume", report.relative(run.path), *more
    )
    return rows


def script_beside(name: str) -> str:
    """Path of another script of this folder."""
    return str(Path(sys.argv[0]).with_name(name))


def show_warnings(console: Console) -> None:
    """Warnings of the libraries appear above the progress bar instead of across it."""
    handler = RichHandler(console=console, show_time=False, show_path=False, markup=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    # Orbax logs, with its traceback, what it raises too.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.captureWarnings(True)
    warnings.formatwarning = lambda message, *_, **__: str(message)  # type: ignore[assignment]


if __name__ == "__main__":
    sys.exit(main())
