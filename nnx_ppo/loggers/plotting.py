"""Learning curves of one or several runs, as a PNG."""

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from nnx_ppo.loggers.reading import read_records

Run = tuple[np.ndarray, np.ndarray, np.ndarray | None]

# Paul Tol's "bright" scheme: distinct in print, on screens and to colour-blind readers.
COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#777777")
NAMES = {"eval/episode_reward/mean": "Return of an evaluation episode", "eval/lifespan/mean": "Steps of an episode"}


def plot_learning_curve(
    run_dirs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    metric: str = "eval/episode_reward/mean",
    x: Literal["steps", "time"] = "steps",
    title: str | None = None,
) -> Path:
    """Draws `metric` over environment steps, or over minutes of wall-clock time, into the PNG `out`.

    Runs in the same parent folder are runs of one task (`runs/<task>/<run>`): their mean is a line, mean ± one
    standard deviation over runs a band, each run a thin line. A single run of a `.../mean` metric gets a band of
    its own `.../std`, the spread over evaluation episodes.

    Args:
        run_dirs: A run folder with `metrics.jsonl`, or several.
        out: The PNG; missing folders are made.
        metric: A scalar of the record.
        x: What lies on the horizontal axis.
        title: The heading; the tasks by default.

    Returns:
        `out`.

    Raises:
        FileNotFoundError: a run has no `metrics.jsonl`.
        ValueError: a run never logged `metric`; the message offers similar ones. Or `x` is neither choice.
    """
    # Not pyplot: figures made this way belong to no global state or display, so any thread may draw them.
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    if x not in ("steps", "time"):
        raise ValueError(f"x={x!r}: the horizontal axis is 'steps' or 'time'.")
    paths = [Path(run_dirs)] if isinstance(run_dirs, str | os.PathLike) else [Path(path) for path in run_dirs]
    if not paths:
        raise ValueError("There is no run to plot; give at least one run folder.")
    folders: dict[Path, list[Run]] = {}
    for path in paths:
        folders.setdefault(path.resolve().parent, []).append(_read(path, metric, x))
    names = [folder.name for folder in folders]
    tasks = {folder.name if names.count(folder.name) == 1 else str(folder): runs for folder, runs in folders.items()}
    several = any(len(runs) > 1 for runs in tasks.values())

    figure = Figure(figsize=(7.5, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    shown = False
    for number, (task, runs) in enumerate(tasks.items()):
        colour = COLOURS[number % len(COLOURS)]
        label = task if len(runs) == 1 else f"{task} ({len(runs)} runs)"
        middle, spread = _mean_and_spread(runs)
        if len(runs) > 1:
            for positions, values, _ in runs:
                axes.plot(positions, values, color=colour, linewidth=0.7, alpha=0.35)
        if spread is not None:
            shown = True
            axes.fill_between(middle[0], middle[1] - spread, middle[1] + spread, color=colour, alpha=0.18, linewidth=0)
        marker = "o" if len(middle[0]) <= 40 else None
        axes.plot(*middle, color=colour, linewidth=2, marker=marker, markersize=3.5, label=label)

    axes.set_xlabel("Environment steps" if x == "steps" else "Wall-clock time (minutes)")
    axes.set_ylabel(NAMES.get(metric, metric))
    axes.set_title(title or ", ".join(tasks), loc="left", fontweight="bold")
    if shown:
        axes.set_title(f"mean ± std over {'runs' if several else 'episodes'}", loc="right", fontsize=8, color="#777777")
    if len(tasks) > 1 or several:
        axes.legend(frameon=False, loc="best")
    if x == "steps":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.set_xlim(left=0)
    if x == "steps" and axes.get_xlim()[1] < 1:  # Only the evaluation of the start, at step 0.
        axes.set_xlim(right=1)
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    return out


def _read(path: Path, metric: str, x: str) -> Run:
    """`(positions, values, std or None)` of the finite values of one run."""
    records = read_records(path)
    points = [record for record in records if isinstance(record.get(metric), int | float)]
    if not points:
        known = sorted({key for record in records for key, value in record.items() if isinstance(value, int | float)})
        close = difflib.get_close_matches(metric, known, n=3, cutoff=0.4) or known
        raise ValueError(f"{path} never logged {metric!r}. Did you mean: {', '.join(close)}?")
    if x == "steps":
        positions = np.array([record["step"] for record in points], float)
    else:
        positions = (np.array([record["time"] for record in points]) - records[0]["time"]) / 60
    spread_key = metric.removesuffix("/mean") + "/std" if metric.endswith("/mean") else None
    spread = [record.get(spread_key) for record in points] if spread_key else [None]
    values = np.array([record[metric] for record in points], float)
    return positions, values, None if None in spread else np.array(spread, float)


def _mean_and_spread(runs: list[Run]) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray | None]:
    """`(positions, mean), spread` over runs, where all of them have values; between their points they are linear."""
    if len(runs) == 1:
        positions, values, spread = runs[0]
        return (positions, values), spread
    start = max(positions[0] for positions, _, _ in runs)
    end = min(positions[-1] for positions, _, _ in runs)
    grid = np.unique(np.concatenate([positions for positions, _, _ in runs]))
    grid = grid[(grid >= start) & (grid <= end)]
    values = np.stack([np.interp(grid, positions, values) for positions, values, _ in runs])
    return (grid, values.mean(axis=0)), values.std(axis=0)
