"""Metrics as TensorBoard events, written by tensorboardX (no TensorFlow)."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


class TensorBoard:
    """Writes scalars as scalars and arrays as histograms, with environment steps as the step.

    Events are flushed with every record that holds an evaluation, else every half minute. In a folder that has
    events already (a resumed run) the newer ones replace those of later steps.

    Args:
        directory: The folder for the event files; it is made with the first record.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory = Path(directory)
        self._writer: Any = None

    def __call__(self, metrics: Mapping[str, Any], steps: int) -> None:
        """Writes one record; what is neither number nor array is left out."""
        if self._writer is None:
            from tensorboardX import SummaryWriter

            resumed = any(self.directory.glob("events.out.tfevents.*"))
            self._writer = SummaryWriter(str(self.directory), purge_step=steps if resumed else None, flush_secs=30)
        for tag, value in metrics.items():
            if isinstance(value, str) or not np.issubdtype(np.asarray(value).dtype, np.number | np.bool_):
                continue
            values = np.asarray(value, dtype=np.float64)
            if values.ndim == 0:
                self._writer.add_scalar(tag, values.item(), steps)
            elif np.isfinite(values).any():
                self._writer.add_histogram(tag, values[np.isfinite(values)], steps)
        if "eval/episode_reward/mean" in metrics:
            self._writer.flush()

    def flush(self) -> None:
        """Puts everything so far on disk."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the event file."""
        if self._writer is not None:
            self._writer.close()
