"""Checkpoints: what is written is what was there, whole or not at all, and a resumed run is the same run."""

import dataclasses
import errno
import json
import pickle
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from probe_envs import Counter, ProbeState, Readout, assert_same_bits, recurrent_actor_critic

from envs.cartpole import CartpoleBalance
from nnx_ppo.algorithms import checkpointing, ppo
from nnx_ppo.algorithms.checkpointing import (
    CheckpointError,
    best_checkpoint,
    checkpoints,
    latest_checkpoint,
    load_checkpoint,
    load_network,
    make_checkpoint_fn,
    read_metadata,
    remove_leftovers,
)
from nnx_ppo.algorithms.config import EvalConfig, PPOConfig, TrainConfig
from nnx_ppo.algorithms.ppo import train_ppo
from nnx_ppo.networks import functional
from nnx_ppo.networks.containers import Sequential
from nnx_ppo.networks.factories import make_mlp_actor_critic
from nnx_ppo.networks.recurrent import GRU
from nnx_ppo.wrappers.episode_wrapper import EpisodeWrapper


class Noisy:
    """Keeps typed and raw keys, integers, flags and an empty array in its state."""

    observation_size, action_size = 2, 1

    def reset(self, rng):
        info = {
            "typed": rng,
            "raw": jax.random.key_data(rng),
            "count": jnp.zeros((), jnp.int32),
            "flag": jnp.zeros((), bool),
            "nothing": jnp.zeros((0, 3)),
        }
        return ProbeState(jax.random.normal(rng, (2,)), jnp.zeros(()), jnp.zeros(()), info)

    def step(self, state, action):
        key, draw = jax.random.split(state.info["typed"])
        count = state.info["count"] + 1
        info = {**state.info, "typed": key, "raw": jax.random.key_data(draw), "count": count, "flag": count > 1}
        obs = 0.9 * state.obs + jax.random.normal(draw, (2,)) + action
        return state.replace(obs=obs, reward=-jnp.sum(obs**2), done=jnp.where(jnp.sum(obs**2) > 9, 1.0, 0.0), info=info)


CONFIG = TrainConfig(
    ppo=PPOConfig(n_envs=4, n_minibatches=2, rollout_length=5, n_epochs=2, learning_rate=3e-3, gradient_clipping=1.0),
    eval=EvalConfig(n_envs=2, every_steps=20, max_episode_length=5),
    checkpoint_every_steps=20,
)


def make_env():
    return EpisodeWrapper(Noisy(), 4)


def feedforward(seed=0, hidden=4):
    return make_mlp_actor_critic(2, 1, [hidden], [4], nnx.Rngs(seed))


