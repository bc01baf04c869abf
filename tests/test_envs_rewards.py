"""Reward shapes, by numbers worked out on paper."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from envs.rewards import gaussian, linear, long_tail, quadratic, tolerance


def test_inside_the_bounds_is_one_and_outside_without_a_margin_zero():
    np.testing.assert_array_equal(tolerance(jnp.array([-1.1, -1.0, 0.0, 2.0, 2.1]), (-1.0, 2.0)), [0, 1, 1, 1, 0])


@pytest.mark.parametrize("sigmoid", [gaussian, linear, quadratic, long_tail])
def test_at_the_margin_is_the_value_at_the_margin_on_both_sides(sigmoid):
    x = jnp.array([-3.0, 1.0, 7.0])
    np.testing.assert_allclose(tolerance(x, (0.0, 4.0), 3.0, 0.25, sigmoid), [0.25, 1.0, 0.25], rtol=1e-6)


@pytest.mark.parametrize(
    ("sigmoid", "value", "at_half", "at_two"),
    [
        (gaussian, 0.1, 0.1**0.25, 0.1**4),  # exp(x^2 ln 0.1)
        (linear, 0.2, 0.6, 0.0),  # 1 - 0.8 x
        (quadratic, 0.0, 0.75, 0.0),  # 1 - x^2
        (quadratic, 0.5, 0.875, 0.0),  # 1 - x^2 / 2, which at 2 is -1
        (long_tail, 0.1, 1 / 3.25, 1 / 37),  # 1 / (1 + 9 x^2)
    ],
)
def test_shapes_have_the_values_of_their_formulas(sigmoid, value, at_half, at_two):
    np.testing.assert_allclose(
        tolerance(jnp.array([1.0, 4.0]), (0, 0), 2.0, value, sigmoid), [at_half, at_two], rtol=1e-5
    )


def test_infinite_bounds_leave_one_side_open():
    np.testing.assert_allclose(tolerance(jnp.array([1e6, 1.0]), (2.0, math.inf), margin=1.0), [1.0, 0.1], rtol=1e-6)


def test_a_nan_is_not_rewarded():
    assert not tolerance(jnp.nan) > 0
    assert math.isnan(tolerance(jnp.nan, margin=1.0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bounds": (1.0, 0.0)}, "the lower bound comes first"),
        ({"margin": -1.0}, "margin=-1.0: give a distance"),
        ({"margin": 1.0, "value_at_margin": 0.0}, r"value_at_margin=0.0: gaussian takes a value in \(0, 1\)"),
        ({"margin": 1.0, "value_at_margin": 1.0, "sigmoid": quadratic}, r"quadratic takes a value in \[0, 1\)"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        tolerance(jnp.zeros(()), **settings)
