"""Stepping environments: the rollout for training, evaluation and the episode for a video.

This is the only file that steps an environment.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from nnx_ppo.algorithms.config import EvalConfig, LoggingLevel, PPOConfig
from nnx_ppo.algorithms.devices import on_each_device
from nnx_ppo.algorithms.jaxprs import reads
from nnx_ppo.algorithms.keys import Stream, numbered_keys, stream_key
from nnx_ppo.algorithms.types import Replaceable, TrainingState, Transition
from nnx_ppo.algorithms.vectorize import one_of, vectorize
from nnx_ppo.networks import functional
from nnx_ppo.networks.functional import reset_carry, tree_where
from nnx_ppo.networks.recording import extract_activations, with_recording
from nnx_ppo.networks.types import ModuleState, StatefulModule

# --- one environment, then many -------------------------------------------------------------------------------

# Compiled per environment object, so that the training, evaluation and video programs share one trace of it.


class _Same:
    """Stands for an environment by identity, so that it need not be hashable (a dataclass of arrays is not)."""

    def __init__(self, env: Any):
        self.env = env

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.env is self.env

    def __hash__(self) -> int:
        return id(self.env)


@functools.partial(jax.jit, static_argnums=0)
def _reset(same: _Same, key: PRNGKeyArray) -> Any:
    return same.env.reset(key)


@functools.partial(jax.jit, static_argnums=0)
def _step(same: _Same, state: Any, action: Any) -> Any:
    return same.env.step(state, action)


def reset(env: Any, key: PRNGKeyArray, n_envs: int) -> Any:
    """`n_envs` fresh initial states, all finite."""
    return _checked_reset(env, numbered_keys(key, jnp.arange(n_envs)))[0]


def step(env: Any, env_states: Any, actions: Any) -> Any:
    """One step of every environment; leaves keep the dtypes they had."""
    return _like_tree(_steps(env, env_states, actions), env_states)


def _steps(env: Any, env_states: Any, actions: Any) -> Any:
    return vectorize(functools.partial(_step, _Same(env)), env_states, actions, lanes=getattr(env, "lanes", None))


def _like_tree(states: Any, template: Any) -> Any:
    cast = lambda new, old: new if new.dtype == old.dtype else new.astype(old.dtype)
    return jax.tree.map(cast, states, template)


def check_step_keeps_shapes(env: Any, env_states: Any, actions: Any) -> None:
    """Trace one step and compare its state with the one it came from.

    Raises:
      TypeError: the structure, a shape or a kind of dtype changes, so the environment cannot run in a compiled loop.
    """
    # Traced as it will be for training, so that this trace of the environment serves there too.
    given, returned = env_states, jax.eval_shape(functools.partial(_steps, env), env_states, actions)
    before, after = (dict(jax.tree_util.tree_flatten_with_path(tree)[0]) for tree in (given, returned))
    keys = {jax.tree_util.keystr(path): path for path in [*before, *after]}
    for key, path in keys.items():
        old, new = before.get(path), after.get(path)
        if old is None or new is None:
            raise TypeError(
                f"the environment's state has {key} only {'after a step' if old is None else 'at reset'}. Reset and "
                "step must return the same structure: create every entry of info and metrics in reset too."
            )
        if old.shape != new.shape or not _keeps_values(new.dtype, old.dtype, flag=key.endswith(FLAGS)):
            raise TypeError(
                f"the environment's state{key} is {old.dtype}{list(old.shape[1:])} at reset and "
                f"{new.dtype}{list(new.shape[1:])} after a step. Both must be the same: fix reset or step."
            )
    if jax.tree.structure(given) != jax.tree.structure(returned):
        raise TypeError(
            f"the environment's state is {jax.tree.structure(given)} at reset and {jax.tree.structure(returned)} "
            "after a step. Both must be the same kind of object."
        )


FLAGS = (".done", "['truncated']", "['truncation']")
"""Entries that are true or false, whatever their dtype."""


def _keeps_values(new: Any, old: Any, flag: bool) -> bool:
    """Whether what a step returns, of dtype `new`, can be kept in the dtype of the initial state."""
    if jnp.issubdtype(old, jax.dtypes.prng_key) or jnp.issubdtype(new, jax.dtypes.prng_key):
        return old == new
    same_kind = jnp.dtype(old).kind == jnp.dtype(new).kind
    return flag or same_kind or jnp.promote_types(old, new) == old


# --- what of a state lasts -------------------------------------------------------------------------------------


Kept = tuple[bool, ...]
"""For each leaf of an environment's state whether anybody looks at it after the step that returned it."""


