"""What users of the published nnx-ppo 0.3 write keeps working: module paths, names, argument order, defaults."""

import dataclasses
import importlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from probe_envs import Counter, ProbeState, Readout

from nnx_ppo.algorithms.config import EvalConfig, LoggingLevel, PPOConfig, TrainConfig

PUBLIC_NAMES = {
    "nnx_ppo.algorithms.config": ["PPOConfig", "EvalConfig", "VideoConfig", "TrainConfig", "VideoData", "TrainResult"],
    "nnx_ppo.algorithms.types": ["EnvState", "RLEnv", "TrainingState", "Transition", "LoggingLevel"],
    "nnx_ppo.algorithms.ppo": ["train_ppo", "default_config", "ppo_step", "ppo_loss", "new_training_state"],
    "nnx_ppo.algorithms.callbacks": ["wandb_video_fn"],
    "nnx_ppo.algorithms.checkpointing": ["make_checkpoint_fn", "load_checkpoint"],
    "nnx_ppo.networks.types": ["ModuleState", "StatefulModule", "StatefulModuleOutput", "PPONetworkOutput"],
    "nnx_ppo.networks.adapter": ["PPOAdapter"],
    "nnx_ppo.networks.containers": ["Sequential"],
    "nnx_ppo.networks.feedforward": ["Dense"],
    "nnx_ppo.networks.normalizer": ["Normalizer", "NormalizerStatistics"],
    "nnx_ppo.networks.sampling_layers": ["ActionSampler", "NormalTanhSampler"],
    "nnx_ppo.networks.factories": ["make_mlp_layers", "make_mlp", "make_mlp_actor_critic"],
    "nnx_ppo.wrappers.episode_wrapper": ["EpisodeWrapper"],
    "nnx_ppo.wrappers.reward_scaling_wrapper": ["RewardScalingWrapper"],
}


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in PUBLIC_NAMES.items() for n in names])
def test_a_published_name_is_where_it_was(module, name):
    assert hasattr(importlib.import_module(module), name)


REQUIRED = inspect.Parameter.empty
SIGNATURES = {
    # (module, function): its published parameters in order, with defaults; keyword-only ones after "*"
    ("nnx_ppo.algorithms.ppo", "train_ppo"): [
        ("env", REQUIRED),
        ("networks", REQUIRED),
        ("config", None),
        "*",
        ("total_steps", None),
        ("seed", None),
        ("log_fn", None),
        ("video_fn", None),
        ("checkpoint_fn", None),
        ("eval_env", None),
        ("initial_state", None),
    ],
    ("nnx_ppo.algorithms.ppo", "new_training_state"): [
        ("env", REQUIRED),
        ("networks", REQUIRED),
        ("n_envs", REQUIRED),
        ("seed", REQUIRED),
        ("learning_rate", 1e-4),
        ("gradient_clipping", None),
        ("weight_decay", None),
    ],
    ("nnx_ppo.algorithms.callbacks", "wandb_video_fn"): [("key", "eval_video"), ("fps", 30)],
    ("nnx_ppo.algorithms.checkpointing", "make_checkpoint_fn"): [("directory", REQUIRED), ("config", None)],
    ("nnx_ppo.algorithms.checkpointing", "load_checkpoint"): [
        ("path", REQUIRED),
        ("networks", REQUIRED),
        ("optimizer", REQUIRED),
    ],
    ("nnx_ppo.networks.factories", "make_mlp_layers"): [
        ("sizes", REQUIRED),
        ("rngs", REQUIRED),
        ("activation", nnx.relu),
        ("activation_last_layer", True),
    ],
    ("nnx_ppo.networks.factories", "make_mlp"): [
        ("sizes", REQUIRED),
        ("rngs", REQUIRED),
        ("activation", nnx.relu),
        ("activation_last_layer", True),
    ],
    ("nnx_ppo.networks.factories", "make_mlp_actor_critic"): [
        ("obs_size", REQUIRED),
        ("action_size", REQUIRED),
        ("actor_hidden_sizes", REQUIRED),
        ("critic_hidden_sizes", REQUIRED),
        ("rngs", REQUIRED),
        ("activation", nnx.relu),
        ("normalize_obs", True),
        ("initializer_scale", 1.0),
        ("entropy_weight", 1e-2),
        ("min_std", 1e-1),
        ("std_scale", 1.0),
    ],
    ("nnx_ppo.networks.sampling_layers", "NormalTanhSampler"): [
        ("rng", REQUIRED),
        ("entropy_weight", REQUIRED),
        ("min_std", 1e-3),
        ("std_scale", 1.0),
    ],
    ("nnx_ppo.networks.feedforward", "Dense"): [
        ("in_features", REQUIRED),
        ("out_features", REQUIRED),
        ("rngs", REQUIRED),
        ("activation", None),
    ],
    ("nnx_ppo.networks.adapter", "PPOAdapter"): [("action", REQUIRED), ("value", REQUIRED)],
    ("nnx_ppo.networks.containers", "Sequential"): [("layers", REQUIRED)],
    ("nnx_ppo.networks.normalizer", "Normalizer"): [("shape", REQUIRED)],
    ("nnx_ppo.wrappers.episode_wrapper", "EpisodeWrapper"): [("env", REQUIRED), ("max_len", REQUIRED)],
    ("nnx_ppo.wrappers.reward_scaling_wrapper", "RewardScalingWrapper"): [
        ("env", REQUIRED),
        ("reward_scale", REQUIRED),
    ],
}


