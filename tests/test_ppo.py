"""One PPO iteration: its losses against NumPy, and the promises about tracing, donation, vmap, sharding and bits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree
from probe_envs import (
    Counter,
    ProbeState,
    Readout,
    TwoArms,
    all_finite,
    assert_same_bits,
    recurrent_actor_critic,
    two_arm_network,
)
from scipy import stats

from nnx_ppo.algorithms import loop, ppo, rollout
from nnx_ppo.algorithms.config import EvalConfig, LoggingLevel, PPOConfig, TrainConfig, VideoConfig
from nnx_ppo.algorithms.loop import NonFiniteError
from nnx_ppo.algorithms.optimizer import (
    WIDTH,
    as_matrix,
    learning_rate,
    make_optimizer,
    new_optimizer_state,
    schedule_learning_rate,
    state_as_matrices,
    state_as_vectors,
)
from nnx_ppo.algorithms.ppo import train_ppo
from nnx_ppo.networks import functional
from nnx_ppo.networks.factories import make_mlp_actor_critic
from nnx_ppo.networks.types import StatefulModule
from nnx_ppo.wrappers.episode_wrapper import EpisodeWrapper


class Drift:
    """A point that the action pushes about; rewarded near 0, lost beyond 2."""

    observation_size, action_size = 2, 1

    def __init__(self):
        self.step_traces = 0

    def reset(self, rng):
        x = jax.random.uniform(rng, (), minval=-1.0, maxval=1.0)
        return ProbeState(jnp.stack([x, x**2]), jnp.zeros(()), jnp.zeros(()))

    def step(self, state, action):
        self.step_traces += 1
        x = state.obs[0] + 0.3 * action[0] + 0.1
        return state.replace(obs=jnp.stack([x, x**2]), reward=1 - x**2, done=jnp.where(jnp.abs(x) > 2, 1.0, 0.0))

    def render(self, trajectory, **kwargs):
        return [np.zeros((2, 2, 3), np.uint8) for _ in trajectory]


def network(seed=0, **kwargs):
    return make_mlp_actor_critic(2, 1, [4], [5], nnx.Rngs(seed), **kwargs)


# --- losses ---------------------------------------------------------------------------------------------------


def rng_minibatch(net, time=5, batch=3, seed=0, terms=None):
    """A minibatch of made-up data for an actor-critic without normalizer."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    tree = (lambda make: make()) if terms is None else (lambda make: {term: make() for term in terms})
    return ppo.Minibatch(
        obs=draw(time, batch, 2),
        rollout_extras={"action": [None, None, draw(time, batch, 1)], "value": [None, None]},
        old_loglikelihoods=draw(time, batch) * 0.3 - 1,
        advantages=tree(lambda: draw(time, batch) * 3 + 1),
        targets=tree(lambda: draw(time, batch)),
        done=jnp.asarray(rng.random((time, batch)) < 0.2),
        network_states=net.initialize_state(batch),
    )


def numpy_mlp(layers, x):
    for i, layer in enumerate(layers):
        x = x @ np.asarray(layer.linear.kernel.get_value(), np.float64) + np.asarray(layer.linear.bias.get_value())
        if i + 1 < len(layers):
            x = np.maximum(x, 0)
    return x