def kept_leaves(env: Any, env_states: Any, actions: Any, recorded: bool = False) -> Kept:
    """What a fresh episode has to replace: all that the next step reads, and what everyone may look at.

    Physics like MJX's returns about a hundred arrays of what it worked out on the way and reads ten of them in the next
    step. The others may stay as they are until then.

    Args:
      env: the environment.
      env_states: of many environments, or their shapes.
      actions: the same.
      recorded: whether `env.replay_record` looks at the states too.
    """
    found: list[bool] = []

    def look(env_states: Any, actions: Any) -> Any:
        state, action = one_of(env_states), one_of(actions)
        public = {id(leaf) for name in PUBLIC for leaf in jax.tree.leaves(getattr(state, name, ()))}
        leaves = jax.tree.leaves(state)
        read = reads(functools.partial(_step, _Same(env)), state, action)[: len(leaves)]
        recording = reads(env.replay_record, state) if recorded else [False] * len(leaves)
        found.extend(a or b or id(leaf) in public for a, b, leaf in zip(read, recording, leaves, strict=True))
        return env_states.done

    # Looked at where each device steps its share, so that the trace of the environment is the one made there.
    jax.eval_shape(functools.partial(on_each_device, look), env_states, actions)
    return tuple(found)


PUBLIC = ("obs", "reward", "done", "metrics", "info")
"""Fields of every environment's state. What else it has is its own."""


def take_kept(states: Any, kept: Kept) -> Any:
    """The states with None for what is not kept."""
    leaves, structure = jax.tree.flatten(states)
    return jax.tree.unflatten(structure, [leaf if keep else None for leaf, keep in zip(leaves, kept, strict=True)])


def where_kept(condition: Bool[Array, " batch"], if_true: Any, if_false: Any, kept: Kept) -> Any:
    """`tree_where` for what is kept; `if_true` has nothing else. The rest is that of `if_false`."""
    chosen = iter(jax.tree.leaves(tree_where(condition, if_true, take_kept(if_false, kept))))
    leaves, structure = jax.tree.flatten(if_false)
    return jax.tree.unflatten(structure, [next(chosen) if keep else x for x, keep in zip(leaves, kept, strict=True)])


# --- fresh episodes -------------------------------------------------------------------------------------------


def _checked_reset(env: Any, keys: PRNGKeyArray, kept: Kept | None = None) -> tuple[Any, Bool[Array, " batch"]]:
    """Fresh initial states, and which of them had to be replaced because they were not finite."""
    states = vectorize(functools.partial(_reset, _Same(env)), keys, lanes=getattr(env, "lanes", None))
    states = take_kept(states, kept) if kept is not None else states
    bad = nonfinite_rows(states)
    return _replace_rows(states, bad), bad


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ResetPool(Replaceable):
    """One fresh initial state per environment, to be taken where an episode ends.

    Resetting every environment at every step costs as much as stepping it; a pool is drawn when its first state is
    needed, so once in a rollout in which some episode ends. Where an episode ends twice within the rollout its state
    is gone, so the pool is drawn anew: no initial state is ever used twice. An environment's n-th state in a rollout
    is always the same, whatever the others do (unless it was not finite and had to be replaced).
    """

    states: Any
    """Of initial states what has to replace an ended one's, see `kept_leaves`."""
    fresh: Bool[Array, " batch"]
    """Whether the state is there and was not taken."""
    taken: Int[Array, " batch"]
    """How many states the environment has had."""
    nonfinite: UInt32[Array, " batch"]
    """How many of them were replaced because they were not finite."""
    row: Int[Array, " batch"]
    """The environment's number."""
    kept: Kept = field(metadata={"static": True})


