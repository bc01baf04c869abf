"""Compiling several programs at once, while other things go on."""

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from nnx_ppo.algorithms.jaxprs import has_callback
from nnx_ppo.algorithms.xla_cpu import products_option
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
        compile_lowered = functional.compile_quickly if quick else functools.partial(compile_well, traced.jaxpr)
        futures[name] = on_a_thread(compile_lowered, traced.lower())
    return futures


def compile_program(jitted: Any, *args: Any) -> jax.stages.Compiled:
    """A program as training compiles it, for arguments like `args`."""
    traced = jitted.trace(*args)
    return compile_well(traced.jaxpr, traced.lower())


def compile_well(jaxpr: Any, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile with every optimisation; `jaxpr` is what was lowered."""
    options: Any = products_option(jaxpr)
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        # XLA's options come and go. Without this one a program is slower, and right.
        if "No such compile option" not in str(error):
            raise
        return lowered.compile()


def on_a_thread(compile_lowered: Callable[[Any], Any], lowered: jax.stages.Lowered) -> Future:
    """Compile on a thread of its own."""
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compile")
    future = pool.submit(compile_lowered, lowered)
    pool.shutdown(wait=False)
    return future