def numpy_losses(net, batch, clip, normalize):
    obs = np.asarray(batch.obs, np.float64)
    mean, scale = np.split(numpy_mlp(net.action.layers[:2], obs), 2, axis=-1)
    raw = np.asarray(batch.rollout_extras["action"][2], np.float64)
    new = (stats.norm(mean, np.logaddexp(0, scale) + 0.1).logpdf(raw) - np.log(1 - np.tanh(raw) ** 2)).sum(-1)
    ratio = np.exp(new - np.asarray(batch.old_loglikelihoods))
    advantage = np.asarray(batch.advantages, np.float64)
    if normalize:
        advantage = (advantage - advantage.mean()) / advantage.std()
    surrogate = [
        min(r * a, min(max(r, 1 - clip), 1 + clip) * a) for r, a in zip(ratio.ravel(), advantage.ravel(), strict=True)
    ]
    value = numpy_mlp(net.value.layers, obs)[..., 0]
    critic = 0.5 * np.mean((value - np.asarray(batch.targets)) ** 2)
    kl = np.mean(ratio - 1 - np.log(ratio))
    return -np.mean(surrogate), critic, kl, ratio


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("clip", [0.2, 0.05])
def test_losses_equal_an_independent_computation(normalize, clip):
    net = network(normalize_obs=False, entropy_weight=0.0)
    batch = rng_minibatch(net)
    config = PPOConfig(normalize_advantages=normalize, clip_range=clip, critic_loss_weight=0.7)
    graphdef, params, variables = functional.split(net)
    total, (metrics, _) = ppo.ppo_loss(config, params, graphdef, variables, batch)
    actor, critic, kl, ratio = numpy_losses(net, batch, clip, normalize)
    assert (ratio > 1 + clip).any()
    assert (ratio < 1 - clip).any()
    np.testing.assert_allclose(metrics["losses/actor_loss"], actor, rtol=1e-4)
    np.testing.assert_allclose(metrics["losses/critic_loss"], critic, rtol=1e-4)
    np.testing.assert_allclose(metrics["losses/approx_kl"], kl, rtol=1e-3)
    np.testing.assert_allclose(total, actor + 0.7 * critic, rtol=1e-4)


def test_the_entropy_bonus_is_the_regularization_and_part_of_the_total():
    net = network(normalize_obs=False, entropy_weight=0.25)
    graphdef, params, variables = functional.split(net)
    total, (metrics, _) = ppo.ppo_loss(PPOConfig(), params, graphdef, variables, rng_minibatch(net))
    np.testing.assert_allclose(metrics["losses/regularization"], -0.25 * metrics["losses/entropy"], rtol=1e-5)
    parts = sum(metrics[f"losses/{name}"] for name in ("actor_loss", "critic_loss", "regularization"))
    np.testing.assert_allclose(total, parts, rtol=1e-5)
    np.testing.assert_allclose(metrics["losses/total"], total)


def test_the_clipped_surrogate_by_hand():
    loss = lambda ratio, advantage: float(
        ppo.clipped_surrogate(jnp.log(jnp.asarray([ratio])), jnp.asarray([advantage]), 0.2)
    )
    assert loss(1.0, 3.0) == pytest.approx(-3.0)
    assert loss(1.5, 2.0) == pytest.approx(-2.4)  # no more gain beyond 1.2
    assert loss(0.5, 2.0) == pytest.approx(-1.0)  # a loss is never clipped away
    assert loss(0.5, -2.0) == pytest.approx(1.6)
    assert loss(1.5, -2.0) == pytest.approx(3.0)


def test_the_clipped_surrogate_has_no_gradient_where_it_is_clipped():
    gradient = jax.grad(lambda log_ratio, advantage: ppo.clipped_surrogate(log_ratio, advantage, 0.2))
    assert float(gradient(jnp.log(1.5), 2.0)) == 0
    assert float(gradient(jnp.log(0.5), -2.0)) == 0
    assert float(gradient(jnp.log(0.5), 2.0)) == pytest.approx(-1.0)
    assert float(gradient(jnp.log(1.5), -2.0)) == pytest.approx(3.0)


class WithCarry(StatefulModule):
    """The same module, made to look recurrent."""

    def __init__(self, module):
        self.module = module

    def initialize_state(self, batch_size):
        return {"inner": self.module.initialize_state(batch_size), "unused": jnp.zeros(batch_size)}

    def __call__(self, state, obs, rollout_extras=None):
        out = self.module(state["inner"], obs, rollout_extras)
        return out.replace(next_state={**state, "inner": out.next_state})


def test_replaying_a_batch_at_once_equals_replaying_it_step_by_step():
    plain = network(normalize_obs=False, entropy_weight=0.0)
    looped = WithCarry(plain)
    results = []
    for net in (plain, looped):
        graphdef, params, variables = functional.split(net)
        batch = rng_minibatch(plain).replace(network_states=net.initialize_state(3))
        loss = lambda p, g=graphdef, v=variables, b=batch: ppo.ppo_loss(PPOConfig(), p, g, v, b)
        (total, (metrics, _)), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        results.append((total, metrics["losses/actor_loss"], metrics["losses/critic_loss"], ravel_pytree(gradient)[0]))
    for at_once, by_step in zip(*results, strict=True):
        np.testing.assert_allclose(at_once, by_step, rtol=1e-4, atol=1e-6)


