"""Stepping environments: what an ending means, where episodes restart, evaluation, recording and the wrappers."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brax import envs as brax_envs
from brax.envs.wrappers.training import EpisodeWrapper as BraxEpisodeWrapper
from flax import nnx
from probe_envs import (
    BrokenResets,
    Counter,
    CountingReadout,
    Poisoned,
    ProbeState,
    Readout,
    TwoArms,
    all_finite,
    assert_same_bits,
    numpy_leaves,
    two_arm_network,
)

from nnx_ppo.algorithms import ppo, rollout
from nnx_ppo.algorithms.config import EvalConfig, LoggingLevel, PPOConfig, TrainConfig
from nnx_ppo.algorithms.keys import numbered_keys
from nnx_ppo.networks import functional
from nnx_ppo.networks.factories import make_mlp_actor_critic
from nnx_ppo.wrappers.episode_wrapper import EpisodeWrapper
from nnx_ppo.wrappers.reward_scaling_wrapper import RewardScalingWrapper


def started(env, network, n_envs=3, seed=0, **config):
    config = PPOConfig(n_envs=n_envs, n_minibatches=1, **config)
    return config, ppo.initial_training_state(env, network, TrainConfig(ppo=config, seed=seed))


def unrolled(env, network, n_envs=3, rollout_length=6, iterations=1, **config):
    """The state after some rollouts and all their transitions, [time, batch, ...]."""
    config, state = started(env, network, n_envs, rollout_length=rollout_length, **config)
    unroll = jax.jit(functools.partial(rollout.unroll, env, config))
    parts = []
    for _ in range(iterations):
        state, transitions = unroll(state)
        state = state.replace(iteration=state.iteration + 1)
        parts.append(transitions)
    return state, jax.tree.map(lambda *x: np.concatenate(x), *parts)


# --- what a step said -----------------------------------------------------------------------------------------


def outcome(**changes):
    state = ProbeState(jnp.zeros((4, 2)), jnp.arange(4.0), jnp.asarray([0.0, 1.0, 0.0, 1.0]))
    return rollout.read_outcome(state.replace(**changes))


def test_done_without_a_time_limit_is_terminated():
    out = outcome()
    np.testing.assert_array_equal(out.done, [False, True, False, True])
    assert not out.truncated.any()
    np.testing.assert_array_equal(out.rewards, np.arange(4.0))
    assert out.done.dtype == out.truncated.dtype == out.nonfinite.dtype == bool


@pytest.mark.parametrize("name", ["truncated", "truncation"])
@pytest.mark.parametrize("dtype", [bool, jnp.float32, jnp.int32])
def test_both_spellings_of_a_time_limit_are_read_in_any_dtype(name, dtype):
    out = outcome(info={name: jnp.asarray([0, 0, 0, 1], dtype)})
    np.testing.assert_array_equal(out.truncated, [False, False, False, True])
    np.testing.assert_array_equal(out.done, [False, True, False, True])


def test_a_time_limit_ends_the_episode_even_if_the_environment_forgets_to_say_done():
    np.testing.assert_array_equal(outcome(info={"truncated": jnp.asarray([1, 0, 0, 0])}).done, [1, 1, 0, 1])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, -1e30])
@pytest.mark.parametrize("where", ["obs", "reward"])
def test_a_nonfinite_observation_or_reward_is_a_termination_with_reward_zero(where, value):
    spoiled = {"obs": jnp.zeros((4, 2)).at[3, 1].set(value), "reward": jnp.arange(4.0).at[3].set(value)}[where]
    out = outcome(**{where: spoiled, "info": {"truncated": jnp.asarray([0, 0, 0, 1])}})
    np.testing.assert_array_equal(out.nonfinite, [False, False, False, True])
    np.testing.assert_array_equal(out.done, [False, True, False, True])
    assert not out.truncated.any()
    np.testing.assert_array_equal(out.rewards, [0, 1, 2, 0])


def test_a_nan_anywhere_in_the_state_counts_and_an_infinity_outside_observation_and_reward_does_not():
    inner = jnp.zeros((4, 2, 2)).at[0, 1, 1].set(np.nan).at[2, 0, 0].set(np.inf)
    np.testing.assert_array_equal(outcome(info={"inner": inner}).nonfinite, [True, False, False, False])


def test_every_reward_term_of_a_nonfinite_step_is_zero():
    out = outcome(reward={"a": jnp.ones(4), "b": jnp.asarray([1.0, np.nan, 1.0, 1.0])})
    np.testing.assert_array_equal(out.rewards["a"], [1, 0, 1, 1])
    np.testing.assert_array_equal(out.rewards["b"], [1, 0, 1, 1])


# --- restarting -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 5])
def test_no_initial_state_is_used_twice_however_short_episodes_are(length):
    iterations, steps = 3, 6
    state, transitions = unrolled(Counter(length), Readout(), n_envs=4, rollout_length=steps, iterations=iterations)
    starts = transitions.obs[transitions.obs[..., 0] == 0][:, 1].tolist()
    starts += np.asarray(state.env_states.obs)[np.asarray(state.env_states.obs[:, 0]) == 0, 1].tolist()
    episodes = 4 * (1 + iterations * steps // length)
    assert len(starts) == episodes
    assert len(set(starts)) == episodes
    # Every episode runs from 0 to its length without a step of another in between.
    np.testing.assert_array_equal(transitions.obs[:, 0, 0], np.arange(iterations * steps) % length)


class CountedResets(Counter):
    """Counts on the host how many single environments are reset."""

    def __init__(self, length):
        super().__init__(length)
        self.resets = 0

    def reset(self, rng):
        def count(number):
            self.resets += np.size(number)

        state = super().reset(rng)
        jax.debug.callback(count, state.obs[1], ordered=False)
        return state


@pytest.mark.parametrize(("length", "draws"), [(6, 1), (3, 2), (1, 6)])
def test_an_iteration_draws_as_many_pools_as_episodes_end_in_one_environment(length, draws):
    env = CountedResets(length)
    config, state = started(env, Readout(), n_envs=5, rollout_length=6)
    unroll = jax.jit(functools.partial(rollout.unroll, env, config))
    jax.effects_barrier()
    env.resets = 0
    jax.block_until_ready(unroll(state))
    jax.effects_barrier()
    assert env.resets == 5 * draws


def test_reset_draws_another_state_for_each_environment_and_key():
    env = Counter()
    ids = lambda seed: np.asarray(rollout.reset(env, jax.random.key(seed), 50).obs[:, 1]).tolist()
    assert len(set(ids(0) + ids(1))) == 100


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PhysicsState(ProbeState):
    """A state with something of its own, as MJX's data is."""

    physics: dict = dataclasses.field(default_factory=dict)


