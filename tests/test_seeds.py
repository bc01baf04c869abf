"""Several seeds in one program: each does what it would do alone."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from probe_envs import Counter, Poisoned, all_finite, assert_same_bits, assert_same_up_to_rounding

from envs.cartpole import CartpoleSwingup
from nnx_ppo.algorithms.config import EvalConfig, LoggingLevel, PPOConfig, TrainConfig
from nnx_ppo.algorithms.ppo import train_ppo
from nnx_ppo.algorithms.seeds import train_ppo_seeds
from nnx_ppo.networks.factories import make_mlp_actor_critic
from nnx_ppo.wrappers.episode_wrapper import EpisodeWrapper

PPO = PPOConfig(n_envs=4, rollout_length=5, n_minibatches=2, n_epochs=2, total_steps=60, learning_rate=1e-3)
CONFIG = TrainConfig(ppo=PPO, eval=EvalConfig(n_envs=3, every_steps=20, max_episode_length=6))
SEEDS = (3, 0, 11)


def make_networks(env, rngs):
    return make_mlp_actor_critic(env.observation_size, env.action_size, [8], [8], rngs, normalize_obs=True)


def alone(env, seed, config=CONFIG, networks=make_networks):
    records = []
    log_fn = lambda metrics, steps: records.append((steps, metrics))
    return train_ppo(env, networks(env, nnx.Rngs(seed)), config, seed=seed, log_fn=log_fn), records


@pytest.fixture(scope="module", params=["counter", "native physics"])
def together(request):
    env = Counter(4, random_length=True) if request.param == "counter" else CartpoleSwingup(physics="native")
    env = EpisodeWrapper(env, 5)
    records = []
    result = train_ppo_seeds(env, make_networks, CONFIG, SEEDS, log_fn=lambda m, steps: records.append((steps, m)))
    return env, result, records


@pytest.mark.parametrize("row", range(len(SEEDS)))
def test_each_seed_is_its_single_run(together, row):
    env, result, records = together
    single, single_records = alone(env, SEEDS[row])
    state = result.training_state(SEEDS[row])
    assert_same_up_to_rounding(state.params, single.training_state.params)
    assert [steps for steps, _ in records] == [steps for steps, _ in single_records] == [0, 20, 40, 60]
    for (_, metrics), (_, wanted) in zip(records, single_records, strict=True):
        assert metrics.keys() == wanted.keys()
        for name in wanted:
            np.testing.assert_allclose(metrics[name][row], wanted[name], rtol=1e-2, atol=1e-4, err_msg=name)


def test_results_are_arrays_of_seed_and_evaluation(together):
    _, result, records = together
    assert result.seeds == SEEDS
    np.testing.assert_array_equal(result.eval_steps, [0, 20, 40, 60])
    name = "eval/episode_reward/mean"
    assert result.eval_history[name].shape == (3, 4)
    np.testing.assert_array_equal(result.eval_history[name].T, [metrics[name] for _, metrics in records])
    assert all(value.shape == (3,) for value in result.final_metrics.values())
    assert (result.total_steps, result.total_iterations) == (60, 3)
    assert result.training_state(11).steps_taken == 60


def test_the_state_of_one_seed_trains_on_alone(together):
    env, result, _ = together
    state = result.training_state(SEEDS[0])
    on = train_ppo(env, make_networks(env, nnx.Rngs(1)), CONFIG, total_steps=80, initial_state=state)
    assert (on.total_steps, on.total_iterations) == (80, 1)
    with pytest.raises(ValueError, match=r"seed 4 was not trained; these were: 3, 0, 11"):
        result.training_state(4)


def test_a_seed_alone_in_the_program_is_not_special(together):
    env, result, _ = together
    only = train_ppo_seeds(env, make_networks, CONFIG, SEEDS[1:2])
    assert_same_up_to_rounding(only.training_state(SEEDS[1]).params, result.training_state(SEEDS[1]).params)


def test_a_stop_sees_the_metrics_of_its_iteration_and_ends_with_an_evaluation():
    env, told = EpisodeWrapper(Counter(4), 3), []
    config = dataclasses.replace(CONFIG, eval=dataclasses.replace(CONFIG.eval, every_steps=1000))
    result = train_ppo_seeds(
        env,
        make_networks,
        config,
        (0, 1),
        log_fn=lambda metrics, steps: told.append(steps),
        stop_fn=lambda steps: told[-1] == steps == 40,
    )
    assert told == [0, 20, 40]
    np.testing.assert_array_equal(result.eval_steps, [0, 40])


def test_functions_made_anew_for_each_network_do_not_matter():
    make = lambda env, rngs: make_mlp_actor_critic(2, 1, [8], [8], rngs, activation=lambda x: jnp.tanh(x))
    assert train_ppo_seeds(Counter(4), make, CONFIG, (0, 1)).total_steps == 60


def test_a_stop_ends_all_seeds_and_evaluation_may_be_off():
    env = EpisodeWrapper(Counter(4), 3)
    config = TrainConfig(ppo=PPO, eval=EvalConfig(enabled=False))
    result = train_ppo_seeds(env, make_networks, config, (0, 1), stop_fn=lambda steps: steps >= 40)
    assert (result.total_steps, result.total_iterations) == (40, 2)
    assert result.eval_history == {}
    assert result.eval_steps.shape == (0,)


def test_what_breaks_in_one_seed_stays_there():
    env = EpisodeWrapper(Counter(4, random_length=True), 5)

    def make(env, rngs):
        network = make_networks(env, rngs)
        made.append(network)
        if len(made) == 2:
            network.layers[0].mean.set_value(jnp.full(2, jnp.nan))
        return network

    made = []
    config = dataclasses.replace(CONFIG, ppo=dataclasses.replace(PPO, max_skipped_updates=4))
    with pytest.warns(RuntimeWarning, match="seed 0 skips its updates"):
        result = train_ppo_seeds(env, make, config, SEEDS)
    for seed in (3, 11):
        assert_same_up_to_rounding(result.training_state(seed).params, alone(env, seed)[0].training_state.params)
    assert all_finite(result.training_state(0).params)


def test_environments_that_break_are_told_of_by_seed():
    class PoisonedAtSeed(Poisoned):
        """Poisons the environments of whose first number a part lies above a half."""

        def reset(self, rng):
            state = super().reset(rng)
            poison = (state.info["id"] > 0.5).astype("int32")
            return state.replace(info={**state.info, "poison": poison})

    with pytest.warns(RuntimeWarning, match="were not finite") as caught:
        result = train_ppo_seeds(EpisodeWrapper(PoisonedAtSeed(3), 5), make_networks, CONFIG, SEEDS)
    assert all_finite(result.training_states.params)
    assert np.all(np.asarray(result.training_states.nonfinite_steps) > 0)
    assert sorted(str(warning.message).split()[1] for warning in caught) == ["0", "11", "3"]


def test_the_environment_is_traced_as_often_for_three_seeds_as_for_one():
    one, three = Counter(4), Counter(4)
    alone(EpisodeWrapper(one, 3), 0)
    train_ppo_seeds(EpisodeWrapper(three, 3), make_networks, CONFIG, SEEDS)
    assert (three.step_traces, three.reset_traces) == (one.step_traces, one.reset_traces)


@pytest.mark.slow
def test_logging_levels_reach_every_seed():
    config = TrainConfig(ppo=PPOConfig(**{**vars(PPO), "logging_level": LoggingLevel.ALL}), eval=CONFIG.eval)
    result = train_ppo_seeds(EpisodeWrapper(Counter(4), 3), make_networks, config, (0, 1))
    single = alone(EpisodeWrapper(Counter(4), 3), 0, config)[0].final_metrics
    timed = {name for name in single if name.startswith(("throughput/", "time/"))}
    assert result.final_metrics.keys() == single.keys() - timed
    assert timed
    assert all(len(value) == 2 for value in result.final_metrics.values())


@pytest.mark.parametrize(
    ("seeds", "message"), [((), "at least one is accepted"), ((1, 2, 1), r"seeds=\(1, 2, 1\): .* only once")]
)
def test_no_seed_and_a_seed_twice_are_refused(seeds, message):
    with pytest.raises(ValueError, match=message):
        train_ppo_seeds(Counter(4), make_networks, CONFIG, seeds)


def test_networks_that_differ_in_more_than_their_numbers_are_refused():
    def make(env, rngs):
        size = 4 + len(built)
        built.append(size)
        return make_mlp_actor_critic(env.observation_size, env.action_size, [size], [8], rngs)

    built = []
    with pytest.raises(ValueError, match="a different network for each seed"):
        train_ppo_seeds(Counter(4), make, CONFIG, (0, 1))


def test_a_seed_can_be_repeated_to_the_bit():
    env = EpisodeWrapper(Counter(4, random_length=True), 3)
    once, twice = (train_ppo_seeds(env, make_networks, CONFIG, (0, 1)) for _ in range(2))
    assert_same_bits(once.training_states, twice.training_states)