def test_a_recurrent_replay_resets_its_carry_where_episodes_ended_and_so_repeats_the_rollout():
    env, net = EpisodeWrapper(Drift(), 3), recurrent_actor_critic(2, 1, nnx.Rngs(0))
    config = PPOConfig(n_envs=4, n_minibatches=1, rollout_length=8)
    state = ppo.initial_training_state(env, net, TrainConfig(ppo=config))
    state, _ = jax.jit(functools.partial(rollout.unroll, env, config))(state)  # so that the carry is not zero
    after, transitions = jax.jit(functools.partial(rollout.unroll, env, config))(state)
    assert 0 < int(transitions.done.sum()) < 32
    batch = ppo.Minibatch(
        transitions.obs,
        transitions.rollout_extras,
        transitions.network_output.loglikelihoods,
        None,
        None,
        transitions.done,
        state.network_states,
    )
    output, _, _ = ppo.replay(state.graphdef, state.params, after.variables, batch)
    np.testing.assert_allclose(output.loglikelihoods, transitions.network_output.loglikelihoods, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(output.value_estimates, transitions.network_output.value_estimates, rtol=1e-4, atol=1e-5)


# --- several heads and terms ----------------------------------------------------------------------------------


def heads(config, advantages, loglikelihoods):
    batch = ppo.Minibatch(None, None, loglikelihoods, advantages, None, None, None)
    return ppo.pair_heads(config, loglikelihoods, batch)


ONE, TWO = jnp.asarray([1.0, 3.0]), jnp.asarray([10.0, 20.0])


def test_a_joint_policy_sees_each_reward_term_apart():
    config = PPOConfig(normalize_advantages=False)
    paired = heads(config, {"a": ONE, "b": TWO}, jnp.zeros(2))
    assert [(name, advantage.tolist()) for name, _, _, advantage in paired] == [("a", [1, 3]), ("b", [10, 20])]


def test_combined_advantages_are_summed_before_they_are_normalized():
    paired = heads(PPOConfig(combine_advantages=True), {"a": ONE, "b": TWO}, jnp.zeros(2))
    ((_, _, _, advantage),) = paired
    np.testing.assert_allclose(advantage, [-1, 1], rtol=1e-5)
    plain = heads(PPOConfig(combine_advantages=True, normalize_advantages=False), {"a": ONE, "b": TWO}, jnp.zeros(2))
    np.testing.assert_array_equal(plain[0][3], [11, 23])


def test_heads_take_the_term_of_their_own_name_or_the_sum_of_all():
    likelihoods = {"b": jnp.ones(2), "a": jnp.zeros(2)}
    plain = {"normalize_advantages": False}
    paired = {name: (new, adv) for name, new, _, adv in heads(PPOConfig(**plain), {"a": ONE, "b": TWO}, likelihoods)}
    np.testing.assert_array_equal(paired["b"], [[1, 1], [10, 20]])
    np.testing.assert_array_equal(paired["a"], [[0, 0], [1, 3]])
    summed = heads(PPOConfig(combine_advantages=True, **plain), {"a": ONE, "b": TWO}, likelihoods)
    assert all(advantage.tolist() == [11, 23] for *_, advantage in summed)
    single = heads(PPOConfig(**plain), ONE, likelihoods)
    assert all(advantage.tolist() == [1, 3] for *_, advantage in single)


def test_heads_and_terms_of_different_names_are_refused_with_both_and_the_way_out():
    with pytest.raises(ValueError, match=r"heads are 'c', 'd' and the reward terms 'a', 'b'.*combine_advantages=True"):
        heads(PPOConfig(), {"a": ONE, "b": TWO}, {"c": ONE, "d": ONE})


def test_a_critic_without_the_reward_terms_is_refused_before_anything_is_compiled():
    config = TrainConfig(ppo=PPOConfig(n_envs=2, n_minibatches=1, rollout_length=2, total_steps=4))
    with pytest.raises(ValueError, match=r"values for a single one and .* rewards for 'x', 'y'.*of its own name"):
        train_ppo(TwoArms(), two_arm_network(nnx.Rngs(0), critic_terms=None), config)


# --- the update -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [None, 0.1])
@pytest.mark.parametrize("clipping", [None, 1.0])
def test_the_optimizer_is_adam_after_clipping_by_the_global_norm(decay, clipping):
    config = PPOConfig(learning_rate=0.01, gradient_clipping=clipping, weight_decay=decay)
    optimizer = make_optimizer(config)
    params = np.asarray([1.0, -2.0, 0.5])
    state, given = optimizer.init(jnp.asarray(params, jnp.float32)), jnp.asarray(params, jnp.float32)
    m, v = np.zeros(3), np.zeros(3)
    for t, gradient in enumerate([[3.0, 4.0, 0.0], [0.1, 0.2, -0.2], [-6.0, 0.0, 8.0]], start=1):
        g = np.asarray(gradient)
        changes, state = optimizer.update(jnp.asarray(g, jnp.float32), state, given)
        given = given + changes
        if clipping is not None:
            g = g * min(1, clipping / np.linalg.norm(g))
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        step = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8) + (decay or 0) * params
        params = params - 0.01 * step
        np.testing.assert_allclose(given, params, rtol=1e-4)


