"""Reading a run's metrics back, from its JSON Lines or its TensorBoard events."""

import json
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

Series = dict[str, tuple[np.ndarray, np.ndarray]]


def read_records(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of `metrics.jsonl`, as `{"step": int, "time": Unix seconds, **metrics}`, in order of steps.

    A torn last line is ignored. Where a run was resumed from an earlier checkpoint, the records that it then
    repeated replace the old ones. Records of one step are merged.

    Args:
        run_dir: The run's folder, or the file itself.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line other than the last is not a record.
    """
    path = Path(run_dir)
    path = path / "metrics.jsonl" if path.is_dir() or path.suffix != ".jsonl" else path
    lines = path.read_bytes().split(b"\n")
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            step = int(record["step"])
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number} is not a record with a step: {line[:80]!r}") from error
        while records and records[-1]["step"] > step:
            records.pop()
        if records and records[-1]["step"] == step:
            records[-1] |= record
        else:
            records.append(record)
    return records


def read_scalars(run_dir: str | os.PathLike[str], source: Literal["jsonl", "tfevents"] = "jsonl") -> Series:
    """Every scalar of a run.

    Tolerates a torn last record. What a resumed run repeated replaces what it had logged before.

    Args:
        run_dir: The run's folder; event files are looked for in it and below.
        source: `metrics.jsonl`, exact, or the TensorBoard events, float32.

    Returns:
        Tag to `(steps [N] int64, values [N] float64)`, by increasing step. What `metrics.jsonl` holds as null
        is NaN.

    Raises:
        FileNotFoundError: the run has no such file.
        ValueError: `source` is neither.
    """
    if source == "jsonl":
        points = (
            (tag, record["step"], float("nan") if value is None else float(value))
            for record in read_records(run_dir)
            for tag, value in record.items()
            if tag not in ("step", "time") and isinstance(value, int | float | None)
        )
    elif source == "tfevents":
        points = _event_points(Path(run_dir))
    else:
        raise ValueError(f"source={source!r}: there are 'jsonl' and 'tfevents'.")
    return _series(points)


def _series(points: Iterable[tuple[str, int, float]]) -> Series:
    """Points in the order of logging, by tag, in which later ones replace those of the same and later steps."""
    tags: dict[str, list[tuple[int, float]]] = {}
    for tag, step, value in points:
        series = tags.setdefault(tag, [])
        while series and series[-1][0] >= step:
            series.pop()
        series.append((step, value))
    return {
        tag: (np.array([step for step, _ in series], np.int64), np.array([value for _, value in series], np.float64))
        for tag, series in tags.items()
    }


def _event_points(run_dir: Path) -> Iterator[tuple[str, int, float]]:
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

    paths = sorted(run_dir.rglob("events.out.tfevents.*"), key=lambda path: path.name)
    if not paths:
        raise FileNotFoundError(f"There are no TensorBoard events (events.out.tfevents.*) in {run_dir}.")
    for path in paths:
        for data in _tfrecords(path.read_bytes()):
            event = Event.FromString(data)
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    yield value.tag, event.step, value.simple_value


def _tfrecords(data: bytes) -> Iterator[bytes]:
    """The whole records of a TFRecord file: length (8 bytes), its checksum (4), the record, its checksum (4)."""
    position = 0
    while position + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, position)
        end = position + 12 + length + 4
        if end > len(data):
            return
        yield data[position + 12 : end - 4]
        position = end
