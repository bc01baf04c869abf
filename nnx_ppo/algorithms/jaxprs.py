"""What a program does, found by looking at its trace (a jaxpr)."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core


def has_open_loop(function: Callable[..., Any], *args: Any) -> bool:
    """Whether `function(*args)` has a loop that ends when something has converged."""
    jaxpr = jax.make_jaxpr(function)(*args)
    return any(equation.primitive.name == "while" for equation in equations(jaxpr.jaxpr))


LARGE = 2000
"""Operations from which on a program with a loop is physics rather than a moving point; a step of MJX has 5,000."""


def keeps_one_core_busy(function: Callable[..., Any], *args: Any) -> bool:
    """Whether XLA runs `function(*args)` on one core of a CPU, and long enough that sharing it out pays.

    What is in a loop are small operations one after another. It pays if the loop has an open end, or much to do.
    """
    names = [e.primitive.name for e in equations(jax.make_jaxpr(function)(*args).jaxpr)]
    return "while" in names or ("scan" in names and len(names) >= LARGE)


def largest_matrix(function: Callable[..., Any], *args: Any) -> int:
    """The size of the largest matrix that a function factorizes or solves for, 0 if there is none."""
    sizes = [
        max(equation.invars[0].aval.shape[-2:])
        for equation in equations(jax.make_jaxpr(function)(*args).jaxpr)
        if equation.primitive.name in LINEAR_ALGEBRA
    ]
    return max(sizes, default=0)


LINEAR_ALGEBRA = {
    "cholesky",
    "eig",
    "eigh",
    "hessenberg",
    "lu",
    "qr",
    "schur",
    "svd",
    "triangular_solve",
    "tridiagonal",
    "tridiagonal_solve",
}
"""What a CPU leaves to LAPACK."""


def has_callback(jaxpr: Any) -> bool:
    """Whether a program calls the host, as the native engine's environments do in every step."""
    return any(name == "ffi_call" or "callback" in name for name in (e.primitive.name for e in equations(jaxpr)))


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, those of the functions that it calls included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from equations(inner)


def reads(function: Callable[..., Any], *args: Any) -> list[bool]:
    """For each leaf of `args` whether anything that `function(*args)` returns depends on it.

    What a loop hands on from one pass to the next counts only if a pass looks at it: a step of MJX loops over substeps
    and hands on a whole state, of which a substep reads a few entries and works out the others anew.
    """
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return _inputs_read(jaxpr, [True] * len(jaxpr.outvars))


def _inputs_read(jaxpr: Any, wanted: Sequence[bool]) -> list[bool]:
    """Which inputs the `wanted` outputs of a jaxpr depend on."""
    needed = {id(out) for out, want in zip(jaxpr.outvars, wanted, strict=True) if want}
    for equation in reversed(jaxpr.eqns):
        outputs = [id(out) in needed for out in equation.outvars]
        if any(outputs):
            inputs = zip(equation.invars, _inputs_of_equation(equation, outputs), strict=True)
            needed |= {id(variable) for variable, read in inputs if read}
    return [id(variable) in needed for variable in jaxpr.invars]


def _inputs_of_equation(equation: Any, wanted: list[bool]) -> list[bool]:
    called = equation.params.get("jaxpr")
    parts = _parts_of_scan(equation.params) if equation.primitive.name == "scan" else None
    if parts and equation.params["length"] > 0:
        return _inputs_of_scan(called.jaxpr, *parts, wanted)
    if equation.primitive.name in ("jit", "pjit") and called is not None:
        return _inputs_read(called.jaxpr, wanted)
    return [True] * len(equation.invars)


def _parts_of_scan(params: Any) -> tuple[int, int] | None:
    """How many inputs are constants and how many are carried; None if this JAX says it in yet another way."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    if hasattr(params.get("ft_in"), "unpack"):  # From JAX 0.12 on.
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return None


def _inputs_of_scan(body: Any, n_consts: int, n_carry: int, wanted: list[bool]) -> list[bool]:
    read = [False] * len(body.invars)
    while True:
        # What a pass reads, the pass before it has to work out.
        again = read[n_consts : n_consts + n_carry] + [False] * (len(wanted) - n_carry)
        more = _inputs_read(body, [want or needed for want, needed in zip(wanted, again, strict=True)])
        if more == read:
            return read
        read = more
