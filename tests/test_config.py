"""The configuration dataclasses: defaults, checks and the way to plain data and back."""

import dataclasses
import itertools
import json
import re
import subprocess
import sys
import tomllib

import pytest
import tomli_w

from nnx_ppo.algorithms.config import (
    EvalConfig,
    LoggingLevel,
    PPOConfig,
    TrainConfig,
    VideoConfig,
    from_plain,
    to_plain,
)

SPECIFIED_DEFAULTS = {
    PPOConfig: {
        "n_envs": 256,
        "rollout_length": 20,
        "total_steps": 512_000,
        "gae_lambda": 0.95,
        "discounting_factor": 0.99,
        "clip_range": 0.2,
        "learning_rate": 1e-4,
        "normalize_advantages": True,
        "combine_advantages": False,
        "n_epochs": 4,
        "n_minibatches": 4,
        "critic_loss_weight": 1.0,
        "gradient_clipping": None,
        "weight_decay": None,
        "logging_level": LoggingLevel.LOSSES,
        "logging_percentiles": None,
    },
    EvalConfig: {
        "enabled": True,
        "every_steps": 50_000,
        "n_envs": 64,
        "max_episode_length": 1000,
        "logging_level": LoggingLevel.NONE,
        "logging_percentiles": (0, 25, 50, 75, 100),
    },
    VideoConfig: {
        "enabled": False,
        "every_steps": 200_000,
        "episode_length": 1000,
        "render_kwargs": {"height": 480, "width": 640},
    },
    TrainConfig: {
        "ppo": PPOConfig(),
        "eval": EvalConfig(),
        "video": VideoConfig(),
        "seed": 17,
        "checkpoint_every_steps": 500_000,
    },
}


@pytest.mark.parametrize("kind", SPECIFIED_DEFAULTS)
def test_defaults_are_the_specified_ones(kind):
    config, expected = kind(), SPECIFIED_DEFAULTS[kind]
    assert {name: getattr(config, name) for name in expected} == expected
    # In this order too: nnx-ppo 0.3 can be called with positional arguments.
    assert [f.name for f in dataclasses.fields(kind)][: len(expected)] == list(expected)


def test_extra_fields_are_off_by_default():
    config = PPOConfig()
    assert config.learning_rate_schedule == "constant"
    assert config.target_kl is None
    assert config.reward_scaling == 1.0


@pytest.mark.parametrize("kind", SPECIFIED_DEFAULTS)
def test_every_field_is_documented_below_its_definition(kind):
    import ast
    import inspect

    (body,) = ast.parse(inspect.getsource(kind)).body
    statements = body.body
    for statement, following in itertools.pairwise(statements):
        if isinstance(statement, ast.AnnAssign):
            assert isinstance(following, ast.Expr), f"{kind.__name__}.{statement.target.id} has no docstring"
            assert isinstance(following.value, ast.Constant)
            assert isinstance(following.value.value, str)


