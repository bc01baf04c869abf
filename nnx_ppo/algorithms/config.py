"""What a user may set: the configuration dataclasses and `LoggingLevel`.

Every class is frozen, checks itself when it is made and converts to plain data and back
(`to_plain`, `from_plain`). This module imports no JAX, so that a script's `--help` is instant.
"""

import dataclasses
import difflib
import enum
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar


class LoggingLevel(enum.Flag):
    """Which groups of metrics an iteration computes; combine them with `|`.

    `nnx_ppo.algorithms.metrics.GLOSSARY` lists the keys of each group.
    """

    LOSSES = enum.auto()
    CRITIC_EXTRA = enum.auto()
    ACTOR_EXTRA = enum.auto()
    ROLLOUT_STATS = enum.auto()
    ROLLOUT_OBS = enum.auto()
    ENV_METRICS = enum.auto()
    NETWORK_METRICS = enum.auto()
    GRAD_NORM = enum.auto()
    WEIGHTS = enum.auto()
    THROUGHPUT = enum.auto()
    BASIC = LOSSES
    # ROLLOUT_OBS is left out of ALL: its cost grows with the observation.
    ALL = (
        LOSSES
        | CRITIC_EXTRA
        | ACTOR_EXTRA
        | ROLLOUT_STATS
        | ENV_METRICS
        | NETWORK_METRICS
        | GRAD_NORM
        | WEIGHTS
        | THROUGHPUT
    )
    NONE = 0

    @classmethod
    def from_names(cls, names: "str | typing.Iterable[str]") -> "LoggingLevel":
        """The union of the named levels; an empty list is `NONE`, a string one name.

        Raises:
          ValueError: a name is not a level.
        """
        level = cls.NONE
        for name in [names] if isinstance(names, str) else names:
            if name.upper() not in cls.__members__:
                raise ValueError(
                    f"LoggingLevel has no member {name!r}{did_you_mean(name.upper(), cls.__members__)}; "
                    f"accepted: {', '.join(cls.__members__)}."
                )
            level |= cls.__members__[name.upper()]
        return level

    @property
    def names(self) -> list[str]:
        """The single levels that this combination consists of."""
        return [member.name for member in LoggingLevel if member in self and member.name]


