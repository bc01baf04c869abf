"""What a run shows: a header, progress and a footer."""

import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from nnx_ppo.algorithms.config import LoggingLevel

PLAIN_LINE_SECONDS = 10.0
"""Where there is no terminal, a line at most this often, and after each evaluation."""
_PHYSICS = {"native": "MuJoCo's C engine", "jax": "MJX", "warp": "MJX-Warp"}
_RETURN, _LENGTH = "eval/episode_reward/mean", "eval/lifespan/mean"


def show_header(console: Console, title: str, summary: str, rows: Mapping[str, str]) -> None:
    """The title in bold, then name and value in two columns."""
    console.print()
    console.print(Text.assemble((title, "bold"), "  ", summary))
    console.print(_two_columns(rows))
    console.print()


def device_line() -> str:
    """What JAX computes on."""
    import jax

    devices = jax.devices()
    if devices[0].platform == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return f"cpu ({cores} cores)"
    return f"{devices[0].device_kind}" + (f" x {len(devices)}" if len(devices) > 1 else "")


def physics_line(env: Any) -> str:
    """The physics engine of an environment."""
    impl = getattr(env, "impl", None)
    return f"{impl} ({_PHYSICS[impl]})" if impl in _PHYSICS else str(impl or "the environment's own")


def parameter_line(networks: Any) -> str:
    """Numbers of parameters, of actor and critic apart where the network has a `PPOAdapter`."""
    import jax
    from flax import nnx

    counts: dict[str, int] = defaultdict(int)
    for path, leaf in jax.tree_util.tree_flatten_with_path(nnx.state(networks, nnx.Param))[0]:
        words = [str(getattr(entry, "key", entry)) for entry in path]
        part = "actor" if "action" in words else "critic" if "value" in words else "shared"
        counts[part] += leaf.size
    total = f"{sum(counts.values()):,} parameters"
    parts = [f"{part} {counts[part]:,}" for part in ("actor", "critic", "shared") if counts[part]]
    return total + (f": {', '.join(parts)}" if len(parts) > 1 else "")


def changes_line(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """Which fields differ from the tuned configuration."""
    if not changes:
        return "nothing: the task's tuned configuration"
    return "\n".join(f"{name} {_short(before)} -> {_short(after)}" for name, (before, after) in changes.items())


class ProgressReport:
    """A `log_fn` that shows how far a run is: a live bar on a terminal, else a line now and then.

    It also adds up the `time/...` metrics for the footer. Use it as a context manager.
    """

    def __init__(self, console: Console, total_steps: int, first_step: int = 0):
        self.console = console
        self.total_steps = total_steps
        self.phase_seconds: dict[str, float] = defaultdict(float)
        self.best: tuple[float, int] | None = None
        """Best evaluation return and the step it was seen at."""
        self.steps = self.first_step = first_step
        self.started = self._line_shown = time.monotonic()
        self.first_iteration_seconds: float | None = None
        self._speed = _Speed()
        self._return: float | None = None
        self._length: float | None = None
        self._reward: float | None = None
        self._bar = _bar(console) if console.is_terminal else None
        self._bar_task = None

    def __enter__(self) -> "ProgressReport":
        if self._bar:
            self._bar_task = self._bar.add_task(
                "compiling", total=self.total_steps, completed=self.first_step, status=""
            )
            self._bar.start()
        else:
            self.console.print("compiling ...")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, metrics: Mapping[str, Any], steps: int) -> None:
        """Take in the metrics of an iteration."""
        for name, value in metrics.items():
            if name.startswith("time/"):
                self.phase_seconds[name.removeprefix("time/").removesuffix("_s")] += float(value)
        if "rollout_batch/reward/mean" in metrics:
            self._reward = float(metrics["rollout_batch/reward/mean"])
        evaluated = _RETURN in metrics
        if evaluated:
            self._return = float(metrics[_RETURN])
            self._length = _mean_length(metrics)
            if self.best is None or self._return > self.best[0]:
                self.best = (self._return, steps)
        if steps > self.steps:
            self._speed.add(steps)
            if self.first_iteration_seconds is None:
                self.first_iteration_seconds = time.monotonic() - self.started
        self.steps = steps
        self._show(evaluated)

    @property
    def steps_per_second(self) -> float | None:
        """Environment steps per second since the first iteration; None before the second."""
        return self._speed.overall

    def _show(self, evaluated: bool) -> None:
        if self._bar and self._bar_task is not None:
            compiling = self.steps <= self.first_step
            self._bar.update(
                self._bar_task,
                completed=min(self.steps, self.total_steps),
                description="compiling" if compiling else "training",
                status=self._status(),
            )
        elif evaluated or time.monotonic() - self._line_shown >= PLAIN_LINE_SECONDS or self.steps >= self.total_steps:
            self._line_shown = time.monotonic()
            self.console.print(f"{self.steps:>12,} / {self.total_steps:,} steps  {self._status()}", soft_wrap=True)

    def _status(self) -> str:
        parts = []
        if (speed := self._speed.recent) is not None:
            parts.append(f"{speed:,.0f} steps/s")
        if self._return is not None:
            length = f" over {self._length:.0f} steps" if self._length is not None else ""
            parts.append(f"eval return {self._return:.1f}{length}")
        if self._reward is not None:
            parts.append(f"reward {self._reward:.3g}")
        if speed and self.steps < self.total_steps:
            parts.append(f"{_duration((self.total_steps - self.steps) / speed)} left")
        return "  ".join(parts)


