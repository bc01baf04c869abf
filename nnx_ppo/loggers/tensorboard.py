"""Metrics as TensorBoard events, written by tensorboardX (no TensorFlow)."""

import os
import time
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
        self._events: Any = None
        self._flushed_at = time.time()

    def __call__(self, metrics: Mapping[str, Any], steps: int) -> None:
        """Writes one record; what is neither number nor array is left out."""
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.summary import histogram, scalar

        self._start(steps)
        now = time.time()
        for tag, value in metrics.items():
            if np.asarray(value).dtype.kind not in "biuf":
                continue
            values = np.asarray(value, dtype=np.float64)
            if values.ndim == 0:
                summary = scalar(tag, values.item())
            elif np.isfinite(values).any():
                summary = histogram(tag, values[np.isfinite(values)], bins=64)
            else:
                continue
            self._events.write_event(Event(wall_time=now, step=int(steps), summary=summary))
        if "eval/episode_reward/mean" in metrics or now >= self._flushed_at + 30:
            self.flush()

    def flush(self) -> None:
        """Puts everything so far on disk."""
        if self._events is not None:
            self._events.flush()
            self._flushed_at = time.time()

    def close(self) -> None:
        """Flushes and closes the event file."""
        if self._events is not None:
            self._events.close()

    def _start(self, steps: int) -> None:
        if self._events is not None:
            return
        # Not SummaryWriter: it hands events to another thread, and its flush does not wait for that.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]

        self.directory.mkdir(parents=True, exist_ok=True)
        resumed = any(self.directory.glob("events.out.tfevents.*"))
        # Files are named by the second; the suffix keeps apart, and in order, those of one second.
        self._events = EventsWriter(str(self.directory / "events"), f".{time.time_ns()}")
        if resumed:  # TensorBoard then drops what was logged for this step and later ones before.
            restart = SessionLog(status=SessionLog.START)
            self._events.write_event(Event(wall_time=time.time(), step=int(steps), session_log=restart))