@dataclass(frozen=True)
class PPOConfig:
    """The algorithm: how much data an iteration collects and how it learns from it."""

    n_envs: int = 256
    """Environments stepped in parallel."""
    rollout_length: int = 20
    """Steps each environment takes per iteration; a batch is n_envs * rollout_length."""
    total_steps: int = 512_000
    """Training stops after the iteration that takes the environment steps to this number or past it."""
    gae_lambda: float = 0.95
    """Decay of generalised advantage estimation: 0 is one-step, 1 is Monte Carlo."""
    discounting_factor: float = 0.99
    """Discount gamma per environment step."""
    clip_range: float = 0.2
    """The likelihood ratio is clipped to 1 ± clip_range."""
    learning_rate: float = 1e-4
    """Adam's step size, for actor and critic together; the starting one if a schedule is set."""
    normalize_advantages: bool = True
    """Zero mean and unit variance of the advantages within each minibatch."""
    combine_advantages: bool = False
    """With several reward terms: sum their advantages before the actor loss instead of keeping them apart."""
    n_epochs: int = 4
    """Passes over the batch per iteration."""
    n_minibatches: int = 4
    """Gradient steps per epoch; divides n_envs, because a minibatch takes whole sequences."""
    critic_loss_weight: float = 1.0
    """Coefficient of the value loss."""
    gradient_clipping: float | None = None
    """Largest global norm of a gradient before Adam; None does not clip."""
    weight_decay: float | None = None
    """If set, AdamW with this decay."""
    logging_level: LoggingLevel = LoggingLevel.LOSSES
    """Groups of metrics to compute."""
    logging_percentiles: tuple[float, ...] | None = None
    """If set, vector metrics become these percentiles instead of mean and standard deviation."""
    learning_rate_schedule: Literal["constant", "linear", "adaptive"] = "constant"
    """linear: to zero at total_steps, and the normalizer's statistics come to rest with it. adaptive: up or down after
    each iteration to end it near target_kl."""
    target_kl: float | None = None
    """Divergence from the policy that collected the data that an adaptive learning rate aims at (0.01 is usual)."""
    reward_scaling: float = 1.0
    """Factor on rewards for learning only: logged and evaluated rewards stay as the environment gave them."""
    max_skipped_updates: int = 64
    """So many updates in a row with a non-finite gradient stop the run with an error."""

    def __post_init__(self):
        at_least(self, 1, "n_envs", "rollout_length", "n_epochs", "n_minibatches", "max_skipped_updates")
        at_least(self, 0, "total_steps", "critic_loss_weight")
        between(self, 0, 1, "gae_lambda", "discounting_factor")
        positive(self, "clip_range", "learning_rate", "reward_scaling")
        positive(self, "gradient_clipping", "target_kl", optional=True)
        if isinstance(self.weight_decay, bool):  # nnx-ppo 0.3 takes True for optax's default decay
            object.__setattr__(self, "weight_decay", 1e-4 if self.weight_decay else None)
        if self.weight_decay is not None:
            at_least(self, 0, "weight_decay")
        boolean(self, "normalize_advantages", "combine_advantages")
        if self.n_envs % self.n_minibatches:
            divisors = [n for n in range(1, self.n_envs + 1) if self.n_envs % n == 0]
            nearest = min(divisors, key=lambda n: abs(n - self.n_minibatches))
            raise ValueError(
                f"n_minibatches={self.n_minibatches} does not divide n_envs={self.n_envs}: minibatches split the "
                f"environments and keep whole sequences together. Use for example n_minibatches={nearest}, or "
                f"n_envs={max(1, round(self.n_envs / self.n_minibatches)) * self.n_minibatches}."
            )
        one_of(self, "learning_rate_schedule", ("constant", "linear", "adaptive"))
        if (self.learning_rate_schedule == "adaptive") != (self.target_kl is not None):
            raise ValueError(
                f"learning_rate_schedule={self.learning_rate_schedule!r} with target_kl={self.target_kl}: an adaptive "
                "learning rate needs a target_kl (0.01 is usual), and nothing else reads it. Set both or neither."
            )
        logging_fields(self)


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation: whole episodes with deterministic actions; it changes nothing in training."""

    enabled: bool = True
    """Whether to evaluate at all."""
    every_steps: int = 50_000
    """Environment steps between evaluations; 0 or less is never."""
    n_envs: int = 64
    """Episodes per evaluation, one in each environment."""
    max_episode_length: int = 1000
    """An episode is cut after so many steps."""
    logging_level: LoggingLevel = LoggingLevel.NONE
    """NETWORK_METRICS and ENV_METRICS add `eval/net/*` and `eval/env/*`; other flags do nothing here."""
    logging_percentiles: tuple[float, ...] | None = (0, 25, 50, 75, 100)
    """Percentiles over episodes; None leaves mean and standard deviation."""

    def __post_init__(self):
        boolean(self, "enabled")
        whole(self, "every_steps")
        at_least(self, 1, "n_envs", "max_episode_length")
        logging_fields(self)


@dataclass(frozen=True)
class VideoConfig:
    """Video of one evaluation episode."""

    enabled: bool = False
    """Whether to record at all; it also needs a video_fn and an environment that can render."""
    every_steps: int = 200_000
    """Environment steps between videos; 0 or less is never."""
    episode_length: int = 1000
    """A recorded episode is cut after so many steps."""
    render_kwargs: dict[str, Any] = field(default_factory=lambda: {"height": 480, "width": 640})
    """Passed on to env.render(trajectory, ...) as they are."""

    def __post_init__(self):
        boolean(self, "enabled")
        whole(self, "every_steps")
        at_least(self, 1, "episode_length")
        if not isinstance(self.render_kwargs, Mapping):
            raise ValueError(
                f"VideoConfig.render_kwargs={self.render_kwargs!r}: a dict of keyword arguments for env.render is "
                'accepted, such as {"height": 480, "width": 640}.'
            )


@dataclass(frozen=True)
class TrainConfig:
    """A training run."""

    ppo: PPOConfig = field(default_factory=PPOConfig)
    """The algorithm."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation."""
    video: VideoConfig = field(default_factory=VideoConfig)
    """Video."""
    seed: int = 17
    """Rollouts, shuffling and evaluation all derive their random keys from it."""
    checkpoint_every_steps: int = 500_000
    """Environment steps between checkpoints; 0 or less is never."""

    def __post_init__(self):
        for name, kind in (("ppo", PPOConfig), ("eval", EvalConfig), ("video", VideoConfig)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(
                    f"TrainConfig.{name}={getattr(self, name)!r}: a {kind.__name__} is accepted; "
                    f"write TrainConfig({name}={kind.__name__}(...))."
                )
        whole(self, "seed", "checkpoint_every_steps")


def __getattr__(name: str) -> Any:
    # The published nnx-ppo keeps these two here; they hold arrays, so ours live in types.py.
    if name in ("VideoData", "TrainResult"):
        from nnx_ppo.algorithms import types as algorithm_types

        return getattr(algorithm_types, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# --- plain data -----------------------------------------------------------------------------------------------

Config = TypeVar("Config")


def to_plain(config: Any) -> dict[str, Any]:
    """A config as dicts, lists, strings, numbers and booleans only: what JSON and TOML can hold.

    Flags become lists of names. TOML has no null, so a field that is None is left out where None is its
    default and is the string "none" elsewhere, also within `render_kwargs`.
    """
    plain = {}
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        if value is None:
            if spec.default is not None:
                plain[spec.name] = "none"
        elif dataclasses.is_dataclass(value):
            plain[spec.name] = to_plain(value)
        elif isinstance(value, LoggingLevel):
            plain[spec.name] = value.names
        else:
            plain[spec.name] = _lists(value)
    return plain


def from_plain(kind: type[Config], plain: Mapping[str, Any]) -> Config:
    """The inverse of `to_plain`; fields that are missing take their defaults.

    Raises:
      ValueError: a key is not a field of `kind` (with the nearest one), or a value is impossible.
    """
    if not isinstance(plain, Mapping):
        raise ValueError(f"{kind.__name__} is read from a dict of its fields, not from {plain!r}.")
    hints = typing.get_type_hints(kind)
    values = {}
    for name, value in plain.items():
        if name not in hints:
            raise ValueError(
                f"{kind.__name__} has no field {name!r}{did_you_mean(name, hints)}; its fields are {', '.join(hints)}."
            )
        hint = hints[name]
        if dataclasses.is_dataclass(hint):
            values[name] = from_plain(hint, value)  # type: ignore[arg-type]
        elif hint is LoggingLevel:
            values[name] = LoggingLevel.from_names(value)
        elif value == "none" and _optional(hint):
            values[name] = None
        elif isinstance(value, Mapping):
            values[name] = {key: None if item == "none" else item for key, item in value.items()}
        else:
            values[name] = tuple(value) if isinstance(value, list) and "tuple" in str(hint) else value
    return kind(**values)


def did_you_mean(name: str, accepted: "typing.Iterable[str]") -> str:
    """' (did you mean ...?)' with the nearest of the accepted names, or nothing."""
    near = difflib.get_close_matches(name, list(accepted), n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _lists(value: Any) -> Any:
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return {key: _lists(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_lists(item) for item in value]
    return value


def _optional(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType) and type(None) in typing.get_args(hint)


# --- checks ---------------------------------------------------------------------------------------------------


def _refuse(config: Any, name: str, accepted: str) -> typing.NoReturn:
    spec = {f.name: f for f in dataclasses.fields(config)}[name]
    advice = "leave it out" if spec.default is dataclasses.MISSING else f"the default is {spec.default!r}"
    raise ValueError(f"{type(config).__name__}.{name}={getattr(config, name)!r}: {accepted} is accepted ({advice}).")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def whole(config: Any, *names: str) -> None:
    """Each field is an int."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool):
            _refuse(config, name, "a whole number")


def at_least(config: Any, lowest: int, *names: str) -> None:
    """Each field is a finite number, whole if so annotated, not below `lowest`."""
    hints = typing.get_type_hints(type(config))
    for name in names:
        value = getattr(config, name)
        kind = "whole number" if hints[name] is int else "number"
        if not _is_number(value) or value < lowest or (hints[name] is int and not isinstance(value, int)):
            _refuse(config, name, f"a {kind} of at least {lowest}")


def between(config: Any, low: float, high: float, *names: str) -> None:
    """Each field is a finite number in [low, high]."""
    for name in names:
        value = getattr(config, name)
        if not _is_number(value) or not low <= value <= high:
            _refuse(config, name, f"a number from {low} to {high}")


def positive(config: Any, *names: str, optional: bool = False) -> None:
    """Each field is a finite number above zero, or None if `optional`."""
    for name in names:
        value = getattr(config, name)
        if not (optional and value is None) and (not _is_number(value) or value <= 0):
            _refuse(config, name, "a number above 0" + (" or None" if optional else ""))


def boolean(config: Any, *names: str) -> None:
    """Each field is True or False."""
    for name in names:
        if not isinstance(getattr(config, name), bool):
            _refuse(config, name, "True or False")


def one_of(config: Any, name: str, accepted: tuple[str, ...]) -> None:
    """The field is one of the accepted strings."""
    value = getattr(config, name)
    if value not in accepted:
        _refuse(config, name, f"one of {', '.join(map(repr, accepted))}{did_you_mean(str(value), accepted)}")


def logging_fields(config: Any) -> None:
    """`logging_level` is a LoggingLevel; `logging_percentiles` is None or numbers in [0, 100], kept as a tuple."""
    if not isinstance(config.logging_level, LoggingLevel):
        _refuse(config, "logging_level", "a LoggingLevel, such as LoggingLevel.LOSSES | LoggingLevel.GRAD_NORM,")
    percentiles = config.logging_percentiles
    if percentiles is None:
        return
    if isinstance(percentiles, str) or not isinstance(percentiles, (tuple, list)):
        _refuse(config, "logging_percentiles", "a tuple of numbers from 0 to 100, or None,")
    if not percentiles or not all(_is_number(p) and 0 <= p <= 100 for p in percentiles):
        _refuse(config, "logging_percentiles", "a tuple of at least one number from 0 to 100, or None,")
    object.__setattr__(config, "logging_percentiles", tuple(percentiles))
