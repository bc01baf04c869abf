"""Generalised advantage estimation against a plain loop and against values known on paper."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnx_ppo.algorithms.returns import gae


def discounted_sums(rewards, values, last_value, done, truncated, final_values, gamma, lambda_):
    """A_t = sum_k (gamma lambda)^k delta_{t+k} for one environment, each sum written out until its episode ends."""
    steps = len(rewards)
    advantages = []
    for t in range(steps):
        total = 0.0
        for k in range(steps - t):
            i = t + k
            if truncated[i]:
                following = final_values[i]
            elif done[i]:
                following = 0.0
            elif i + 1 < steps:
                following = values[i + 1]
            else:
                following = last_value
            total += (gamma * lambda_) ** k * (rewards[i] + gamma * following - values[i])
            if done[i]:
                break
        advantages.append(total)
    return advantages


def random_rollout(seed, steps, batch, p_done=0.3, p_truncated=0.5):
    rng = np.random.default_rng(seed)
    done = rng.random((steps, batch)) < p_done
    return {
        "rewards": rng.normal(size=(steps, batch)),
        "values": rng.normal(size=(steps, batch)),
        "last_values": rng.normal(size=batch),
        "done": done,
        "truncated": done & (rng.random((steps, batch)) < p_truncated),
        "final_values": rng.normal(size=(steps, batch)),
    }


compiled = jax.jit(gae)


def run_gae(rollout, gamma, lambda_):
    arrays = {name: jnp.asarray(x, None if x.dtype == bool else jnp.float32) for name, x in rollout.items()}
    return np.asarray(compiled(**arrays, gamma=gamma, lambda_=lambda_))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    gamma=st.floats(0, 1),
    lambda_=st.floats(0, 1),
    p_done=st.sampled_from([0.0, 0.3, 1.0]),
    p_truncated=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_gae_is_the_discounted_sum_of_residuals_within_each_episode(seed, gamma, lambda_, p_done, p_truncated):
    rollout = random_rollout(seed, 7, 3, p_done, p_truncated)
    expected = np.stack(
        [
            discounted_sums(
                *(rollout[name][..., b] for name in ("rewards", "values", "last_values", "done", "truncated")),
                rollout["final_values"][:, b],
                gamma,
                lambda_,
            )
            for b in range(3)
        ],
        axis=1,
    )
    np.testing.assert_allclose(run_gae(rollout, gamma, lambda_), expected, rtol=1e-4, atol=1e-4)


def test_lambda_zero_is_the_one_step_residual():
    rollout = random_rollout(0, 7, 3, p_done=0.0)
    following = np.concatenate([rollout["values"][1:], rollout["last_values"][None]])
    residual = rollout["rewards"] + 0.9 * following - rollout["values"]
    np.testing.assert_allclose(run_gae(rollout, 0.9, 0.0), residual, rtol=1e-5, atol=1e-6)


def test_lambda_one_is_the_monte_carlo_return_minus_the_value():
    rollout = random_rollout(1, 7, 3, p_done=0.0)
    returns, following = [], rollout["last_values"]
    for reward in rollout["rewards"][::-1]:
        following = reward + 0.9 * following
        returns.append(following)
    expected = np.stack(returns[::-1]) - rollout["values"]
    np.testing.assert_allclose(run_gae(rollout, 0.9, 1.0), expected, rtol=1e-5, atol=1e-6)


def test_numbers_worked_out_by_hand():
    # gamma = lambda = 1/2. Step 1 is terminal: 4 + 0 - 2 = 2. Step 0: 1 + 2/2 - 0 + 2/4 = 2.5.
    # Step 2 meets a time limit with V(final) = 6: 0 + 6/2 - 1 = 2. Step 3 bootstraps from V(last) = 8: 1 + 8/2 - 3 = 2.
    column = lambda *x: jnp.asarray(x)[:, None]
    advantages = gae(
        column(1.0, 4.0, 0.0, 1.0),
        column(0.0, 2.0, 1.0, 3.0),
        jnp.asarray([8.0]),
        column(False, True, True, False),
        column(False, False, True, False),
        column(99.0, 99.0, 6.0, 99.0),
        gamma=0.5,
        lambda_=0.5,
    )
    np.testing.assert_array_equal(advantages[:, 0], [2.5, 2.0, 2.0, 2.0])


@pytest.mark.parametrize("lambda_", [0.0, 0.5, 1.0])
def test_with_time_limits_the_value_of_a_constant_reward_is_a_fixed_point_at_1_over_1_minus_gamma(lambda_):
    gamma, v = 0.9, 10.0
    full = jnp.full((6, 2), v)
    limit = jnp.zeros((6, 2), bool).at[2].set(True).at[5, 1].set(True)
    advantages = gae(jnp.ones((6, 2)), full, full[0], limit, limit, full, gamma, lambda_)
    np.testing.assert_allclose(advantages, 0.0, atol=1e-5)


def test_what_follows_an_end_does_not_reach_what_precedes_it():
    rollout = random_rollout(2, 7, 3, p_done=0.0)
    for truncated in (False, True):
        rollout["done"][2], rollout["truncated"][2] = True, truncated
        before = run_gae(rollout, 0.99, 0.95)
        changed = {name: x.copy() for name, x in rollout.items()}
        changed["rewards"][3:] = 1e6
        changed["values"][3:] = -1e6
        after = run_gae(changed, 0.99, 0.95)
        np.testing.assert_array_equal(before[:3], after[:3])


def test_a_nan_in_final_values_that_are_not_read_does_no_harm():
    rollout = random_rollout(3, 7, 3)
    rollout["final_values"] = np.where(rollout["truncated"], rollout["final_values"], np.nan)
    assert np.isfinite(run_gae(rollout, 0.9, 0.9)).all()


def test_gae_can_be_differentiated_and_vmapped():
    rollout = {k: jnp.asarray(v, None if v.dtype == bool else jnp.float32) for k, v in random_rollout(4, 3, 2).items()}
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), rollout)
    both = jax.vmap(lambda r: gae(**r, gamma=0.9, lambda_=0.9))(stacked)
    np.testing.assert_array_equal(both[0], both[1])