def show_footer(
    console: Console,
    title: str,
    report: ProgressReport,
    eval_history: Sequence[Mapping[str, Any]],
    files: Mapping[str, str],
) -> None:
    """How the run ended: returns, time per phase, speed, and where everything is."""
    rows: dict[str, str] = {}
    if eval_history:
        last = eval_history[-1]
        rows["final return"] = f"{float(last[_RETURN]):.1f} ± {float(last['eval/episode_reward/std']):.1f}"
        if report.best is not None:
            rows["best return"] = f"{report.best[0]:.1f} at step {report.best[1]:,}"
    elapsed = time.monotonic() - report.started
    rows["time"] = _duration(elapsed)
    if report.first_iteration_seconds is not None:
        rows["time"] += f", first iteration after {report.first_iteration_seconds:.1f} s"
    phases = {name: seconds for name, seconds in report.phase_seconds.items() if seconds >= 0.05}
    if phases:
        rows["of it"] = ", ".join(f"{name} {_duration(seconds)}" for name, seconds in phases.items())
    if report.steps_per_second is not None:
        rows["speed"] = f"{report.steps_per_second:,.0f} steps/s, everything included"
    console.print()
    console.print(Text(title, "bold"))
    console.print(_two_columns({**rows, **files}))


class _Speed:
    """Steps per second, over all and over the last half minute."""

    def __init__(self) -> None:
        self._points: list[tuple[float, int]] = []

    def add(self, steps: int) -> None:
        self._points.append((time.monotonic(), steps))
        while len(self._points) > 3 and self._points[-1][0] - self._points[2][0] > 30:
            del self._points[1]  # The first stays, for the overall speed.

    @property
    def overall(self) -> float | None:
        return self._between(0)

    @property
    def recent(self) -> float | None:
        return self._between(1) if len(self._points) > 2 else self._between(0)

    def _between(self, start: int) -> float | None:
        if len(self._points) < 2:
            return None
        (t0, s0), (t1, s1) = self._points[start], self._points[-1]
        return (s1 - s0) / (t1 - t0) if t1 > t0 else None


class _Steps(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.completed:,.0f} / {task.total or 0:,.0f}", "progress.download")


def _bar(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        _Steps(),
        TextColumn("{task.fields[status]}"),
        console=console,
        refresh_per_second=4,
    )


def _two_columns(rows: Mapping[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(f"  {name}", Text(value))
    return table


def _mean_length(metrics: Mapping[str, Any]) -> float | None:
    # With percentiles asked for, the mean is not there; the median says as much.
    for name in (_LENGTH, "eval/lifespan/p50"):
        if name in metrics:
            return float(metrics[name])
    return None


def _short(value: Any) -> str:
    return "|".join(value.names) or "NONE" if isinstance(value, LoggingLevel) else str(value)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def relative(path: Path) -> str:
    """A path as a person in the current folder would write it."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
