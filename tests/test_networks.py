"""Network modules against NumPy and SciPy, and the contract that the algorithm relies on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict
from probe_envs import Leaky, PerKey, assert_same_bits, recurrent_actor_critic
from scipy import integrate, stats

from nnx_ppo.networks import functional
from nnx_ppo.networks.adapter import PPOAdapter
from nnx_ppo.networks.containers import Sequential
from nnx_ppo.networks.factories import ACTIVATIONS, make_mlp, make_mlp_actor_critic, make_mlp_layers
from nnx_ppo.networks.feedforward import Dense
from nnx_ppo.networks.normalizer import Normalizer
from nnx_ppo.networks.sampling_layers import NormalTanhSampler
from nnx_ppo.networks.types import PPONetworkOutput, StatefulModule, StatefulModuleOutput

# --- Normalizer -----------------------------------------------------------------------------------------------


def test_normalizer_statistics_are_those_of_all_data_whatever_the_batches():
    rng = np.random.default_rng(0)
    batches = [rng.normal([3, -200, 0.01], [2, 5, 1e-3], size=(t, b, 3)) for t, b in [(1, 1), (5, 2), (20, 7)]]
    normalizer = Normalizer(3)
    for batch in batches:
        normalizer.update_statistics(jnp.asarray(batch, jnp.float32))
    everything = np.concatenate([batch.reshape(-1, 3) for batch in batches])
    np.testing.assert_allclose(normalizer.mean.get_value(), everything.mean(0), rtol=1e-5)
    np.testing.assert_allclose(normalizer.variance.get_value(), everything.var(0), rtol=1e-4)
    assert float(normalizer.counter.get_value()) == 1 + 10 + 140
    out = normalizer((), jnp.asarray(everything, jnp.float32)).output
    np.testing.assert_allclose(np.mean(out, 0), 0, atol=1e-3)
    np.testing.assert_allclose(np.std(out, 0), 1, rtol=1e-3)


def test_normalizer_is_the_identity_before_its_first_update():
    x = jnp.asarray([[1.0, -5.0], [1e6, 0.0]])
    np.testing.assert_array_equal(Normalizer(2)((), x).output, x)


@pytest.mark.parametrize("constant", [0.0, 1.0, -1e4, 0.1])
def test_normalizer_only_centres_a_constant_feature(constant):
    normalizer = Normalizer(1)
    for _ in range(3):
        normalizer.update_statistics(jnp.full((50, 3, 1), constant))
    out = normalizer((), jnp.asarray([[constant], [constant + 1.0]])).output
    np.testing.assert_allclose(out[0], 0.0, atol=2e-3)
    np.testing.assert_allclose(out[1], 1.0, atol=2e-3)


def test_normalizer_keeps_its_precision_after_a_billion_samples():
    normalizer = Normalizer(1)
    rng = np.random.default_rng(1)
    first = rng.normal(5, 2, size=(100, 10, 1))
    normalizer.update_statistics(jnp.asarray(first, jnp.float32))
    normalizer.counter.set_value(jnp.asarray(1e9))
    for _ in range(20):
        normalizer.update_statistics(jnp.asarray(rng.normal(50, 20, size=(100, 10, 1)), jnp.float32))
    # 20,000 new samples in a billion: the mean moves by 45 * 2e-5, the variance by about (396 + 45^2) * 2e-5.
    np.testing.assert_allclose(normalizer.mean.get_value(), first.mean() + 45 * 2e-5, atol=2e-4)
    np.testing.assert_allclose(normalizer.variance.get_value(), first.var() + 2421 * 2e-5, rtol=2e-3)
    assert float(normalizer.variance.get_value()[0]) > 0
    assert float(normalizer.counter.get_value()) == pytest.approx(1e9 + 20_000, rel=1e-6)


@pytest.mark.parametrize("shape", [3, (3,), [3], np.int64(3), {"a": (3,), "b": 2}, ((3,), (2, 2)), {"clock": ()}])
def test_normalizer_takes_shapes_as_numbers_tuples_lists_and_trees_of_them(shape):
    def example(shape):
        if isinstance(shape, dict):
            return {key: example(value) for key, value in shape.items()}
        if shape and isinstance(shape, tuple) and isinstance(shape[0], tuple):
            return tuple(map(example, shape))
        sizes = (int(shape),) if np.ndim(shape) == 0 and not isinstance(shape, (tuple, list)) else tuple(shape)
        return jnp.asarray(np.random.default_rng(0).normal(3, 4, size=(6, 5, *sizes)), jnp.float32)

    normalizer, data = Normalizer(shape), example(shape)
    normalizer.update_statistics(data)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), data)
    out = normalizer((), flat).output
    assert jax.tree.structure(out) == jax.tree.structure(flat)
    for leaf in jax.tree.leaves(out):
        np.testing.assert_allclose(np.mean(leaf, 0), 0, atol=1e-5)
        np.testing.assert_allclose(np.std(leaf, 0), 1, rtol=1e-4)


def test_normalizer_takes_integers_and_frozen_dicts():
    normalizer = Normalizer(FrozenDict({"count": (1,)}))
    obs = FrozenDict({"count": jnp.arange(6).reshape(6, 1)})
    extras = normalizer((), obs).rollout_extras
    normalizer.update_statistics(jax.tree.map(lambda x: x[None], extras))
    out = normalizer((), obs).output["count"]
    np.testing.assert_allclose(out[:, 0], (np.arange(6) - 2.5) / np.std(np.arange(6)), rtol=1e-5)


def test_normalizer_does_not_learn_while_it_is_called():
    normalizer = Normalizer(2)
    before = nnx.state(normalizer)
    before = jax.tree.map(jnp.copy, before)
    normalizer((), jnp.ones((4, 2)))
    assert_same_bits(before, nnx.state(normalizer))


def test_normalizer_statistics_are_not_parameters():
    assert not jax.tree.leaves(nnx.state(Normalizer(2), nnx.Param))


@pytest.mark.parametrize(
    ("shape", "obs"),
    [(3, jnp.zeros((2, 4))), ({"a": 3}, {"b": jnp.zeros((2, 3))}), ({"a": 3}, jnp.zeros((2, 3))), (3, jnp.zeros(3)[0])],
)
def test_normalizer_refuses_other_inputs_and_says_what_it_was_built_for(shape, obs):
    with pytest.raises(ValueError, match=r"built for inputs of shape .*3.* and got .*env\.observation_size"):
        Normalizer(shape)((), obs)


# --- NormalTanhSampler ----------------------------------------------------------------------------------------


def softplus(x):
    return np.logaddexp(0, x)


def sampler(**kwargs):
    return NormalTanhSampler(nnx.Rngs(3), **{"entropy_weight": 0.5, "min_std": 0.2, "std_scale": 0.7, **kwargs})


PARAMETERS = np.asarray([[0.3, -1.2, 0.1, 2.0], [2.5, 0.0, -3.0, 0.5]])
MEAN, STD = PARAMETERS[:, :2], (softplus(PARAMETERS[:, 2:]) + 0.2) * 0.7


def test_sampler_parameters_are_mean_and_shifted_scaled_softplus():
    metrics = sampler()((), jnp.asarray(PARAMETERS)).metrics
    np.testing.assert_allclose(metrics["mu"], MEAN, rtol=1e-6)
    np.testing.assert_allclose(metrics["sigma"], STD, rtol=1e-6)


def test_log_likelihood_is_the_density_of_the_squashed_action_by_change_of_variables():
    out = sampler()((), jnp.asarray(PARAMETERS))
    action = np.asarray(out.output["action"], np.float64)
    density = stats.norm(MEAN, STD).logpdf(np.arctanh(action)) - np.log(1 - action**2)
    np.testing.assert_allclose(out.output["log_likelihood"], density.sum(-1), rtol=1e-3, atol=1e-3)


def test_log_likelihood_stays_finite_where_tanh_saturates():
    out = sampler()((), jnp.asarray([[60.0, -60.0, 0.0, 0.0]]))
    assert np.isfinite(out.output["log_likelihood"]).all()
    np.testing.assert_array_equal(np.abs(out.output["action"]), 1.0)


def test_samples_follow_the_stated_distribution():
    out = sampler()((), jnp.tile(jnp.asarray(PARAMETERS[:1]), (4000, 1)))
    for i in range(2):
        raw = np.arctanh(np.asarray(out.output["action"][:, i], np.float64))
        assert stats.kstest(raw, stats.norm(MEAN[0, i], STD[0, i]).cdf).pvalue > 1e-3


def test_entropy_is_that_of_the_squashed_distribution():
    def exact(mean, std):
        def integrand(z):
            log_density = stats.norm.logpdf(z, mean, std) - np.log(4) + 2 * np.logaddexp(z, -z)
            return -np.exp(stats.norm.logpdf(z, mean, std)) * log_density

        # log(1 - tanh(z)^2) = log 4 - 2 log(e^z + e^-z)
        return integrate.quad(integrand, mean - 12 * std, mean + 12 * std, limit=200)[0]

    for mean, std in zip(MEAN, STD, strict=True):
        parameters = np.concatenate([mean, np.log(np.expm1(std / 0.7 - 0.2))])
        out = sampler()((), jnp.tile(jnp.asarray(parameters, jnp.float32), (20_000, 1)))
        estimates = np.asarray(out.output["entropy"])
        expected = sum(exact(m, s) for m, s in zip(mean, std, strict=True))
        assert abs(estimates.mean() - expected) < 5 * estimates.std() / np.sqrt(20_000)
        np.testing.assert_allclose(out.regularization_loss, -0.5 * estimates, rtol=1e-6)


def test_entropy_bonus_pulls_a_saturated_mean_back():
    def loss(parameters):
        return jnp.mean(sampler(entropy_weight=1.0)((), jnp.tile(parameters, (500, 1))).regularization_loss)

    gradient = jax.grad(loss)(jnp.asarray([3.0, -3.0, 0.0, 0.0]))
    assert gradient[0] > 0  # descending lowers a high mean
    assert gradient[1] < 0


def test_sampler_replay_reproduces_action_and_likelihood_and_ignores_its_own_noise():
    module = sampler()
    first = module((), jnp.asarray(PARAMETERS))
    again = module((), jnp.asarray(PARAMETERS), first.rollout_extras)
    assert_same_bits(
        [first.output[k] for k in ("action", "log_likelihood")], [again.output[k] for k in ("action", "log_likelihood")]
    )
    fresh = module((), jnp.asarray(PARAMETERS))
    assert not np.array_equal(first.output["action"], fresh.output["action"])


def test_replay_differentiates_the_likelihood_of_the_stored_action_only():
    # d/d mean of log N(z; mean, std) = (z - mean) / std^2, summed over actions; the tanh term has no parameters.
    stored = jnp.asarray([[0.9, -2.0]])
    likelihood = lambda p: sampler()((), p, stored).output["log_likelihood"][0]
    gradient = jax.grad(likelihood)(jnp.asarray(PARAMETERS[:1], jnp.float32))
    np.testing.assert_allclose(gradient[0, :2], ((stored - MEAN[:1]) / STD[:1] ** 2)[0], rtol=1e-5)


def test_after_eval_the_sampler_returns_the_mode_and_draws_nothing():
    module = sampler()
    module.eval()
    counts = jax.tree.map(jnp.copy, nnx.state(module, nnx.RngState))
    out = module((), jnp.asarray(PARAMETERS))
    np.testing.assert_allclose(out.output["action"], np.tanh(MEAN), rtol=1e-6)
    assert_same_bits(counts, nnx.state(module, nnx.RngState))
    module.train()
    assert not np.allclose(module((), jnp.asarray(PARAMETERS)).output["action"], np.tanh(MEAN))


def test_sampler_refuses_an_odd_number_of_parameters():
    with pytest.raises(ValueError, match=r"got 3 features; .* even number: .*2 \* action_size"):
        sampler()((), jnp.zeros((2, 3)))


# --- Dense, Sequential, factories -----------------------------------------------------------------------------


def test_dense_is_activation_of_x_kernel_plus_bias():
    layer = Dense(2, 3, nnx.Rngs(0), nnx.relu)
    kernel, bias = np.asarray(layer.linear.kernel.get_value()), np.asarray([0.1, -0.2, 0.3])
    layer.linear.bias.set_value(jnp.asarray(bias))
    x = np.asarray([[1.0, -2.0], [0.5, 4.0]])
    np.testing.assert_allclose(layer((), jnp.asarray(x)).output, np.maximum(x @ kernel + bias, 0), rtol=1e-5)


@pytest.mark.parametrize(
    ("obs", "said"), [(jnp.zeros((2, 5)), r"shape \(2, 5\)"), ({"state": jnp.zeros((2, 3))}, r"keys \['state'\]")]
)
def test_dense_refuses_an_input_of_another_size_and_points_to_the_observation_size(obs, said):
    with pytest.raises(ValueError, match=rf"Dense\(3 -> 4\) got an input of .*{said}.*observation_size"):
        Dense(3, 4, nnx.Rngs(0))((), obs)


class Shift(StatefulModule):
    """Adds its carry, which grows by one per call; its loss and metrics are its step."""

    def __init__(self, by):
        self.by = by

    def initialize_state(self, batch_size):
        return jnp.zeros(batch_size)

    def __call__(self, state, obs, rollout_extras=None):
        replay = jnp.zeros(obs.shape[0]) if rollout_extras is None else rollout_extras
        loss = jnp.full(obs.shape[0], float(self.by))
        return StatefulModuleOutput(state + self.by, obs + state + replay, loss, {"by": loss}, state)


def test_sequential_routes_carry_extras_metrics_and_losses_by_position():
    net = Sequential([Shift(1), Shift(10)])
    carry = net.initialize_state(2)
    out = net(carry, jnp.asarray([0.0, 5.0]))
    out = net(out.next_state, out.output)
    np.testing.assert_array_equal(out.output, [11.0, 16.0])
    np.testing.assert_array_equal(out.next_state, [[2, 2], [20, 20]])
    np.testing.assert_array_equal(out.regularization_loss, [11, 11])
    assert list(out.metrics) == [0, 1]
    np.testing.assert_array_equal(out.rollout_extras, [[1, 1], [10, 10]])
    np.testing.assert_array_equal(net(carry, jnp.zeros(2), [jnp.ones(2), 2 * jnp.ones(2)]).output, [3, 3])
    assert_same_bits(net.reset_state(out.next_state), carry)


def test_sequential_uses_the_given_names_in_metrics():
    net = Sequential({"encoder": Shift(1), "head": Shift(2)})
    assert list(net(net.initialize_state(1), jnp.zeros(1)).metrics) == ["encoder", "head"]
    assert net[1].by == 2


def test_sequential_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        Sequential([])


def test_sequential_refuses_a_carry_of_another_length():
    net = Sequential([Shift(1), Shift(2)])
    with pytest.raises(ValueError, match=r"2 layers got a carry with 1 entries.*initialize_state"):
        net([jnp.zeros(1)], jnp.zeros(1))


def test_an_mlp_activates_between_layers_and_after_the_last_only_if_asked():
    layers = make_mlp_layers([2, 4, 3], nnx.Rngs(0), nnx.tanh)
    assert [layer.activation for layer in layers] == [nnx.tanh, nnx.tanh]
    net = make_mlp([2, 4, 3], nnx.Rngs(0), "tanh", activation_last_layer=False)
    assert [layer.activation for layer in net.layers] == [nnx.tanh, None]
    assert net(net.initialize_state(5), jnp.zeros((5, 2))).output.shape == (5, 3)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_named_activation_works(name):
    make_mlp([1, 1], nnx.Rngs(0), name)([()], jnp.ones((1, 1)))


def test_an_unknown_activation_gets_a_suggestion():
    with pytest.raises(ValueError, match=r"activation='rellu' is not known \(did you mean 'relu'\?\).*tanh"):
        make_mlp([1, 1], nnx.Rngs(0), "rellu")


def test_an_mlp_of_one_size_is_refused():
    with pytest.raises(ValueError, match=r"sizes=\[3\]; give at least"):
        make_mlp([3], nnx.Rngs(0))


def test_make_mlp_actor_critic_builds_the_documented_structure():
    net = make_mlp_actor_critic(3, 2, [8, 7], [5], nnx.Rngs(0), activation="swish", entropy_weight=0.3, min_std=0.4)
    normalizer, adapter = net.layers
    assert isinstance(normalizer, Normalizer)
    *actor, head = adapter.action.layers
    assert [(layer.in_features, layer.out_features) for layer in actor] == [(3, 8), (8, 7), (7, 4)]
    assert [(layer.in_features, layer.out_features) for layer in adapter.value.layers] == [(3, 5), (5, 1)]
    assert [layer.activation for layer in actor] == [nnx.swish, nnx.swish, None]
    assert (head.entropy_weight, head.min_std, head.std_scale) == (0.3, 0.4, 1.0)
    assert isinstance(make_mlp_actor_critic(3, 2, [], [], nnx.Rngs(0), normalize_obs=False), PPOAdapter)


def test_make_mlp_actor_critic_initialises_with_fan_in_uniform_of_the_given_scale():
    net = make_mlp_actor_critic(100, 2, [200], [50], nnx.Rngs(0), initializer_scale=4.0)
    kernel = np.asarray(net.layers[1].action.layers[0].linear.kernel.get_value())
    bound = np.sqrt(3 * 4.0 / 100)
    assert abs(kernel).max() <= bound
    np.testing.assert_allclose(kernel.std(), bound / np.sqrt(3), rtol=0.02)


# --- PPOAdapter -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 4])
def test_the_output_has_a_batch_axis_also_for_a_batch_of_one(batch):
    net = make_mlp_actor_critic(3, 2, [4], [4], nnx.Rngs(0))
    out = net(net.initialize_state(batch), jnp.zeros((batch, 3))).output
    assert isinstance(out, PPONetworkOutput)
    assert out.actions.shape == (batch, 2)
    assert out.loglikelihoods.shape == out.value_estimates.shape == out.entropies.shape == (batch,)


def test_adapter_takes_a_tree_of_samplers_and_a_tree_of_critics():
    rngs = nnx.Rngs(0)
    head = lambda size: Sequential([Dense(3, 2 * size, rngs), NormalTanhSampler(rngs, 0.1)])
    net = PPOAdapter(PerKey({"arm": head(2), "leg": head(1)}), PerKey({"a": Dense(3, 1, rngs), "b": Dense(3, 1, rngs)}))

    state = net.initialize_state(4)
    out = net(state, jnp.ones((4, 3)))
    assert out.output.actions["arm"].shape == (4, 2)
    assert out.output.actions["leg"].shape == (4, 1)
    for tree in (out.output.loglikelihoods, out.output.entropies):
        assert {k: v.shape for k, v in tree.items()} == {"arm": (4,), "leg": (4,)}
    assert {k: v.shape for k, v in out.output.value_estimates.items()} == {"a": (4,), "b": (4,)}
    np.testing.assert_allclose(out.regularization_loss, -0.1 * sum(out.output.entropies.values()), rtol=1e-5)
    again = net(state, jnp.ones((4, 3)), out.rollout_extras)
    assert_same_bits(out.output.loglikelihoods, again.output.loglikelihoods)


def test_adapter_says_what_an_action_port_must_end_with():
    net = PPOAdapter(Dense(3, 2, nnx.Rngs(0)), Dense(3, 1, nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"'action' and 'log_likelihood'.*NormalTanhSampler"):
        net({"action": (), "value": ()}, jnp.zeros((1, 3)))


# --- the contract ---------------------------------------------------------------------------------------------


def test_a_split_network_called_as_a_function_leaves_the_caller_untouched():
    net = make_mlp_actor_critic(3, 2, [4], [4], nnx.Rngs(0))
    graphdef, params, variables = functional.split(net)
    before = jax.tree.map(jnp.copy, variables)
    first, after = functional.apply(graphdef, params, variables, net.initialize_state(2), jnp.ones((2, 3)))
    again, _ = functional.apply(graphdef, params, variables, net.initialize_state(2), jnp.ones((2, 3)))
    assert_same_bits(first.output.actions, again.output.actions)
    assert_same_bits(before, variables)
    following, _ = functional.apply(graphdef, params, after, net.initialize_state(2), jnp.ones((2, 3)))
    assert not np.array_equal(first.output.actions, following.output.actions)


def test_the_evaluation_graphdef_is_deterministic_and_leaves_the_original_alone():
    net = make_mlp_actor_critic(3, 2, [4], [4], nnx.Rngs(0))
    graphdef, params, variables = functional.split(net)
    deterministic = functional.evaluation_graphdef(graphdef, params, variables)
    x, state = jnp.ones((2, 3)), net.initialize_state(2)
    out, after = functional.apply(deterministic, params, variables, state, x)
    np.testing.assert_allclose(out.output.actions, np.tanh(out.metrics[1]["action"][2]["mu"]), rtol=1e-6)
    assert_same_bits(after, variables)
    assert functional.split(net)[0] == graphdef


def test_whether_a_network_has_a_carry_is_told_by_its_leaves():
    assert functional.is_stateless(make_mlp_actor_critic(3, 2, [4], [4], nnx.Rngs(0)).initialize_state(2))
    assert not functional.is_stateless(recurrent_actor_critic(3, 2, nnx.Rngs(0)).initialize_state(2))


def test_by_default_resetting_gives_the_initial_carry():
    module = Leaky(3, nnx.Rngs(0))
    assert_same_bits(module.reset_state(jnp.ones((5, 3))), jnp.zeros((5, 3)))