class Physics:
    """A decaying number in two substeps; `energy` is worked out anew in each, `drawn` is handed on as it is.

    Args:
      public: keep everything in `info`, where it lasts whatever a step reads.
    """

    observation_size, action_size = 2, 1

    def __init__(self, public):
        self.public = public

    def reset(self, rng):
        position = 1 + jax.random.uniform(rng)
        physics = {"position": position, "energy": position**2, "drawn": position, "steps": jnp.zeros(())}
        return self.state(physics, jnp.zeros(()))

    def step(self, state, action):
        def substep(physics, _):
            position = 0.8 * physics["position"] + 0.01 * action[0]
            return {**physics, "position": position, "energy": position**2}, None

        physics = state.info["physics"] if self.public else state.physics
        physics, _ = jax.lax.scan(substep, physics, None, length=2)
        physics["steps"] += 1
        return self.state(physics, (physics["energy"] < 0.3 * physics["drawn"]).astype(jnp.float32))

    def state(self, physics, done):
        obs = jnp.stack([physics["position"], physics["energy"]])
        info, own = ({"physics": physics}, {}) if self.public else ({}, physics)
        return PhysicsState(obs, physics["energy"], done, info, {}, own)

    def replay_record(self, state):
        return state.physics["energy"]


def test_what_every_step_works_out_anew_need_not_be_restarted_and_nothing_that_is_seen_changes():
    network = make_mlp_actor_critic(2, 1, [8], [8], nnx.Rngs(0))
    after, seen = {}, {}
    for public in (True, False):
        after[public], seen[public] = unrolled(Physics(public), network, n_envs=7, rollout_length=9, iterations=3)
    assert_same_bits(seen[True], seen[False])
    assert 5 < np.sum(seen[True].done) < 100
    assert_same_bits(after[True].env_states.obs, after[False].env_states.obs)
    lasting, all_of_it = after[False].env_states.physics, after[True].env_states.info["physics"]
    for name in ("position", "drawn", "steps"):
        np.testing.assert_array_equal(lasting[name], all_of_it[name])
    # Where the last step ended an episode, the energy is still the one of its end, and only there.
    ended = seen[False].done[-1]
    np.testing.assert_array_equal(lasting["energy"][~ended], all_of_it["energy"][~ended])
    assert np.all(lasting["energy"][ended] != all_of_it["energy"][ended])