def recurrent(seed=0):
    return recurrent_actor_critic(2, 1, nnx.Rngs(seed))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of four iterations that saved after each; what it saved, as it was then."""
    directory = tmp_path_factory.mktemp("checkpoints")
    write, states = make_checkpoint_fn(directory, CONFIG, metadata={"task": "noisy"}), {}

    def checkpoint(state, step):
        states[step] = jax.tree.map(jnp.copy, state)
        write(state, step)

    result = train_ppo(make_env(), feedforward(), CONFIG, total_steps=80, checkpoint_fn=checkpoint)
    return directory, states, result


def template(network):
    return ppo.initial_training_state(make_env(), network, CONFIG).optimizer


def load(path, network):
    return load_checkpoint(path, network, template(network))


def test_directories_are_named_by_ten_digits_and_hold_nothing_else(saved):
    directory, *_ = saved
    assert sorted(p.name for p in directory.iterdir()) == [f"step_{step:010d}" for step in (0, 20, 40, 60, 80)]
    assert latest_checkpoint(directory).name == "step_0000000080"
    assert latest_checkpoint(directory / "elsewhere") is None


def test_a_loaded_state_equals_the_saved_one_to_the_bit(saved):
    directory, states, _ = saved
    network = feedforward(seed=9)
    loaded = load(directory / "step_0000000040", network)
    state = ppo.with_env_states(make_env(), loaded["training_state"], CONFIG.ppo)
    assert_same_bits(state, states[40])
    dtypes = lambda tree: [x.dtype for x in jax.tree.leaves(tree)]
    assert dtypes(state) == dtypes(states[40])
    assert state.steps_taken == loaded["step"] == 40
    assert loaded["config"] == CONFIG
    assert loaded["metadata"]["task"] == "noisy"
    # The network that was passed holds it too.
    assert_same_bits(functional.split(network)[1], states[40].params)
    assert_same_bits(functional.split(network)[2], states[40].variables)


def test_a_resumed_run_is_the_same_run_to_the_bit(saved):
    directory, _, result = saved
    network, logged = feedforward(seed=9), []
    loaded = load(str(directory / "step_0000000040"), network)
    resumed = train_ppo(
        make_env(),
        network,
        loaded["config"],
        total_steps=80,
        initial_state=loaded["training_state"],
        log_fn=lambda metrics, steps: logged.append(steps),
    )
    assert logged == [60, 80]
    assert_same_bits(resumed.training_state, result.training_state)
    assert resumed.eval_history == result.eval_history[-2:]
    assert resumed.final_metrics == result.final_metrics


def test_a_recurrent_run_resumed_in_another_process_is_the_same_run_to_the_bit(tmp_path):
    result = train_ppo(
        make_env(), recurrent(), CONFIG, total_steps=80, checkpoint_fn=make_checkpoint_fn(tmp_path, CONFIG)
    )
    assert float(jnp.abs(result.training_state.network_states[0]).sum()) > 0
    program = f"""
        import sys
        sys.path.insert(0, "tests")
        from test_checkpointing import *
        network = recurrent(seed=5)
        loaded = load("{tmp_path}/step_0000000040", network)
        train_ppo(make_env(), network, loaded["config"], total_steps=80, initial_state=loaded["training_state"],
                  checkpoint_fn=make_checkpoint_fn("{tmp_path}/again"))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, cwd=Path(__file__).parent.parent)
    network = recurrent(seed=7)
    loaded = load(tmp_path / "again" / "step_0000000080", network)
    assert_same_bits(ppo.with_env_states(make_env(), loaded["training_state"], CONFIG.ppo), result.training_state)


# --- a small state, so that files can be broken cheaply -------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    env, network = Counter(3), Readout(1.5)
    config = TrainConfig(ppo=PPOConfig(n_envs=2, n_minibatches=1))
    return ppo.initial_training_state(env, network, config)


@pytest.fixture
def checkpoint(small, tmp_path):
    make_checkpoint_fn(tmp_path)(small, 7)
    return tmp_path / "step_0000000007"


def load_small(path, small, network=None):
    return load_checkpoint(path, network or Readout(0.0), small.optimizer)


def test_without_a_configuration_none_comes_back(checkpoint, small):
    network = Readout(0.0)
    loaded = load_small(checkpoint, small, network)
    assert loaded["config"] is None
    assert loaded["step"] == 7
    assert float(network.weight.get_value()) == 1.5


def test_if_writing_fails_there_is_no_checkpoint(small, tmp_path, monkeypatch):
    for broken in ("write_text", "rename"):
        with monkeypatch.context() as patch:

            def fail(*args, **kwargs):
                raise OSError("disk full")

            patch.setattr(checkpointing.Path, broken, fail)
            with pytest.raises(OSError, match="disk full"):
                make_checkpoint_fn(tmp_path)(small, 1)
        assert not list(tmp_path.glob("step_*"))
        assert latest_checkpoint(tmp_path) is None
    make_checkpoint_fn(tmp_path)(small, 1)
    assert latest_checkpoint(tmp_path).name == "step_0000000001"


def test_if_replacing_a_checkpoint_fails_while_writing_the_old_one_stays(checkpoint, small, monkeypatch):
    with monkeypatch.context() as patch:

        def fail(*args, **kwargs):
            raise OSError("disk full")

        patch.setattr(checkpointing.Path, "write_text", fail)
        with pytest.raises(OSError, match="disk full"):
            make_checkpoint_fn(checkpoint.parent)(small.replace(params=jax.tree.map(lambda p: p + 1, small.params)), 7)
    network = Readout(0.0)
    load_small(checkpoint, small, network)
    assert float(network.weight.get_value()) == 1.5


def test_saving_the_same_step_again_replaces_it(checkpoint, small):
    make_checkpoint_fn(checkpoint.parent)(small.replace(params=jax.tree.map(lambda p: p + 1, small.params)), 7)
    network = Readout(0.0)
    load_small(checkpoint, small, network)
    assert float(network.weight.get_value()) == 2.5
    assert [path.name for path in checkpoint.parent.iterdir()] == [checkpoint.name]