def empty_reset_pool(env_states: Any, kept: Kept) -> ResetPool:
    """A pool with nothing in it yet; `env_states` gives the shapes."""
    batch = env_states.done.shape
    none = jnp.zeros(batch, jnp.int32)
    states = take_kept(env_states, kept)
    return ResetPool(states, jnp.zeros(batch, bool), none, none.astype(jnp.uint32), jnp.arange(*batch), kept)


def restart(
    env: Any, pool: ResetPool, env_states: Any, done: Bool[Array, " batch"], key: PRNGKeyArray
) -> tuple[Any, ResetPool]:
    """Put fresh initial states where `done`; `key` is the same for all steps of a rollout."""
    n_envs = done.shape[0]

    def take(pool: ResetPool, env_states: Any, done: jax.Array, key: PRNGKeyArray) -> tuple[Any, ResetPool]:
        def exhausted(pool: ResetPool) -> Bool[Array, ""]:
            return jnp.any(done & ~pool.fresh)

        def draw(pool: ResetPool) -> ResetPool:
            keys = numbered_keys(key, pool.taken * n_envs + pool.row)
            states, nonfinite = _checked_reset(env, keys, pool.kept)
            return pool.replace(
                states=_like_tree(states, pool.states),
                fresh=jnp.ones_like(pool.fresh),
                # Those that were still fresh come out as they were.
                nonfinite=pool.nonfinite + (nonfinite & ~pool.fresh),
            )

        # Not a cond: under vmap a cond runs both branches always, a loop only while some lane needs it.
        pool = jax.lax.while_loop(exhausted, draw, pool)
        pool_left = pool.replace(fresh=pool.fresh & ~done, taken=pool.taken + done)
        return where_kept(done, pool.states, env_states, pool.kept), pool_left

    # A state that is not finite is replaced by one of the same device, the only case in which their number matters.
    return on_each_device(take, pool, env_states, done, everywhere=(key,))


# --- what a step said -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The rewards and endings of one step of every environment; nothing in it is NaN or infinite."""

    rewards: Any
    done: Bool[Array, " batch"]
    truncated: Bool[Array, " batch"]
    nonfinite: Bool[Array, " batch"]


def read_outcome(env_states: Any) -> Outcome:
    """Rewards and endings; an environment that went non-finite counts as terminated with reward 0."""
    nonfinite = nonfinite_rows(env_states)
    truncated = _flag(env_states, "truncated") | _flag(env_states, "truncation")
    done = env_states.done.astype(bool) | truncated | nonfinite
    rewards = jax.tree.map(
        lambda reward: jnp.where(nonfinite, 0.0, reward.astype(jnp.float32)),
        env_states.reward,
    )
    return Outcome(rewards, done, truncated & ~nonfinite, nonfinite)


HUGE = 1e15
"""Observations and rewards beyond it count as not finite: their squares and sums soon are not."""


def nonfinite_rows(env_states: Any) -> Bool[Array, " batch"]:
    """Which environments hold a NaN, or something huge or infinite in observation or reward.

    An infinity elsewhere in the state may be meant (a bound, a distance to nothing).
    """
    batch = env_states.done.shape[0]
    finite = jnp.ones(batch, bool)
    for leaf in jax.tree.leaves((env_states.obs, env_states.reward)):
        finite &= _rows(leaf, lambda x: jnp.abs(x) < HUGE, batch)
    for leaf in jax.tree.leaves(env_states):
        finite &= _rows(leaf, lambda x: x == x, batch)
    return ~finite


def _rows(leaf: jax.Array, check: Any, batch: int) -> Bool[Array, " batch"]:
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return jnp.ones(batch, bool)
    return jnp.all(check(leaf).reshape(batch, -1), axis=1)


def _replace_rows(env_states: Any, bad: Bool[Array, " batch"]) -> Any:
    """Put the state of a finite row in place of each bad one; where there is none, zeros in place of what is bad."""
    source = jnp.where(bad, jnp.argmin(bad), jnp.arange(bad.shape[0]))

    def zero_where(is_bad: Any, x: jax.Array) -> jax.Array:
        return jnp.where(is_bad(x), jnp.zeros_like(x), x) if jnp.issubdtype(x.dtype, jnp.inexact) else x

    states = jax.tree.map(lambda x: zero_where(jnp.isnan, x[source]), env_states)
    finite = functools.partial(jax.tree.map, functools.partial(zero_where, lambda x: jnp.abs(x) >= HUGE))
    return states.replace(obs=finite(states.obs), reward=finite(states.reward))