NAN, INF = float("nan"), float("inf")
IMPOSSIBLE = [
    # (class, arguments, what the message says: given, accepted, what to do)
    (PPOConfig, {"n_envs": 0}, ["n_envs=0", "at least 1", "256"]),
    (PPOConfig, {"n_envs": 2.5}, ["n_envs=2.5", "whole number"]),
    (PPOConfig, {"n_envs": True}, ["n_envs=True", "whole number"]),
    (PPOConfig, {"n_envs": "many"}, ["n_envs='many'", "whole number"]),
    (PPOConfig, {"n_envs": 10, "n_minibatches": 4}, ["n_minibatches=4", "n_envs=10", "n_minibatches=5"]),
    (PPOConfig, {"n_envs": 4, "n_minibatches": 8}, ["n_minibatches=8", "n_envs=4", "n_minibatches=4", "n_envs=8"]),
    (PPOConfig, {"n_minibatches": 0}, ["n_minibatches=0", "at least 1"]),
    (PPOConfig, {"n_epochs": 0}, ["n_epochs=0", "at least 1"]),
    (PPOConfig, {"rollout_length": -1}, ["rollout_length=-1", "at least 1"]),
    (PPOConfig, {"total_steps": -1}, ["total_steps=-1", "at least 0"]),
    (PPOConfig, {"total_steps": 1e6}, ["total_steps=1000000.0", "whole number"]),
    (PPOConfig, {"gae_lambda": 1.01}, ["gae_lambda=1.01", "from 0 to 1", "0.95"]),
    (PPOConfig, {"discounting_factor": -0.1}, ["discounting_factor=-0.1", "from 0 to 1"]),
    (PPOConfig, {"discounting_factor": NAN}, ["discounting_factor=nan", "from 0 to 1"]),
    (PPOConfig, {"clip_range": 0}, ["clip_range=0", "above 0"]),
    (PPOConfig, {"learning_rate": -1e-4}, ["learning_rate=-0.0001", "above 0"]),
    (PPOConfig, {"learning_rate": INF}, ["learning_rate=inf", "above 0"]),
    (PPOConfig, {"learning_rate": "1e-4"}, ["learning_rate='1e-4'", "a number above 0"]),
    (PPOConfig, {"learning_rate": None}, ["learning_rate=None", "a number above 0"]),
    (PPOConfig, {"normalize_advantages": "yes"}, ["normalize_advantages='yes'", "True or False"]),
    (PPOConfig, {"combine_advantages": 1}, ["combine_advantages=1", "True or False"]),
    (PPOConfig, {"critic_loss_weight": -1}, ["critic_loss_weight=-1", "at least 0"]),
    (PPOConfig, {"gradient_clipping": 0.0}, ["gradient_clipping=0.0", "above 0 or None"]),
    (PPOConfig, {"weight_decay": -0.1}, ["weight_decay=-0.1", "at least 0"]),
    (PPOConfig, {"logging_level": "LOSSES"}, ["logging_level='LOSSES'", "LoggingLevel.LOSSES"]),
    (PPOConfig, {"logging_level": 1}, ["logging_level=1", "LoggingLevel"]),
    (PPOConfig, {"logging_percentiles": (50, 101)}, ["logging_percentiles=(50, 101)", "0 to 100"]),
    (PPOConfig, {"logging_percentiles": ()}, ["logging_percentiles=()", "at least one", "None"]),
    (PPOConfig, {"logging_percentiles": "50"}, ["logging_percentiles='50'", "tuple"]),
    (PPOConfig, {"logging_percentiles": 50}, ["logging_percentiles=50", "tuple"]),
    (PPOConfig, {"learning_rate_schedule": "liner"}, ["learning_rate_schedule='liner'", "did you mean 'linear'"]),
    (PPOConfig, {"learning_rate_schedule": "adaptive"}, ["target_kl=None", "0.01"]),
    (PPOConfig, {"target_kl": 0.01}, ["target_kl=0.01", "both or neither"]),
    (EvalConfig, {"enabled": None}, ["EvalConfig.enabled=None", "True or False"]),
    (EvalConfig, {"every_steps": 0.5}, ["every_steps=0.5", "whole number"]),
    (EvalConfig, {"n_envs": 0}, ["EvalConfig.n_envs=0", "at least 1", "64"]),
    (EvalConfig, {"max_episode_length": 0}, ["max_episode_length=0", "at least 1"]),
    (EvalConfig, {"logging_percentiles": (NAN,)}, ["logging_percentiles=(nan,)", "0 to 100"]),
    (VideoConfig, {"episode_length": 0}, ["episode_length=0", "at least 1"]),
    (VideoConfig, {"every_steps": None}, ["every_steps=None", "whole number"]),
    (VideoConfig, {"render_kwargs": [480, 640]}, ["render_kwargs=[480, 640]", "dict", "height"]),
    (TrainConfig, {"ppo": None}, ["TrainConfig.ppo=None", "PPOConfig(...)"]),
    (TrainConfig, {"eval": PPOConfig()}, ["TrainConfig.eval=PPOConfig", "EvalConfig"]),
    (TrainConfig, {"seed": 1.0}, ["seed=1.0", "whole number"]),
    (TrainConfig, {"checkpoint_every_steps": "never"}, ["checkpoint_every_steps='never'", "whole number"]),
]


@pytest.mark.parametrize(("kind", "arguments", "said"), IMPOSSIBLE)
def test_an_impossible_value_is_refused_with_given_accepted_and_what_to_do(kind, arguments, said):
    with pytest.raises(ValueError) as refused:  # noqa: PT011 (the message is what is tested)
        kind(**arguments)
    for part in said:
        assert part in str(refused.value)


def test_the_suggested_minibatches_and_environments_are_themselves_accepted():
    for n_envs, n_minibatches in [(10, 4), (7, 2), (256, 3), (1, 4), (6, 12), (30, 7)]:
        with pytest.raises(ValueError, match="does not divide") as refused:
            PPOConfig(n_envs=n_envs, n_minibatches=n_minibatches)
        advice = str(refused.value).split("Use for example")[1]
        fewer, more = map(int, re.findall(r"=(\d+)", advice))
        PPOConfig(n_envs=n_envs, n_minibatches=fewer)
        PPOConfig(n_envs=more, n_minibatches=n_minibatches)


@pytest.mark.parametrize(
    "arguments",
    [
        {"gae_lambda": 0, "discounting_factor": 1},
        {"gae_lambda": 1, "discounting_factor": 0},
        {"weight_decay": 0.0},
        {"critic_loss_weight": 0},
        {"total_steps": 0},
        {"logging_percentiles": [0, 99.5, 100]},
        {"logging_level": LoggingLevel.NONE},
        {"logging_level": LoggingLevel.ALL | LoggingLevel.ROLLOUT_OBS},
        {"learning_rate_schedule": "adaptive", "target_kl": 0.01},
    ],
)
def test_values_at_the_edge_are_accepted(arguments):
    PPOConfig(**arguments)


