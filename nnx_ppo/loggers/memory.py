"""Metrics kept in memory, for notebooks, sweeps and tests."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from nnx_ppo.loggers.writer import host_copy


class Memory:
    """Keeps every record.

    `records` is a list of `{"step": int, **metrics}` in the order of logging, with NumPy values.
    """

    synchronous = True

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def __call__(self, metrics: Mapping[str, Any], steps: int) -> None:
        """Keeps a copy of one record."""
        self.records.append({"step": int(steps), **host_copy(metrics)})

    def series(self, tag: str) -> tuple[np.ndarray, np.ndarray]:
        """`(steps [N], values [N, ...])` of the N records that have `tag`.

        Raises:
            KeyError: no record has it.
        """
        records = [record for record in self.records if tag in record]
        if not records:
            known = sorted({key for record in self.records for key in record} - {"step"})
            raise KeyError(f"No record has {tag!r}; there are {known}.")
        return np.array([record["step"] for record in records]), np.stack([np.asarray(r[tag]) for r in records])