@pytest.mark.parametrize("decay", [None, 0.1])
def test_an_update_of_all_parameters_as_a_matrix_is_the_one_of_the_vector(decay):
    config = PPOConfig(learning_rate=0.01, gradient_clipping=1.0, weight_decay=decay)
    optimizer, rng = make_optimizer(config), np.random.default_rng(0)
    random = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    params, gradients = ({"w": random(30, 40), "b": random(7), "scale": random()} for _ in range(2))
    vector, gradient = ravel_pytree(params)[0], ravel_pytree(gradients)[0]
    state = new_optimizer_state(config, params)
    changes, after = optimizer.update(gradient, state, vector)

    matrix, unravel = as_matrix(params)
    assert matrix.shape == (-(-1208 // WIDTH), WIDTH)
    folded, folded_after = optimizer.update(as_matrix(gradients)[0], state_as_matrices(state), matrix)
    # The squares that the norm is made of are added up in another order.
    assert_tree_close(unravel(matrix + folded), ravel_pytree(params)[1](vector + changes))
    assert_tree_close(state_as_vectors(folded_after, params), after)
    assert not np.any((matrix + folded).reshape(-1)[1208:]), "what it is filled up with has to stay zero"


def assert_tree_close(given, expected):
    assert jax.tree.structure(given) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8), given, expected)


@pytest.mark.parametrize("size", [1, WIDTH - 1, WIDTH, WIDTH + 1])
def test_parameters_of_any_number_become_a_matrix_and_come_back(size):
    params = {"a": jnp.arange(size, dtype=jnp.float32), "b": jnp.asarray(-1.0)}
    matrix, unravel = as_matrix(params)
    jax.tree.map(np.testing.assert_array_equal, unravel(matrix), params)
    state = new_optimizer_state(PPOConfig(), params)
    jax.tree.map(np.testing.assert_array_equal, state_as_vectors(state_as_matrices(state), params), state)


LIMITED = EpisodeWrapper(Drift(), 7)


@functools.cache
def compiled(env, config):
    """Compiled once for all tests that use the same environment and configuration."""
    return jax.jit(functools.partial(ppo.ppo_step, env, config))


def one_iteration(config, env=LIMITED, net=None, seed=3):
    state = ppo.initial_training_state(env, net or network(), TrainConfig(ppo=config, seed=seed))
    return state, *compiled(env, config)(state)


SMALL = PPOConfig(n_envs=4, n_minibatches=2, rollout_length=5, n_epochs=2, learning_rate=0.01)


def test_the_first_adam_update_moves_every_parameter_by_the_learning_rate_against_its_gradient():
    config = PPOConfig(n_envs=4, n_minibatches=1, rollout_length=5, n_epochs=1, learning_rate=0.01)
    before, after, _ = one_iteration(config, net=network(normalize_obs=False))
    moved = np.abs(ravel_pytree(after.params)[0] - ravel_pytree(before.params)[0])
    assert (np.isclose(moved, 0.01, rtol=1e-2) | (moved < 1e-6)).all()
    assert (moved > 1e-3).mean() > 0.5


