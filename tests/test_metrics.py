"""What is logged: the keys of every level, their numbers against NumPy, and what they cost."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from logging_probe_env import Workbench, discrete_network, two_headed_network
from probe_envs import BrokenResets, Counter, Readout

from nnx_ppo.algorithms import metrics as metrics_module
from nnx_ppo.algorithms import ppo, rollout
from nnx_ppo.algorithms.config import EvalConfig, LoggingLevel, PPOConfig, TrainConfig, VideoConfig
from nnx_ppo.algorithms.metrics import EVALUATION_GLOSSARY, GLOSSARY, evaluation_metrics, iteration_metrics
from nnx_ppo.networks import functional
from nnx_ppo.networks.types import StatefulModuleOutput

L = LoggingLevel
EVERYTHING = L.ALL | L.ROLLOUT_OBS
PERCENTILES = (0, 25, 50, 99.5, 100)
SIZES = {"n_envs": 4, "n_minibatches": 1, "n_epochs": 1, "rollout_length": 7, "total_steps": 56}


@functools.cache
def probe(kind):
    """Environment, network and first state: "dicts" has one of everything, "scalars" nothing that is a dict."""
    if kind == "dicts":
        env, network = Workbench(), two_headed_network()
    else:
        env, network = Counter(3, ending="truncation"), discrete_network(2)
    return env, network, ppo.initial_training_state(env, network, TrainConfig(ppo=PPOConfig(**SIZES)))


@functools.cache
def keys(kind, level, percentiles=None):
    """What an iteration emits, found by tracing alone."""
    env, _, state = probe(kind)
    config = PPOConfig(**SIZES, logging_level=level, logging_percentiles=percentiles)
    return frozenset(jax.eval_shape(functools.partial(ppo.ppo_step, env, config), state)[1])


# --- keys -----------------------------------------------------------------------------------------------------


def each(*names, statistics=("mean", "std")):
    return {f"{name}/{statistic}" for name in names for statistic in statistics}


LAYERS = [f"weights/layers/2/{port}" for port in (
    "action/modules/x/layers/0", "action/modules/y/layers/0", "value/modules/x", "value/modules/y"
)]  # fmt: skip
EXPECTED = {
    L.LOSSES: {
        "losses/actor_loss", "losses/actor_loss/x", "losses/actor_loss/y", "losses/critic_loss", "losses/critic_loss/x",
        "losses/critic_loss/y", "losses/entropy", "losses/regularization", "losses/total", "rollout_batch/reward/mean",
    },
    L.CRITIC_EXTRA: {"losses/explained_variance"} | each(
        *(f"losses/{name}{term}" for name in ("predicted_value", "advantages") for term in ("", "/x", "/y"))
    ),
    L.ACTOR_EXTRA: {"losses/clipping_fraction", "losses/approx_kl", "losses/policy_std"}
    | each("loglikelihood", "loglikelihood/x", "loglikelihood/y"),
    L.ROLLOUT_STATS: {"rollout_batch/done_rate", "rollout_batch/truncation_rate"}
    | each(*(f"rollout_batch/{name}" for name in ("reward", "reward/x", "reward/y", "action/x", "action/y"))),
    L.ROLLOUT_OBS: each("rollout_batch/obs/position", "rollout_batch/obs/clock"),
    L.ENV_METRICS: {"env/near", "env/nonfinite"} | each("env/height", "env/arms/reach"),
    L.NETWORK_METRICS: each("net/1/first", "net/1/gain")
    | each(*(f"net/2/action/{head}/1/{name}" for head in "xy" for name in ("mu", "sigma"))),
    L.GRAD_NORM: {"grad_norm", "grad_norm/actor", "grad_norm/critic"},
    L.WEIGHTS: {"weights/layers/1/gain"}
    | each(*(f"{layer}/linear/{array}" for layer in LAYERS for array in ("bias", "kernel"))),
    L.THROUGHPUT: set(),  # The loop measures it.
}  # fmt: skip
"""Written by hand from the contract."""


@pytest.mark.parametrize(
    "level",
    [*L, EVERYTHING, L.ALL, L.NONE, L.GRAD_NORM | L.ACTOR_EXTRA, L.ROLLOUT_STATS | L.LOSSES | L.WEIGHTS],
    ids=lambda level: "|".join(level.names) or "NONE",
)
def test_the_keys_of_a_level_are_those_of_the_contract_and_those_of_several_their_union(level):
    expected = set().union(*(EXPECTED[single] for single in L if single in level))
    assert keys("dicts", level) == expected


def test_all_is_everything_but_the_observations_and_basic_is_the_losses():
    assert L.ROLLOUT_OBS not in L.ALL
    assert functools.reduce(lambda a, b: a | b, L) == EVERYTHING
    assert L.BASIC is L.LOSSES
    assert set(GLOSSARY) == set(L)
    assert PPOConfig().logging_level == L.LOSSES


def test_percentiles_replace_mean_and_standard_deviation_but_not_the_mean_reward_of_the_losses():
    statistics = ("p0", "p25", "p50", "p99.5", "p100")
    plain = keys("dicts", EVERYTHING)
    expected = {key for key in plain if not key.endswith(("/mean", "/std"))} | {"rollout_batch/reward/mean"}
    expected |= each(*(key.removesuffix("/std") for key in plain if key.endswith("/std")), statistics=statistics)
    assert keys("dicts", EVERYTHING, PERCENTILES) == expected


def test_a_scalar_reward_one_head_and_a_flat_observation_have_bare_keys_and_a_discrete_policy_no_std():
    found = keys("scalars", EVERYTHING)
    assert "losses/policy_std" not in found
    assert "losses/regularization" not in found  # No module adds any.
    losses = {"losses/actor_loss", "losses/critic_loss", "losses/entropy", "losses/total", "losses/approx_kl"}
    assert {key for key in found if key.startswith("losses/")} == losses | {
        "losses/clipping_fraction", "losses/explained_variance", *each("losses/predicted_value", "losses/advantages")
    }  # fmt: skip
    rollouts = each(*(f"rollout_batch/{name}" for name in ("reward", "action", "obs")))
    rates = {"rollout_batch/done_rate", "rollout_batch/truncation_rate"}
    assert {key for key in found if key.startswith("rollout_batch/")} == rollouts | rates
    assert each("loglikelihood", "env/steps") <= found


def pattern(key):
    """A key of the glossary as a regular expression."""
    statistic = r"(mean|std|p\d+(\.\d+)?)"
    optional = key.split("/")[0] in ("env", "net", "weights")  # Flags and scalars have no statistic.
    key = re.escape(key).replace("/<statistic>", f"(/{statistic}){'?' if optional else ''}")
    key = key.replace("<percentile>", r"p\d+(\.\d+)?")
    return re.compile(re.sub(r"<(metric|module|layer)>", ".+", re.sub(r"<(term|head|leaf)>", r"[^/]+", key)))


@functools.cache
def logged_run():
    """Everything that a run with every level, evaluation, video and checkpoints logs."""
    env, network, _ = probe("dicts")
    config = TrainConfig(
        ppo=PPOConfig(**SIZES, logging_level=EVERYTHING),
        eval=EvalConfig(every_steps=28, n_envs=2, max_episode_length=5, logging_level=L.ALL),
        video=VideoConfig(enabled=True, every_steps=28, episode_length=3),
        checkpoint_every_steps=28,
    )
    records = []
    ppo.train_ppo(
        env, network, config, log_fn=lambda metrics, steps: records.append((steps, metrics)),
        video_fn=lambda video: None, checkpoint_fn=lambda state, step: None,
    )  # fmt: skip
    return records


def test_what_is_emitted_is_what_the_glossary_explains_both_ways():
    run = set().union(*(metrics for _, metrics in logged_run()))
    scalars, percentiles = keys("scalars", EVERYTHING), keys("dicts", EVERYTHING, PERCENTILES)
    everything = run | scalars | percentiles
    training = [pattern(key) for level in GLOSSARY.values() for key in level]
    evaluation = [pattern(key) for key in EVALUATION_GLOSSARY]
    unexplained = {key for key in everything if not any(p.fullmatch(key) for p in training + evaluation)}
    assert not unexplained
    for level, entries in GLOSSARY.items():
        patterns = [pattern(key) for key in entries]
        assert [key for key in EXPECTED[level] if not any(p.fullmatch(key) for p in patterns)] == []
    assert [p.pattern for p in training + evaluation if not any(p.fullmatch(key) for key in everything)] == []


def test_throughput_comes_with_what_was_done_and_compile_time_once():
    records = logged_run()
    assert [steps for steps, _ in records] == [0, 28, 56]
    phases = {phase: {f"throughput/{phase}_sps", f"time/{phase}_s"} for phase in ("train", "eval", "video")}
    timed = [{key for key in metrics if key.startswith(("time/", "throughput/"))} for _, metrics in records]
    saved = {"time/checkpoint_s"}
    assert timed[0] == phases["eval"] | saved  # The start's video is recorded when its program is there.
    assert timed[1] == phases["train"] | phases["eval"] | phases["video"] | saved | {"time/compile_s"}
    assert timed[2] == phases["train"] | phases["eval"] | saved | phases["video"]
    for _, metrics in records:
        for phase, steps in (("train", 28), ("eval", 6)):
            if f"time/{phase}_s" in metrics:
                taken = metrics[f"throughput/{phase}_sps"] * metrics[f"time/{phase}_s"]
                assert taken == pytest.approx(steps)


def test_evaluation_keys_are_there_only_when_it_ran_and_ignore_the_levels_of_training():
    assert not any(key.startswith("eval/") for key in keys("dicts", EVERYTHING))
    found = {key for key in logged_run()[1][1] if key.startswith("eval/")}
    statistics = ("p0", "p25", "p50", "p75", "p100")
    rewards = [f"eval/episode_reward{term}" for term in ("", "/x", "/y")]
    others = {key.rsplit("/", 1)[0] for key in found} - set(rewards)
    assert found == each(*rewards) | each(*rewards, *others, statistics=statistics)
    assert {"eval/lifespan", "eval/env/near", "eval/env/arms/reach", "eval/net/1/gain"} <= others


# --- numbers --------------------------------------------------------------------------------------------------


@functools.cache
def dumped():
    """A rollout, its advantages and targets, and its metrics with and without percentiles, all from one program."""
    env, _, state = probe("dicts")
    plain = PPOConfig(**SIZES, logging_level=EVERYTHING)
    detailed = PPOConfig(**SIZES, logging_level=EVERYTHING, logging_percentiles=PERCENTILES)

    @jax.jit
    def run(state):
        after, transitions = rollout.unroll(env, plain, state)
        advantages, targets = ppo.estimate_advantages(plain, after, transitions)
        rest = (transitions, advantages, targets, {}, after.params, after.nonfinite_steps)
        return transitions, advantages, targets, iteration_metrics(plain, *rest), iteration_metrics(detailed, *rest)

    return jax.device_get(run(state))


def numpy_values():
    """Every vector-valued metric as the values it is made of, taken from the dumped rollout."""
    transitions, advantages, _, _, _ = dumped()
    output, total = transitions.network_output, lambda tree: tree["x"] + tree["y"]
    values = {}
    for name, tree in {
        "losses/predicted_value": output.value_estimates,
        "losses/advantages": advantages,
        "loglikelihood": output.loglikelihoods,
        "rollout_batch/reward": transitions.rewards,
    }.items():
        values |= {name: total(tree), f"{name}/x": tree["x"], f"{name}/y": tree["y"]}
    values |= {f"rollout_batch/action/{head}": output.actions[head] for head in "xy"}
    values |= {f"rollout_batch/obs/{leaf}": transitions.obs[leaf] for leaf in ("position", "clock")}
    env = transitions.metrics["env"]
    values |= {"env/height": env["height"], "env/arms/reach": env["arms"]["reach"]}
    net = transitions.metrics["net"]
    values |= {f"net/1/{name}": net[1][name] for name in ("first", "gain")}
    for head in "xy":
        values |= {f"net/2/action/{head}/1/{name}": net[2]["action"][head][1][name] for name in ("mu", "sigma")}
    params = nnx.to_pure_dict(probe("dicts")[2].params)["layers"][2]
    for head in "xy":
        for array in ("kernel", "bias"):
            action = params["action"]["modules"][head]["layers"][0]["linear"][array]
            values[f"weights/layers/2/action/modules/{head}/layers/0/linear/{array}"] = action
            value = params["value"]["modules"][head]["linear"][array]
            values[f"weights/layers/2/value/modules/{head}/linear/{array}"] = value
    return {name: np.asarray(array, np.float64).ravel() for name, array in values.items()}


def test_means_standard_deviations_and_percentiles_are_those_of_the_dumped_rollout():
    *_, plain, detailed = dumped()
    values = numpy_values()
    assert {key.rsplit("/", 1)[0] for key in plain if key.endswith("/std")} == set(values)
    for name, array in values.items():
        close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5, err_msg=name)
        close(plain[f"{name}/mean"], array.mean())
        close(plain[f"{name}/std"], np.sqrt(np.mean((array - array.mean()) ** 2)))
        ordered = np.sort(array)
        for percentile in PERCENTILES:
            position = percentile / 100 * (len(ordered) - 1)
            below, part = int(position), position % 1
            between = ordered[below] * (1 - part) + ordered[min(below + 1, len(ordered) - 1)] * part
            close(detailed[f"{name}/p{percentile}"], between)


def test_rates_flags_scalars_and_the_mean_reward_are_those_of_the_dumped_rollout():
    transitions, *_, plain, detailed = dumped()
    ended = np.arange(1, 8)[:, None].repeat(4, 1) % 3 == 0
    np.testing.assert_array_equal(transitions.done, ended)
    limit = ended & (transitions.metrics["env"]["arms"]["reach"][..., 0] <= 0)
    assert 0 < limit.sum() < ended.sum()
    for metrics in (plain, detailed):
        assert metrics["rollout_batch/done_rate"] == pytest.approx(2 / 7)
        assert metrics["rollout_batch/truncation_rate"] == pytest.approx(limit.mean())
        near = transitions.metrics["env"]["arms"]["reach"][..., 0] > np.float32(0.2)
        assert metrics["env/near"] == pytest.approx(near.mean())
        assert metrics["env/nonfinite"] == 0
        assert metrics["weights/layers/1/gain"] == 1
        mean = np.mean(transitions.rewards["x"] + transitions.rewards["y"], dtype=np.float64)
        assert metrics["rollout_batch/reward/mean"] == pytest.approx(mean, rel=1e-4, abs=1e-5)


def test_explained_variance_is_that_of_the_sums_over_terms():
    transitions, _, targets, plain, _ = dumped()
    value = sum(np.asarray(v, np.float64) for v in transitions.network_output.value_estimates.values())
    target = sum(np.asarray(v, np.float64) for v in targets.values())
    expected = 1 - np.var(target - value) / np.var(target)
    assert plain["losses/explained_variance"] == pytest.approx(expected, rel=1e-3)


def test_explained_variance_is_nan_if_targets_do_not_vary_beyond_rounding():
    values = jnp.linspace(0, 1, 50)
    explained = metrics_module.explained_variance
    assert np.isnan(explained(values, jnp.full(50, 0.1)))
    assert np.isnan(explained(values, (100 - values) + values))
    assert np.isnan(explained(values, jnp.zeros(50)))
    assert explained(values, values) == 1
    assert explained(jnp.zeros(50), values) == 0
    assert explained(2 * values, values) == pytest.approx(0, abs=1e-5)
    assert explained(values, 1e-4 * values) < 0


def test_percentiles_are_named_exactly():
    found = metrics_module.reduce("m", jnp.arange(5.0), (0, 2.5, 50.0, 99.99999, 100))
    assert list(found) == ["m/p0", "m/p2.5", "m/p50", "m/p99.99999", "m/p100"]


def moved(params):
    """Parameters some way from those that the rollout was made with."""
    leaves, structure = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    moved = [leaf + jnp.asarray(0.3 * rng.normal(size=leaf.shape), leaf.dtype) for leaf in leaves]
    return jax.tree.unflatten(structure, moved)


def numpy_forward(params, transitions):
    """Per head the log-likelihoods of the stored actions and the standard deviations; per term the values."""
    network = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(params)["layers"])
    obs = transitions.obs
    flat = np.concatenate([obs["clock"][..., None], obs["position"]], -1).astype(np.float64) * network[1]["gain"]
    linear = lambda layer: flat @ layer["linear"]["kernel"] + layer["linear"]["bias"]
    likelihoods, stds, values = {}, {}, {}
    for head in "xy":
        mean, scale = np.split(linear(network[2]["action"]["modules"][head]["layers"][0]), 2, -1)
        stds[head] = np.logaddexp(0, scale) + 0.1
        raw = np.asarray(transitions.rollout_extras[2]["action"][head][1], np.float64)
        density = -0.5 * ((raw - mean) / stds[head]) ** 2 - np.log(stds[head]) - 0.5 * np.log(2 * np.pi)
        likelihoods[head] = np.sum(density - np.log(1 - np.tanh(raw) ** 2), -1)
        values[head] = linear(network[2]["value"]["modules"][head])[..., 0]
    return likelihoods, stds, values


@functools.cache
def loss_and_gradient():
    """Metrics and gradient of the loss on the whole dumped rollout, at parameters that have moved."""
    transitions, advantages, targets, _, _ = dumped()
    state = probe("dicts")[2]
    batch = ppo.Minibatch(
        transitions.obs, transitions.rollout_extras, transitions.network_output.loglikelihoods, advantages, targets,
        transitions.done, state.network_states,
    )  # fmt: skip
    config = PPOConfig(**SIZES, logging_level=L.ALL)
    loss = lambda params: ppo.ppo_loss(config, params, state.graphdef, state.variables, batch)
    params = moved(state.params)

    @jax.jit
    def run(params):
        gradient, (metrics, _) = jax.grad(loss, has_aux=True)(params)
        return metrics | metrics_module.grad_norms(gradient)

    return params, jax.device_get(run(params))


def test_kl_clipping_and_policy_std_equal_an_independent_computation():
    transitions = dumped()[0]
    params, metrics = loss_and_gradient()
    new, stds, _ = numpy_forward(params, transitions)
    ratios = np.stack([np.exp(new[head] - transitions.network_output.loglikelihoods[head]) for head in "xy"])
    outside = (ratios < 0.8) | (ratios > 1.2)
    assert 0.1 < outside.mean() < 1
    assert metrics["losses/clipping_fraction"] == pytest.approx(outside.mean())
    assert metrics["losses/approx_kl"] == pytest.approx(np.mean(ratios - 1 - np.log(ratios)), rel=1e-3)
    every_std = np.concatenate([stds[head].ravel() for head in "xy"])
    assert metrics["losses/policy_std"] == pytest.approx(every_std.mean(), rel=1e-4)


def test_gradient_norms_equal_numerical_differentiation():
    transitions, advantages, targets, _, _ = dumped()
    params, metrics = loss_and_gradient()
    old = transitions.network_output.loglikelihoods

    def loss(params):
        new, _, values = numpy_forward(params, transitions)
        total = 0.0
        for term in "xy":
            ratio, advantage = np.exp(new[term] - old[term]), np.asarray(advantages[term], np.float64)
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            total -= np.mean(np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage))
            total += 0.5 * np.mean((values[term] - targets[term]) ** 2)
        return total

    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    leaves, structure = jax.tree.flatten(params)
    leaves = [np.array(leaf, np.float64) for leaf in leaves]
    squares = dict.fromkeys(("actor", "critic", "shared"), 0.0)
    for name, leaf in zip(names, leaves, strict=True):
        port = "actor" if "action" in name else "critic" if "value'" in name else "shared"
        for index in np.ndindex(leaf.shape):
            at, ends = leaf[index], []
            for step in (-1e-6, 1e-6):
                leaf[index] = at + step
                ends.append(loss(jax.tree.unflatten(structure, leaves)))
            leaf[index] = at
            squares[port] += ((ends[1] - ends[0]) / 2e-6) ** 2
    assert squares["shared"] > 0  # The gain belongs to both.
    assert metrics["grad_norm"] == pytest.approx(np.sqrt(sum(squares.values())), rel=1e-3)
    assert metrics["grad_norm/actor"] == pytest.approx(np.sqrt(squares["actor"]), rel=1e-3)
    assert metrics["grad_norm/critic"] == pytest.approx(np.sqrt(squares["critic"]), rel=1e-3)


def test_gradient_norms_are_split_at_the_outermost_pair_of_ports_or_not_at_all():
    one = lambda **parts: nnx.State({name: nnx.Param(jnp.asarray(value)) for name, value in parts.items()})
    norms = lambda tree: {key: float(value) for key, value in metrics_module.grad_norms(nnx.State(tree)).items()}
    assert norms(one(trunk=3.0, head=4.0)) == {"grad_norm": 5}
    inner = {"action": one(value=3.0, action=4.0), "value": one(w=12.0)}
    # A part of the trunk that reads an observation called "action" belongs to neither.
    split = norms({"trunk": one(action=84.0), **inner})
    assert split == pytest.approx({"grad_norm": 85, "grad_norm/actor": 5, "grad_norm/critic": 12})
    assert norms({"actor": one(w=3.0), "critic": one(w=4.0)})["grad_norm/critic"] == 4
    assert norms({"action": one(w=3.0)}) == {"grad_norm": 3}


def test_gradient_norms_are_those_before_clipping_and_a_skipped_update_makes_the_means_nan():
    env, _, state = probe("scalars")
    config = PPOConfig(**SIZES, gradient_clipping=1e-3, logging_level=L.GRAD_NORM | L.ACTOR_EXTRA | L.LOSSES)
    step = jax.jit(functools.partial(ppo.ppo_step, env, config))
    _, metrics = step(state)
    assert metrics["grad_norm"] > 1e-2
    parts = np.hypot(metrics["grad_norm/actor"], metrics["grad_norm/critic"])
    assert metrics["grad_norm"] == pytest.approx(parts, rel=1e-5)
    broken = jax.tree.map(jnp.copy, state.params)
    broken["value"]["linear"]["bias"] = jax.tree.map(lambda x: x * jnp.nan, broken["value"]["linear"]["bias"])
    after, metrics = step(state.replace(params=broken))
    assert int(after.skipped_updates) == 1
    means = {key for key in metrics if key.startswith(("losses", "grad_norm"))}
    assert all(np.isnan(metrics[key]) for key in means)
    assert np.isfinite(metrics["rollout_batch/reward/mean"])


def test_broken_resets_are_counted_among_what_was_not_finite():
    env, network = BrokenResets(0.5), Readout()
    config = PPOConfig(**SIZES, logging_level=L.ENV_METRICS)
    state = ppo.initial_training_state(env, network, TrainConfig(ppo=config))
    after, metrics = jax.jit(functools.partial(ppo.ppo_step, env, config))(state)
    assert int(metrics["env/nonfinite"]) == int(after.nonfinite_steps) - int(state.nonfinite_steps) > 0


class Telling(Readout):
    """Reports what it sees."""

    def __call__(self, state, obs, rollout_extras=None):
        out = super().__call__(state, obs, rollout_extras)
        return StatefulModuleOutput(state, out.output, out.regularization_loss, {"seen": obs[..., 0], "two": 2.0})


def test_evaluation_metrics_are_averaged_over_each_episode_up_to_its_end():
    env, network = Counter(9, random_length=True), Telling()
    graphdef, params, variables = functional.split(network)
    config = EvalConfig(n_envs=16, max_episode_length=30, logging_level=L.ENV_METRICS | L.NETWORK_METRICS)

    @jax.jit
    def run(key):
        episodes = rollout.evaluate(env, config, graphdef, params, variables, key)
        return episodes, evaluation_metrics(episodes, (0, 75)), evaluation_metrics(episodes, None)

    episodes, percentiles, plain = jax.device_get(run(jax.random.key(0)))
    lives = episodes.lifespan.astype(np.float64)
    assert lives.min() < lives.max() <= 9
    # `steps` counts 1, 2, ..., n and the network sees 0, 1, ..., n - 1.
    for name, expected in {
        "episode_reward": lives * (lives + 1) / 2,
        "lifespan": lives,
        "env/steps": (lives + 1) / 2,
        "net/seen": (lives - 1) / 2,
        "net/two": np.full(16, 2.0),
    }.items():
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6, err_msg=name)
        close(plain[f"eval/{name}/mean"], expected.mean())
        close(plain[f"eval/{name}/std"], expected.std())
        close([percentiles[f"eval/{name}/p{p}"] for p in (0, 75)], np.percentile(expected, (0, 75)))
        assert (f"eval/{name}/mean" in percentiles) == (name == "episode_reward")


# --- cost -----------------------------------------------------------------------------------------------------


@functools.cache
def lowered(level, percentiles=None):
    env, _, state = probe("scalars")
    config = PPOConfig(**SIZES, logging_level=level, logging_percentiles=percentiles)
    return jax.jit(functools.partial(ppo.ppo_step, env, config)).lower(state)


def operations(program):
    """How many operations a compiled program has."""
    return len(re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = ", program.compile().as_text(), re.MULTILINE))


def test_levels_that_are_off_cost_nothing_in_the_compiled_program(monkeypatch):
    none, losses, everything = (operations(lowered(level)) for level in (L.NONE, L.LOSSES, EVERYTHING))
    assert none < losses < everything

    # The same program, with what only other levels need cut out of the source.
    def absent(*args, **kwargs):
        raise AssertionError("computed although nobody asked for it")

    for name in ("explained_variance", "pack"):
        monkeypatch.setattr(metrics_module, name, absent)
    monkeypatch.setattr(metrics_module, "reduce", absent)
    monkeypatch.setattr(ppo, "grad_norms", absent)
    monkeypatch.setattr(ppo, "approximate_kl", lambda log_ratio: jnp.zeros(()))
    lowered.cache_clear()
    assert operations(lowered(L.LOSSES)) == losses
    monkeypatch.setattr(ppo, "mean_entropy", lambda output: jnp.zeros(()))
    lowered.cache_clear()
    assert operations(lowered(L.NONE)) == none
    lowered.cache_clear()


def test_percentiles_sort_each_metric_once_and_nothing_else_sorts():
    sorts = lambda program: program.as_text().count("stablehlo.sort")
    one_each = {key for key in keys("scalars", EVERYTHING) if key.endswith("/std")}
    metrics = sorts(lowered(EVERYTHING, PERCENTILES)) - sorts(lowered(EVERYTHING))
    # Arrays of one shape share a function that sorts.
    assert 0 < metrics <= len(one_each)