def test_keep_leaves_the_newest_checkpoints(small, tmp_path):
    write = make_checkpoint_fn(tmp_path, keep=2)
    for step in (5, 10, 15, 20):
        write(small, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_0000000015", "step_0000000020"]


def steps_in(directory):
    return [int(path.name.removeprefix("step_")) for path in checkpoints(directory)]


def test_the_best_checkpoint_stays_besides_the_newest(small, tmp_path):
    returns = {5: 1.0, 10: 9.0, 15: 3.0, 25: 4.0}
    write = make_checkpoint_fn(tmp_path, keep=2, score=returns.get)
    for step in (5, 10, 15, 20, 25):
        write(small, step)
    assert steps_in(tmp_path) == [10, 20, 25]
    assert best_checkpoint(tmp_path).name == "step_0000000010"
    returns[30] = 9.0  # Of equals the newest.
    write(small, 30)
    assert steps_in(tmp_path) == [25, 30]
    assert best_checkpoint(tmp_path).name == "step_0000000030"


def test_without_scores_none_is_the_best(checkpoint):
    assert best_checkpoint(checkpoint.parent) is None


def test_an_asynchronous_checkpoint_appears_only_after_its_commit(small, tmp_path):
    write = make_checkpoint_fn(tmp_path, asynchronous=True, metadata=lambda step: {"told": 10 * step})
    for step in (1, 2):
        write(small, step)
        assert steps_in(tmp_path) == list(range(1, step))
        write.commit()
        write.wait()
        assert steps_in(tmp_path) == list(range(1, step + 1))
    write(small, 3)  # The next call and wait commit what is under way.
    write(small, 4)
    assert steps_in(tmp_path) == [1, 2, 3]
    write.wait()
    assert steps_in(tmp_path) == [1, 2, 3, 4]
    assert read_metadata(tmp_path / "step_0000000004")["told"] == 40
    assert_same_bits(load_small(tmp_path / "step_0000000002", small)["training_state"].params, small.params)


def test_what_can_never_be_saved_fails_at_the_first_checkpoint(small, tmp_path):
    write = make_checkpoint_fn(tmp_path, asynchronous=True)
    with pytest.raises(CheckpointError, match=r"first checkpoint cannot be written to .* \(OSError: .*No space left"):
        write(small.replace(rng_key=FullDisk()), 0)
    assert list(tmp_path.iterdir()) == []
    write = make_checkpoint_fn(tmp_path, asynchronous=True, metadata={"not JSON": object()})
    with pytest.raises(CheckpointError, match="not JSON serializable"):
        write(small, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_does_not_take_its_first_checkpoint_for_a_rehearsal(checkpoint, small, caplog):
    write = make_checkpoint_fn(checkpoint.parent, asynchronous=True)
    write(small.replace(rng_key=FullDisk()), 9)
    write.wait()
    assert "step 9 could not be written" in caplog.text
    assert steps_in(checkpoint.parent) == [7]


def test_a_checkpoint_whose_record_never_got_out_is_abandoned(small, tmp_path):
    write = make_checkpoint_fn(tmp_path, asynchronous=True)
    write(small, 0)
    write.commit()
    write(small, 1)
    write.abandon()
    write.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step_0000000000"]

    def fail(metrics, steps):
        if steps == 40:
            raise RuntimeError("the log is broken")

    directory = tmp_path / "run"
    with pytest.raises(RuntimeError, match="broken"):
        train_ppo(
            make_env(),
            feedforward(),
            CONFIG,
            total_steps=80,
            log_fn=fail,
            checkpoint_fn=make_checkpoint_fn(directory, asynchronous=True),
        )
    assert steps_in(directory) == [0, 20]


def test_pruning_never_takes_the_checkpoint_just_written_for_an_old_one(small, tmp_path):
    write = make_checkpoint_fn(tmp_path, keep=2)
    for step in (40, 60, 80):
        write(small, step)
    write(small, 50)  # Gone back to an older one, and on from there.
    assert steps_in(tmp_path) == [50, 60, 80]
    write(small, 55)
    assert steps_in(tmp_path) == [50, 55, 60, 80]


def test_a_score_that_is_no_number_is_none(small, tmp_path):
    write = make_checkpoint_fn(tmp_path, score={1: 1.0, 2: float("nan"), 3: float("inf")}.get)
    for step in (1, 2, 3):
        write(small, step)
    assert best_checkpoint(tmp_path).name == "step_0000000001"


def test_if_the_new_name_cannot_be_given_the_old_checkpoint_stays(checkpoint, small, monkeypatch):
    rename = Path.rename

    def fail(path, target):
        if path.name.startswith(".unfinished"):
            raise OSError("disk full")
        return rename(path, target)

    monkeypatch.setattr(checkpointing.Path, "rename", fail)
    with pytest.raises(OSError, match="disk full"):
        make_checkpoint_fn(checkpoint.parent)(small.replace(params=jax.tree.map(lambda p: p + 1, small.params)), 7)
    network = Readout(0.0)
    load_small(checkpoint, small, network)
    assert float(network.weight.get_value()) == 1.5
    assert list(checkpoint.parent.iterdir()) == [checkpoint]


def test_a_writer_killed_between_two_names_is_mended(checkpoint):
    checkpoint.rename(checkpoint.with_name(f".replaced_{checkpoint.name}_123"))
    remove_leftovers(checkpoint.parent)
    assert list(checkpoint.parent.iterdir()) == [checkpoint]


def test_two_arrays_of_one_name_are_refused(small, tmp_path):
    state = small.replace(network_states={"a/b": jnp.zeros(1), "a": {"b": jnp.zeros(1)}})
    with pytest.raises(CheckpointError, match="two keys of a dict are alike but for a '/'"):
        make_checkpoint_fn(tmp_path)(state, 1)


class FullDisk:
    """An array that cannot be written."""

    shape, dtype, size = (1,), jnp.dtype("float32"), 1

    def __array__(self, *args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_later_checkpoint_that_cannot_be_written_costs_a_warning_and_the_old_one_stands(small, tmp_path, caplog):
    write = make_checkpoint_fn(tmp_path, asynchronous=True)
    write(small, 1)
    write(small.replace(rng_key=FullDisk()), 2)
    write.commit()
    write(small, 3)  # There is room again.
    write.wait()
    assert steps_in(tmp_path) == [1, 3]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step_0000000001", "step_0000000003"]
    (warning,) = [record.getMessage() for record in caplog.records if "checkpoint at step" in record.getMessage()]
    assert "step 2 could not be written (OSError: [Errno 28] No space left" in warning
    assert "Training goes on; step_0000000001 stands" in warning


def test_training_lets_a_checkpoint_appear_after_the_record_of_its_step(tmp_path):
    order = []

    class Writer:
        def __call__(self, state, step):
            order.append(f"begin {step}")

        def commit(self):
            order.append("commit")

        def wait(self):
            order.append("wait")

    config = dataclasses.replace(CONFIG, eval=dataclasses.replace(CONFIG.eval, every_steps=40))
    train_ppo(
        make_env(),
        feedforward(),
        config,
        total_steps=40,
        log_fn=lambda metrics, steps: order.append(f"log {steps}"),
        checkpoint_fn=Writer(),
    )
    assert order == [
        "begin 0",
        "log 0",
        "commit",
        "begin 20",
        "log 20",
        "commit",
        "begin 40",
        "log 40",
        "commit",
        "wait",
    ]


def test_what_a_killed_writer_left_is_no_checkpoint_and_can_be_removed(checkpoint):
    directory = checkpoint.parent
    for name in (".unfinished_step_0000000009_1", ".removed_step_0000000003_1"):
        shutil.copytree(checkpoint, directory / name)
    assert latest_checkpoint(directory) == checkpoint
    remove_leftovers(directory)
    assert list(directory.iterdir()) == [checkpoint]


def test_a_light_checkpoint_has_no_episodes_and_trains_on_with_fresh_ones(saved, tmp_path):
    _, states, _ = saved
    make_checkpoint_fn(tmp_path, CONFIG, env_states=False)(states[40], 40)
    names = read_metadata(tmp_path / "step_0000000040")["leaves"]
    assert not [name for name in names if name.startswith(("env_states", "network_states"))]
    network = feedforward()
    state = load(tmp_path / "step_0000000040", network)["training_state"]
    assert_same_bits(state.params, states[40].params)
    result = train_ppo(make_env(), network, CONFIG, total_steps=80, initial_state=state)
    assert result.total_steps == 80
    fresh = ppo.with_env_states(make_env(), state, CONFIG.ppo).env_states
    first = ppo.initial_training_state(make_env(), feedforward(), CONFIG).env_states
    assert not jnp.any(fresh.obs == first.obs)  # Not the initial states of the run's start once more.


def test_a_light_checkpoint_of_a_recurrent_network_begins_with_its_learned_carry_in_any_number_of_environments(
    tmp_path,
):
    network = lambda: Sequential([GRU(2, 3, nnx.Rngs(0), trainable_initial_state=True), feedforward_of(3)])
    trained = network()
    trained.layers[0].initial["h"].set_value(jnp.full(3, 7.0))
    state = ppo.initial_training_state(make_env(), trained, CONFIG)
    make_checkpoint_fn(tmp_path, CONFIG, env_states=False)(state, 0)
    other = network()
    loaded = load_checkpoint(tmp_path / "step_0000000000", other, state.optimizer)["training_state"]
    wider = dataclasses.replace(CONFIG.ppo, n_envs=6)
    ready = ppo.with_env_states(make_env(), loaded, wider)
    np.testing.assert_array_equal(jax.tree.leaves(ready.network_states)[0], jnp.full((6, 3), 7.0))
    result = train_ppo(make_env(), other, dataclasses.replace(CONFIG, ppo=wider), total_steps=30, initial_state=loaded)
    assert result.total_steps == 30


def feedforward_of(size):
    return make_mlp_actor_critic(size, 1, [4], [4], nnx.Rngs(1), normalize_obs=False)


@pytest.mark.slow  # Compiles MJX twice.
def test_a_checkpoint_of_one_physics_engine_goes_on_with_another(tmp_path):
    make = lambda physics: EpisodeWrapper(CartpoleBalance(physics=physics), 50)
    network = lambda: make_mlp_actor_critic(5, 1, [4], [4], nnx.Rngs(0))
    config = TrainConfig(
        ppo=PPOConfig(n_envs=4, n_minibatches=1, rollout_length=5, n_epochs=1, total_steps=20),
        eval=EvalConfig(enabled=False),
        checkpoint_every_steps=20,
    )
    saved = train_ppo(make("native"), network(), config, checkpoint_fn=make_checkpoint_fn(tmp_path)).training_state
    other = network()
    state = load_checkpoint(latest_checkpoint(tmp_path), other, saved.optimizer)["training_state"]
    result = train_ppo(make("jax"), other, config, total_steps=40, initial_state=state)
    native = train_ppo(make("native"), network(), config, total_steps=40, initial_state=saved)
    assert result.total_steps == 40
    # One iteration of the same episodes, on engines that agree to a few digits.
    np.testing.assert_allclose(result.training_state.env_states.obs, native.training_state.env_states.obs, atol=1e-3)


def test_only_the_network_can_be_loaded(saved):
    directory, states, _ = saved
    network = feedforward(seed=9)
    load_network(directory / "step_0000000040", network)
    assert_same_bits(functional.split(network)[1], states[40].params)
    with pytest.raises(CheckpointError, match="build both alike"):
        load_network(directory / "step_0000000040", feedforward(hidden=6))


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_nothing_is_refused(tmp_path, keep):
    with pytest.raises(ValueError, match=f"keep={keep}; keep at least 1"):
        make_checkpoint_fn(tmp_path, keep=keep)


def test_the_latest_checkpoint_is_the_one_with_the_highest_number(small, tmp_path):
    for name in ("step_0000000009", "step_9999999999", "step_10000000000", "step_0000000010", "step_best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metadata.json").write_text("{}")
    (tmp_path / "step_99999999999").mkdir()  # has no metadata: not complete
    assert latest_checkpoint(tmp_path).name == "step_10000000000"


def test_another_architecture_is_refused_naming_the_parameter_and_leaves_the_network_alone(saved):
    directory, *_ = saved
    other = feedforward(hidden=6)
    before = jax.tree.map(jnp.copy, nnx.state(other))
    with pytest.raises(
        CheckpointError, match=r"params/\S*action\S*linear\S* is float32\[4\] in the checkpoint and float32\[6\].*alike"
    ):
        load(directory / "step_0000000040", other)
    assert_same_bits(nnx.state(other), before)


def test_a_network_with_more_or_fewer_parameters_is_refused(checkpoint, small):
    with pytest.raises(CheckpointError, match=r"params/\S* is only in .*another architecture"):
        load_small(checkpoint, small, feedforward())


def test_an_environment_with_another_state_is_refused_naming_the_entry(saved):
    directory, *_ = saved
    network = feedforward()
    loaded = load(directory / "step_0000000040", network)
    with pytest.raises(CheckpointError, match=r"env_states/\S+ is only in"):
        train_ppo(Counter(3), network, CONFIG, initial_state=loaded["training_state"])


def damage_metadata(path, text):
    (path / "metadata.json").write_text(text)


def drop(path, *names):
    metadata = json.loads((path / "metadata.json").read_text())
    for name in names:
        metadata.pop(name, None)
        metadata.get("leaves", {}).pop(name, None)
    damage_metadata(path, json.dumps(metadata))


def truncate_arrays(path):
    files = [file for file in (path / "arrays").rglob("*") if file.is_file()]
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def name_more_arrays(path):
    metadata = json.loads((path / "metadata.json").read_text())
    metadata["leaves"]["params/extra"] = {"shape": [1], "dtype": "float32"}
    damage_metadata(path, json.dumps(metadata))


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda path: (path / "metadata.json").unlink(), "is not a checkpoint: it has no metadata.json"),
        (lambda path: damage_metadata(path, '{"format": 1, "st'), "is damaged.*older checkpoint"),
        (lambda path: damage_metadata(path, ""), "is damaged"),
        (lambda path: damage_metadata(path, "[]"), "has format None; this version reads format 1"),
        (lambda path: damage_metadata(path, '{"format": 99}'), "has format 99; this version reads format 1"),
        (lambda path: drop(path, "leaves"), "is damaged: it lacks leaves"),
        (lambda path: drop(path, "step"), "is damaged: it lacks step"),
        (lambda path: damage_metadata(path, '{"format": 1, "step": 7, "leaves": null}'), "is damaged: it lacks leaves"),
        (lambda path: drop(path, "rng_key"), "is damaged: it lacks rng_key"),
        (lambda path: shutil.rmtree(path / "arrays"), "arrays of the checkpoint .* cannot be read.*older checkpoint"),
        (truncate_arrays, "arrays of the checkpoint .* cannot be read.*older checkpoint"),
        (name_more_arrays, "params/extra"),
    ],
)
def test_a_damaged_checkpoint_is_refused_with_a_reason(checkpoint, small, break_it, said):
    break_it(checkpoint)
    with pytest.raises(CheckpointError, match=f"(?s){said}"):
        load_small(checkpoint, small)


