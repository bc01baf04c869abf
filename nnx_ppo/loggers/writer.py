"""`Logger`: any number of sinks behind one `log_fn` that never slows, stops or fails training.

Two kinds of sink:

- A *synchronous* one (its attribute `synchronous` is true: `JsonLines`, `Memory`) is written before the call
  returns, so metrics are on disk before they go anywhere else.
- Every other has a daemon thread and a bounded queue of its own. It may be slow, raise or hang: training and
  the other sinks do not notice. A full queue drops its oldest record; what was lost is reported.
"""

import logging
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nnx_ppo.loggers.mp4 import write_mp4

if TYPE_CHECKING:
    from nnx_ppo.algorithms.types import VideoData

Metrics = Mapping[str, Any]
Sink = Callable[[Metrics, int], object]

log = logging.getLogger(__name__)


class SinkUnavailable(RuntimeError):
    """Raised by a sink that can never work in this process; it is reported and not tried again."""


class Logger:
    """A `log_fn` (and, by `video_fn`, a `video_fn`) that passes everything on to its sinks.

    A sink is any callable `sink(metrics, steps)`. It may also have `flush()`, `close()`, an attribute
    `synchronous`, and `log_video(path, video)` where `path` is an mp4 and `video` its `VideoData` without frames.

    A delivery that raises is tried `attempts` times with growing pauses, then given up; the first failure of
    each sink is reported on the logger `nnx_ppo.loggers.writer` (which is stderr, unless you configure
    `logging`). `close`, or leaving the `with` block, delivers what waits and reports what could not be.

    Args:
        *sinks: Where records go. Without any that need a thread, none is started.
        video_directory: Where `video_fn` keeps its mp4s (`step_{step:010d}.mp4`); by default they are
            temporary and only passed to the sinks.
        fps: Frames per second of the videos.
        capacity: How many records may wait for one sink.
        attempts: How often one delivery is tried.
        backoff: Seconds before the second try; doubled for each further one.
        close_timeout: Seconds that leaving the `with` block waits for slow sinks.
    """

    def __init__(
        self,
        *sinks: Sink,
        video_directory: str | os.PathLike[str] | None = None,
        fps: float = 30,
        capacity: int = 1000,
        attempts: int = 4,
        backoff: float = 0.5,
        close_timeout: float = 30,
    ):
        if capacity < 1 or attempts < 1:
            raise ValueError(f"capacity={capacity}, attempts={attempts}: each must be at least 1.")
        self._direct = [_Direct(sink) for sink in sinks if getattr(sink, "synchronous", False)]
        self._lanes = [
            _Lane(sink, capacity, attempts, backoff) for sink in sinks if not getattr(sink, "synchronous", False)
        ]
        self._videos = None if video_directory is None else Path(video_directory)
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._fps = fps
        self._close_timeout = close_timeout
        self._closed = False
        self.last_video: Path | None = None

    def __call__(self, metrics: Metrics, steps: int) -> None:
        """Records `metrics` (scalars and arrays, on the host or a device) at `steps` environment steps.

        Values are copied to the host before this returns, so their buffers may then be donated.
        """
        self._check_open()
        metrics = host_copy(metrics)
        for sink in (*self._direct, *self._lanes):
            sink.put(lambda sink, metrics=metrics: sink(metrics, steps))

    def video_fn(self, video: "VideoData") -> Path | None:
        """Encodes `video` once, here and now, and passes the file on to every sink with `log_video`.

        Returns:
            The mp4, or None if no video directory was given and no sink takes videos.

        Raises:
            EncodingUnavailable, OSError: as `write_mp4`; `train_ppo`'s `VideoWorker` contains them.
        """
        self._check_open()
        takers = [sink for sink in (*self._direct, *self._lanes) if hasattr(sink.sink, "log_video")]
        if self._videos is None and not takers:
            return None
        if self._videos is None and self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="videos", ignore_cleanup_errors=True)
        directory = self._videos or Path(self._temporary.name)  # pyright: ignore[reportOptionalMemberAccess]
        path = write_mp4(directory / f"step_{video.step:010d}.mp4", video.frames, self._fps)
        self.last_video = path
        summary = _without_frames(video)
        for sink in takers:
            sink.put(lambda sink: sink.log_video(path, summary))
        return path

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until every record so far is delivered or given up, at most `timeout` s; whether that came true."""
        deadline = _Deadline(timeout)
        for sink in self._direct:
            sink.flush()
        return all(lane.wait_until_idle(deadline.left()) for lane in self._lanes)

    def close(self, timeout: float | None = None) -> bool:
        """Delivers what waits, closes the sinks and reports losses. Further calls do nothing.

        Args:
            timeout: Seconds for all sinks together; `close_timeout` by default. A sink that hangs is left behind.

        Returns:
            Whether every record reached every sink.
        """
        if self._closed:
            return True
        self._closed = True
        deadline = _Deadline(self._close_timeout if timeout is None else timeout)
        for lane in self._lanes:
            lane.begin_close()
        for lane in self._lanes:
            lane.end_close(deadline.left())
        for sink in self._direct:
            sink.close()
        if self._temporary is not None:
            self._temporary.cleanup()
        return not any(sink.lost for sink in (*self._direct, *self._lanes))

    def __enter__(self) -> "Logger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("This Logger is closed; make a new one to log more.")


def host_copy(metrics: Metrics) -> dict[str, Any]:
    """The same metrics as Python numbers and NumPy arrays that share no memory with the given ones.

    Scalars of any kind become `bool`, `int` or `float`, exactly; what is neither number nor array stays as it is.
    """
    for value in metrics.values():
        if hasattr(value, "copy_to_host_async"):  # All transfers start before the first is waited for.
            value.copy_to_host_async()
    return {key: _on_host(value) for key, value in metrics.items()}


def _on_host(value: Any) -> Any:
    if not hasattr(value, "__array__"):
        return value
    array = np.array(value, copy=True)
    return array.item() if array.ndim == 0 else array


def _without_frames(video: "VideoData") -> "VideoData":
    """The video's numbers, without the hundreds of megabytes of its pixels."""
    import dataclasses

    return dataclasses.replace(video, frames=np.zeros((0, *video.frames.shape[1:]), np.uint8))