def test_cadences_of_zero_and_below_are_accepted_because_they_mean_never():
    EvalConfig(every_steps=0)
    VideoConfig(every_steps=-1)
    TrainConfig(checkpoint_every_steps=-5)


def test_configs_are_frozen():
    for kind in SPECIFIED_DEFAULTS:
        name = dataclasses.fields(kind)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(kind(), name, getattr(kind(), name))


def test_ppo_and_eval_configs_are_hashable_even_when_given_lists():
    assert hash(PPOConfig(logging_percentiles=[1, 2])) == hash(PPOConfig(logging_percentiles=(1, 2)))
    assert hash(EvalConfig(logging_percentiles=[0])) == hash(EvalConfig(logging_percentiles=(0,)))


def test_two_default_video_configs_do_not_share_their_dict():
    assert VideoConfig().render_kwargs is not VideoConfig().render_kwargs


# --- logging levels -------------------------------------------------------------------------------------------


def test_all_is_every_level_but_the_observations():
    singles = [level for level in LoggingLevel.__members__.values() if len(level.names) == 1]
    assert len(set(singles)) == 10
    for level in singles:
        assert (level in LoggingLevel.ALL) == (level != LoggingLevel.ROLLOUT_OBS)
    assert LoggingLevel.BASIC is LoggingLevel.LOSSES
    assert not LoggingLevel.NONE


def test_an_unknown_level_gets_a_suggestion():
    with pytest.raises(ValueError, match=r"'GRAD_NORMS' \(did you mean 'GRAD_NORM'\?\)"):
        LoggingLevel.from_names(["LOSSES", "GRAD_NORMS"])


def test_a_level_may_be_given_as_one_name_instead_of_a_list():
    assert LoggingLevel.from_names("all") == LoggingLevel.ALL


# --- plain data -----------------------------------------------------------------------------------------------

UNUSUAL = TrainConfig(
    ppo=PPOConfig(
        n_envs=12,
        n_minibatches=3,
        learning_rate=1 / 3,
        gradient_clipping=0.5,
        weight_decay=0.0,
        logging_level=LoggingLevel.LOSSES | LoggingLevel.GRAD_NORM,
        logging_percentiles=(0, 2.5, 50, 99.5),
        learning_rate_schedule="adaptive",
        target_kl=0.01,
    ),
    eval=EvalConfig(enabled=False, every_steps=-1, logging_percentiles=None, logging_level=LoggingLevel.ENV_METRICS),
    video=VideoConfig(enabled=True, render_kwargs={"height": 8, "width": 8, "camera": "side", "camera_id": None}),
    seed=-3,
    checkpoint_every_steps=0,
)
EVERYTHING = TrainConfig(ppo=PPOConfig(logging_level=LoggingLevel.ALL | LoggingLevel.ROLLOUT_OBS))
NOTHING = TrainConfig(ppo=PPOConfig(logging_level=LoggingLevel.NONE))


@pytest.mark.parametrize("config", [TrainConfig(), UNUSUAL, EVERYTHING, NOTHING])
def test_a_config_survives_json_and_toml(config):
    assert from_plain(TrainConfig, json.loads(json.dumps(to_plain(config)))) == config
    assert from_plain(TrainConfig, tomllib.loads(tomli_w.dumps(to_plain(config)))) == config


def test_flags_are_plain_lists_of_names():
    assert to_plain(UNUSUAL)["ppo"]["logging_level"] == ["LOSSES", "GRAD_NORM"]
    assert to_plain(NOTHING)["ppo"]["logging_level"] == []


def test_json_null_means_none():
    assert from_plain(EvalConfig, {"logging_percentiles": None}).logging_percentiles is None


def test_missing_keys_take_their_defaults():
    assert from_plain(TrainConfig, {"ppo": {"n_envs": 8}}) == TrainConfig(ppo=PPOConfig(n_envs=8))


def test_an_unknown_key_gets_a_suggestion():
    with pytest.raises(ValueError, match=r"PPOConfig has no field 'learning_rat' \(did you mean 'learning_rate'\?\)"):
        from_plain(TrainConfig, {"ppo": {"learning_rat": 1e-3}})


def test_a_value_in_place_of_a_section_is_refused():
    with pytest.raises(ValueError, match=r"PPOConfig is read from a dict of its fields, not from 3"):
        from_plain(TrainConfig, {"ppo": 3})


def test_importing_the_configuration_imports_no_jax():
    program = (
        "import sys, nnx_ppo.algorithms.config; "
        "print([m for m in ('jax', 'flax', 'numpy', 'mujoco', 'wandb') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
