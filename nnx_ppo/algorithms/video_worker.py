"""One background thread that renders and encodes videos while training goes on."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

log = logging.getLogger(__name__)


class VideoWorker:
    """Runs jobs one at a time, in order, on one daemon thread that starts with the first job.

    A job that raises costs its video and one message (each distinct message is shown once). When jobs come
    faster than they finish, the oldest waiting one is skipped with a message, so memory stays bounded and
    training never waits.

    Args:
        waiting: How many jobs may wait behind the one that runs.
    """

    def __init__(self, waiting: int = 2):
        if waiting < 1:
            raise ValueError(f"waiting={waiting}: at least one job must be able to wait; the default is 2.")
        self._limit = waiting
        self._jobs: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition()
        self._running = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._reported: set[str] = set()
        self.failed = 0
        self.skipped = 0

    def submit(self, job: Callable[[], object]) -> None:
        """Queues `job` and returns at once; `RuntimeError` after `close`."""
        with self._changed:
            if self._closed:
                raise RuntimeError("This VideoWorker is closed; make a new one for more videos.")
            # Until the thread has taken up its first job, that one waits too.
            if len(self._jobs) + self._running > self._limit:
                self._jobs.popleft()
                self.skipped += 1
                log.warning(
                    "A video was skipped: rendering is slower than videos are due. "
                    "Raise video.every_steps, or lower video.episode_length or the frame size."
                )
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="video", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def drain(self, timeout: float | None = None) -> bool:
        """Waits until no job runs or waits, at most `timeout` seconds; whether that came true."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._jobs or self._running), timeout)

    def close(self, timeout: float | None = 300) -> bool:
        """Finishes what was submitted, for at most `timeout` seconds, and ends the thread.

        Without a GPU a long episode takes a minute to draw, and three may be left: hence the default.

        Returns:
            Whether every job was finished or had failed; if not, a message says how many are lost.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        finished = self.drain(timeout)
        with self._changed:
            self._closed = True
            lost = len(self._jobs) + self._running
            self._jobs.clear()
            self._changed.notify_all()
        if not finished:
            log.warning("%d video(s) were not finished within %g s and are lost.", lost, timeout)
        elif self._thread is not None:
            self._thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return finished

    def __enter__(self) -> "VideoWorker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._running = True
            try:
                job()
            except Exception as error:  # Whatever a video does wrong, training goes on.
                self._report(error)
            finally:
                del job  # It may hold a whole video.
                with self._changed:
                    self._running = False
                    self._changed.notify_all()

    def _report(self, error: Exception) -> None:
        self.failed += 1
        message = f"A video was lost, training goes on. {type(error).__name__}: {error}"
        if message not in self._reported:
            self._reported.add(message)
            log.warning(message)


def stack_frames(frames: Sequence[np.ndarray]) -> np.ndarray:
    """`(T, H, W, 3)` of a list of `(H, W, 3)` frames, without a copy where they are the rows of one array.

    `envs.rendering.render_frames` returns such a list: a thousand 480x640 frames are 0.9 GB, which need not
    be held twice.
    """
    whole = frames[0].base
    if (
        isinstance(whole, np.ndarray)
        and whole.shape == (len(frames), *frames[0].shape)
        and all(
            frame.base is whole and frame.__array_interface__ == row.__array_interface__
            for frame, row in zip(frames, whole, strict=True)
        )
    ):
        return whole
    return np.stack(frames)
