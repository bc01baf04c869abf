"""Metrics as JSON Lines: the record of a run that everything else can be rebuilt from."""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


class JsonLines:
    """Appends one line per record to a file: `{"step": 5120, "time": 1767225600.5, "losses/total": 0.25, ...}`.

    `step` is the number of environment steps, `time` Unix time in seconds; a metric of either name would be
    hidden by it. Numbers are exact (a float32 is written as the double it equals), arrays are nested lists, and
    NaN and infinities, which JSON lacks, are `null`. Each record is with the operating system when the call
    returns, so it survives the death of the process.

    A file that exists is continued. A last line that was cut off, by a kill or a full disk, is removed.

    Args:
        path: The file; missing folders are made.

    Raises:
        OSError: the file cannot be written; at construction, so before a long run, or (disk full) when called,
            after which the file ends with the last whole record.
    """

    synchronous = True

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 - closed by close()
        self._end = _repair(self._file)

    def __call__(self, metrics: Mapping[str, Any], steps: int) -> None:
        """Writes one record; floats, ints, bools, strings and arrays are kept, anything else as its text."""
        record = {**metrics, "step": int(steps), "time": round(time.time(), 3)}
        record = {"step": record.pop("step"), "time": record.pop("time"), **record}
        line = json.dumps({key: _plain(value) for key, value in record.items()}, allow_nan=False, default=str)
        data = line.encode() + b"\n"
        try:
            if self._file.write(data) != len(data):
                raise OSError(f"{self.path} took only a part of a record; is the disk full?")
        except OSError:
            self._file.truncate(self._end)
            raise
        self._end += len(data)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _repair(file: Any) -> int:
    """Removes a torn last line and returns the length of the file."""
    end = file.seek(0, os.SEEK_END)
    position, tail = end, b""
    while position > 0 and b"\n" not in tail:
        start = max(0, position - 2**16)
        file.seek(start)
        tail = file.read(position - start) + tail
        position = start
    whole = end - (len(tail) - tail.rfind(b"\n") - 1)
    if whole == end:
        return end
    try:
        complete = isinstance(json.loads(tail[tail.rfind(b"\n") + 1 :]), dict)
    except ValueError:
        complete = False
    if complete:  # Only its line end is missing.
        file.write(b"\n")
        return end + 1
    file.truncate(whole)
    return whole


def _plain(value: Any) -> Any:
    """`value` as JSON has it: finite numbers, nested lists, None for what is not finite."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "__array__"):
        return _plain(np.asarray(value))
    return value
