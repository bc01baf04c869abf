"""What every module must keep: replays are exact, batches, scans and steps agree, environments do not mix."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from probe_envs import assert_same_bits

from nnx_ppo.networks import functional
from nnx_ppo.networks.adapter import PPOAdapter
from nnx_ppo.networks.cnn import CNNEncoder
from nnx_ppo.networks.containers import Concat, Parallel, Sequential, Splitter
from nnx_ppo.networks.delay import Delay
from nnx_ppo.networks.feedforward import Dense
from nnx_ppo.networks.forward_model import ForwardModel
from nnx_ppo.networks.normalizer import Normalizer
from nnx_ppo.networks.recording import Recorder
from nnx_ppo.networks.recurrent import GRU, LSTM, SimpleRNN
from nnx_ppo.networks.sampling_layers import CategoricalSampler, NormalSampler, NormalTanhSampler
from nnx_ppo.networks.types import StatefulModule
from nnx_ppo.networks.utils import Filter, Flattener, Map, Merge, Scale
from nnx_ppo.networks.variational import AR1VariationalBottleneck, VariationalBottleneck

TIME, BATCH = 7, 3
RNGS = nnx.Rngs(11)
SIX = (6,)
TREE = {"a": (4,), "b": (2, 3)}
# Environment 0 never ends, 1 ends twice in a row, 2 ends in the middle.
DONE = np.zeros((TIME, BATCH), bool)
DONE[[2, 3, 4], [1, 1, 2]] = True


def forward_model(policy):
    return ForwardModel(policy, Dense(6 + 2, 6, RNGS), 6, 2, weight=0.3)


def everything():
    """A network with one of nearly each kind, nested."""
    policy = Sequential(
        [
            LSTM(8, 6, RNGS, trainable_initial_state=True),
            Dense(6, 6, RNGS),
            AR1VariationalBottleneck(3, RNGS, ar1_weight=0.5),
            Dense(3, 7, RNGS),
            Splitter(arm=4, gripper=3),
            Map(arm=NormalTanhSampler(RNGS, 0.1), gripper=CategoricalSampler(RNGS, 0.1)),
        ]
    )
    one_hot = lambda action: jnp.concatenate([action["arm"], jax.nn.one_hot(action["gripper"], 3)], -1)
    actor = ForwardModel(policy, Dense(8 + 5, 8, RNGS), 8, 5, encode_action=one_hot)
    return Sequential(
        {
            "normalizer": Normalizer(TREE),
            "delay": Delay({"a": jnp.zeros(4), "b": jnp.zeros((2, 3))}, 2),
            "encoder": Concat(b=Sequential([Flattener(), GRU(6, 5, RNGS)]), a=Dense(4, 3, RNGS)),
            "ports": PPOAdapter(action=actor, value=Parallel(y=SimpleRNN(8, 1, RNGS), x=Dense(8, 1, RNGS))),
        }
    )


MODULES = {
    "Dense": (lambda: Dense(6, 5, RNGS, nnx.tanh), SIX),
    "CNNEncoder": (lambda: CNNEncoder((5, 4, 2), 3, RNGS, (4,), (3,), (2,)), (5, 4, 2)),
    "Normalizer": (lambda: Normalizer(TREE, clip=1.0), TREE),
    "Flattener": (lambda: Flattener(), TREE),
    "Filter": (lambda: Filter({"one": "a", "two": ("b",), "three": lambda obs: obs["a"][..., :1]}), TREE),
    "Scale": (lambda: Scale(3.0), TREE),
    "Splitter": (lambda: Splitter(a=2, b=3), SIX),
    "Sequential": (lambda: Sequential([Dense(6, 4, RNGS), GRU(4, 3, RNGS), Dense(3, 2, RNGS)]), SIX),
    "Parallel": (lambda: Parallel(b=LSTM(6, 3, RNGS), a=Dense(6, 3, RNGS)), SIX),
    "Concat": (lambda: Concat(b=Flattener(), a=SimpleRNN(4, 3, RNGS)), TREE),
    "Map": (lambda: Map(b=Scale(2.0), a=GRU(4, 3, RNGS)), TREE),
    "Merge": (lambda: Merge(m=Splitter(b=1), n=Parallel(a=GRU(6, 2, RNGS))), SIX),
    "LSTM": (lambda: LSTM(6, 4, RNGS), SIX),
    "LSTM, learned start": (lambda: LSTM(6, 4, RNGS, trainable_initial_state=True, use_optimized=False), SIX),
    "GRU": (lambda: GRU(6, 4, RNGS, trainable_initial_state=True), SIX),
    "SimpleRNN": (lambda: SimpleRNN(6, 4, RNGS), SIX),
    "Delay": (lambda: Delay({"a": jnp.zeros(4), "b": jnp.zeros((2, 3))}, 2, initial_value=-1.0), TREE),
    "VariationalBottleneck": (lambda: VariationalBottleneck(3, RNGS, 0.5), SIX),
    "AR1VariationalBottleneck": (lambda: AR1VariationalBottleneck(3, RNGS, 0.5, ar1_weight=2.0), SIX),
    "NormalSampler": (lambda: NormalSampler(6, RNGS, 0.1), SIX),
    "CategoricalSampler": (lambda: CategoricalSampler(RNGS, 0.1), SIX),
    "NormalTanhSampler": (lambda: NormalTanhSampler(RNGS, 0.0), SIX),
    "ForwardModel": (lambda: forward_model(Sequential([Dense(6, 4, RNGS), NormalTanhSampler(RNGS, 0.0)])), SIX),
    "ForwardModel, recurrent": (
        lambda: forward_model(Sequential([GRU(6, 4, RNGS), NormalTanhSampler(RNGS, 0.0)])),
        SIX,
    ),
    "Recorder": (lambda: Recorder(GRU(6, 4, RNGS)), SIX),
    "PPOAdapter": (
        lambda: PPOAdapter(Sequential([Dense(6, 4, RNGS), NormalTanhSampler(RNGS, 0.0)]), GRU(6, 1, RNGS)),
        SIX,
    ),
    "everything": (everything, TREE),
}


def inputs(shapes):
    rng = np.random.default_rng(5)
    draw = lambda shape: jnp.asarray(rng.normal(1, 2, size=(TIME, BATCH, *shape)), jnp.float32)
    return {key: draw(shape) for key, shape in shapes.items()} if isinstance(shapes, dict) else draw(shapes)


class Player:
    """A module and its rollouts; one per module, because compiling the step is what takes the time."""

    def __init__(self, name):
        make, shapes = MODULES[name]
        # A copy, because the modules above share a random stream, which moves on with each that is made.
        self.network, self.obs = functional.merge(*functional.split(make())), inputs(shapes)
        self.parts = graphdef, params, _ = functional.split(self.network)

        @jax.jit
        def step(variables, carry, obs, extras, done):
            out, variables = functional.apply(graphdef, params, variables, carry, obs, extras)
            loss = jnp.broadcast_to(out.regularization_loss, (BATCH,))
            carry = functional.reset_carry(graphdef, params, variables, out.next_state, done)
            return variables, carry, (out.output, loss, out.rollout_extras)

        self.step = step
        self.output, self.loss, self.extras, self.carries = self.play(self.obs)

    def play(self, obs, extras=None):
        """Step by step, as a rollout does: outputs, losses and extras over time, and the carry around each step."""
        variables, carry, steps = self.parts[2], self.network.initialize_state(BATCH), []
        carries = [carry]
        for t in range(TIME):
            at = lambda tree: jax.tree.map(lambda x: x[t], tree)
            variables, carry, this = self.step(variables, carry, at(obs), at(extras), jnp.asarray(DONE[t]))
            carries.append(carry)
            steps.append(this)
        return *jax.tree.map(lambda *xs: np.stack(xs), *steps), carries


player = functools.cache(Player)


def without_noise(output):
    """Leaves but the entropies, which NormalTanhSampler estimates from a sample of its own."""
    named = jax.tree_util.tree_flatten_with_path(output)[0]
    return [leaf for path, leaf in named if "entrop" not in jax.tree_util.keystr(path)]


def assert_close(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


def has_entropy_noise(network):
    return any(isinstance(m, NormalTanhSampler) and m.entropy_weight for _, m in nnx.iter_modules(network))


@pytest.mark.parametrize("name", MODULES)
def test_replaying_step_by_step_or_as_a_sequence_reproduces_the_rollout(name):
    p = player(name)
    graphdef, params, variables = p.parts
    hash(graphdef)
    again, again_loss, _, _ = p.play(p.obs, p.extras)

    @jax.jit
    def sequence(variables, carry, obs, extras):
        network = functional.merge(graphdef, params, variables)
        out = functional.over_time(network, carry, obs, extras, jnp.asarray(DONE))
        return out.output, jnp.broadcast_to(out.regularization_loss, DONE.shape)

    at_once, at_once_loss = sequence(variables, p.carries[0], p.obs, p.extras)
    assert jax.tree.structure(again) == jax.tree.structure(at_once) == jax.tree.structure(p.output)
    assert_close(without_noise(p.output), without_noise(again))
    assert_close(without_noise(p.output), without_noise(at_once))
    if not has_entropy_noise(p.network):
        assert_close(p.loss, again_loss)
        assert_close(p.loss, at_once_loss)


@pytest.mark.parametrize("name", MODULES)
def test_resetting_one_environment_gives_it_a_fresh_carry_and_leaves_the_others_theirs(name):
    p = player(name)
    used, fresh = p.carries[2], p.network.initialize_state(BATCH)
    reset = functional.reset_carry(*p.parts, used, jnp.asarray([False, True, False]))
    assert jax.tree.structure(reset) == jax.tree.structure(used)
    rows = lambda tree, *index: jax.tree.map(lambda x: np.asarray(x)[list(index)], tree)
    assert_same_bits(rows(reset, 0, 2), rows(used, 0, 2))
    assert_same_bits(rows(reset, 1), rows(fresh, 1))


@pytest.mark.parametrize("name", MODULES)
def test_what_one_environment_sees_changes_nothing_for_the_others(name):
    p = player(name)
    output, loss, _, carries = p.play(jax.tree.map(lambda x: x.at[:, 1].add(1.5), p.obs))
    rest = lambda tree: jax.tree.map(lambda x: np.asarray(x)[:, [0, 2]], tree)
    assert_close(rest(p.output), rest(output))
    assert_close(rest(p.loss), rest(loss))
    rows = lambda tree: jax.tree.map(lambda x: np.asarray(x)[[0, 2]], tree)
    for a, b in zip(p.carries, carries, strict=True):
        assert_close(rows(a), rows(b))


def test_a_container_keeps_its_order_when_it_is_split_and_merged():
    network = Concat(b=Scale(1.0), a=Scale(1.0))
    merged = functional.merge(*functional.split(network))
    out = merged(merged.initialize_state(1), {"a": jnp.zeros((1, 1)), "b": jnp.ones((1, 1))})
    np.testing.assert_array_equal(out.output, [[1.0, 0.0]])


def test_only_recurrent_layers_are_scanned():
    calls = []

    class Spy(StatefulModule):
        def __init__(self, name):
            self.name = name

        def __call__(self, state, obs, rollout_extras=None):
            calls.append((self.name, obs.shape))
            return Scale(1.0)(state, obs)

    network = Sequential([Spy("before"), GRU(6, 4, RNGS), Parallel(a=Spy("after"), b=LSTM(4, 2, RNGS))])
    functional.over_time(network, network.initialize_state(BATCH), inputs(SIX), None, jnp.asarray(DONE))
    assert calls == [("before", (TIME * BATCH, 6)), ("after", (TIME * BATCH, 4))]


def test_a_subclass_that_changes_only_the_step_is_not_bypassed_by_its_parent_for_sequences():
    class Doubled(Sequential):
        def __call__(self, state, obs, rollout_extras=None):
            out = super().__call__(state, obs, rollout_extras)
            return out.replace(output=2 * out.output)

    layer = GRU(6, 4, RNGS)
    plain, doubled = Sequential([layer]), Doubled([layer])
    run = lambda net: functional.over_time(net, net.initialize_state(BATCH), inputs(SIX), None, jnp.asarray(DONE))
    np.testing.assert_allclose(run(doubled).output, 2 * run(plain).output, rtol=1e-6)


def test_random_streams_advance_with_a_sequence_as_with_a_step():
    network = Sequential([GRU(6, 4, RNGS), NormalTanhSampler(nnx.Rngs(3), 0.1)])
    count = lambda: [int(x) for x in jax.tree.leaves(nnx.state(network, nnx.RngCount))]
    before = count()
    extras = [None, jnp.zeros((TIME, BATCH, 2))]
    functional.over_time(network, network.initialize_state(BATCH), inputs(SIX), extras, jnp.asarray(DONE))
    assert count() != before
