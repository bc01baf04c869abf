"""Probe environments whose solution is known on paper, trained from scratch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from probe_envs import ActionReward, ConstantReward, OneStep, ProbeState, TwoArms, TwoSteps, two_arm_network

from nnx_ppo.algorithms.config import EvalConfig, PPOConfig, TrainConfig
from nnx_ppo.algorithms.ppo import train_ppo
from nnx_ppo.networks.factories import make_mlp_actor_critic
from nnx_ppo.wrappers.episode_wrapper import EpisodeWrapper


def train(env, steps, network=None, evaluate=None, **config):
    """The trained network, in evaluation mode."""
    base = {"n_envs": 16, "n_minibatches": 2, "rollout_length": 8, "n_epochs": 4, "learning_rate": 3e-3}
    network = network or make_mlp_actor_critic(
        env.observation_size, env.action_size, [8], [8], nnx.Rngs(0), normalize_obs=False, activation="tanh"
    )
    config = TrainConfig(
        ppo=PPOConfig(**{**base, **config}), eval=evaluate or EvalConfig(enabled=False), checkpoint_every_steps=0
    )
    result = train_ppo(env, network, config, total_steps=steps)
    network.eval()
    return network, result


def values(network, *observations):
    obs = jnp.asarray(observations)
    return np.asarray(network(network.initialize_state(len(observations)), obs).output.value_estimates)


def actions(network, *observations):
    obs = jnp.asarray(observations)
    return np.asarray(network(network.initialize_state(len(observations)), obs).output.actions)


@pytest.mark.parametrize("gae_lambda", [0.0, 0.95])
def test_a_constant_reward_with_time_limits_is_worth_1_over_1_minus_gamma(gae_lambda):
    # The limit of 5 steps must not be felt: as a termination it would give at most 1 + ... + 0.9^4 = 4.1.
    env = EpisodeWrapper(ConstantReward(), 5)
    network, _ = train(env, 100_000, discounting_factor=0.9, gae_lambda=gae_lambda, learning_rate=1e-2)
    np.testing.assert_allclose(values(network, [1.0]), 10.0, atol=0.3)


def test_a_single_step_is_worth_its_reward():
    network, _ = train(OneStep(), 20_000)
    np.testing.assert_allclose(values(network, [1.0]), 1.0, atol=0.03)


def test_a_reward_one_step_ahead_is_discounted_once():
    network, _ = train(TwoSteps(), 40_000, discounting_factor=0.6)
    np.testing.assert_allclose(values(network, [-1.0], [1.0]), [0.6, 1.0], atol=0.04)


def test_an_action_is_found_that_maximises_the_reward():
    evaluation = EvalConfig(n_envs=8, every_steps=10**9, max_episode_length=5)
    network, result = train(ActionReward(seen=False), 60_000, evaluate=evaluation)
    np.testing.assert_allclose(actions(network, [1.0]), 0.5, atol=0.1)
    assert result.eval_history[-1]["eval/episode_reward/mean"] > -0.01


def test_the_action_depends_on_the_observation():
    network, _ = train(ActionReward(), 60_000)
    np.testing.assert_allclose(actions(network, [1.0], [-1.0])[:, 0], [0.5, -0.5], atol=0.1)


def test_a_network_that_computes_in_bfloat16_learns_and_tells_likelihoods_and_values_in_float32():
    env = ActionReward()
    network = make_mlp_actor_critic(1, 1, [8], [8], nnx.Rngs(0), normalize_obs=False, activation="tanh")
    for _, module in nnx.iter_graph(network):
        if isinstance(module, nnx.Linear):
            module.dtype = jnp.bfloat16
    network, _ = train(env, 60_000, network)
    out = network(network.initialize_state(2), jnp.array([[1.0], [-1.0]])).output
    np.testing.assert_allclose(out.actions[:, 0], [0.5, -0.5], atol=0.1)
    assert out.loglikelihoods.dtype == out.value_estimates.dtype == jnp.float32
    kinds = {leaf.dtype for leaf in jax.tree.leaves(nnx.state(network, nnx.Param))}
    assert kinds == {jnp.dtype(jnp.float32)}


class Blind:
    """A bandit whose reward depends on a past that the policy cannot see: the best memoryless action is 0.

    The target alternates between 0.8 and -0.8, but the observation is the same.
    """

    observation_size, action_size = 1, 1

    def reset(self, rng):
        return ProbeState(jnp.ones(1), jnp.zeros(()), jnp.zeros(()), {"target": jnp.asarray(0.8)})

    def step(self, state, action):
        target = state.info["target"]
        return state.replace(reward=-jnp.sum((action - target) ** 2), info={"target": -target})


def test_a_memoryless_policy_settles_between_what_it_cannot_tell_apart():
    network, _ = train(EpisodeWrapper(Blind(), 6), 60_000, discounting_factor=0.5)
    np.testing.assert_allclose(actions(network, [1.0]), 0.0, atol=0.12)


@pytest.mark.parametrize("combine", [False, True])
def test_each_head_finds_its_own_best_action_from_its_own_reward_term(combine):
    network, _ = train(
        TwoArms(), 60_000, network=two_arm_network(nnx.Rngs(0)), combine_advantages=combine, learning_rate=1e-2
    )
    obs = {"position": jnp.zeros((1, 2)), "clock": jnp.zeros((1,), jnp.int32)}
    found = network(network.initialize_state(1), obs).output.actions
    np.testing.assert_allclose(found["x"], 0.5, atol=0.15)
    np.testing.assert_allclose(found["y"], -0.5, atol=0.15)
