"""Ready networks."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_ppo.algorithms.config import did_you_mean
from nnx_ppo.networks.adapter import PPOAdapter
from nnx_ppo.networks.containers import Parallel, Sequential
from nnx_ppo.networks.feedforward import Dense
from nnx_ppo.networks.normalizer import Normalizer, map_shapes, plain_containers
from nnx_ppo.networks.recurrent import LSTM
from nnx_ppo.networks.sampling_layers import NormalTanhSampler
from nnx_ppo.networks.types import StatefulModule
from nnx_ppo.networks.utils import Filter, Flattener

Activation = Callable[[jax.Array], jax.Array]
Initializer = Callable[..., jax.Array]

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


def make_critic(
    sizes: Sequence[int],
    rngs: nnx.Rngs,
    activation: Activation | str = nnx.relu,
    reward_terms: Sequence[str] | None = None,
    kernel_init: Initializer | None = None,
) -> Sequential:
    """A critic: a value, or for dict rewards a dict of values by reward term, on shared hidden layers.

    Args:
      sizes: layer sizes from the input to the last hidden layer; `[n]` is a linear critic.
      rngs: stream that the initial parameters are drawn from.
      activation: a function, or the name of one of `ACTIVATIONS`.
      reward_terms: the keys of the environment's reward; None for a single reward.
      kernel_init: initialiser of all kernels; None takes variance scaling (fan-in, uniform).
    """
    kernel_init = kernel_init or _variance_scaling(1.0)
    head = lambda: Dense(sizes[-1], 1, rngs, kernel_init=kernel_init)
    trunk = make_mlp_layers(sizes, rngs, activation, kernel_init=kernel_init) if len(sizes) > 1 else []
    return Sequential([*trunk, head() if reward_terms is None else Parallel({term: head() for term in reward_terms})])


def make_mlp_actor_critic(
    obs_size: Any,
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
    kernel_init: Initializer | None = None,
    last_kernel_init: Initializer | None = None,
    reward_terms: Sequence[str] | None = None,
) -> StatefulModule:
    """An actor and a critic without a shared trunk, the standard network of continuous control.

        Sequential([Normalizer, PPOAdapter(action=Sequential([actor..., NormalTanhSampler]), value=critic)])

    With `kernel_init=nnx.initializers.orthogonal(2**0.5)` and `last_kernel_init=nnx.initializers.orthogonal(0.01)` it
    starts as Andrychowicz et al. 2021 ("What matters in on-policy reinforcement learning?") recommend.

    Args:
      obs_size: size of the flat observation, or a tree of shapes, which is flattened behind the normalizer.
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
      kernel_init: initialiser of all kernels, instead of variance scaling.
      last_kernel_init: initialiser of the actor's last kernel; a small one makes the first policy the same everywhere.
      reward_terms: the keys of the environment's reward if it is a dict; the critic gets a head for each.
    """
    kernel_init = kernel_init or _variance_scaling(initializer_scale)
    flat = isinstance(obs_size, (int, np.integer))
    features = int(obs_size) if flat else flat_size(obs_size)
    sampler = NormalTanhSampler(rngs, entropy_weight=entropy_weight, min_std=min_std, std_scale=std_scale)
    actor = _actor([features, *actor_hidden_sizes, 2 * action_size], rngs, activation, kernel_init, last_kernel_init)
    critic = make_critic([features, *critic_hidden_sizes], rngs, activation, reward_terms, kernel_init)
    adapter = PPOAdapter(action=Sequential([*actor, sampler]), value=critic)
    front = [Normalizer(obs_size)] if normalize_obs else []
    front = front if flat else [*front, Flattener()]
    return Sequential([*front, adapter]) if front else adapter


def make_asymmetric_actor_critic(
    obs_size: Mapping[str, Any],
    action_size: int,
    actor_hidden_sizes: Sequence[int],
    critic_hidden_sizes: Sequence[int],
    rngs: nnx.Rngs,
    actor_keys: Sequence[str] = ("state",),
    critic_keys: Sequence[str] = ("privileged_state",),
    activation: Activation | str = nnx.relu,
    normalize_obs: bool = True,
    entropy_weight: float = 1e-2,
    min_std: float = 1e-1,
    kernel_init: Initializer | None = None,
    last_kernel_init: Initializer | None = None,
    reward_terms: Sequence[str] | None = None,
) -> StatefulModule:
    """An actor that sees what the robot senses, and a critic that sees what only the simulator knows.

    Pinto et al. 2018, "Asymmetric actor critic for image-based robot learning".

        Sequential({normalizer, ports: PPOAdapter(action=[Filter, Flattener, actor...], value=[Filter, ...])})

    Args:
      obs_size: shapes of the observation's entries, as `env.observation_size` has them.
      action_size: number of actions, each in (-1, 1).
      actor_hidden_sizes: sizes of the actor's hidden layers.
      critic_hidden_sizes: sizes of the critic's hidden layers.
      rngs: stream for initial parameters and for sampling.
      actor_keys: the entries that the actor sees.
      critic_keys: the entries that the critic sees; name the actor's too if it is to see them.
      activation: a function, or the name of one of `ACTIVATIONS`.
      normalize_obs: whether to put a `Normalizer` in front.
      entropy_weight: weight of the entropy bonus.
      min_std: least standard deviation of the actions before squashing.
      kernel_init: initialiser of all kernels; None takes variance scaling (fan-in, uniform).
      last_kernel_init: initialiser of the actor's last kernel.
      reward_terms: the keys of the environment's reward if it is a dict.

    Raises:
      ValueError: the observation has no such entry.
    """
    seen = {}
    for key in (*actor_keys, *critic_keys):
        if key not in obs_size:
            raise ValueError(
                f"the observation has no entry {key!r}{did_you_mean(key, obs_size)}; it has {', '.join(obs_size)}. "
                "Set actor_keys and critic_keys."
            )
        seen[key] = obs_size[key]
    kernel_init = kernel_init or _variance_scaling(1.0)
    pick = lambda keys: [Filter({key: key for key in keys}), Flattener()]
    size = lambda keys: flat_size({key: seen[key] for key in keys})
    actor = _actor(
        [size(actor_keys), *actor_hidden_sizes, 2 * action_size], rngs, activation, kernel_init, last_kernel_init
    )
    critic = make_critic([size(critic_keys), *critic_hidden_sizes], rngs, activation, reward_terms, kernel_init)
    sampler = NormalTanhSampler(rngs, entropy_weight=entropy_weight, min_std=min_std)
    front = {"normalizer": Normalizer(seen)} if normalize_obs else {}
    return Sequential(
        {
            "filter": Filter({key: key for key in seen}),
            **front,
            "ports": PPOAdapter(
                action=Sequential([*pick(actor_keys), *actor, sampler]),
                value=Sequential([*pick(critic_keys), critic]),
            ),
        }
    )


def make_recurrent_actor_critic(
    obs_size: Any,
    action_size: int,
    hidden_features: int,
    actor_hidden_sizes: Sequence[int],
    critic_hidden_sizes: Sequence[int],
    rngs: nnx.Rngs,
    cell: Callable[[int, int, nnx.Rngs], StatefulModule] = LSTM,
    encoder_sizes: Sequence[int] = (),
    activation: Activation | str = nnx.relu,
    normalize_obs: bool = True,
    entropy_weight: float = 1e-2,
    min_std: float = 1e-1,
    kernel_init: Initializer | None = None,
    last_kernel_init: Initializer | None = None,
    reward_terms: Sequence[str] | None = None,
) -> Sequential:
    """An actor and a critic on a shared recurrent core, for what one observation does not tell.

        Sequential({normalizer, flattener, encoder, core, ports: PPOAdapter(action=..., value=...)})

    In the loss only the core is scanned over time.

    Args:
      obs_size: size of the flat observation, or a tree of shapes.
      action_size: number of actions, each in (-1, 1).
      hidden_features: size of the core's carry and output.
      actor_hidden_sizes: sizes of the actor's hidden layers, behind the core.
      critic_hidden_sizes: sizes of the critic's hidden layers, behind the core.
      rngs: stream for initial parameters and for sampling.
      cell: the kind of core: LSTM, GRU, SimpleRNN, or what takes the same arguments.
      encoder_sizes: sizes of the layers in front of the core.
      activation: a function, or the name of one of `ACTIVATIONS`.
      normalize_obs: whether to put a `Normalizer` in front.
      entropy_weight: weight of the entropy bonus.
      min_std: least standard deviation of the actions before squashing.
      kernel_init: initialiser of all kernels but the core's; None takes variance scaling (fan-in, uniform).
      last_kernel_init: initialiser of the actor's last kernel.
      reward_terms: the keys of the environment's reward if it is a dict.
    """
    kernel_init = kernel_init or _variance_scaling(1.0)
    sizes = [flat_size(obs_size), *encoder_sizes]
    layers: dict[str, StatefulModule] = {"normalizer": Normalizer(obs_size)} if normalize_obs else {}
    layers["flattener"] = Flattener()
    if encoder_sizes:
        layers["encoder"] = make_mlp(sizes, rngs, activation, kernel_init=kernel_init)
    layers["core"] = cell(sizes[-1], hidden_features, rngs)
    actor = _actor(
        [hidden_features, *actor_hidden_sizes, 2 * action_size], rngs, activation, kernel_init, last_kernel_init
    )
    layers["ports"] = PPOAdapter(
        action=Sequential([*actor, NormalTanhSampler(rngs, entropy_weight=entropy_weight, min_std=min_std)]),
        value=make_critic([hidden_features, *critic_hidden_sizes], rngs, activation, reward_terms, kernel_init),
    )
    return Sequential(layers)


def flat_size(shapes: Any) -> int:
    """How many numbers a tree of shapes holds: `{"a": (3,), "b": 2}` gives 5."""
    zeros = jax.eval_shape(lambda: map_shapes(jnp.zeros, plain_containers(shapes)))
    return sum(leaf.size for leaf in jax.tree.leaves(zeros))


def _variance_scaling(scale: float) -> Initializer:
    return nnx.initializers.variance_scaling(scale, "fan_in", "uniform")


def _actor(
    sizes: Sequence[int],
    rngs: nnx.Rngs,
    activation: Activation | str,
    kernel_init: Initializer,
    last_kernel_init: Initializer | None,
) -> list[Dense]:
    hidden = make_mlp_layers(sizes[:-1], rngs, activation, kernel_init=kernel_init) if len(sizes) > 2 else []
    return [*hidden, Dense(sizes[-2], sizes[-1], rngs, kernel_init=last_kernel_init or kernel_init)]


def _activation(activation: Activation | str) -> Activation:
    if not isinstance(activation, str):
        return activation
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation={activation!r} is not known{did_you_mean(activation, ACTIVATIONS)}; "
            f"a function or one of {', '.join(ACTIVATIONS)} is accepted."
        )
    return ACTIVATIONS[activation]