@pytest.mark.parametrize(
    ("public", "recorded", "lasts"),
    [(False, False, {"position", "drawn", "steps"}), (False, True, {"position", "drawn", "steps", "energy"})],
)
def test_what_lasts_is_what_a_step_or_a_record_reads_and_what_everyone_may_see(public, recorded, lasts):
    env = Physics(public)
    states = rollout.reset(env, jax.random.key(0), 3)
    kept = rollout.kept_leaves(env, states, jnp.zeros((3, 1)), recorded)
    found = rollout.take_kept(states, kept)
    assert {name for name, leaf in found.physics.items() if leaf is not None} == lasts
    assert all(leaf is not None for leaf in (found.obs, found.reward, found.done))


def test_an_evaluation_is_the_same_whether_or_not_all_of_the_state_lasts():
    network = make_mlp_actor_critic(2, 1, [8], [8], nnx.Rngs(0))
    graphdef, params, variables = functional.split(network)
    episodes = [
        rollout.evaluate(Physics(public), EvalConfig(n_envs=5), graphdef, params, variables, jax.random.key(1))
        for public in (True, False)
    ]
    assert_same_bits(*episodes)
    assert len(set(np.asarray(episodes[0].lifespan).tolist())) > 1


def test_the_carry_is_reset_with_its_episode_and_with_no_other():
    env = Counter(5, random_length=True)
    state, transitions = unrolled(env, CountingReadout(), n_envs=6, rollout_length=17)
    steps_so_far = transitions.obs[..., 0]
    calls = np.rint((transitions.network_output.value_estimates - transitions.obs.sum(-1)) / 100)
    np.testing.assert_array_equal(calls, steps_so_far + 1)
    np.testing.assert_array_equal(state.network_states["count"], state.env_states.obs[:, 0])
    assert len({tuple(x) for x in transitions.done.T}) > 1


# --- time limits ----------------------------------------------------------------------------------------------


def final_values(transitions):
    return np.asarray(transitions.final_values)


@pytest.mark.parametrize("ending", ["truncated", "truncation"])
def test_a_truncated_step_bootstraps_from_the_observation_before_the_reset(ending):
    _, transitions = unrolled(Counter(4, ending), Readout(2.0), n_envs=3, rollout_length=8)
    np.testing.assert_array_equal(transitions.truncated[:, 0], [0, 0, 0, 1, 0, 0, 0, 1])
    expected = np.where(transitions.truncated, 2 * (4 + transitions.obs[..., 1]), 0)
    np.testing.assert_allclose(final_values(transitions), expected, rtol=1e-6)


def test_for_a_recurrent_network_it_also_uses_the_carry_before_the_reset():
    _, transitions = unrolled(Counter(4, "truncated"), CountingReadout(2.0), n_envs=3, rollout_length=8)
    # The call on the final observation is the fifth of the episode.
    expected = np.where(transitions.truncated, 500 + 2 * (4 + transitions.obs[..., 1]), 0)
    np.testing.assert_allclose(final_values(transitions), expected, rtol=1e-6)


def test_a_terminated_step_bootstraps_with_nothing():
    config, state = started(Counter(3), Readout(2.0), rollout_length=6, discounting_factor=0.5, gae_lambda=1.0)
    state, transitions = jax.jit(functools.partial(rollout.unroll, Counter(3), config))(state)
    assert not transitions.truncated.any()
    _, targets = ppo.estimate_advantages(config, state, transitions)
    # With lambda = 1 a target is the discounted sum of rewards 1, 2, 3 up to the end.
    np.testing.assert_allclose(targets[:, 0], [1 + 2 / 2 + 3 / 4, 2 + 3 / 2, 3] * 2, rtol=1e-5)


