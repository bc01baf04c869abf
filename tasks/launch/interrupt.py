"""Ctrl-C and SIGTERM end a run cleanly: after the iteration in progress, with a checkpoint."""

import os
import signal
import sys
from types import FrameType
from typing import Any


class StopOnSignal:
    """While entered, the first SIGINT or SIGTERM only asks `train_ppo` to stop; the second exits at once.

    Use the object as `stop_fn`. Afterwards `exit_code` is 0, or by the shell's convention 128 + the signal: 130 after
    Ctrl-C, 143 after SIGTERM, which for a scheduler means that the run is not finished and can be resumed.
    """

    reads_metrics = False
    """So the loop need not wait for an iteration's metrics before it asks."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> int:
        """What the process should return."""
        return 128 + self.received if self.received else 0

    @property
    def signal_name(self) -> str:
        """The signal that asked to stop; empty if none did."""
        return self.received.name if self.received else ""

    def __call__(self, steps: int) -> bool:
        """Whether to stop."""
        del steps
        return self.received is not None

    def __enter__(self) -> "StopOnSignal":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.received is not None:
            # Not sys.exit: the main thread may sit in a compilation, and other threads would be waited for.
            os.write(sys.stderr.fileno(), b"\nstopped at once; the last checkpoint stands\n")
            os._exit(128 + number)
        self.received = signal.Signals(number)
        message = (
            f"\n{self.received.name}: stopping after this iteration, with a checkpoint and the videos that are being "
            "made; once more exits at once\n"
        )
        os.write(sys.stderr.fileno(), message.encode())