@pytest.mark.parametrize(("where", "published"), SIGNATURES.items())
def test_a_published_function_takes_the_same_arguments_in_the_same_order(where, published):
    module, name = where
    function = getattr(importlib.import_module(module), name)
    given = dict(inspect.signature(function.__init__ if inspect.isclass(function) else function).parameters)
    given.pop("self", None)
    positional = published[: published.index("*")] if "*" in published else published
    keywords = published[published.index("*") + 1 :] if "*" in published else []
    ours = [p for p in given.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in ours[: len(positional)]] == positional
    for keyword, default in keywords:
        assert given[keyword].kind is inspect.Parameter.KEYWORD_ONLY
        assert given[keyword].default == default
    # What we added must be optional.
    published_names = {entry[0] for entry in positional + keywords}
    extras = [p for p in given.values() if p.name not in published_names and p.kind is not p.VAR_KEYWORD]
    assert all(p.default is not REQUIRED for p in extras)


def test_the_published_results_and_states_have_their_fields():
    from nnx_ppo.algorithms.config import TrainResult, VideoData

    names = lambda kind: [field.name for field in dataclasses.fields(kind)]
    assert names(VideoData) == ["frames", "step", "episode_reward", "episode_length"]
    assert names(TrainResult) == [
        "training_state", "final_metrics", "eval_history", "total_steps", "total_iterations",
    ]  # fmt: skip
    from nnx_ppo.algorithms.types import TrainingState

    for name in ("networks", "network_states", "env_states", "optimizer", "rng_key", "steps_taken"):
        assert name in names(TrainingState) or isinstance(getattr(TrainingState, name), property)


def test_weight_decay_true_takes_the_default_of_adamw_as_before():
    assert PPOConfig(weight_decay=True).weight_decay == 1e-4
    assert PPOConfig(weight_decay=False).weight_decay is None


def test_the_default_configuration_is_the_published_one():
    from nnx_ppo.algorithms.ppo import default_config

    assert default_config() == TrainConfig()


def test_logging_level_is_found_in_types_too():
    from nnx_ppo.algorithms import types

    assert types.LoggingLevel is LoggingLevel


class PublishedStyle:
    """An environment written as those for nnx-ppo 0.3 are: it changes `info` in place, its flags are plain Python."""

    observation_size, action_size = 2, 1

    def reset(self, rng):
        return self._state(jax.random.uniform(rng, (2,)))

    def step(self, state, action):
        return self._state(state.obs + 0.1 * action)

    def _state(self, position):
        distance = jnp.sum(position**2)
        return ProbeState(position, jnp.exp(-distance), jnp.where(distance > 4, 1.0, 0.0), {}, {"distance": distance})


class PublishedWrapper:
    """A wrapper as users of nnx-ppo 0.3 have: not one of our `Wrapper`s, and it writes into `info`."""

    def __init__(self, env):
        self.env = env

    def reset(self, rng):
        state = self.env.reset(rng)
        state.info["age"] = 0
        state.info["truncated"] = False
        return state

    def step(self, state, action):
        following = self.env.step(state, action)
        following.info["age"] = state.info["age"] + 1
        following.info["truncated"] = following.info["age"] >= 3
        return following.replace(done=jnp.logical_or(following.done, following.info["truncated"]).astype(float))


def test_a_program_written_for_the_published_package_runs():
    from nnx_ppo.algorithms.ppo import train_ppo
    from nnx_ppo.networks.types import PPONetworkOutput, StatefulModule, StatefulModuleOutput

    class Network(StatefulModule):
        def __init__(self, rngs):
            self.actor = nnx.Linear(2, 1, rngs=rngs)
            self.critic = nnx.Linear(2, 1, rngs=rngs)

        def __call__(self, network_state, obs, rollout_extras=None):
            raw = self.actor(obs) if rollout_extras is None else rollout_extras
            zeros = jnp.zeros(obs.shape[0])
            values = self.critic(obs)[:, 0]
            output = PPONetworkOutput(actions=jnp.tanh(raw), loglikelihoods=zeros, value_estimates=values)
            return StatefulModuleOutput(
                next_state=network_state, output=output, regularization_loss=zeros, metrics={}, rollout_extras=raw
            )

        def initialize_state(self, batch_size):
            return ()

    config = TrainConfig(
        ppo=PPOConfig(n_envs=4, rollout_length=6, total_steps=48, n_epochs=1, n_minibatches=2),
        eval=EvalConfig(enabled=True, every_steps=24, n_envs=2, max_episode_length=10),
        seed=3,
    )
    logged = []
    result = train_ppo(
        PublishedWrapper(PublishedStyle()),
        Network(nnx.Rngs(0)),
        config,
        log_fn=lambda metrics, steps: logged.append((steps, metrics)),
    )
    assert [steps for steps, _ in logged] == [0, 24, 48]
    assert [e["step"] for e in result.eval_history] == [0, 24, 48]
    assert result.final_metrics["eval/lifespan/p50"] == 3
    assert np.isfinite(list(result.final_metrics.values())).all()
    networks = result.training_state.networks
    assert networks((), jnp.zeros((1, 2))).output.actions.shape == (1, 1)


def test_loading_as_the_published_example_does(tmp_path):
    from nnx_ppo.algorithms import ppo
    from nnx_ppo.algorithms.checkpointing import load_checkpoint, make_checkpoint_fn

    env, network = Counter(3), Readout(2.0)
    state = ppo.new_training_state(env, network, 2, 0)
    make_checkpoint_fn(str(tmp_path), config=TrainConfig())(state, 5)
    fresh = ppo.new_training_state(env, Readout(0.0), n_envs=2, seed=1)
    networks = fresh.networks
    loaded = load_checkpoint(str(tmp_path / "step_0000000005"), networks, fresh.optimizer)
    assert {"training_state", "step", "config"} <= loaded.keys()
    assert float(networks.weight.get_value()) == float(loaded["training_state"].networks.weight.get_value()) == 2.0