class _Deadline:
    """A time limit shared by several waits."""

    def __init__(self, timeout: float | None):
        self._end = None if timeout is None else time.monotonic() + timeout

    def left(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())


def _name(sink: Any) -> str:
    return getattr(sink, "__qualname__", None) or type(sink).__name__


class _Direct:
    """A synchronous sink. What it fails to take is kept and offered again, first, at the next record."""

    # Far more than any run produces; it bounds memory if a disk stays full for a very long run.
    _LIMIT = 100_000

    def __init__(self, sink: Sink):
        self.sink = sink
        self.lost = 0
        self._pending: deque[Callable[[Any], object]] = deque()
        self._reported = False

    def put(self, deliver: Callable[[Any], object]) -> None:
        if len(self._pending) == self._LIMIT:
            self._pending.popleft()
            self.lost += 1
        self._pending.append(deliver)
        self.flush()

    def flush(self) -> None:
        try:
            while self._pending:
                self._pending[0](self.sink)
                self._pending.popleft()
        except Exception as error:
            if not self._reported:
                self._reported = True
                log.warning(
                    "%s failed and is tried again with the next record; training goes on. %s: %s",
                    _name(self.sink),
                    type(error).__name__,
                    error,
                )

    def close(self) -> None:
        self.flush()
        self.lost += len(self._pending)
        if self.lost:
            log.warning("%s did not get %d record(s).", _name(self.sink), self.lost)
        try:
            if hasattr(self.sink, "close"):
                self.sink.close()  # pyright: ignore[reportFunctionMemberAccess]
        except Exception as error:
            log.warning("%s could not be closed. %s: %s", _name(self.sink), type(error).__name__, error)


class _Lane:
    """A sink's own daemon thread and bounded queue."""

    def __init__(self, sink: Sink, capacity: int, attempts: int, backoff: float):
        self.sink = sink
        self.lost = 0
        self._capacity, self._attempts, self._backoff = capacity, attempts, backoff
        self._queue: deque[Callable[[Any], object]] = deque()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._abandoned = False
        self._busy = False
        self._dead = False
        self._last_error: Exception | None = None
        self._reported = False
        self._thread = threading.Thread(target=self._work, name=f"log {_name(sink)}", daemon=True)
        self._thread.start()

    def put(self, deliver: Callable[[Any], object]) -> None:
        with self._changed:
            if self._dead:
                self.lost += 1
                return
            if len(self._queue) == self._capacity:
                self._queue.popleft()
                self.lost += 1
            self._queue.append(deliver)
            self._changed.notify_all()

    def wait_until_idle(self, timeout: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not (self._queue or self._busy), timeout)

    def begin_close(self) -> None:
        with self._changed:
            self._closing.set()
            self._changed.notify_all()

    def end_close(self, timeout: float | None) -> None:
        """Waits for the thread, leaves it behind if it hangs, and reports what was lost."""
        self._thread.join(timeout)
        with self._changed:
            hangs = self._thread.is_alive()
            self._abandoned = True
            self.lost += len(self._queue) + (hangs and self._busy)
            self._queue.clear()
        if self._dead or not (self.lost or hangs):  # That a sink is off has been said.
            return
        reason = " It did not finish in time." if hangs else ""
        if self._last_error is not None:
            reason += f" Last error: {type(self._last_error).__name__}: {self._last_error}"
        log.warning("%s did not get %d record(s).%s", _name(self.sink), self.lost, reason)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing.is_set())
                if not self._queue:
                    break
                deliver = self._queue.popleft()
                self._busy = True
            delivered = self._try(lambda deliver=deliver: deliver(self.sink))
            del deliver
            with self._changed:
                self._busy = False
                if self._abandoned:  # What was under way has been counted as lost.
                    return
                if not delivered:
                    self.lost += 1
                if self._dead:
                    self.lost += len(self._queue)
                    self._queue.clear()
                self._changed.notify_all()
        if hasattr(self.sink, "close") and not self._dead:
            self._try(self.sink.close)  # pyright: ignore[reportFunctionMemberAccess]

    def _try(self, action: Callable[[], object]) -> bool:
        """Runs `action`, several times if need be; whether it succeeded."""
        for attempt in range(self._attempts):
            try:
                action()
                return True
            except SinkUnavailable as error:
                self._dead = True
                self._report(error, "is off")
                return False
            except Exception as error:
                self._report(error, "failed and is tried again")
            if attempt + 1 < self._attempts:
                self._closing.wait(self._backoff * 2**attempt)  # Returns at once while closing.
        return False

    def _report(self, error: Exception, verdict: str) -> None:
        self._last_error = error
        if not self._reported and not self._abandoned:  # What it lost has been said.
            self._reported = True
            log.warning("%s %s; training goes on. %s: %s", _name(self.sink), verdict, type(error).__name__, error)
