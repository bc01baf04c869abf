"""Learning that needs the network to be right: memory, delay, discrete and dict actions, several rewards."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from probe_envs import ProbeState

from nnx_ppo.algorithms.config import EvalConfig, PPOConfig, TrainConfig
from nnx_ppo.algorithms.ppo import train_ppo
from nnx_ppo.networks.adapter import PPOAdapter
from nnx_ppo.networks.containers import Parallel, Sequential
from nnx_ppo.networks.delay import Delay
from nnx_ppo.networks.factories import make_critic, make_mlp_layers
from nnx_ppo.networks.feedforward import Dense
from nnx_ppo.networks.recurrent import GRU, LSTM
from nnx_ppo.networks.sampling_layers import CategoricalSampler, NormalTanhSampler

CONFIG = TrainConfig(
    ppo=PPOConfig(
        n_envs=64,
        rollout_length=16,
        total_steps=60_000,
        learning_rate=5e-3,
        discounting_factor=0.9,
        n_minibatches=2,
        normalize_advantages=True,
    ),
    eval=EvalConfig(every_steps=10_000, n_envs=256, max_episode_length=10, logging_percentiles=None),
    seed=3,
)


class Recall:
    """A side, -1 or 1, is shown at the start only; the choice at the last of `length` steps earns it: 1 if right.

    The last observation is the same for both sides, so a policy without memory earns 1/2 on average, whatever it does.
    """

    observation_size, action_size = 2, 2

    def __init__(self, length=4):
        self.length = length

    def reset(self, rng):
        side = jnp.where(jax.random.bernoulli(rng), 1.0, -1.0)
        info = {"side": side, "t": jnp.zeros((), jnp.int32)}
        return ProbeState(jnp.stack([side, 0.0]), jnp.zeros(()), jnp.zeros(()), info)

    def step(self, state, action):
        t = state.info["t"] + 1
        over = t >= self.length
        right = (action == 1) == (state.info["side"] > 0)
        return state.replace(
            obs=jnp.stack([0.0, jnp.where(t == self.length - 1, 1.0, 0.0)]),
            reward=jnp.where(over & right, 1.0, 0.0),
            done=over.astype(jnp.float32),
            info={**state.info, "t": t},
        )


class Follow:
    """Each step shows a new side and wants the choice to match the one shown a step before; reward 1 if it does.

    With `lag=0` the one shown now is wanted. Episodes of 5 steps; at the first step the wanted side is -1.
    """

    observation_size, action_size = 1, 2

    def __init__(self, lag):
        self.lag = lag

    def reset(self, rng):
        side = jnp.where(jax.random.bernoulli(rng), 1.0, -1.0)
        info = {"key": rng, "before": -jnp.ones(()), "t": jnp.zeros((), jnp.int32)}
        return ProbeState(side[None], jnp.zeros(()), jnp.zeros(()), info)

    def step(self, state, action):
        key, draw = jax.random.split(state.info["key"])
        now = state.obs[0]
        wanted = state.info["before"] if self.lag else now
        t = state.info["t"] + 1
        return state.replace(
            obs=jnp.where(jax.random.bernoulli(draw), 1.0, -1.0)[None],
            reward=jnp.where((action == 1) == (wanted > 0), 1.0, 0.0),
            done=(t >= 5).astype(jnp.float32),
            info={"key": key, "before": now, "t": t},
        )


class TwoHands:
    """One step, dict actions, dict rewards: each hand is to copy its own sign, times 0.5; the best is 0 for each."""

    observation_size = 2

    def reset(self, rng):
        signs = jnp.where(jax.random.bernoulli(rng, shape=(2,)), 1.0, -1.0)
        return ProbeState(signs, {"left": jnp.zeros(()), "right": jnp.zeros(())}, jnp.zeros(()))

    def step(self, state, action):
        miss = lambda name, i: -jnp.sum((action[name] - 0.5 * state.obs[i]) ** 2)
        return state.replace(reward={"left": miss("left", 0), "right": 100 * miss("right", 1)}, done=jnp.ones(()))


class OneBody(TwoHands):
    """The same with one action vector for both hands."""

    def step(self, state, action):
        return super().step(state, {"left": action[:1], "right": action[1:]})


def discrete(front, features, rngs):
    return Sequential(
        [
            *front,
            PPOAdapter(
                action=Sequential([Dense(features, 2, rngs), CategoricalSampler(rngs, 1e-3)]),
                value=make_critic([features], rngs),
            ),
        ]
    )


def final_return(env, networks, config=CONFIG, **changes):
    config = dataclasses.replace(config, ppo=dataclasses.replace(config.ppo, **changes))
    return train_ppo(env, networks, config).eval_history[-1]


@pytest.mark.parametrize("cell", [LSTM, GRU])
def test_a_recurrent_policy_recalls_what_it_saw_three_steps_ago(cell):
    rngs = nnx.Rngs(0)
    last = final_return(Recall(), discrete([cell(2, 16, rngs)], 16, rngs))
    assert last["eval/episode_reward/mean"] > 0.98


def test_a_policy_without_memory_cannot():
    rngs = nnx.Rngs(0)
    last = final_return(Recall(), discrete(make_mlp_layers([2, 16], rngs, nnx.tanh), 16, rngs), total_steps=20_000)
    # 256 fair coins: standard deviation 1/32.
    assert abs(last["eval/episode_reward/mean"] - 0.5) < 5 / 32


def test_discrete_actions_are_learned():
    rngs = nnx.Rngs(0)
    last = final_return(Follow(lag=0), discrete(make_mlp_layers([1, 8], rngs, nnx.tanh), 8, rngs), total_steps=30_000)
    assert last["eval/episode_reward/mean"] > 4.9


def test_a_delayed_observation_is_what_a_task_with_that_lag_needs():
    rngs = nnx.Rngs(0)
    delayed = [Delay(jnp.zeros(1), 1, initial_value=-1.0), *make_mlp_layers([1, 8], rngs, nnx.tanh)]
    last = final_return(Follow(lag=1), discrete(delayed, 8, rngs), total_steps=30_000)
    assert last["eval/episode_reward/mean"] > 4.9


@pytest.mark.parametrize("combine", [False, True])
def test_two_heads_and_two_rewards_are_learned_keyed_and_combined(combine):
    rngs = nnx.Rngs(0)
    head = lambda: Sequential([Dense(2, 2, rngs), NormalTanhSampler(rngs, 1e-4, min_std=0.05)])
    networks = PPOAdapter(
        action=Parallel(left=head(), right=head()),
        value=make_critic([2, 16], rngs, nnx.tanh, reward_terms=["left", "right"]),
    )
    last = final_return(TwoHands(), networks, combine_advantages=combine, critic_loss_weight=0.01)
    # Doing nothing costs 0.25 and 25. Combined, the larger reward drowns the smaller one.
    assert last["eval/episode_reward/right/mean"] > -2.5
    if not combine:
        assert last["eval/episode_reward/left/mean"] > -0.025


@pytest.mark.parametrize("combine", [False, True])
def test_one_joint_policy_learns_from_two_rewards_keyed_and_combined(combine):
    rngs = nnx.Rngs(0)
    networks = PPOAdapter(
        action=Sequential([Dense(2, 4, rngs), NormalTanhSampler(rngs, 1e-4, min_std=0.05)]),
        value=make_critic([2, 16], rngs, nnx.tanh, reward_terms=["left", "right"]),
    )
    last = final_return(OneBody(), networks, combine_advantages=combine, critic_loss_weight=0.01)
    assert last["eval/episode_reward/right/mean"] > -2.5
    if not combine:
        assert last["eval/episode_reward/left/mean"] > -0.025
