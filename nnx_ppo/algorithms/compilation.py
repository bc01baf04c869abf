"""Compiling several programs at once, while other things go on."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from nnx_ppo.algorithms.jaxprs import has_callback
from nnx_ppo.networks import functional


def compile_programs(programs: Mapping[str, tuple[Any, tuple]]) -> dict[str, Future]:
    """Trace every program here and compile all of them at once.

    A compiled program refuses arguments of other shapes or types, so nothing is ever traced again unnoticed.

    Args:
      programs: name -> (jitted function, its arguments or their shapes). One named "training" is compiled with every
        optimisation.

    Returns:
      Name -> the compiled program, once it is there: `result()` waits for it.
    """
    futures = {}
    for name, (jitted, args) in programs.items():
        traced = jitted.trace(*args)
        # Evaluation on the native engine spends its time there: optimising the rest would only delay the start.
        quick = name != "training" and has_callback(traced.jaxpr)
        futures[name] = begin_to_compile(traced.lower(), quick)
    return futures


def begin_to_compile(lowered: jax.stages.Lowered, quick: bool) -> Future:
    """Compile on a thread of its own; `quick` as `functional.compile_quickly`."""
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compile")
    future = pool.submit(functional.compile_quickly, lowered) if quick else pool.submit(lowered.compile)
    pool.shutdown(wait=False)
    return future
