"""Shapes of reward terms: smooth functions from a quantity to [0, 1].

The idea is that of ``dm_control.utils.rewards`` (Tassa et al. 2018, "DeepMind Control Suite"):
a quantity is as it should be, or so far off, and the shape says what that costs.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

Sigmoid = Callable[[jax.Array, float], jax.Array]


def gaussian(x: jax.Array, value_at_1: float) -> jax.Array:
    """``exp(-x^2 a)`` with a such that the value at 1 is ``value_at_1`` in (0, 1)."""
    _check_value(value_at_1, "gaussian", zero_allowed=False)
    return jnp.power(value_at_1, jnp.square(x))


def quadratic(x: jax.Array, value_at_1: float) -> jax.Array:
    """``max(0, 1 - (1 - value_at_1) x^2)`` with ``value_at_1`` in [0, 1)."""
    _check_value(value_at_1, "quadratic")
    return jnp.maximum(0.0, 1.0 - (1.0 - value_at_1) * jnp.square(x))


def linear(x: jax.Array, value_at_1: float) -> jax.Array:
    """``max(0, 1 - (1 - value_at_1) |x|)`` with ``value_at_1`` in [0, 1)."""
    _check_value(value_at_1, "linear")
    return jnp.maximum(0.0, 1.0 - (1.0 - value_at_1) * jnp.abs(x))


def long_tail(x: jax.Array, value_at_1: float) -> jax.Array:
    """``1 / (1 + x^2 a)`` with a such that the value at 1 is ``value_at_1`` in (0, 1)."""
    _check_value(value_at_1, "long_tail", zero_allowed=False)
    return 1.0 / (1.0 + (1.0 / value_at_1 - 1.0) * jnp.square(x))


def tolerance(
    x: jax.Array,
    bounds: tuple[float, float] = (0.0, 0.0),
    margin: float = 0.0,
    value_at_margin: float = 0.1,
    sigmoid: Sigmoid = gaussian,
) -> jax.Array:
    """1 where ``x`` lies within ``bounds``, falling off outside.

    With d the distance of x from the nearer bound (0 inside), the value is ``sigmoid(d / margin,
    value_at_margin)``: 1 at the bound and ``value_at_margin`` at a distance of ``margin``. With a
    margin of 0 it is 0 everywhere outside.

    Args:
      x: quantities, any shape.
      bounds: lower and upper end of the desired interval, both included; may be infinite.
      margin: distance over which the value falls, in the unit of ``x``.
      value_at_margin: the value at that distance.
      sigmoid: the shape: ``gaussian``, ``quadratic``, ``linear``, ``long_tail`` or a function like them.

    Returns:
      Values in [0, 1], the shape of ``x``.

    Raises:
      ValueError: bounds in the wrong order, a negative margin, or ``value_at_margin`` out of range.
    """
    low, high = bounds
    if low > high:
        raise ValueError(f"bounds={bounds}: the lower bound comes first")
    if margin < 0:
        raise ValueError(f"margin={margin}: give a distance, 0 or more")
    x = jnp.asarray(x, jnp.float32)
    inside = (low <= x) & (x <= high)
    if margin == 0:
        return jnp.where(inside, 1.0, 0.0)
    distance = jnp.where(x < low, low - x, x - high)
    return jnp.where(inside, 1.0, sigmoid(distance / margin, value_at_margin))


def _check_value(value: float, name: str, zero_allowed: bool = True) -> None:
    if not 0 <= value < 1 or (value == 0 and not zero_allowed):
        accepted = "[0, 1)" if zero_allowed else "(0, 1)"
        raise ValueError(f"value_at_margin={value}: {name} takes a value in {accepted}")
