"""What a run shows before and after its progress: a header and a footer."""

import textwrap
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from nnx_ppo.algorithms.config import LoggingLevel

RETURN, RETURN_STD = "eval/episode_reward/mean", "eval/episode_reward/std"
_PHYSICS = {"native": "MuJoCo's C engine", "jax": "MJX", "warp": "MJX-Warp"}


def show_header(console: Console, title: str, summary: str, rows: Mapping[str, str], table: str) -> None:
    """The title in bold, name and value in two columns, and a table of the network."""
    console.print()
    console.print(Text.assemble((title, "bold"), "  ", summary), soft_wrap=True)
    _show_rows(console, rows)
    console.print()
    console.print(Text(textwrap.indent(table, "  "), style="dim"), soft_wrap=True)
    console.print()


def device_line(devices: Sequence[Any]) -> str:
    """What a run computes on."""
    from envs.physics import available_cpus

    count = len(devices)
    if devices[0].platform == "cpu":
        return f"cpu ({available_cpus()} cores" + (f", {count} devices)" if count > 1 else ")")
    return devices[0].device_kind + (f" x {count}" if count > 1 else "")


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


def since_then_line(config: Mapping[str, tuple[Any, Any]], machine: Mapping[str, tuple[Any, Any]]) -> str:
    """What is not as it was when a resumed run began: fields of its configuration, versions, device and code."""
    rows = [changes_line(config)] if config else []
    if machine:
        rows.append(changes_line(machine) + "\nso it goes on from the same state, but not necessarily to the bit")
    return "\n".join(rows) or "nothing has changed: it goes on to the bit"


class RunSummary:
    """A `log_fn` that keeps what the footer says, and shows that the run compiles until the first record comes."""

    synchronous = True

    def __init__(
        self,
        console: Console,
        started: float,
        first_step: int = 0,
        evaluations: Sequence[Mapping[str, Any]] = (),
    ):
        """`started` is the `time.monotonic()` at the start of the program, `evaluations` those of a resumed run."""
        self.returns: dict[int, float] = {record["step"]: record[RETURN] for record in evaluations}
        """Mean evaluation return by step."""
        self.phase_seconds: dict[str, float] = defaultdict(float)
        """The `time/...` metrics, added up."""
        self.first_iteration_seconds: float | None = None
        self._console = console
        self._started = started
        self._points: list[tuple[float, int]] = []
        self._first_step = first_step
        self._status = console.status("compiling")

    def __enter__(self) -> "RunSummary":
        if self._console.is_terminal:
            self._status.start()
        else:
            self._console.print("compiling ...")
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def __call__(self, metrics: Mapping[str, Any], steps: int) -> None:
        """Take in one record."""
        self._status.stop()
        for name, value in metrics.items():
            if name.startswith("time/"):
                self.phase_seconds[name.removeprefix("time/").removesuffix("_s")] += float(value)
        if RETURN in metrics:
            self.returns[steps] = float(metrics[RETURN])
        if steps > self._first_step:
            if self.first_iteration_seconds is None:
                self.first_iteration_seconds = time.monotonic() - self._started
            self._points = [*self._points[:1], (time.monotonic(), steps)]

    @property
    def elapsed_seconds(self) -> float:
        """Since the program started."""
        return time.monotonic() - self._started

    @property
    def steps_per_second(self) -> float | None:
        """Environment steps per second since the first iteration; None before the second."""
        if len(self._points) < 2:
            return None
        (t0, s0), (t1, s1) = self._points
        return (s1 - s0) / (t1 - t0)


def show_footer(
    console: Console,
    title: str,
    summary: RunSummary,
    evaluations: Sequence[Mapping[str, Any]],
    files: Mapping[str, str],
) -> None:
    """How the run ended: returns, time per phase, speed, and where everything is.

    `evaluations` are records with `step` and the `eval/...` metrics, oldest first.
    """
    rows: dict[str, str] = {}
    if evaluations:
        last, best = evaluations[-1], max(evaluations, key=lambda record: record[RETURN])
        rows["final return"] = f"{last[RETURN]:.1f} ± {last[RETURN_STD]:.1f}"
        rows["best return"] = f"{best[RETURN]:.1f} at step {best['step']:,}"
    rows["time"] = _duration(summary.elapsed_seconds)
    if summary.first_iteration_seconds is not None:
        rows["time"] += f", first iteration after {summary.first_iteration_seconds:.1f} s"
    phases = {name: seconds for name, seconds in summary.phase_seconds.items() if seconds >= 0.05}
    if phases:
        rows["of it"] = ", ".join(f"{name} {_duration(seconds)}" for name, seconds in phases.items())
    if summary.steps_per_second is not None:
        rows["speed"] = f"{summary.steps_per_second:,.0f} steps/s, everything included"
    console.print()
    console.print(Text(title, "bold"))
    _show_rows(console, {**rows, **files})


def _show_rows(console: Console, rows: Mapping[str, str]) -> None:
    # No table: it would break long commands and paths into lines that cannot be copied.
    width = max(map(len, rows)) + 4
    for name, value in rows.items():
        for i, line in enumerate(value.splitlines()):
            label = f"  {name}".ljust(width) if i == 0 else " " * width
            console.print(Text.assemble((label, "dim"), line), soft_wrap=True)


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
