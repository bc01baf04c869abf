"""Environments and networks so small that what training must find in them is known on paper.

Everything is deterministic given its keys. Environments hash by identity, as the compiled programs expect.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_ppo.networks.adapter import PPOAdapter
from nnx_ppo.networks.containers import Sequential
from nnx_ppo.networks.feedforward import Dense
from nnx_ppo.networks.sampling_layers import NormalTanhSampler
from nnx_ppo.networks.types import PPONetworkOutput, StatefulModule, StatefulModuleOutput


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ProbeState:
    """The smallest state that the contract allows."""

    obs: Any
    reward: Any
    done: Any
    info: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)


class ConstantReward:
    """Reward 1 for ever. With time limits alone, V = 1 / (1 - gamma)."""

    observation_size, action_size = 1, 1

    def reset(self, rng):
        return ProbeState(jnp.ones(1), jnp.zeros(()), jnp.zeros(()))

    def step(self, state, action):
        return state.replace(reward=jnp.ones(()))


class OneStep:
    """One step, reward 1, terminated: V = 1 whatever gamma is."""

    observation_size, action_size = 1, 1

    def reset(self, rng):
        return ProbeState(jnp.ones(1), jnp.zeros(()), jnp.zeros(()))

    def step(self, state, action):
        return state.replace(reward=jnp.ones(()), done=jnp.ones(()))


class TwoSteps:
    """Two steps, reward 1 on the second: V(first) = gamma, V(second) = 1."""

    observation_size, action_size = 1, 1

    def reset(self, rng):
        return ProbeState(-jnp.ones(1), jnp.zeros(()), jnp.zeros(()))

    def step(self, state, action):
        second = state.obs[0] > 0
        return state.replace(obs=jnp.ones(1), reward=jnp.where(second, 1.0, 0.0), done=jnp.where(second, 1.0, 0.0))


class ActionReward:
    """One step; reward -(action - best)^2, best = 0.5 * observation and the observation -1 or 1."""

    observation_size, action_size = 1, 1

    def __init__(self, seen: bool = True):
        self.seen = seen

    def reset(self, rng):
        side = jnp.where(jax.random.bernoulli(rng), 1.0, -1.0) if self.seen else 1.0
        return ProbeState(jnp.full(1, side), jnp.zeros(()), jnp.zeros(()))

    def step(self, state, action):
        return state.replace(reward=-jnp.sum((action - 0.5 * state.obs) ** 2), done=jnp.ones(()))


class Counter:
    """Counts. The observation is (steps since reset, the number drawn at reset); `info["id"]` is that number.

    The reward is the steps after the step, so an episode of length n has the return n (n + 1) / 2.

    Args:
      length: the episode ends with this step; None never ends.
      ending: how: "terminated", or one of the two spellings of a time limit.
      random_length: if given, the length is drawn from 1..length at reset.
    """

    observation_size, action_size = 2, 1

    def __init__(self, length=None, ending="terminated", random_length=False):
        self.length, self.ending, self.random_length = length, ending, random_length
        self.reset_traces = self.step_traces = 0

    def reset(self, rng):
        self.reset_traces += 1
        number = jax.random.uniform(rng)
        info = {"id": number, "key": rng, "length": jnp.asarray(self.length or 0, jnp.int32)}
        if self.random_length:
            info["length"] = jax.random.randint(jax.random.fold_in(rng, 1), (), 1, self.length + 1)
        if self.ending != "terminated":
            info[self.ending] = jnp.zeros(())
        obs = jnp.stack([jnp.zeros(()), number])
        return ProbeState(obs, jnp.zeros(()), jnp.zeros(()), info, {"steps": jnp.zeros(())})

    def step(self, state, action):
        self.step_traces += 1
        steps = state.obs[0] + 1
        over = jnp.where((self.length is not None) & (steps >= state.info["length"]), 1.0, 0.0)
        info = state.info
        if self.ending != "terminated":
            info = {**info, self.ending: over}
        return ProbeState(state.obs.at[0].set(steps), steps, over, info, {"steps": steps})


class Poisoned(Counter):
    """A `Counter` that breaks with the second step of an episode where `info["poison"]` is not 0.

    That number says what it breaks into (an index into `values`), and `info["place"]` where: 0 the observation, 1 the
    reward, 2 the rest of the state. They are data, so that one compiled program serves all cases.
    """

    values = (0.0, float("nan"), float("inf"), -float("inf"))

    def reset(self, rng):
        state = super().reset(rng)
        marks = {"poison": jnp.zeros((), jnp.int32), "place": jnp.zeros((), jnp.int32), "inner": jnp.zeros(3)}
        return state.replace(info={**state.info, **marks})

    def step(self, state, action):
        state = super().step(state, action)
        value = jnp.asarray(self.values)[state.info["poison"]]
        spoil = lambda x, place: jnp.where((state.info["place"] == place) & (state.obs[0] == 2), x + value, x)
        return state.replace(
            obs=state.obs.at[1].set(spoil(state.obs[1], 0)),
            reward=spoil(state.reward, 1),
            info={**state.info, "inner": state.info["inner"].at[1].set(spoil(state.info["inner"][1], 2))},
        )


class BrokenResets(Counter):
    """A `Counter` of which a part of the initial states holds a NaN."""

    def __init__(self, share, length=2):
        super().__init__(length)
        self.share = share

    def reset(self, rng):
        state = super().reset(rng)
        bad = jax.random.bernoulli(jax.random.fold_in(rng, 2), self.share)
        return state.replace(obs=jnp.where(bad, jnp.nan, state.obs))


class TwoArms:
    """Observations, actions and rewards are dicts; arm x wants the action 0.5, arm y the action -0.5."""

    observation_size = {"position": (2,), "clock": ()}  # noqa: RUF012
    action_size = {"x": 1, "y": 2}  # noqa: RUF012

    def reset(self, rng):
        obs = {"position": jax.random.normal(rng, (2,)), "clock": jnp.zeros((), jnp.int32)}
        return ProbeState(obs, {"x": jnp.zeros(()), "y": jnp.zeros(())}, jnp.zeros((), bool))

    def step(self, state, action):
        clock = state.obs["clock"] + 1
        reward = {"x": -jnp.sum((action["x"] - 0.5) ** 2), "y": 3.0 - jnp.sum((action["y"] + 0.5) ** 2)}
        return state.replace(obs={**state.obs, "clock": clock}, reward=reward, done=clock >= 3)


# --- networks -------------------------------------------------------------------------------------------------


class Readout(StatefulModule):
    """Values that can be computed by hand: weight * sum(obs). Acts 0 and claims the log-likelihood 0."""

    def __init__(self, weight=1.0):
        self.weight = nnx.Param(jnp.asarray(weight))

    def __call__(self, state, obs, rollout_extras=None):
        value = self.weight.get_value() * jnp.sum(obs, -1)
        zeros = jnp.zeros(obs.shape[:-1])
        output = PPONetworkOutput(zeros[..., None], zeros, value)
        return StatefulModuleOutput(state, output, zeros, {}, None)


class CountingReadout(Readout):
    """Its carry counts the calls since the episode started; the value is 100 * count + weight * sum(obs)."""

    def initialize_state(self, batch_size):
        return {"count": jnp.zeros(batch_size)}

    def __call__(self, state, obs, rollout_extras=None):
        out = super().__call__(state, obs, rollout_extras)
        count = state["count"] + 1
        value = 100 * count + out.output.value_estimates
        return out.replace(next_state={"count": count}, output=out.output.replace(value_estimates=value))


class Leaky(StatefulModule):
    """A recurrent layer: its carry is a leaky sum of what it saw, which it appends to its input."""

    def __init__(self, size, rngs):
        self.size = size
        self.decay = nnx.Param(jax.random.uniform(rngs(), (size,)))

    def initialize_state(self, batch_size):
        return jnp.zeros((batch_size, self.size))

    def __call__(self, state, obs, rollout_extras=None):
        state = jax.nn.sigmoid(self.decay.get_value()) * state + obs
        return StatefulModuleOutput(state, jnp.concatenate([obs, state], -1), jnp.zeros(()), {})


def recurrent_actor_critic(obs_size, action_size, rngs, entropy_weight=1e-2):
    """`Leaky` in front of a linear actor and critic."""
    return Sequential(
        [
            Leaky(obs_size, rngs),
            PPOAdapter(
                action=Sequential(
                    [Dense(2 * obs_size, 2 * action_size, rngs), NormalTanhSampler(rngs, entropy_weight, min_std=0.1)]
                ),
                value=Dense(2 * obs_size, 1, rngs),
            ),
        ]
    )


class PerKey(StatefulModule):
    """One module per entry of a dict: the output is a dict of their outputs, all from the same input."""

    def __init__(self, modules):
        self.modules = nnx.Dict(modules)

    def initialize_state(self, batch_size):
        return {key: module.initialize_state(batch_size) for key, module in self.modules.items()}

    def __call__(self, state, obs, rollout_extras=None):
        replay = rollout_extras or dict.fromkeys(self.modules)
        outs = {key: module(state[key], obs, replay[key]) for key, module in self.modules.items()}
        pick = lambda name: {key: getattr(out, name) for key, out in outs.items()}
        losses = sum(pick("regularization_loss").values())
        names = ("next_state", "output", "metrics", "rollout_extras")
        return StatefulModuleOutput(regularization_loss=losses, **{name: pick(name) for name in names})


class Flat(StatefulModule):
    """Concatenates the leaves of an observation tree."""

    def __call__(self, state, obs, rollout_extras=None):
        leaves = [jnp.asarray(leaf, jnp.float32) for leaf in jax.tree.leaves(obs)]
        batch = leaves[0].shape[0]
        flat = jnp.concatenate([leaf.reshape(batch, -1) for leaf in leaves], -1)
        return StatefulModuleOutput(state, flat, jnp.zeros(()), {})


def two_arm_network(rngs, critic_terms=("x", "y"), heads=("x", "y"), entropy_weight=1e-3):
    """An actor head and a critic head per arm of `TwoArms`."""
    sizes = {"x": 1, "y": 2}
    head = lambda size: Sequential([Dense(3, 2 * size, rngs), NormalTanhSampler(rngs, entropy_weight, min_std=0.1)])
    actor = PerKey({name: head(sizes.get(name, 1)) for name in heads})
    critic = PerKey({name: Dense(3, 1, rngs) for name in critic_terms}) if critic_terms else Dense(3, 1, rngs)
    return Sequential([Flat(), PPOAdapter(action=actor, value=critic)])


# --- helpers --------------------------------------------------------------------------------------------------


def numpy_leaves(tree):
    """Every leaf as a NumPy array; typed keys as their data."""
    is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(tree)]


def assert_same_bits(a, b):
    """Two trees hold the same numbers, bit for bit."""
    a, b = numpy_leaves(a), numpy_leaves(b)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


def assert_same_up_to_rounding(params, expected, learning_rate=1e-3):
    """Adam moves a parameter whose gradient is all rounding by up to its learning rate; there are few of these."""
    a, b = (np.concatenate([np.ravel(leaf) for leaf in numpy_leaves(tree)]) for tree in (params, expected))
    apart = np.abs(a - b)
    assert apart.max() < learning_rate
    assert np.quantile(apart, 0.95) < 0.02 * learning_rate


def all_finite(tree):
    """No NaN and no infinity in any leaf."""
    return all(np.isfinite(x).all() for x in numpy_leaves(tree) if np.issubdtype(x.dtype, np.inexact))
