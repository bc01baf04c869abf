"""Modules beyond the core against numbers made by hand or by NumPy, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from probe_envs import Counter, assert_same_bits
from scipy import stats

from nnx_ppo.algorithms.rollout import record_activations_rollout
from nnx_ppo.networks import functional
from nnx_ppo.networks.adapter import PPOAdapter
from nnx_ppo.networks.cnn import CNNEncoder
from nnx_ppo.networks.containers import Concat, Parallel, Sequential, Splitter
from nnx_ppo.networks.delay import Delay
from nnx_ppo.networks.describe import describe
from nnx_ppo.networks.factories import (
    make_asymmetric_actor_critic,
    make_critic,
    make_mlp_actor_critic,
    make_recurrent_actor_critic,
)
from nnx_ppo.networks.feedforward import Dense
from nnx_ppo.networks.forward_model import ForwardModel
from nnx_ppo.networks.normalizer import Normalizer
from nnx_ppo.networks.recording import Recorder, extract_activations, with_recording
from nnx_ppo.networks.recurrent import GRU, LSTM, SimpleRNN
from nnx_ppo.networks.sampling_layers import CategoricalSampler, NormalSampler, NormalTanhSampler
from nnx_ppo.networks.utils import Filter, Flattener, Map, Merge, Scale
from nnx_ppo.networks.variational import AR1VariationalBottleneck, VariationalBottleneck


def run(module, obs, state=None):
    return module(module.initialize_state(jax.tree.leaves(obs)[0].shape[0]) if state is None else state, obs)


# --- containers and small modules -----------------------------------------------------------------------------

TREE = {"b": jnp.asarray([[1.0, 2.0]]), "a": jnp.asarray([[[3.0], [4.0]]])}


def test_containers_route_by_name():
    x = jnp.asarray([[2.0]])
    assert run(Parallel(one=Scale(1), ten=Scale(10)), x).output == {"one": x, "ten": 10 * x}
    assert run(Map({"b": Scale(2)}), {"b": x, "dropped": x}).output == {"b": 2 * x}
    np.testing.assert_array_equal(run(Concat(b=Scale(1), a=Scale(5)), {"a": x, "b": x}).output, [[2.0, 10.0]])
    merged = run(Merge(m=Parallel(p=Scale(1)), n=Parallel(q=Scale(2), r=Scale(3))), x).output
    assert merged == {"p": x, "q": 2 * x, "r": 3 * x}
    assert set(run(Parallel(one=Scale(1), ten=Scale(10)), x).metrics) == {"one", "ten"}


def test_splitter_cuts_in_the_order_given_and_drops_the_rest():
    out = run(Splitter(z=1, a=2), jnp.arange(4.0)[None]).output
    np.testing.assert_array_equal(out["z"], [[0]])
    np.testing.assert_array_equal(out["a"], [[1, 2]])


def test_flattener_joins_leaves_by_sorted_key_and_preserves_levels():
    np.testing.assert_array_equal(run(Flattener(), TREE).output, [[3, 4, 1, 2]])
    np.testing.assert_array_equal(run(Flattener(1), {"x": TREE, "y": TREE["b"]}).output["x"], [[3, 4, 1, 2]])
    np.testing.assert_array_equal(run(Flattener(), {"c": jnp.asarray([5, 6])}).output, [[5], [6]])


def test_filter_takes_keys_paths_and_functions():
    obs = {"arm": {"q": [jnp.ones(2), jnp.zeros(2)]}, "t": jnp.full(2, 7.0)}
    out = run(Filter({"t": "t", "q1": ("arm", "q", 1), "twice": lambda obs: 2 * obs["t"]}), obs).output
    assert {name: float(value[0]) for name, value in out.items()} == {"t": 7, "q1": 0, "twice": 14}
    assert float(run(Filter("t"), obs).output[0]) == 7


def test_named_layers_name_parameters_and_metrics_and_keep_their_order():
    net = Sequential({"z": Scale(2.0), "a": Dense(1, 1, nnx.Rngs(0))})
    paths = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(net, nnx.Param))]
    assert paths == ["layers.a.linear.bias", "layers.a.linear.kernel"]
    merged = functional.merge(*functional.split(net))
    assert list(run(merged, jnp.ones((1, 1))).metrics) == ["z", "a"]
    assert isinstance(merged["a"], Dense)
    assert isinstance(merged[0], Scale)


@pytest.mark.parametrize(
    ("make", "obs", "error", "message"),
    [
        (lambda: Parallel({"a": Scale(1)}, b=Scale(1)), None, ValueError, "both a dict and keywords"),
        (lambda: Map(), None, ValueError, "no modules"),
        (lambda: Concat(a=nnx.relu), None, TypeError, "as 'a'; StatefulModules are accepted"),
        (lambda: Sequential([nnx.Linear(1, 1, rngs=nnx.Rngs(0))]), None, TypeError, "got Linear as 0"),
        (lambda: Splitter(a=0), None, ValueError, "a=0; a whole number of at least 1"),
        (lambda: Filter({"a": 3}), None, TypeError, "int for 'a'"),
        (lambda: Flattener(-1), None, ValueError, "preserve_levels=-1"),
        (lambda: Delay(jnp.zeros(1), 0), None, ValueError, "k_steps=0"),
        (lambda: Normalizer(1, clip=0.0), None, ValueError, "clip=0.0"),
        (lambda: NormalSampler(1, nnx.Rngs(0), 0.0, initial_std=-1.0), None, ValueError, "initial_std=-1.0"),
        (lambda: CNNEncoder((4, 4), 1, nnx.Rngs(0)), None, ValueError, r"\(height, width, channels\)"),
        (lambda: Map(b=Scale(1)), {"a": jnp.ones((1, 1))}, ValueError, "Map takes the key 'b'.*which has 'a'"),
        (lambda: Map(b=Scale(1)), jnp.ones((1, 1)), ValueError, r"takes a dict with the key 'b'.*shape \(1, 1\)"),
        (lambda: Filter("c"), TREE, ValueError, "the key 'c' of its input, which has 'b', 'a'"),
        (lambda: Splitter(a=3), jnp.ones((1, 2)), ValueError, r"at least 3 features.*\(1, 2\)"),
        (lambda: Merge(m=Scale(1)), jnp.ones((1, 1)), TypeError, "'m' returned an array"),
        (
            lambda: Merge(m=Parallel(a=Scale(1)), n=Parallel(a=Scale(1))),
            jnp.ones((1, 1)),
            ValueError,
            "'a' from both 'm' and 'n'",
        ),
        (lambda: Flattener(2), {"x": jnp.ones((1, 1))}, TypeError, "1 more levels"),
        (lambda: LSTM(3, 2, nnx.Rngs(0)), jnp.ones((1, 4)), ValueError, r"LSTM\(3 -> 2\) takes 3 features.*\(1, 4\)"),
        (lambda: Delay({"a": jnp.zeros(2)}, 1), {"a": jnp.zeros((1, 3))}, ValueError, r"\[\(2,\)\].*\[\(3,\)\]"),
        (lambda: VariationalBottleneck(2, nnx.Rngs(0)), jnp.ones((1, 3)), ValueError, "4 features, and got"),
        (lambda: NormalSampler(2, nnx.Rngs(0), 0.0), jnp.ones((1, 4)), ValueError, "one mean per action"),
        (lambda: CNNEncoder((4, 4, 1), 1, nnx.Rngs(0)), jnp.ones((1, 4, 4, 3)), ValueError, r"\(4, 4, 1\) and got"),
    ],
)
def test_bad_input_is_refused_with_what_was_given_and_what_is_accepted(make, obs, error, message):
    with pytest.raises(error, match=message):
        run(make(), obs)


def test_an_error_names_the_path_to_the_module():
    inner = Sequential({"head": Parallel(a=Sequential([Flattener(), Dense(3, 1, nnx.Rngs(0))]))})
    net = PPOAdapter(action=inner, value=Dense(3, 1, nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"^in module action/head/a/1: Dense\(3 -> 1\) got an input of shape \(2, 5\)"):
        run(net, jnp.ones((2, 5)))


def test_a_carry_of_another_structure_is_refused():
    with pytest.raises(ValueError, match=r"Parallel takes a carry with the keys \['a'\].*type tuple.*initialize_state"):
        Parallel(a=Scale(1))((), jnp.ones((1, 1)))
    with pytest.raises(ValueError, match=r"GRU\(1 -> 2\) takes a carry of 1 array\(s\) of shape \(1, 2\) and got \[\]"):
        GRU(1, 2, nnx.Rngs(0))((), jnp.ones((1, 1)))


# --- with memory ----------------------------------------------------------------------------------------------

sigmoid = lambda x: 1 / (1 + np.exp(-x))


def test_lstm_is_the_textbook_formula_and_its_carry_is_hidden_then_cell():
    layer = LSTM(2, 3, nnx.Rngs(0), use_optimized=False)
    rng = np.random.default_rng(0)
    x, h, c = (rng.normal(size=(4, n)) for n in (2, 3, 3))
    cell = layer.cell
    gate = lambda name: (
        x @ np.asarray(getattr(cell, {"f": "if_"}.get(name, f"i{name}")).kernel.get_value())
        + h @ np.asarray(getattr(cell, f"h{name}").kernel.get_value())
        + np.asarray(getattr(cell, f"h{name}").bias.get_value())
    )
    new_c = sigmoid(gate("f")) * c + sigmoid(gate("i")) * np.tanh(gate("g"))
    new_h = sigmoid(gate("o")) * np.tanh(new_c)
    out = layer((jnp.asarray(h, jnp.float32), jnp.asarray(c, jnp.float32)), jnp.asarray(x, jnp.float32))
    for given, expected in zip((out.output, *out.next_state), (new_h, new_h, new_c), strict=True):
        np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "parts"), [(LSTM, 2), (GRU, 1), (SimpleRNN, 1)])
def test_a_learned_initial_carry_is_what_an_episode_starts_with(kind, parts):
    layer = kind(2, 3, nnx.Rngs(0), trainable_initial_state=True)
    names = list(layer.initial)
    assert len(names) == parts
    for i, name in enumerate(layer.carry_names):
        layer.initial[name].set_value(jnp.full(3, float(i + 1)))
    leaves = jax.tree.leaves(layer.initialize_state(4))
    assert [float(leaf[3, 0]) for leaf in leaves] == [1.0, 2.0][:parts]
    assert_same_bits(layer.reset_state(layer.initialize_state(4)), layer.initialize_state(4))


@pytest.mark.parametrize("k", [1, 3])
def test_delay_gives_the_input_of_k_steps_ago(k):
    layer = Delay({"x": jnp.zeros(()), "n": jnp.zeros((), jnp.int32)}, k, initial_value=-5)
    state, seen = layer.initialize_state(2), []
    for t in range(6):
        out = layer(state, {"x": jnp.asarray([t, 10.0 + t]), "n": jnp.asarray([t, t])})
        state = out.next_state
        seen.append(np.asarray(out.output["x"]))
    expected = [[-5, -5]] * k + [[t, 10 + t] for t in range(6 - k)]
    np.testing.assert_array_equal(seen, expected)
    assert out.output["n"].dtype == jnp.int32


# --- normalizer -----------------------------------------------------------------------------------------------


def test_normalizer_clips_its_output_only_if_asked():
    plain, clipped = Normalizer({"a": 1}), Normalizer({"a": 1}, clip=2.0)
    x = {"a": jnp.asarray([[-7.0], [0.5], [3.0]])}
    np.testing.assert_array_equal(plain((), x).output["a"], x["a"])
    np.testing.assert_array_equal(clipped((), x).output["a"], [[-2.0], [0.5], [2.0]])
    assert_same_bits(clipped((), x).rollout_extras, x)  # statistics see what is not clipped


# --- variational and forward model ----------------------------------------------------------------------------


def test_bottleneck_price_is_the_divergence_from_the_standard_normal():
    layer = VariationalBottleneck(1, nnx.Rngs(0), kl_weight=0.5, min_std=0.1)
    mean, scale = 0.7, -0.3
    std = np.logaddexp(0, scale) + 0.1
    z = np.linspace(-12, 12, 200_001)
    density = stats.norm.pdf(z, mean, std)
    log_ratio = stats.norm.logpdf(z, mean, std) - stats.norm.logpdf(z)
    expected = np.trapezoid(density * log_ratio, z)
    out = run(layer, jnp.asarray([[mean, scale]]))
    np.testing.assert_allclose(out.metrics["kl_divergence"], [expected], rtol=1e-4)
    np.testing.assert_allclose(out.regularization_loss, [0.5 * expected], rtol=1e-4)
    np.testing.assert_allclose(out.metrics["sigma"], [[std]], rtol=1e-6)
    np.testing.assert_allclose(out.output, mean + std * np.asarray(out.rollout_extras), rtol=1e-6)


def test_bottleneck_does_not_sample_in_evaluation():
    layer = VariationalBottleneck(2, nnx.Rngs(0))
    layer.eval()
    np.testing.assert_array_equal(run(layer, jnp.asarray([[1.0, 2.0, 0.0, 0.0]])).output, [[1.0, 2.0]])


def test_replayed_noise_moves_with_the_parameters():
    layer, noise = VariationalBottleneck(1, nnx.Rngs(0)), jnp.asarray([[1.5]])
    gradient = jax.grad(lambda x: layer((), x, noise).output[0, 0])(jnp.asarray([[0.0, 0.0]]))
    np.testing.assert_allclose(gradient, [[1.0, 1.5 * 0.5]], rtol=1e-5)  # softplus'(0) = 1/2


def test_jumps_cost_their_mean_square_but_not_at_the_first_step():
    layer = AR1VariationalBottleneck(2, nnx.Rngs(0), kl_weight=0.0, ar1_weight=3.0)
    layer.eval()
    first = run(layer, jnp.asarray([[1.0, 1.0, 0.0, 0.0]]))
    second = layer(first.next_state, jnp.asarray([[2.0, 3.0, 0.0, 0.0]]))
    assert (float(first.metrics["l2_diff"][0]), float(first.regularization_loss[0])) == (0.0, 0.0)
    assert (float(second.metrics["l2_diff"][0]), float(second.regularization_loss[0])) == (2.5, 7.5)


@pytest.mark.parametrize("through_time", [True, False])
def test_the_gradient_of_a_jump_reaches_the_earlier_latent_only_if_asked(through_time):
    layer = AR1VariationalBottleneck(1, nnx.Rngs(0), kl_weight=0.0, backprop_through_time=through_time)
    layer.eval()
    obs = jnp.asarray([[[1.0, 0.0]], [[4.0, 0.0]]])
    loss = lambda obs: jnp.sum(
        functional.over_time(layer, layer.initialize_state(1), obs, None, jnp.zeros((2, 1), bool)).regularization_loss
    )
    gradient = jax.grad(loss)(obs)[:, 0, 0]
    np.testing.assert_allclose(gradient, [-6.0 if through_time else 0.0, 6.0], atol=1e-6)


def test_forward_model_compares_its_prediction_with_what_came_next():
    rngs = nnx.Rngs(0)
    predictor = Dense(3, 2, rngs)
    policy = Sequential([Dense(2, 2, rngs), NormalTanhSampler(rngs, 0.0)])
    model = ForwardModel(policy, predictor, 2, 1, weight=2.0)
    one, two = jnp.asarray([[0.3, -0.2]]), jnp.asarray([[1.0, 0.5]])
    first = run(model, one)
    second = model(first.next_state, two)
    predicted = predictor((), jnp.concatenate([one, first.output["action"]], -1)).output
    mse = float(np.mean((np.asarray(predicted) - np.asarray(two)) ** 2))
    assert float(first.metrics["fm_pred_mse"][0]) == 0
    np.testing.assert_allclose(second.metrics["fm_pred_mse"], [mse], rtol=1e-5)
    np.testing.assert_allclose(second.regularization_loss, [2 * mse], rtol=1e-5)


def test_forward_model_refuses_what_it_cannot_join_or_compare():
    rngs = nnx.Rngs(0)
    discrete = Sequential([Dense(2, 3, rngs), CategoricalSampler(rngs, 0.0)])
    with pytest.raises(TypeError, match="encode_action"):
        run(ForwardModel(discrete, Dense(3, 2, rngs), 2, 1), jnp.ones((1, 2)))
    with pytest.raises(ValueError, match="predictor without a carry"):
        ForwardModel(discrete, GRU(3, 2, rngs), 2, 1)
    one_hot = lambda action: jax.nn.one_hot(action, 3)
    with pytest.raises(
        ValueError, match=r"gives an array of shape \(1, 4\) and its target is an array of shape \(1, 2"
    ):
        run(ForwardModel(discrete, Dense(5, 4, rngs), 2, 3, encode_action=one_hot), jnp.ones((1, 2)))


# --- samplers and the image encoder ---------------------------------------------------------------------------


def test_normal_sampler_has_the_density_and_entropy_of_a_normal():
    sampler = NormalSampler(2, nnx.Rngs(0), 0.5, initial_std=0.7)
    mean = np.asarray([[1.0, -2.0]] * 3)
    out = run(sampler, jnp.asarray(mean))
    density = stats.norm(mean, 0.7).logpdf(np.asarray(out.output["action"])).sum(-1)
    np.testing.assert_allclose(out.output["log_likelihood"], density, rtol=1e-4)
    np.testing.assert_allclose(out.output["entropy"], [2 * stats.norm(0, 0.7).entropy()] * 3, rtol=1e-5)
    np.testing.assert_allclose(out.regularization_loss, -0.5 * np.asarray(out.output["entropy"]), rtol=1e-6)
    sampler.eval()
    np.testing.assert_array_equal(run(sampler, jnp.asarray(mean)).output["action"], np.float32(mean))


def test_categorical_sampler_draws_by_its_probabilities():
    p = np.asarray([0.2, 0.0, 0.8])
    sampler = CategoricalSampler(nnx.Rngs(0), 0.5)
    out = run(sampler, jnp.tile(jnp.log(jnp.asarray(p)), (4000, 1)))
    action = np.asarray(out.output["action"])
    np.testing.assert_allclose(np.bincount(action, minlength=3) / 4000, p, atol=0.03)
    np.testing.assert_allclose(out.output["log_likelihood"], np.log(p[action]), rtol=1e-5)
    np.testing.assert_allclose(out.output["entropy"][0], stats.entropy([0.2, 0.8]), rtol=1e-5)
    assert "std" not in out.output
    sampler.eval()
    gradient = jax.grad(lambda x: jnp.sum(run(sampler, x).regularization_loss))(jnp.log(jnp.asarray([p])))
    assert np.isfinite(gradient).all()
    assert int(run(sampler, jnp.asarray([[0.0, 3.0, 1.0]])).output["action"][0]) == 1


def test_image_encoder_scales_integers_and_has_the_stated_size():
    encoder = CNNEncoder((9, 8, 3), 5, nnx.Rngs(0), (4, 6), (3, 3), (2, 2))
    image = np.random.default_rng(0).integers(0, 256, size=(2, 9, 8, 3)).astype(np.uint8)
    out = run(encoder, jnp.asarray(image)).output
    assert out.shape == (2, 5)
    np.testing.assert_allclose(out, run(encoder, jnp.asarray(image / 255.0)).output, rtol=1e-4, atol=1e-5)


# --- factories, describe, recording ---------------------------------------------------------------------------


def test_an_asymmetric_critic_sees_the_privileged_entry_and_the_actor_does_not():
    sizes = {"state": (3,), "privileged_state": (5,), "other": 2}
    net = make_asymmetric_actor_critic(sizes, 2, [4], [4], nnx.Rngs(0), activation="tanh")
    net.eval()
    obs = {"state": jnp.ones((2, 3)), "privileged_state": jnp.ones((2, 5)), "other": jnp.ones((2, 2))}
    base = run(net, obs).output
    private = run(net, obs | {"privileged_state": jnp.zeros((2, 5))}).output
    public = run(net, obs | {"state": jnp.zeros((2, 3)), "other": jnp.zeros((2, 2))}).output
    assert_same_bits(base.actions, private.actions)
    assert_same_bits(base.value_estimates, public.value_estimates)
    assert not np.array_equal(base.value_estimates, private.value_estimates)
    assert not np.array_equal(base.actions, public.actions)
    with pytest.raises(ValueError, match=r"no entry 'stat' \(did you mean 'state'\?\)"):
        make_asymmetric_actor_critic(sizes, 2, [4], [4], nnx.Rngs(0), actor_keys=["stat"])


@pytest.mark.parametrize("cell", [LSTM, GRU, SimpleRNN])
def test_a_recurrent_actor_critic_has_one_core_and_a_head_per_reward(cell):
    net = make_recurrent_actor_critic(
        {"a": 2, "b": (2, 2)}, 3, 4, [5], [], nnx.Rngs(0), cell=cell, encoder_sizes=[7], reward_terms=["x", "y"]
    )
    assert net.names == ("normalizer", "flattener", "encoder", "core", "ports")
    assert (net["core"].in_features, net["core"].hidden_features) == (7, 4)
    out = run(net, {"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2, 2))}).output
    assert {name: value.shape for name, value in out.value_estimates.items()} == {"x": (2,), "y": (2,)}
    assert out.actions.shape == (2, 3)


def test_a_small_last_layer_makes_the_first_policy_the_same_everywhere():
    init = nnx.initializers.orthogonal
    net = make_mlp_actor_critic(
        4, 2, [16], [16], nnx.Rngs(0), normalize_obs=False, kernel_init=init(2**0.5), last_kernel_init=init(1e-4)
    )
    net.eval()
    kernel = np.asarray(net.action[0].linear.kernel.get_value())
    np.testing.assert_allclose(kernel @ kernel.T, 2 * np.eye(4), atol=1e-4)
    assert np.abs(run(net, 5 * jnp.eye(4)).output.actions).max() < 0.01


def test_a_critic_without_hidden_layers_is_linear():
    assert len(make_critic([3], nnx.Rngs(0)).in_order()) == 1


def test_describe_counts_every_parameter_once_and_adds_up():
    shared = Dense(3, 3, nnx.Rngs(0))
    net = Sequential({"z": shared, "a": Parallel(y=Dense(3, 2, nnx.Rngs(0)), x=shared)})
    rows = [line.split() for line in describe(net).splitlines()]
    assert rows == [
        ["module", "kind", "sizes", "parameters"],
        ["network", "Sequential", "20"],
        ["z", "Dense", "3", "->", "3", "12"],
        ["a", "Parallel", "8"],
        ["a/y", "Dense", "3", "->", "2", "8"],
        ["a/x", "Dense", "3", "->", "3", "(above)"],
    ]


def test_recording_changes_no_output_and_touches_no_training_state():
    net = make_recurrent_actor_critic(2, 1, 3, [4], [4], nnx.Rngs(0))
    before = jax.tree.map(jnp.copy, nnx.state(net))
    recording = with_recording(net)
    obs = jnp.asarray([[0.5, -1.0]])
    recorded = run(recording, obs)
    assert_same_bits(nnx.state(net), before)
    assert not any(isinstance(module, Recorder) for _, module in nnx.iter_modules(net))
    plain = run(net, obs)
    assert_same_bits(recorded.output, plain.output)
    activations = extract_activations(recorded.metrics)
    assert set(activations) == {"normalizer", "flattener", "core", "ports"}
    np.testing.assert_array_equal(activations["core"], plain.next_state[2][0])
    assert extract_activations(plain.metrics) is None
    with pytest.warns(UserWarning, match="records already"):
        assert with_recording(recording) is recording


def test_recording_selects_layers_and_dtype_over_whole_episodes():
    net = make_recurrent_actor_critic(2, 1, 3, [4], [4], nnx.Rngs(0))
    activations, ended = record_activations_rollout(
        Counter(3), net, 2, 5, jax.random.key(0), layers=["core", "ports/action/0"], dtype=jnp.bfloat16
    )
    assert jax.tree.map(lambda x: (x.shape, x.dtype.name), activations) == {
        "core": ((5, 2, 3), "bfloat16"),
        "ports": {"action": {0: ((5, 2, 4), "bfloat16")}},
    }
    np.testing.assert_array_equal(ended, np.tile([[False], [False], [False], [True], [True]], 2))
    with pytest.raises(ValueError, match="layers='cor' fits no module"):
        with_recording(net, layers=["cor"])
