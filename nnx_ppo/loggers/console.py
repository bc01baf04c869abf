"""Progress on the terminal: a live bar where there is one, plain lines in a log file."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import IO, Any

RETURN, LENGTH = "eval/episode_reward", "eval/lifespan"


class Console:
    """Shows steps, steps per second, the latest evaluation's return and length, and the time left.

    On a terminal this is one live bar, above which every evaluation leaves a line. Elsewhere it is a plain line
    for the first record, for every evaluation, every `interval` seconds, and for the last record.

    Args:
        total_steps: Environment steps of the whole run; None if not known (then no time left is shown).
        file: Where to write; stdout by default.
        interval: Seconds between plain lines.
        clock: The time in seconds, for tests.
    """

    def __init__(
        self,
        total_steps: int | None = None,
        *,
        file: IO[str] | None = None,
        interval: float = 10,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._total = total_steps
        self._file = file
        self._interval = interval
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque()
        self._shown: dict[str, float] = {}
        self._printed_at: float | None = None
        self._unprinted: int | None = None
        self._started = False
        self._console: Any = None
        self._progress: Any = None
        self._task: Any = None

    def __call__(self, metrics: Mapping[str, Any], steps: int) -> None:
        """Shows one record."""
        now = self._clock()
        evaluated = f"{RETURN}/mean" in metrics
        for name, key in (("return", RETURN), ("length", LENGTH)):
            # With percentiles configured, a lifespan has no mean but a median.
            value = metrics.get(f"{key}/mean", metrics.get(f"{key}/p50"))
            if value is not None:
                self._shown[name] = float(value)
        if self._started:  # What follows the first record is compiling, which says nothing of speed.
            self._samples.append((now, int(steps)))
        while len(self._samples) > 2 and self._samples[0][0] < now - 30:
            self._samples.popleft()

        self._start()
        if self._progress is not None:
            if evaluated:
                self._console.print(f"  {steps:>13,} steps  {self._evaluation()}", highlight=False)
            self._progress.update(self._task, completed=steps, status=self._status())
        elif evaluated or self._printed_at is None or now - self._printed_at >= self._interval:
            self._print(steps, now)
        else:
            self._unprinted = steps

    def close(self) -> None:
        """Leaves the bar as it is, or prints the last record if it was not."""
        if self._progress is not None:
            self._progress.stop()
        elif self._unprinted is not None:
            self._print(self._unprinted, self._clock())

    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        # Imported with the first record: a run without a console need not have rich.
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        self._console = RichConsole(file=self._file)
        if not self._console.is_terminal or self._console.is_dumb_terminal or self._console.is_jupyter:
            return
        self._progress = Progress(
            TextColumn("  {task.completed:>13,} steps"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[status]}"),
            console=self._console,
            refresh_per_second=4,
        )
        self._progress.start()
        self._task = self._progress.add_task("", total=self._total, status="")

    def _print(self, steps: int, now: float) -> None:
        self._printed_at, self._unprinted = now, None
        of = f" of {self._total:,} ({steps / self._total:.0%})" if self._total else ""
        parts = (f"{steps:,}{of} steps", self._status(), self._evaluation())
        print("  ".join(filter(None, parts)), file=self._console.file, flush=True)

    def _evaluation(self) -> str:
        return "  ".join(f"{name} {value:,.1f}" for name, value in self._shown.items())

    def _status(self) -> str:
        """Steps per second over the last half minute, and the time left at that pace."""
        if len(self._samples) < 2:
            return ""
        (then, before), (now, steps) = self._samples[0], self._samples[-1]
        if now <= then or steps <= before:
            return ""
        speed = (steps - before) / (now - then)
        status = f"{speed:,.0f} steps/s"
        if self._total and steps < self._total:
            status += f"  {_duration((self._total - steps) / speed)} left"
        return status


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