def test_an_update_makes_what_turned_out_well_more_likely():
    net = network(normalize_obs=False, entropy_weight=0.0)
    graphdef, params, variables = functional.split(net)
    batch = rng_minibatch(net)
    # As if it had just been collected: the old likelihoods are the current ones.
    output, _, _ = ppo.replay(graphdef, params, variables, batch)
    batch = batch.replace(old_loglikelihoods=output.loglikelihoods)
    gradient = jax.grad(lambda p: ppo.ppo_loss(PPOConfig(), p, graphdef, variables, batch)[0])(params)
    moved = jax.tree.map(lambda p, g: p - 1e-2 * g, params, gradient)
    change = ppo.replay(graphdef, moved, variables, batch)[0].loglikelihoods - output.loglikelihoods
    assert float(jnp.corrcoef(change.ravel(), batch.advantages.ravel())[0, 1]) > 0.3
    assert float(jnp.mean(change * (batch.advantages - batch.advantages.mean()))) > 0


def test_an_epoch_uses_every_environment_once_and_no_two_epochs_alike(monkeypatch):
    seen = []
    take = ppo.Minibatch.take

    def spy(self, rows):
        jax.debug.callback(lambda r: seen.append(np.sort(r).tolist()), rows)
        return take(self, rows)

    monkeypatch.setattr(ppo.Minibatch, "take", spy)
    config = PPOConfig(n_envs=12, n_minibatches=3, rollout_length=2, n_epochs=4)
    jax.block_until_ready(one_iteration(config))
    jax.effects_barrier()
    assert len(seen) == 12
    together = sorted(row for rows in seen for row in rows)
    assert together == sorted(list(range(12)) * 4)
    assert len({tuple(rows) for rows in seen}) > 3


def test_the_normalizer_learns_from_the_rollout_after_the_update():
    before, after, _ = one_iteration(SMALL)
    normalizer = after.networks.layers[0]
    assert float(normalizer.counter.get_value()) == 20
    assert not np.array_equal(normalizer.mean.get_value(), before.networks.layers[0].mean.get_value())


def test_an_iteration_counts_itself_and_its_steps():
    _, after, _ = one_iteration(SMALL)
    assert int(after.iteration) == 1
    assert after.steps_taken == 20


def test_a_linear_schedule_goes_from_full_to_zero_at_total_steps():
    config = PPOConfig(
        n_envs=4,
        n_minibatches=1,
        rollout_length=5,
        n_epochs=1,
        total_steps=80,
        learning_rate=0.01,
        learning_rate_schedule="linear",
    )
    optimizer_state = make_optimizer(config).init(jnp.zeros(3))
    rates = [float(learning_rate(schedule_learning_rate(config, optimizer_state, jnp.asarray(i)))) for i in range(4)]
    np.testing.assert_allclose(rates, [0.01, 0.0075, 0.005, 0.0025], rtol=1e-5)


def test_under_a_linear_schedule_statistics_go_the_learning_rates_share_of_every_step():
    config = dataclasses.replace(SMALL, learning_rate_schedule="linear", total_steps=80)
    state = ppo.initial_training_state(LIMITED, network(), TrainConfig(ppo=config, seed=3))
    step, unroll = compiled(LIMITED, config), jax.jit(functools.partial(rollout.unroll, LIMITED, config))
    count, mean, square = 0.0, np.zeros(2), np.ones(2)
    for share in (1.0, 0.75, 0.5, 0.25, 0.0):
        seen = np.asarray(unroll(state)[1].obs, np.float64).reshape(20, 2)
        state, _ = step(state)
        # Of all observations so far as one sample, what a plain average would say.
        whole_mean = (count * mean + seen.sum(0)) / (count + 20)
        whole_square = (count * square + (seen**2).sum(0)) / (count + 20)
        variance = square - mean**2 + share * (whole_square - whole_mean**2 - (square - mean**2))
        count, mean = count + share * 20, mean + share * (whole_mean - mean)
        square = variance + mean**2
        normalizer = state.networks.layers[0]
        np.testing.assert_allclose(normalizer.counter.get_value(), count)
        np.testing.assert_allclose(normalizer.mean.get_value(), mean, rtol=1e-4)
        np.testing.assert_allclose(normalizer.variance.get_value(), variance, rtol=1e-4)