def test_the_last_step_of_a_rollout_bootstraps_from_where_the_next_one_starts():
    config, state = started(Counter(), CountingReadout(2.0), rollout_length=2, discounting_factor=0.5, gae_lambda=0.0)
    state, transitions = jax.jit(functools.partial(rollout.unroll, Counter(), config))(state)
    _, targets = ppo.estimate_advantages(config, state, transitions)
    number = np.asarray(transitions.obs[0, :, 1])
    np.testing.assert_allclose(targets[0], 1 + 0.5 * (200 + 2 * (1 + number)), rtol=1e-5)
    np.testing.assert_allclose(targets[1], 2 + 0.5 * (300 + 2 * (2 + number)), rtol=1e-5)


# --- bad numbers ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def poisoned_run():
    env = Poisoned(4)
    config, start = started(env, make_mlp_actor_critic(2, 1, [4], [4], nnx.Rngs(0)), 4, rollout_length=8, n_epochs=1)
    unroll = jax.jit(functools.partial(rollout.unroll, env, config))
    step = jax.jit(functools.partial(ppo.ppo_step, env, config))

    def run(place, poison):
        """Transitions, state and metrics after an iteration; environment 1 is poisoned in its first episode."""
        info = dict(start.env_states.info)
        info["poison"], info["place"] = info["poison"].at[1].set(poison), info["place"].at[1].set(place)
        state = start.replace(env_states=start.env_states.replace(info=info))
        return unroll(state)[1], *step(state)

    return run


@pytest.mark.parametrize(("place", "poison"), [(0, 1), (0, 2), (1, 1), (1, 3), (2, 1)])
def test_one_broken_environment_is_contained(poisoned_run, place, poison):
    healthy, *_ = poisoned_run(place, 0)
    broken, after, metrics = poisoned_run(place, poison)
    others = np.asarray([0, 2, 3])
    assert_same_bits(
        [broken.obs[:, others], broken.rewards[:, others], broken.done[:, others]],
        [healthy.obs[:, others], healthy.rewards[:, others], healthy.done[:, others]],
    )
    # It breaks with the second step: terminated, reward 0, and a fresh episode of four steps follows.
    np.testing.assert_array_equal(broken.nonfinite[:, 1], np.arange(8) == 1)
    np.testing.assert_array_equal(broken.done[:, 1], np.isin(np.arange(8), [1, 5]))
    np.testing.assert_array_equal(broken.rewards[:, 1], [1, 0, 1, 2, 3, 4, 1, 2])
    np.testing.assert_array_equal(broken.obs[:, 1, 0], [0, 1, 0, 1, 2, 3, 0, 1])
    assert not broken.truncated.any()
    assert all_finite(after)
    assert all_finite(metrics)
    assert int(after.nonfinite_steps) == 1
    assert int(after.skipped_updates) == 0


def test_broken_initial_states_are_replaced_and_counted():
    env = BrokenResets(0.4)
    network = make_mlp_actor_critic(2, 1, [4], [4], nnx.Rngs(0))
    config, state = started(env, network, 16, rollout_length=6)
    assert all_finite(state.env_states)
    step = jax.jit(functools.partial(ppo.ppo_step, env, config))
    for _ in range(2):
        state, metrics = step(state)
    assert all_finite(state)
    assert all_finite(metrics)
    assert int(state.nonfinite_steps) > 0


def test_if_every_initial_state_is_broken_the_network_still_sees_no_nan():
    env = BrokenResets(1.0)
    network = make_mlp_actor_critic(2, 1, [4], [4], nnx.Rngs(0))
    config, state = started(env, network, 1, rollout_length=6)
    state, _ = jax.jit(functools.partial(ppo.ppo_step, env, config))(state)
    assert all_finite(state)
    assert int(state.nonfinite_steps) > 0


def test_one_broken_initial_state_leaves_the_others_as_they_are():
    env = BrokenResets(0.3)
    key = jax.random.key(1)
    raw = jax.vmap(env.reset)(numbered_keys(key, jnp.arange(20)))
    good = np.isfinite(raw.obs).all(-1)
    assert 0 < good.sum() < 20
    states = rollout.reset(env, key, 20)
    np.testing.assert_array_equal(states.obs[good], raw.obs[good])
    assert all_finite(states)


# --- shapes and dtypes ----------------------------------------------------------------------------------------


