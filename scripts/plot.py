"""Draws learning curves: `python scripts/plot.py RUN [RUN ...]`, where RUN is a folder below `runs/<task>/`."""

import argparse
import sys
from pathlib import Path

from nnx_ppo.loggers.plotting import plot_learning_curve


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Draw learning curves of runs into a PNG. Runs of one task are shown as mean and spread."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="a run folder (with metrics.jsonl)")
    parser.add_argument("--metric", default="eval/episode_reward/mean", help="a key of metrics.jsonl (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("learning_curve.png"), help="the PNG (%(default)s)")
    parser.add_argument("--x", choices=("steps", "time"), default="steps", help="the horizontal axis (%(default)s)")
    parser.add_argument("--title", default=None, help="the heading (the tasks)")
    options = parser.parse_args(arguments)
    try:
        path = plot_learning_curve(options.runs, options.out, metric=options.metric, x=options.x, title=options.title)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