class Masked(StatefulModule):
    """An actor-critic that keeps a mask with infinities and a running maximum that starts at one."""

    def __init__(self):
        self.network = network()
        self.mask = nnx.Variable(jnp.asarray([0.0, -jnp.inf]))
        self.largest = nnx.Variable(-jnp.inf * jnp.ones(()))

    def __call__(self, state, obs, rollout_extras=None):
        return self.network(state, obs, rollout_extras)

    def initialize_state(self, batch_size):
        return self.network.initialize_state(batch_size)

    def reset_state(self, state):
        return self.network.reset_state(state)

    def update_statistics(self, rollout_extras):
        self.largest.set_value(jnp.maximum(self.largest.get_value(), 5.0))
        self.network.update_statistics(rollout_extras)


def test_under_a_linear_schedule_infinite_variables_stay_and_may_become_finite():
    config = dataclasses.replace(SMALL, learning_rate_schedule="linear", total_steps=80)
    _, state, _ = one_iteration(config, net=Masked())
    np.testing.assert_array_equal(state.networks.mask.get_value(), [0.0, -np.inf])
    assert state.networks.largest.get_value() == 5.0


def test_reward_scaling_is_for_learning_only():
    _, plain, metrics = one_iteration(SMALL)
    _, scaled, scaled_metrics = one_iteration(PPOConfig(**{**vars(SMALL), "reward_scaling": 0.1}))
    np.testing.assert_array_equal(metrics["rollout_batch/reward/mean"], scaled_metrics["rollout_batch/reward/mean"])
    assert float(scaled_metrics["losses/critic_loss"]) < float(metrics["losses/critic_loss"])
    assert not np.array_equal(ravel_pytree(plain.params)[0], ravel_pytree(scaled.params)[0])


# --- gradients that are not finite ----------------------------------------------------------------------------


class Overflowing(Drift):
    """Rewards whose squares are not finite once they are scaled, while `info["huge"]` counts down."""

    def reset(self, rng):
        state = super().reset(rng)
        return state.replace(info={"huge": jnp.zeros((), jnp.int32)})

    def step(self, state, action):
        huge = state.info["huge"]
        state = super().step(state, action)
        reward = jnp.where(huge > 0, 1e14, state.reward)
        return state.replace(reward=reward, done=jnp.zeros(()), info={"huge": jnp.maximum(huge - 1, 0)})


SCALED = PPOConfig(**{**vars(SMALL), "reward_scaling": 1e10})


def overflowing_start(config, huge):
    env, net = Overflowing(), network()
    state = ppo.initial_training_state(env, net, TrainConfig(ppo=config))
    info = {"huge": jnp.full(config.n_envs, huge, jnp.int32)}
    return env, net, state.replace(env_states=state.env_states.replace(info=info))


def test_an_update_that_is_not_finite_is_skipped_and_counted_and_training_goes_on():
    env, _, state = overflowing_start(SCALED, huge=SCALED.rollout_length)
    step = jax.jit(functools.partial(ppo.ppo_step, env, SCALED))
    after, _ = step(state)
    assert_same_bits(after.params, state.params)
    assert int(after.skipped_updates) == 4
    assert all_finite((after.params, after.variables, after.optimizer))
    again, _ = step(after)
    assert int(again.skipped_updates) == 0
    assert not np.array_equal(ravel_pytree(again.params)[0], ravel_pytree(after.params)[0])


def test_too_many_skipped_updates_end_the_run_naming_step_and_quantity_and_keep_the_last_good_parameters():
    config = PPOConfig(**{**vars(SCALED), "total_steps": 1000, "max_skipped_updates": 8})
    env, net, state = overflowing_start(config, huge=10**6)
    good = jax.tree.map(jnp.copy, state.params)
    with pytest.raises(NonFiniteError, match=r"8 updates in a row .* up to step 40 .*losses/critic_loss"):
        train_ppo(env, net, TrainConfig(ppo=config, eval=EvalConfig(enabled=False)), initial_state=state)
    assert_same_bits(functional.split(net)[1], good)


# --- promises of the compiled iteration -----------------------------------------------------------------------