class Changing:
    """Returns another state at reset than after a step."""

    observation_size, action_size = 1, 1

    def __init__(self, at_reset, after_step):
        self.at_reset, self.after_step = at_reset, after_step

    def reset(self, rng):
        return ProbeState(jnp.zeros(1), jnp.zeros(()), jnp.zeros(())).replace(**self.at_reset)

    def step(self, state, action):
        return state.replace(reward=jnp.ones(())).replace(**self.after_step)


@pytest.mark.parametrize(
    ("at_reset", "after_step", "said"),
    [
        ({}, {"obs": jnp.zeros(2)}, [".obs", "float32[1] at reset", "float32[2] after a step"]),
        ({}, {"info": {"new": jnp.zeros(())}}, [".info['new'] only after a step", "reset too"]),
        ({"metrics": {"old": jnp.zeros(())}}, {"metrics": {}}, [".metrics['old'] only at reset"]),
        ({"reward": jnp.zeros((), int)}, {"reward": jnp.asarray(0.7)}, [".reward", "int32[]", "float32[]"]),
        ({"obs": jnp.zeros(1, bool)}, {"obs": jnp.ones(1)}, [".obs", "bool[1]", "float32[1]"]),
        ({"info": {"k": jnp.zeros(2)}}, {"info": {"k": jnp.zeros(3)}}, [".info['k']", "float32[2]", "float32[3]"]),
    ],
)
def test_a_step_that_changes_its_state_is_refused_with_the_entry_and_both_types(at_reset, after_step, said):
    with pytest.raises(TypeError) as refused:
        started(Changing(at_reset, after_step), make_mlp_actor_critic(1, 1, [], [], nnx.Rngs(0)))
    for part in said:
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("at_reset", "after_step"),
    [
        ({"done": jnp.zeros((), bool)}, {"done": jnp.zeros(())}),
        ({"done": jnp.zeros(())}, {"done": jnp.zeros((), bool)}),
        ({"reward": 0.0, "done": False}, {"reward": 1.0, "done": 0.0}),
        ({"info": {"truncation": 0.0}}, {"info": {"truncation": jnp.ones((), bool)}}),
        ({"metrics": {"m": jnp.zeros(())}}, {"metrics": {"m": jnp.ones((), jnp.int32)}}),
    ],
)
def test_harmless_differences_of_dtype_are_evened_out(at_reset, after_step):
    env = Changing(at_reset, after_step)
    _, transitions = unrolled(env, make_mlp_actor_critic(1, 1, [], [], nnx.Rngs(0)), iterations=2)
    np.testing.assert_array_equal(transitions.rewards, 1.0)


def test_an_environment_need_not_be_hashable():
    import dataclasses

    @dataclasses.dataclass
    class Env(Counter):
        table: jax.Array = dataclasses.field(default_factory=lambda: jnp.ones(3))

        def __post_init__(self):
            Counter.__init__(self, 3)

    with pytest.raises(TypeError):
        hash(Env())
    _, transitions = unrolled(Env(), Readout(), rollout_length=3)
    np.testing.assert_array_equal(transitions.rewards[:, 0], [1, 2, 3])


# --- trees, keys ----------------------------------------------------------------------------------------------


class Random:
    """Keeps a key in its state, typed or raw, and draws its observations from it."""

    observation_size, action_size = 1, 1

    def __init__(self, raw):
        self.raw = raw

    def reset(self, rng):
        rng = jax.random.key_data(rng) if self.raw else rng
        return ProbeState(jnp.zeros(1), jnp.zeros(()), jnp.zeros(()), {"rng": rng, "t": jnp.zeros((), jnp.int32)})

    def step(self, state, action):
        key = jax.random.wrap_key_data(state.info["rng"]) if self.raw else state.info["rng"]
        key, draw = jax.random.split(key)
        t = state.info["t"] + 1
        info = {"rng": jax.random.key_data(key) if self.raw else key, "t": t}
        return state.replace(obs=jax.random.normal(draw, (1,)), info=info, done=jnp.where(t == 3, 1.0, 0.0))


