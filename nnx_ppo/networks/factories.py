"""Ready networks."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from nnx_ppo.algorithms.config import did_you_mean
from nnx_ppo.networks.adapter import PPOAdapter
from nnx_ppo.networks.containers import Sequential
from nnx_ppo.networks.feedforward import Dense
from nnx_ppo.networks.normalizer import Normalizer
from nnx_ppo.networks.sampling_layers import NormalTanhSampler
from nnx_ppo.networks.types import StatefulModule

Activation = Callable[[jax.Array], jax.Array]

ACTIVATIONS: dict[str, Activation] = {
    "relu": nnx.relu,
    "tanh": nnx.tanh,
    "swish": nnx.swish,
    "silu": nnx.silu,
    "elu": nnx.elu,
    "gelu": nnx.gelu,
}


def make_mlp_layers(
    sizes: Sequence[int],
    rngs: nnx.Rngs,
    activation: Activation | str = nnx.relu,
    activation_last_layer: bool = True,
    **linear_kwargs: Any,
) -> list[Dense]:
    """The layers of a multilayer perceptron, to be put into a `Sequential` among others.

    Args:
      sizes: layer sizes, from the input to the output.
      rngs: stream that the initial parameters are drawn from.
      activation: a function, or the name of one of `ACTIVATIONS`.
      activation_last_layer: whether the last layer is followed by the activation too.
      **linear_kwargs: passed on to `nnx.Linear`.
    """
    if len(sizes) < 2:
        raise ValueError(f"make_mlp_layers got sizes={list(sizes)}; give at least an input and an output size.")
    function = _activation(activation)
    last = len(sizes) - 2
    return [
        Dense(n_in, n_out, rngs, function if i < last or activation_last_layer else None, **linear_kwargs)
        for i, (n_in, n_out) in enumerate(itertools.pairwise(sizes))
    ]


def make_mlp(
    sizes: Sequence[int],
    rngs: nnx.Rngs,
    activation: Activation | str = nnx.relu,
    activation_last_layer: bool = True,
    **linear_kwargs: Any,
) -> Sequential:
    """A multilayer perceptron; arguments as for `make_mlp_layers`."""
    return Sequential(make_mlp_layers(sizes, rngs, activation, activation_last_layer, **linear_kwargs))


def make_mlp_actor_critic(
    obs_size: int,
    action_size: int,
    actor_hidden_sizes: Sequence[int],
    critic_hidden_sizes: Sequence[int],
    rngs: nnx.Rngs,
    activation: Activation | str = nnx.relu,
    normalize_obs: bool = True,
    initializer_scale: float = 1.0,
    entropy_weight: float = 1e-2,
    min_std: float = 1e-1,
    std_scale: float = 1.0,
) -> StatefulModule:
    """An actor and a critic without a shared trunk, the standard network of continuous control.

        Sequential([Normalizer, PPOAdapter(action=Sequential([actor..., NormalTanhSampler]), value=critic)])

    Args:
      obs_size: size of the flat observation.
      action_size: number of actions, each in (-1, 1).
      actor_hidden_sizes: sizes of the actor's hidden layers.
      critic_hidden_sizes: sizes of the critic's hidden layers.
      rngs: stream for initial parameters and for sampling.
      activation: a function, or the name of one of `ACTIVATIONS`.
      normalize_obs: whether to put a `Normalizer` in front.
      initializer_scale: scale of the variance-scaling initialisation (fan-in, uniform).
      entropy_weight: weight of the entropy bonus.
      min_std: least standard deviation of the actions before squashing.
      std_scale: factor on that standard deviation.
    """
    kernel_init = nnx.initializers.variance_scaling(initializer_scale, "fan_in", "uniform")
    actor = make_mlp_layers(
        [obs_size, *actor_hidden_sizes, 2 * action_size], rngs, activation, False, kernel_init=kernel_init
    )
    critic = make_mlp([obs_size, *critic_hidden_sizes, 1], rngs, activation, False, kernel_init=kernel_init)
    sampler = NormalTanhSampler(rngs, entropy_weight=entropy_weight, min_std=min_std, std_scale=std_scale)
    adapter = PPOAdapter(action=Sequential([*actor, sampler]), value=critic)
    return Sequential([Normalizer(obs_size), adapter]) if normalize_obs else adapter


def _activation(activation: Activation | str) -> Activation:
    if not isinstance(activation, str):
        return activation
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation={activation!r} is not known{did_you_mean(activation, ACTIVATIONS)}; "
            f"a function or one of {', '.join(ACTIVATIONS)} is accepted."
        )
    return ACTIVATIONS[activation]