class CountedCalls(StatefulModule):
    """Counts how often Python runs the network."""

    calls = 0

    def __init__(self, module):
        self.module = module

    def initialize_state(self, batch_size):
        return self.module.initialize_state(batch_size)

    def update_statistics(self, rollout_extras):
        self.module.update_statistics(rollout_extras)

    def __call__(self, state, obs, rollout_extras=None):
        CountedCalls.calls += 1
        return self.module(state, obs, rollout_extras)


QUIET = TrainConfig(ppo=SMALL, eval=EvalConfig(enabled=False))


def test_environment_and_network_are_traced_before_the_first_iteration_and_never_again():
    env, counts = Drift(), []
    config = TrainConfig(ppo=SMALL, eval=EvalConfig(n_envs=2, every_steps=20, max_episode_length=5))
    CountedCalls.calls = 0
    log = lambda metrics, steps: counts.append((env.step_traces, CountedCalls.calls))
    train_ppo(EpisodeWrapper(env, 4), CountedCalls(network()), config, total_steps=200, log_fn=log)
    assert len(counts) == 11
    assert set(counts) == {counts[0]}
    assert counts[0][0] <= 2


@pytest.fixture(scope="module")
def kept():
    """The states of a run as the loop had them, and as it gave them to checkpoint_fn."""
    own, given, call = [], [], loop.Action.__call__
    config = TrainConfig(ppo=SMALL, eval=EvalConfig(enabled=False), checkpoint_every_steps=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Action, "__call__", lambda self, state, steps: own.append(state) or call(self, state, steps))
        train_ppo(Drift(), network(), config, total_steps=60, checkpoint_fn=lambda state, step: given.append(state))
    return own, given


def test_the_loop_donates_the_state_of_the_iteration_before(kept):
    deleted = [all(x.is_deleted() for x in jax.tree.leaves((s.params, s.env_states))) for s in kept[0]]
    assert deleted == [True, True, True, False]


def test_a_checkpoint_function_may_keep_the_states_it_was_given_and_training_goes_on_from_them(kept, trained):
    _, states = kept
    assert [state.steps_taken for state in states] == [0, 20, 40, 60]
    result = train_ppo(Drift(), network(7), QUIET, total_steps=100, initial_state=states[1])
    assert_same_bits(result.training_state, trained[-1].training_state)


@pytest.fixture(scope="module")
def trained():
    """A run without evaluation, to compare others with."""
    env, net = Drift(), network()
    held = jax.tree.map(lambda x: x, nnx.state(net))
    before = jax.tree.map(jnp.copy, held)
    result = train_ppo(env, net, QUIET, total_steps=100)
    return env, net, held, before, result


def test_the_same_seed_gives_the_same_run_to_the_bit_and_another_does_not(trained):
    again = train_ppo(Drift(), network(), QUIET, total_steps=100)
    assert_same_bits(again.training_state, trained[-1].training_state)
    other = train_ppo(Drift(), network(), QUIET, total_steps=100, seed=1)
    assert not np.array_equal(other.training_state.env_states.obs, again.training_state.env_states.obs)


@pytest.mark.parametrize(("every_steps", "video"), [(20, 0), (60, 40), (10**6, 20)])
def test_evaluation_and_video_at_any_cadence_leave_training_the_same_to_the_bit(trained, every_steps, video):
    config = TrainConfig(
        ppo=SMALL,
        eval=EvalConfig(n_envs=3, every_steps=every_steps, max_episode_length=6),
        video=VideoConfig(enabled=True, every_steps=video, episode_length=3),
    )
    result = train_ppo(Drift(), network(), config, total_steps=100, video_fn=lambda video: None)
    assert result.eval_history
    assert_same_bits(result.training_state, trained[-1].training_state)


def test_the_callers_network_holds_what_was_learned_and_its_old_arrays_stay_valid(trained):
    _, net, held, before, result = trained
    assert_same_bits(held, before)
    assert_same_bits(functional.split(net)[1], result.training_state.params)
    assert_same_bits(functional.split(net)[2], result.training_state.variables)
    assert_same_bits(nnx.state(result.training_state.networks), nnx.state(net))


def test_an_initial_state_stays_valid_and_continues_to_the_bit(trained):
    first = train_ppo(Drift(), network(), QUIET, total_steps=40)
    copy = jax.tree.map(jnp.copy, first.training_state)
    second = train_ppo(Drift(), network(5), QUIET, total_steps=100, initial_state=first.training_state)
    assert_same_bits(first.training_state, copy)
    assert_same_bits(second.training_state, trained[-1].training_state)
    assert (first.total_steps, first.total_iterations) == (40, 2)
    assert (second.total_steps, second.total_iterations) == (100, 3)