@pytest.mark.parametrize("raw", [True, False])
def test_random_keys_may_live_in_the_state(raw):
    env, network = Random(raw), make_mlp_actor_critic(1, 1, [], [], nnx.Rngs(0))
    _, transitions = unrolled(env, network, n_envs=4, rollout_length=9)
    drawn = transitions.obs[transitions.obs != 0]
    assert len(set(drawn.tolist())) == drawn.size == 4 * 6
    graphdef, params, variables = functional.split(network)
    recording = jax.jit(functools.partial(rollout.record_episode, env, 5, graphdef))(
        params, variables, jax.random.key(0)
    )
    states = rollout.trajectory(recording)
    assert len(states) == 4
    keys = {tuple(numpy_leaves(state.info["rng"])[0].ravel().tolist()) for state in states}
    assert len(keys) == 4


def test_observations_actions_rewards_and_values_may_be_trees():
    env, network = TwoArms(), two_arm_network(nnx.Rngs(0))
    config, state = started(env, network, 4, rollout_length=6)
    state, metrics = jax.jit(functools.partial(ppo.ppo_step, env, config))(state)
    assert all_finite(state)
    assert {"losses/critic_loss/x", "losses/critic_loss/y", "losses/actor_loss/x"} <= metrics.keys()
    assert state.env_states.obs["clock"].dtype == jnp.int32


# --- evaluation -----------------------------------------------------------------------------------------------


def evaluate(env, network, key=0, n_envs=8, max_episode_length=20, level=LoggingLevel.NONE):
    graphdef, params, variables = functional.split(network)
    graphdef = functional.evaluation_graphdef(graphdef, params, variables)
    config = EvalConfig(n_envs=n_envs, max_episode_length=max_episode_length, logging_level=level)
    program = jax.jit(functools.partial(rollout.evaluate, env, config, graphdef))
    return jax.device_get(program(params, variables, jax.random.key(key)))


def test_evaluation_sums_each_episode_up_to_and_with_its_end():
    episodes = evaluate(Counter(9, random_length=True), Readout(), n_envs=40)
    n = episodes.lifespan
    assert 1 <= n.min() < n.max() <= 9
    np.testing.assert_array_equal(episodes.rewards, n * (n + 1) / 2)


@pytest.mark.parametrize("ending", ["terminated", "truncated", "truncation"])
def test_evaluation_ends_with_the_episode_however_it_ends(ending):
    episodes = evaluate(Counter(4, ending), Readout())
    np.testing.assert_array_equal(episodes.lifespan, 4)
    np.testing.assert_array_equal(episodes.rewards, 10)


def test_evaluation_cuts_an_endless_episode():
    episodes = evaluate(Counter(), Readout(), max_episode_length=7)
    np.testing.assert_array_equal(episodes.lifespan, 7)
    np.testing.assert_array_equal(episodes.rewards, 28)


def test_evaluation_through_the_episode_wrapper_runs_whole_episodes():
    episodes = evaluate(EpisodeWrapper(Counter(), 6), Readout())
    np.testing.assert_array_equal(episodes.lifespan, 6)


def test_evaluation_stops_once_every_episode_ended():
    steps = []

    class Counted(Counter):
        def step(self, state, action):
            jax.debug.callback(lambda x: steps.append(1), state.obs[0])
            return super().step(state, action)

    evaluate(Counted(3), Readout(), n_envs=2, max_episode_length=1000)
    jax.effects_barrier()
    assert len(steps) in (3, 2 * 3)  # once per step, or once per step and environment


def test_evaluation_is_deterministic_and_draws_new_states_with_another_key():
    network = make_mlp_actor_critic(2, 1, [4], [4], nnx.Rngs(0))

    class Acting(Counter):
        def step(self, state, action):
            state = super().step(state, action)
            return state.replace(reward=state.obs[1] + action[0])

    env = Acting(3)
    assert_same_bits(evaluate(env, network, key=0), evaluate(env, network, key=0))
    assert not np.intersect1d(evaluate(env, network, key=0).rewards, evaluate(env, network, key=1).rewards).size


def test_evaluation_carries_the_memory_of_a_recurrent_network_from_step_to_step():
    class Remembering(Counter):
        def step(self, state, action):
            state = super().step(state, action)
            return state.replace(reward=action[0])

    class Acts(CountingReadout):
        def __call__(self, state, obs, rollout_extras=None):
            out = super().__call__(state, obs, rollout_extras)
            return out.replace(output=out.output.replace(actions=out.next_state["count"][:, None]))

    episodes = evaluate(Remembering(4), Acts())
    np.testing.assert_array_equal(episodes.rewards, 1 + 2 + 3 + 4)


