"""An environment and networks that have one of everything that is logged: dicts, two heads, flags, vectors, scalars."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from probe_envs import Flat, PerKey, ProbeState

from nnx_ppo.networks.adapter import PPOAdapter
from nnx_ppo.networks.containers import Sequential
from nnx_ppo.networks.feedforward import Dense
from nnx_ppo.networks.sampling_layers import NormalTanhSampler
from nnx_ppo.networks.types import StatefulModule, StatefulModuleOutput


class Workbench:
    """Dict observations, actions, rewards and metrics; every third step ends an episode, in either way."""

    def reset(self, rng):
        obs = {"position": jax.random.normal(rng, (2,)), "clock": jnp.zeros((), jnp.int32)}
        metrics = {"height": jnp.zeros(()), "near": jnp.zeros((), bool), "arms": {"reach": jnp.zeros(2)}}
        info = {"truncated": jnp.zeros((), bool)}
        return ProbeState(obs, {"x": jnp.zeros(()), "y": jnp.zeros(())}, jnp.zeros((), bool), info, metrics)

    def step(self, state, action):
        clock, position = state.obs["clock"] + 1, 0.9 * state.obs["position"]
        reward = {"x": position[0] - jnp.sum(action["x"] ** 2), "y": 2 * position[1] + jnp.sum(action["y"])}
        over = clock >= 3
        return ProbeState(
            {"position": position, "clock": clock},
            reward,
            over & (position[0] > 0),
            {"truncated": over & (position[0] <= 0)},
            {"height": position[1], "near": position[0] > 0.2, "arms": {"reach": position}},
        )

    def render(self, trajectory, **kwargs):
        return [np.zeros((2, 2, 3), np.uint8) for _ in trajectory]


class Gain(StatefulModule):
    """A scalar parameter, and metrics of each shape that a module may give."""

    def __init__(self):
        self.gain = nnx.Param(jnp.ones(()))

    def __call__(self, state, obs, rollout_extras=None):
        metrics = {"first": obs[..., 0], "gain": self.gain.get_value()}
        return StatefulModuleOutput(state, self.gain.get_value() * obs, jnp.zeros(()), metrics)


class Discrete(StatefulModule):
    """A sampler that tells neither an entropy nor a standard deviation, and adds nothing to the loss."""

    def __call__(self, state, obs, rollout_extras=None):
        chosen = jnp.argmax(obs, -1) if rollout_extras is None else rollout_extras
        likelihood = jnp.take_along_axis(jax.nn.log_softmax(obs), chosen[..., None], -1)[..., 0]
        output = {"action": chosen[..., None] / 2, "log_likelihood": likelihood}
        return StatefulModuleOutput(state, output, jnp.zeros(()), {}, chosen)


def two_headed_network(seed=0):
    """Linear heads x and y (1 and 2 actions) and values x and y, no entropy bonus, so that NumPy can follow."""
    rngs = nnx.Rngs(seed)
    head = lambda size: Sequential([Dense(3, 2 * size, rngs), NormalTanhSampler(rngs, 0.0, min_std=0.1)])
    actor = PerKey({"x": head(1), "y": head(2)})
    return Sequential([Flat(), Gain(), PPOAdapter(actor, PerKey({"x": Dense(3, 1, rngs), "y": Dense(3, 1, rngs)}))])


def discrete_network(obs_size, seed=0):
    """One head without a standard deviation, one value."""
    rngs = nnx.Rngs(seed)
    return PPOAdapter(Sequential([Dense(obs_size, 3, rngs), Discrete()]), Dense(obs_size, 1, rngs))