def test_a_folder_of_checkpoints_gets_a_hint_to_the_newest(checkpoint, small):
    with pytest.raises(CheckpointError, match=r"is not a checkpoint.*Did you mean .*step_0000000007"):
        load_small(checkpoint.parent, small)


def test_nothing_is_pickled(checkpoint, small, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    load_small(checkpoint, small)
    for file in checkpoint.rglob("*"):
        assert file.suffix not in (".pkl", ".pickle")
        if file.is_file():
            assert not file.read_bytes().startswith(b"\x80\x04")


def test_keys_of_another_generator_survive(small, tmp_path):
    state = small.replace(rng_key=jax.random.key(3, impl="rbg"))
    make_checkpoint_fn(tmp_path)(state, 1)
    loaded = load_small(tmp_path / "step_0000000001", small)["training_state"]
    assert loaded.rng_key.dtype == state.rng_key.dtype
    assert_same_bits(loaded.rng_key, state.rng_key)


def test_metadata_is_plain_json_that_names_every_array(checkpoint, small):
    metadata = json.loads((checkpoint / "metadata.json").read_text())
    assert metadata["step"] == 7
    assert len(metadata["leaves"]) == len(jax.tree.leaves(small))
    assert metadata["leaves"]["iteration"] == {"shape": [], "dtype": "int32"}


def test_a_network_loaded_in_evaluation_mode_trains_with_exploration(saved):
    directory, states, _ = saved
    network = feedforward()
    network.eval()
    assert load(directory / "step_0000000040", network)["training_state"].graphdef == states[40].graphdef