def test_evaluation_metrics_are_means_over_the_life_of_each_episode():
    episodes = evaluate(Counter(9, random_length=True), Readout(), n_envs=20, level=LoggingLevel.ENV_METRICS)
    np.testing.assert_allclose(episodes.metrics["env"]["steps"], (episodes.lifespan + 1) / 2, rtol=1e-6)
    assert "net" not in episodes.metrics


def test_evaluation_takes_network_metrics_of_any_shape():
    class Telling(Readout):
        def __call__(self, state, obs, rollout_extras=None):
            out = super().__call__(state, obs, rollout_extras)
            return out.replace(metrics={"one": jnp.asarray(2.0), "step": obs[:, 0], "both": obs})

    episodes = evaluate(Counter(4), Telling(), n_envs=3, level=LoggingLevel.NETWORK_METRICS)
    net = episodes.metrics["net"]
    np.testing.assert_array_equal(net["one"], [2, 2, 2])
    np.testing.assert_array_equal(net["step"], [1.5, 1.5, 1.5])  # seen: 0, 1, 2, 3
    assert net["both"].shape == (3, 2)


def test_a_broken_episode_ends_and_evaluates_to_what_it_had():
    class Breaking(Counter):
        def step(self, state, action):
            state = super().step(state, action)
            return state.replace(obs=jnp.where(state.obs[0] >= 3, jnp.nan, state.obs))

    episodes = evaluate(Breaking(), Readout(), level=LoggingLevel.ENV_METRICS)
    np.testing.assert_array_equal(episodes.lifespan, 3)
    np.testing.assert_array_equal(episodes.rewards, 1 + 2)
    assert all_finite(episodes)


def test_several_reward_terms_are_evaluated_apart():
    episodes = evaluate(TwoArms(), two_arm_network(nnx.Rngs(0)))
    assert set(episodes.rewards) == {"x", "y"}
    np.testing.assert_array_equal(episodes.lifespan, 3)


# --- recording ------------------------------------------------------------------------------------------------


def record(env, network, length):
    graphdef, params, variables = functional.split(network)
    program = jax.jit(functools.partial(rollout.record_episode, env, length, graphdef))
    return program(params, variables, jax.random.key(0))


@pytest.mark.parametrize(("length", "steps"), [(10, 4), (4, 4), (2, 2)])
def test_a_recording_holds_the_initial_state_and_one_per_step(length, steps):
    recording = record(Counter(4), Readout(), length)
    states = rollout.trajectory(recording)
    assert [float(state.obs[0]) for state in states] == list(range(steps + 1))
    assert int(recording.length) == steps
    assert float(recording.reward) == steps * (steps + 1) / 2
    assert len({float(state.obs[1]) for state in states}) == 1


def test_a_recording_keeps_only_what_the_environment_says_rendering_needs():
    class Slim(Counter):
        def render_state(self, state):
            return {"position": state.obs[0]}

    states = rollout.trajectory(record(Slim(2), Readout(), 5))
    assert [list(state) for state in states] == [["position"]] * 3
    assert [float(state["position"]) for state in states] == [0, 1, 2]


# --- wrappers -------------------------------------------------------------------------------------------------


def steps_of(env, n, seed=0):
    state = jax.jit(env.reset)(jax.random.key(seed))
    states = [state]
    step = jax.jit(env.step)
    for _ in range(n):
        states.append(step(states[-1], jnp.zeros(1)))
    return states


def test_the_episode_wrapper_counts_from_zero_and_truncates_at_its_limit():
    states = steps_of(EpisodeWrapper(Counter(), 3), 3)
    assert [int(s.info["step_counter"]) for s in states] == [0, 1, 2, 3]
    assert [bool(s.info["truncated"]) for s in states] == [False, False, False, True]
    assert [float(s.done) for s in states] == [0, 0, 0, 1]


def test_a_state_that_is_terminal_at_the_time_limit_is_not_truncated():
    last = steps_of(EpisodeWrapper(Counter(3), 3), 3)[-1]
    assert bool(last.done)
    assert not bool(last.info["truncated"])