def _flag(env_states: Any, name: str) -> Bool[Array, " batch"]:
    flag = env_states.info.get(name) if hasattr(env_states.info, "get") else None
    return jnp.zeros(env_states.done.shape, bool) if flag is None else flag.astype(bool)


# --- training -------------------------------------------------------------------------------------------------


def unroll(
    env: Any, config: PPOConfig, state: TrainingState, keep_replay: bool = False
) -> tuple[TrainingState, Transition]:
    """Step every environment `rollout_length` times with the current policy.

    With `keep_replay` the transitions also have `env.replay_record(state)` of each step.

    Returns:
      The state with environments, carries and random streams moved on, and the transitions [time, batch, ...].
    """
    reset_key = stream_key(state.rng_key, Stream.RESET_POOL, state.iteration)

    def one_step(carry: Any, _: None) -> tuple[Any, Transition]:
        variables, network_states, env_states, pool = carry
        obs = env_states.obs
        out, variables = functional.apply(state.graphdef, state.params, variables, network_states, obs)
        next_env_states = step(env, env_states, out.output.actions)
        outcome = read_outcome(next_env_states)
        transition = Transition(
            obs=obs,
            # What only the loss reads is not kept (and so not computed).
            network_output=out.output.replace(entropies=None, stds=None),
            rewards=outcome.rewards,
            done=outcome.done,
            truncated=outcome.truncated,
            final_values=_final_values(state, variables, out.next_state, next_env_states.obs, outcome.truncated),
            nonfinite=outcome.nonfinite,
            metrics=_step_metrics(config.logging_level, next_env_states, out.metrics, outcome.nonfinite),
            rollout_extras=out.rollout_extras,
            replay=jax.vmap(env.replay_record)(env_states) if keep_replay else None,
        )
        network_states = reset_carry(state.graphdef, state.params, variables, out.next_state, outcome.done)
        next_env_states, pool = restart(env, pool, next_env_states, outcome.done, reset_key)
        return (variables, network_states, next_env_states, pool), transition

    network = (state.graphdef, state.params, state.variables, state.network_states)
    out = functional.output_shapes(*network, state.env_states.obs)
    kept = kept_leaves(env, state.env_states, out.output.actions, recorded=keep_replay)
    carry = (state.variables, state.network_states, state.env_states, empty_reset_pool(state.env_states, kept))
    (variables, network_states, env_states, pool), transitions = jax.lax.scan(
        one_step, carry, None, length=config.rollout_length
    )
    state = state.replace(
        variables=variables,
        network_states=network_states,
        env_states=env_states,
        nonfinite_steps=state.nonfinite_steps + jnp.sum(pool.nonfinite),
    )
    return state, transitions


def first_nonfinite(transitions: Transition) -> dict[str, Any]:
    """The rollout of the environment that was not finite first (of the first one, if none was), and when it was."""
    when = jnp.argmax(jnp.any(transitions.nonfinite, axis=1))
    env = jnp.argmax(transitions.nonfinite[when])
    of_env = lambda tree: jax.tree.map(lambda x: x[:, env], tree)
    return {
        "found": jnp.any(transitions.nonfinite),
        "when": when,
        "env": env,
        "done": of_env(transitions.done),
        "records": of_env(transitions.replay),
        "actions": of_env(transitions.network_output.actions),
    }


def _final_values(
    state: TrainingState, variables: nnx.State, carry: ModuleState, obs: Any, truncated: Bool[Array, " batch"]
) -> Any:
    """The critic's view of final, pre-reset observations. Few steps end at a time limit: most skip the pass."""

    def values(obs: Any, carry: ModuleState, truncated: jax.Array, params: nnx.State, variables: nnx.State) -> Any:
        out, _ = functional.apply(state.graphdef, params, variables, carry, obs)
        return jax.tree.map(lambda v: jnp.where(truncated, v, 0.0), out.output.value_estimates)

    def values_if_any(*args: Any) -> Any:
        nothing = jax.tree.map(lambda v: jnp.zeros(v.shape, v.dtype), jax.eval_shape(values, *args))
        return jax.lax.cond(jnp.any(args[2]), values, lambda *_: nothing, *args)

    return on_each_device(values_if_any, obs, carry, truncated, everywhere=(state.params, variables))