def test_the_configuration_of_the_caller_is_not_changed(trained):
    assert QUIET.ppo.total_steps == 512_000
    assert QUIET.seed == 17


def test_an_initial_state_of_another_number_of_environments_is_refused():
    state = ppo.new_training_state(Drift(), network(), n_envs=3, seed=0)
    with pytest.raises(ValueError, match=r"has 3 environments and the configuration n_envs=4; go on with n_envs=3"):
        train_ppo(Drift(), network(), QUIET, initial_state=state)


def test_a_network_left_in_evaluation_mode_is_trained_with_exploration_all_the_same(trained):
    net = network()
    net.eval()
    result = train_ppo(Drift(), net, QUIET, total_steps=100)
    assert_same_bits(result.training_state.params, trained[-1].training_state.params)


# --- what is asked for at the start ---------------------------------------------------------------------------


def test_a_network_that_does_not_fit_the_observation_is_refused_at_once():
    with pytest.raises(ValueError, match=r"observation_size"):
        train_ppo(Drift(), make_mlp_actor_critic(3, 1, [4], [4], nnx.Rngs(0)), QUIET, total_steps=20)


@pytest.mark.parametrize("level", [LoggingLevel.LOSSES, LoggingLevel.NONE])
def test_metric_keys_are_exactly_those_of_the_level(level):
    config = PPOConfig(**{**vars(SMALL), "logging_level": level})
    state = ppo.initial_training_state(LIMITED, network(), TrainConfig(ppo=config))
    _, metrics = jax.eval_shape(functools.partial(ppo.ppo_step, LIMITED, config), state)
    names = ("actor_loss", "critic_loss", "entropy", "total", "regularization")
    expected = {f"losses/{name}" for name in names} | {"rollout_batch/reward/mean"}
    assert set(metrics) == (expected if level else set())
    assert all(value.shape == () for value in metrics.values())


def test_several_heads_and_terms_have_a_key_each_and_the_bare_key_is_their_sum():
    config = PPOConfig(n_envs=4, n_minibatches=2, rollout_length=3, n_epochs=1)
    _, _, metrics = one_iteration(config, TwoArms(), two_arm_network(nnx.Rngs(0)))
    for name in ("losses/actor_loss", "losses/critic_loss"):
        parts = [metrics[f"{name}/x"], metrics[f"{name}/y"]]
        np.testing.assert_allclose(metrics[name], sum(parts), rtol=1e-4, atol=1e-6)
    assert set(metrics) - {k for k in metrics if k.endswith(("/x", "/y"))} == {
        "losses/actor_loss",
        "losses/critic_loss",
        "losses/entropy",
        "losses/total",
        "losses/regularization",
        "rollout_batch/reward/mean",
    }
    # At most 0 + 3 per step, and at least 3 - 1.5^2 - 2 * 1.5^2.
    assert -3.75 < float(metrics["rollout_batch/reward/mean"]) < 3


def test_readout_values_reach_the_explained_targets():
    # Counter(2) with gamma 0.5, lambda 1 and values 0: targets 1 + 2/2 and 2, so the loss is half their mean square.
    config = PPOConfig(n_envs=2, n_minibatches=1, rollout_length=4, n_epochs=1, discounting_factor=0.5, gae_lambda=1.0)
    _, _, metrics = one_iteration(config, Counter(2), Readout(0.0))
    np.testing.assert_allclose(metrics["losses/critic_loss"], 0.5 * 4, rtol=1e-6)
    np.testing.assert_allclose(metrics["rollout_batch/reward/mean"], 1.5, rtol=1e-6)


def test_a_new_state_does_not_follow_its_network():
    networks = network()
    state = ppo.initial_training_state(LIMITED, networks, TrainConfig(ppo=SMALL))
    before = jax.tree.map(np.array, state.params)
    nnx.update(networks, jax.tree.map(lambda leaf: leaf + 1, nnx.state(networks, nnx.Param)))
    jax.tree.map(np.testing.assert_array_equal, state.params, before)