@pytest.mark.parametrize("ending", ["truncated", "truncation"])
@pytest.mark.parametrize("limit", [2, 5])
def test_a_time_limit_of_the_inner_environment_is_respected(ending, limit):
    states = steps_of(EpisodeWrapper(Counter(2, ending), limit), 2)
    assert [bool(s.info["truncated"]) for s in states] == [False, False, True]
    assert bool(states[-1].done)


def test_an_inner_environment_that_builds_its_info_anew_can_be_wrapped():
    class Fresh(Counter):
        def step(self, state, action):
            state = super().step(state, action)
            return state.replace(info={name: state.info[name] for name in ("id", "key", "length")})

    states = steps_of(EpisodeWrapper(Fresh(), 2), 2)
    assert [bool(s.info["truncated"]) for s in states] == [False, False, True]


def test_wrapping_does_not_touch_the_state_it_was_given():
    env = EpisodeWrapper(Counter(), 3)
    state = env.reset(jax.random.key(0))
    env.step(state, jnp.zeros(1))
    assert int(state.info["step_counter"]) == 0


def test_only_the_first_reset_of_training_spreads_the_phases():
    env = EpisodeWrapper(Counter(), 5)
    state, transitions = unrolled(env, Readout(), n_envs=64, rollout_length=5)
    _config, first = started(env, Readout(), n_envs=64)
    counters = collections.Counter(np.asarray(first.env_states.info["step_counter"]).tolist())
    assert set(counters) == {0, 1, 2, 3, 4}
    # Each environment meets its limit once within the limit, and the episode that follows starts from 0.
    np.testing.assert_array_equal(transitions.truncated.sum(0), 1)
    first_end = transitions.truncated.argmax(0)
    np.testing.assert_array_equal(state.env_states.info["step_counter"], 4 - first_end)


def test_an_episode_limit_below_one_is_refused():
    with pytest.raises(ValueError, match="max_len=0; an episode has at least 1 step"):
        EpisodeWrapper(Counter(), 0)


def test_the_reward_scaling_wrapper_scales_every_term_and_nothing_else():
    env = RewardScalingWrapper(TwoArms(), 0.5)
    plain = TwoArms()
    state = plain.step(plain.reset(jax.random.key(0)), {"x": jnp.ones(1), "y": jnp.ones(2)})
    scaled = env.step(env.reset(jax.random.key(0)), {"x": jnp.ones(1), "y": jnp.ones(2)})
    np.testing.assert_allclose(scaled.reward["x"], 0.5 * state.reward["x"])
    np.testing.assert_allclose(scaled.reward["y"], 0.5 * state.reward["y"])
    assert_same_bits(scaled.obs, state.obs)
    assert env.observation_size == plain.observation_size


def test_wrappers_pass_on_what_they_do_not_have_and_say_what_nobody_has():
    env = RewardScalingWrapper(EpisodeWrapper(Counter(), 7), 2.0)
    assert env.max_len == 7
    assert callable(env.randomize_phase)
    assert not hasattr(env, "render")
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = env.no_such_thing


# --- Brax -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [
        lambda env: env,
        lambda env: EpisodeWrapper(env, 3),
        lambda env: BraxEpisodeWrapper(env, 3, 1),
        lambda env: EpisodeWrapper(BraxEpisodeWrapper(env, 3, 1), 10),
    ],
    ids=["bare", "ours", "brax's", "both"],
)
def test_a_brax_environment_trains_and_its_time_limits_are_truncations(wrap, request):
    env = wrap(brax_envs.get_environment("fast"))
    network = make_mlp_actor_critic(env.observation_size, env.action_size, [4], [4], nnx.Rngs(0))
    config, state = started(env, network, 4, rollout_length=8)
    if "step_counter" in state.env_states.info:
        info = {**state.env_states.info, "step_counter": jnp.zeros(4, jnp.int32)}
        state = state.replace(env_states=state.env_states.replace(info=info))
    after, transitions = jax.jit(functools.partial(rollout.unroll, env, config))(state)
    expected = np.isin(np.arange(8), [2, 5]) & ("bare" not in request.node.name)
    np.testing.assert_array_equal(transitions.done, np.repeat(expected[:, None], 4, 1))
    np.testing.assert_array_equal(transitions.truncated, transitions.done)
    assert all_finite(transitions)
    assert int(after.nonfinite_steps) == 0