def _step_metrics(level: LoggingLevel, env_states: Any, network_metrics: Any, nonfinite: jax.Array) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    if LoggingLevel.ENV_METRICS in level:
        zero = lambda m: tree_where(nonfinite, jnp.zeros_like(m), m)
        metrics["env"] = jax.tree.map(zero, env_states.metrics)
    if LoggingLevel.NETWORK_METRICS in level:
        # A module may return one number for the whole batch.
        rows = lambda m: m if jnp.ndim(m) else jnp.broadcast_to(m, nonfinite.shape)
        metrics["net"] = jax.tree.map(rows, network_metrics)
    return metrics


# --- evaluation -----------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Episodes:
    """What evaluation knows of its episodes, one per environment."""

    rewards: Any
    """Sum over the episode, per reward term, each [batch]."""
    lifespan: Int[Array, " batch"]
    """Steps of the episode, the ending step included."""
    metrics: dict[str, Any]
    """`env` and `net` metrics summed over the episode and divided by its lifespan."""


def evaluate(
    env: Any,
    config: EvalConfig,
    graphdef: nnx.GraphDef,
    params: nnx.State,
    variables: nnx.State,
    key: PRNGKeyArray,
) -> Episodes:
    """One whole episode in each of `config.n_envs` environments; ends as soon as the last one has.

    `graphdef` is the network in evaluation mode. Its random streams are a copy: nothing here reaches training.
    """
    env_states = reset(env, key, config.n_envs)
    network = functional.merge(graphdef, params, variables)
    carry = network.initialize_state(config.n_envs)

    def one_step(variables: nnx.State, carry: ModuleState, env_states: Any) -> tuple[Any, ...]:
        out, variables = functional.apply(graphdef, params, variables, carry, env_states.obs)
        next_states = step(env, env_states, out.output.actions)
        metrics = _step_metrics(config.logging_level, next_states, out.metrics, nonfinite_rows(next_states))
        return variables, out.next_state, next_states, metrics

    metric_shapes = jax.eval_shape(one_step, variables, carry, env_states)[3]
    out = functional.output_shapes(graphdef, params, variables, carry, env_states.obs)
    kept = kept_leaves(env, env_states, out.output.actions)
    zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tree)
    episodes = Episodes(zeros(env_states.reward), jnp.zeros(config.n_envs, jnp.int32), zeros(metric_shapes))

    def running(loop: Any) -> Bool[Array, ""]:
        t, alive, *_ = loop
        return jnp.any(alive) & (t < config.max_episode_length)

    def body(loop: Any) -> Any:
        t, alive, variables, carry, env_states, episodes = loop
        variables, carry, next_states, metrics = one_step(variables, carry, env_states)
        outcome = read_outcome(next_states)
        add = lambda total, new: total + tree_where(alive, new.astype(jnp.float32), jnp.zeros_like(total))
        episodes = Episodes(
            jax.tree.map(add, episodes.rewards, outcome.rewards),
            episodes.lifespan + alive,
            jax.tree.map(add, episodes.metrics, metrics),
        )
        # An ended episode stays where it is, so that what follows its end cannot overflow or turn into NaN.
        env_states = where_kept(~alive | outcome.done, take_kept(env_states, kept), next_states, kept)
        return t + 1, alive & ~outcome.done, variables, carry, env_states, episodes

    loop = (jnp.zeros((), jnp.int32), jnp.ones(config.n_envs, bool), variables, carry, env_states, episodes)
    *_, episodes = jax.lax.while_loop(running, body, loop)
    per_step = lambda total: total / _like(episodes.lifespan, total)
    return Episodes(episodes.rewards, episodes.lifespan, jax.tree.map(per_step, episodes.metrics))


def _like(x: jax.Array, target: jax.Array) -> jax.Array:
    return x.reshape(x.shape + (1,) * (target.ndim - x.ndim))


# --- video ----------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Recording:
    """One recorded episode: the states before and after each step, of which `length + 1` are valid."""

    states: Any
    length: Int[Array, ""]
    reward: Float[Array, ""]


def record_episode(
    env: Any,
    episode_length: int,
    graphdef: nnx.GraphDef,
    params: nnx.State,
    variables: nnx.State,
    key: PRNGKeyArray,
) -> Recording:
    """Run one deterministic episode and keep what rendering needs.

    That is `env.render_state(state)` where an environment offers it, else the whole state.
    """
    slim = getattr(env, "render_state", lambda state: state)
    first = lambda tree: jax.tree.map(lambda x: x[0], tree)
    env_states = reset(env, key, 1)
    carry = functional.merge(graphdef, params, variables).initialize_state(1)
    frame = slim(first(env_states))
    states = jax.tree.map(lambda x: jnp.broadcast_to(x, (episode_length + 1, *x.shape)), frame)
    put = lambda states, t, frame: jax.tree.map(lambda buffer, x: buffer.at[t].set(x), states, frame)

    def running(loop: Any) -> Bool[Array, ""]:
        t, done, *_ = loop
        return ~done & (t < episode_length)

    def body(loop: Any) -> Any:
        t, _, variables, carry, env_states, states, total = loop
        out, variables = functional.apply(graphdef, params, variables, carry, env_states.obs)
        env_states = step(env, env_states, out.output.actions)
        outcome = read_outcome(env_states)
        total += sum(reward[0] for reward in jax.tree.leaves(outcome.rewards))
        states = put(states, t + 1, slim(first(env_states)))
        return t + 1, outcome.done[0], variables, out.next_state, env_states, states, total

    loop = (
        jnp.zeros((), jnp.int32),
        jnp.zeros((), bool),
        variables,
        carry,
        env_states,
        states,
        jnp.zeros(()),
    )
    length, _, _, _, _, states, total = jax.lax.while_loop(running, body, loop)
    return Recording(states, length, total)


def trajectory(recording: Recording) -> list[Any]:
    """The recorded states as a list of `length + 1`, on the host; one transfer."""
    states, length = jax.device_get((recording.states, recording.length))
    return [jax.tree.map(lambda x: x[t], states) for t in range(int(length) + 1)]


# --- activations ----------------------------------------------------------------------------------------------


def record_activations_rollout(
    env: Any,
    networks: StatefulModule,
    n_envs: int,
    max_episode_length: int,
    key: PRNGKeyArray,
    layers: Sequence[str] | None = None,
    dtype: Any = None,
) -> tuple[Any, Bool[Array, "time batch"]]:
    """What every module put out in one deterministic episode of each environment.

    Keeps `max_episode_length * n_envs` rows of all recorded units on the device. `networks` is left as it was.

    Args:
      env: the environment.
      networks: the network; it need not be a recording one.
      n_envs: episodes, one in each environment.
      max_episode_length: steps that are recorded.
      key: random key of the initial states.
      layers: which modules, as for `with_recording`; None takes all.
      dtype: what floating-point activations are kept as; None keeps theirs.

    Returns:
      Activations in nested dicts like the modules, leaves [time, batch, ...], and for each step whether the episode
      had ended before it. Such steps repeat the end and mean nothing.
    """
    network = with_recording(networks, layers, dtype)
    graphdef, params, variables = functional.split(network)
    graphdef = functional.evaluation_graphdef(graphdef, params, variables)

    @jax.jit
    def record(params: nnx.State, variables: nnx.State, key: PRNGKeyArray) -> Any:
        def one_step(carry: Any, _: None) -> tuple[Any, Any]:
            variables, network_states, env_states, ended = carry
            out, variables = functional.apply(graphdef, params, variables, network_states, env_states.obs)
            next_states = step(env, env_states, out.output.actions)
            done = ended | read_outcome(next_states).done
            env_states = tree_where(done, env_states, next_states)
            return (variables, out.next_state, env_states, done), (extract_activations(out.metrics), ended)

        carry = functional.merge(graphdef, params, variables).initialize_state(n_envs)
        start = (variables, carry, reset(env, key, n_envs), jnp.zeros(n_envs, bool))
        return jax.lax.scan(one_step, start, None, length=max_episode_length)[1]

    return record(params, variables, key)
