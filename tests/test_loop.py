"""The host loop: what happens when, what callbacks get, and what is left when something ends it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from probe_envs import Counter, Readout, TwoArms, assert_same_bits, two_arm_network

from nnx_ppo.algorithms import ppo, video_recorder
from nnx_ppo.algorithms.config import EvalConfig, LoggingLevel, PPOConfig, TrainConfig, VideoConfig
from nnx_ppo.algorithms.loop import Programs, run_training
from nnx_ppo.algorithms.types import TrainResult, VideoData, add_steps
from nnx_ppo.networks import functional

BATCH = 10


class Rendered(Counter):
    """Renders frames that show the step count."""

    def render(self, trajectory, height=2, width=3):
        return [np.full((height, width, 3), int(state.obs[0]), np.uint8) for state in trajectory]


ENV, LIMITED = Rendered(3), Counter(3)


def fake_iteration(state):
    """Counts and moves the parameter by one: compiles in no time."""
    state = state.replace(
        params=jax.tree.map(lambda p: p + 1, state.params),
        iteration=state.iteration + 1,
        steps=add_steps(state.steps, BATCH),
    )
    return state, {"iteration": state.iteration, "vector": jnp.arange(3.0)}


@pytest.fixture(scope="module")
def start():
    config = TrainConfig(ppo=PPOConfig(n_envs=2, n_minibatches=1))
    return ppo.initial_training_state(ENV, Readout(0.0), config)


class Journal:
    """Callbacks that write down when they are called, with what."""

    def __init__(self, stop_at=None, fail_at=None):
        self.entries, self.logged, self.videos, self.states = [], [], [], []
        self.stop_at, self.fail_at = stop_at, fail_at

    def log(self, metrics, steps):
        self.entries.append(("log", steps))
        self.logged.append((steps, metrics))
        if steps == self.fail_at:
            raise RuntimeError("from the callback")

    def video(self, data):
        self.videos.append(data)

    def checkpoint(self, state, step):
        self.entries.append(("checkpoint", step))
        self.states.append((step, state.steps_taken))

    def stop(self, steps):
        self.entries.append(("stop", steps))
        return steps == self.stop_at


class Asked:
    """A stop_fn that does not look at metrics."""

    reads_metrics = False

    def __init__(self, journal):
        self.journal = journal

    def __call__(self, steps):
        return self.journal.stop(steps)


def run(start, journal, total_steps=40, resumed=False, env=ENV, network=None, stop_fn=None, **config):
    config = TrainConfig(
        **{"eval": EvalConfig(enabled=False), "checkpoint_every_steps": 0, **config},
        ppo=PPOConfig(n_envs=2, n_minibatches=1),
    )
    network = network if network is not None else Readout(0.0)
    programs = Programs(
        train=fake_iteration,
        eval_env=env,
        steps_per_iteration=BATCH,
        total_steps=total_steps,
        max_skipped_updates=64,
        nonfinite_names=(),
    )
    return run_training(
        programs,
        config,
        start,
        network,
        resumed=resumed,
        log_fn=journal.log,
        video_fn=journal.video,
        checkpoint_fn=journal.checkpoint,
        stop_fn=stop_fn or (journal.stop if journal.stop_at is not None else None),
    )


EVERY = EvalConfig(n_envs=2, every_steps=BATCH, max_episode_length=5)


def evaluated(journal):
    return [steps for steps, metrics in journal.logged if "eval/episode_reward/mean" in metrics]


# --- order and cadence ----------------------------------------------------------------------------------------


def test_at_the_start_and_in_every_iteration_a_checkpoint_comes_before_the_log_and_a_stop_after_it(start):
    journal = Journal(stop_at=-1)
    run(start, journal, total_steps=20, eval=EVERY, checkpoint_every_steps=BATCH)
    assert journal.entries == [
        ("checkpoint", 0),
        ("log", 0),
        ("checkpoint", 10),
        ("log", 10),
        ("stop", 10),
        ("checkpoint", 20),
        ("log", 20),
        ("stop", 20),
    ]


def test_order_at_the_start_and_in_an_iteration_is_evaluation_video_checkpoint_log(start, monkeypatch):
    from nnx_ppo.algorithms import loop

    order, call = [], loop.Action.__call__
    monkeypatch.setattr(loop.Action, "__call__", lambda self, *args: order.append(self.name) or call(self, *args))
    journal = Journal()
    journal.log = lambda metrics, steps: order.append("log")
    video = VideoConfig(enabled=True, every_steps=BATCH, episode_length=2)
    run(start, journal, total_steps=10, eval=EVERY, video=video, checkpoint_every_steps=BATCH)
    assert order == ["evaluation", "video", "checkpoint", "log"] * 2


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (10, [0, 10, 20, 30, 40]),
        (15, [0, 20, 30, 40]),  # 15 is crossed at 20, 30 at 30; 40 is the end
        (20, [0, 20, 40]),
        (4, [0, 10, 20, 30, 40]),  # at most once per iteration
        (1000, [0, 40]),  # the final one always happens
        (0, []),
        (-7, []),
    ],
)
def test_an_action_is_due_where_the_steps_cross_a_multiple_and_at_the_end(start, every, expected):
    journal = Journal()
    run(start, journal, eval=dataclasses.replace(EVERY, every_steps=every), checkpoint_every_steps=every)
    assert evaluated(journal) == expected
    assert [step for step, _ in journal.states] == expected
    assert all(step == taken for step, taken in journal.states)


def test_a_disabled_evaluation_never_runs(start):
    journal = Journal()
    result = run(start, journal, eval=dataclasses.replace(EVERY, enabled=False))
    assert evaluated(journal) == result.eval_history == []


def test_training_stops_after_the_iteration_that_passes_total_steps(start):
    for total, steps, iterations in [(40, 40, 4), (41, 50, 5), (1, 10, 1), (0, 0, 0)]:
        result = run(start, Journal(), total_steps=total)
        assert (result.total_steps, result.total_iterations) == (steps, iterations)
        assert result.training_state.steps_taken == steps


def test_log_fn_is_called_once_per_iteration_and_at_the_start_only_if_something_ran(start):
    journal = Journal()
    run(start, journal, checkpoint_every_steps=BATCH)
    assert [steps for steps, _ in journal.logged] == [10, 20, 30, 40]
    assert [metrics["iteration"] for _, metrics in journal.logged] == [1, 2, 3, 4]
    journal = Journal()
    run(start, journal, video=VideoConfig(enabled=True, every_steps=1000, episode_length=2))
    assert [steps for steps, _ in journal.logged] == [0, 10, 20, 30, 40]


def test_a_resumed_run_does_not_repeat_the_start(start):
    journal = Journal()
    first = run(start, journal, total_steps=20, eval=EVERY, checkpoint_every_steps=20)
    again = Journal()
    state = first.training_state
    result = run(state, again, resumed=True, total_steps=40, eval=EVERY, checkpoint_every_steps=20)
    assert evaluated(again) == [30, 40]
    assert [step for step, _ in again.states] == [40]
    assert (result.total_steps, result.total_iterations) == (40, 2)


def test_train_ppo_given_a_state_that_has_not_trained_yet_begins_with_the_start():
    config = TrainConfig(ppo=PPOConfig(n_envs=2, n_minibatches=1, rollout_length=2, total_steps=0), eval=EVERY)
    network, journal = Readout(0.0), Journal()
    state = ppo.new_training_state(LIMITED, network, 2, 0)
    ppo.train_ppo(LIMITED, network, config, initial_state=state, log_fn=journal.log)
    assert evaluated(journal) == [0]


def test_steps_stay_exact_beyond_what_32_bits_hold(start):
    near = 2**32 - 15
    state = start.replace(steps=jnp.asarray([0, near], jnp.uint32))
    journal = Journal()
    result = run(state, journal, resumed=True, total_steps=2**32 + 20, checkpoint_every_steps=2**32)
    steps = [steps for steps, _ in journal.logged]
    assert steps == [near + 10, near + 20, near + 30, near + 40]
    assert all(type(step) is int for step in steps)
    assert result.total_steps == result.training_state.steps_taken == near + 40
    assert journal.states == [(near + 20, near + 20), (near + 40, near + 40)]


@pytest.mark.parametrize("count", [1, 2**31, 2**32 - 1, 2**32, 3 * 2**33 + 5])
@pytest.mark.parametrize("before", [0, 2**24 + 1, 2**32 - 1, 2**40 + 7])
def test_adding_steps_carries_over(before, count):
    after = add_steps(jnp.asarray([before >> 32, before % 2**32], jnp.uint32), count)
    assert (int(after[0]) << 32) + int(after[1]) == before + count


# --- stopping -------------------------------------------------------------------------------------------------


def test_a_stop_saves_and_ends_normally_with_exactly_that_iteration(start):
    journal = Journal(stop_at=20)
    result = run(start, journal, eval=dataclasses.replace(EVERY, every_steps=1000), checkpoint_every_steps=1000)
    assert isinstance(result, TrainResult)
    assert (result.total_steps, result.total_iterations) == (20, 2)
    logs_and_stops = [("log", 10), ("stop", 10), ("log", 20), ("stop", 20)]
    assert journal.entries == [("checkpoint", 0), ("log", 0), *logs_and_stops, ("checkpoint", 20)]
    assert [evaluation["step"] for evaluation in result.eval_history] == [0, 20]
    assert "eval/episode_reward/mean" in result.final_metrics


def test_a_stop_fn_that_reads_no_metrics_is_asked_before_they_are_fetched_and_no_record_is_lost(start):
    journal = Journal(stop_at=20)
    result = run(start, journal, checkpoint_every_steps=1000, stop_fn=Asked(journal))
    assert journal.entries == [
        ("checkpoint", 0),
        ("stop", 10),
        ("log", 10),
        ("stop", 20),
        ("log", 20),
        ("checkpoint", 20),
    ]
    assert (result.total_steps, result.final_metrics["iteration"]) == (20, 2)


def test_a_stop_does_not_save_or_evaluate_a_second_time_what_was_just_due(start):
    journal = Journal(stop_at=20)
    result = run(start, journal, eval=dataclasses.replace(EVERY, every_steps=20), checkpoint_every_steps=20)
    assert [step for step, _ in journal.states] == [0, 20]
    assert [evaluation["step"] for evaluation in result.eval_history] == [0, 20]


def test_an_exception_in_a_callback_comes_out_and_leaves_the_network_trained(start):
    network = Readout(0.0)
    with pytest.raises(RuntimeError, match="from the callback"):
        run(start, Journal(fail_at=20), network=network)
    assert float(network.weight.get_value()) >= 2


def test_the_callers_network_is_updated_at_the_end(start):
    network = Readout(0.0)
    result = run(start, Journal(), network=network)
    assert float(network.weight.get_value()) == 4
    assert_same_bits(functional.split(network)[1], result.training_state.params)


# --- what callbacks get ---------------------------------------------------------------------------------------


def test_metrics_are_plain_numbers_and_arrays_and_belong_to_the_callback(start):
    journal = Journal()
    result = run(start, journal, total_steps=20, eval=EVERY)
    for _, metrics in journal.logged:
        assert all(isinstance(value, (int, float, np.ndarray)) for value in metrics.values())
    final = dict(result.final_metrics)
    journal.logged[-1][1].clear()
    assert result.final_metrics == final
    assert "vector" in final


@pytest.mark.parametrize(
    ("percentiles", "statistics"),
    [((0, 25, 99.5), ["p0", "p25", "p99.5"]), (None, ["mean", "std"])],
)
def test_evaluation_keys_follow_the_percentiles(start, percentiles, statistics):
    journal = Journal()
    result = run(start, journal, total_steps=0, eval=dataclasses.replace(EVERY, logging_percentiles=percentiles))
    ((_, metrics),) = journal.logged
    headline = {f"eval/episode_reward/{s}" for s in {"mean", "std", *statistics}}
    assert set(metrics) == headline | {f"eval/lifespan/{s}" for s in statistics}
    # Episodes of Counter(3): 1 + 2 + 3.
    assert metrics["eval/episode_reward/mean"] == 6
    assert metrics["eval/episode_reward/std"] == 0
    assert metrics[f"eval/lifespan/{statistics[0]}"] == 3
    assert result.eval_history == [{"step": 0, **metrics}]


def test_evaluation_statistics_are_those_of_the_episodes(start):
    journal = Journal()
    config = EvalConfig(n_envs=64, every_steps=10, max_episode_length=20, logging_percentiles=(0, 50, 100))
    env = Counter(9, random_length=True)
    run(start, journal, total_steps=0, env=env, eval=config)
    run(start, other := Journal(), total_steps=0, env=env, eval=dataclasses.replace(config, logging_percentiles=None))
    ((_, metrics),), ((_, moments),) = journal.logged, other.logged
    lengths = [metrics[f"eval/lifespan/p{p}"] for p in (0, 50, 100)]
    assert lengths == [1, 5, 9] or 1 <= lengths[0] < lengths[1] < lengths[2] <= 9
    assert metrics["eval/episode_reward/p100"] == lengths[2] * (lengths[2] + 1) / 2
    assert moments["eval/lifespan/mean"] > 1
    assert moments["eval/lifespan/std"] > 0


def test_several_reward_terms_have_their_own_evaluation_keys():
    network = two_arm_network(nnx.Rngs(0))
    config = TrainConfig(
        ppo=PPOConfig(n_envs=2, n_minibatches=1, rollout_length=2, total_steps=0),
        eval=dataclasses.replace(EVERY, logging_percentiles=(50,)),
    )
    ((metrics),) = ppo.train_ppo(TwoArms(), network, config).eval_history
    expected = {f"eval/episode_reward{term}/{s}" for term in ("", "/x", "/y") for s in ("mean", "std", "p50")}
    assert set(metrics) == expected | {"eval/lifespan/p50", "step"}
    total = metrics["eval/episode_reward/x/mean"] + metrics["eval/episode_reward/y/mean"]
    assert metrics["eval/episode_reward/mean"] == pytest.approx(total, rel=1e-5)


def test_environment_and_network_metrics_are_evaluated_on_request_only(start):
    journal = Journal()
    level = LoggingLevel.ENV_METRICS | LoggingLevel.GRAD_NORM
    config = dataclasses.replace(EVERY, logging_level=level, logging_percentiles=None)
    run(start, journal, total_steps=0, eval=config)
    ((_, metrics),) = journal.logged
    assert {key for key in metrics if not key.startswith(("eval/episode_reward", "eval/lifespan"))} == {
        "eval/env/steps/mean",
        "eval/env/steps/std",
    }
    assert metrics["eval/env/steps/mean"] == 2  # (1 + 2 + 3) / 3


def test_every_evaluation_draws_fresh_initial_states():
    class Draws(Counter):
        def step(self, state, action):
            state = super().step(state, action)
            return state.replace(reward=state.obs[1])

    env, network = Draws(1), Readout(0.0)
    config = TrainConfig(ppo=PPOConfig(n_envs=2, n_minibatches=1))
    state = ppo.initial_training_state(env, network, config)
    result = run(state, Journal(), env=env, network=network, eval=EVERY)
    means = [evaluation["eval/episode_reward/mean"] for evaluation in result.eval_history]
    assert len(means) == len(set(means)) == 5
    again = run(state, Journal(), env=env, network=network, eval=dataclasses.replace(EVERY, every_steps=20))
    assert [e["eval/episode_reward/mean"] for e in again.eval_history] == means[::2]


# --- video ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "length"), [(10, 3), (2, 2)])
def test_a_video_has_a_frame_for_the_initial_state_and_for_every_step(start, limit, length):
    journal = Journal()
    video = VideoConfig(enabled=True, every_steps=20, episode_length=limit, render_kwargs={"height": 4, "width": 5})
    run(start, journal, video=video)
    assert [data.step for data in journal.videos] == [0, 20, 40]
    for data in journal.videos:
        assert isinstance(data, VideoData)
        assert data.frames.shape == (length + 1, 4, 5, 3)
        assert data.frames.dtype == np.uint8
        assert data.frames[:, 0, 0, 0].tolist() == list(range(length + 1))
        assert (data.episode_length, data.episode_reward) == (length, length * (length + 1) / 2)
        assert (type(data.episode_length), type(data.episode_reward), type(data.step)) == (int, float, int)


class Obedient(Rendered):
    """The reward is the action."""

    def step(self, state, action):
        state = super().step(state, action)
        return state.replace(reward=action[0])


class Weight(Readout):
    """Acts as its parameter says, which `fake_iteration` moves by one."""

    def __call__(self, state, obs, rollout_extras=None):
        out = super().__call__(state, obs, rollout_extras)
        actions = jnp.full((*obs.shape[:-1], 1), self.weight.get_value())
        return out.replace(output=out.output.replace(actions=actions))


@pytest.mark.parametrize(
    ("total", "every", "stop_at", "expected"),
    [
        (40, 20, None, {0: 0, 20: 6, 40: 12}),  # three steps, each rewarded with the iterations done
        (20, 10, None, {0: 0, 10: 3, 20: 6}),
        (10, 1000, None, {0: 0}),
        (0, 1000, None, {0: 0}),
        (40, 1000, 10, {0: 0}),
    ],
)
def test_a_video_shows_the_policy_of_its_step_also_where_it_is_recorded_later(total, every, stop_at, expected):
    config = TrainConfig(ppo=PPOConfig(n_envs=2, n_minibatches=1))
    env, network = Obedient(3), Weight(0.0)
    journal = Journal(stop_at=stop_at)
    video = VideoConfig(enabled=True, every_steps=every, episode_length=5)
    state = ppo.initial_training_state(env, network, config)
    run(state, journal, total_steps=total, env=env, network=network, video=video)
    assert {data.step: data.episode_reward for data in journal.videos} == expected
    assert [data.step for data in journal.videos] == sorted(expected)


def test_the_first_iteration_does_not_wait_for_the_program_of_videos(start, monkeypatch):
    journal, compile_programs = Journal(), video_recorder.compile_programs

    def noted(programs):
        journal.entries.append(("compile", *programs))
        return compile_programs(programs)

    monkeypatch.setattr(video_recorder, "compile_programs", noted)
    run(start, journal, video=VideoConfig(enabled=True, every_steps=1000, episode_length=2))
    assert journal.entries[:3] == [("log", 0), ("log", 10), ("compile", "video")]
    assert journal.entries.count(("compile", "video")) == 1


@pytest.mark.parametrize(("env", "has_video_fn", "missing"), [(LIMITED, True, "render"), (ENV, False, "video_fn")])
def test_a_missing_part_for_videos_is_said_once_and_training_goes_on(start, capsys, env, has_video_fn, missing):
    journal = Journal()
    if not has_video_fn:
        journal.video = None
    result = run(start, journal, env=env, video=VideoConfig(enabled=True, every_steps=BATCH))
    assert result.total_steps == 40
    said = capsys.readouterr().err
    assert said.count("No videos") == 1
    assert missing in said
    assert [steps for steps, _ in journal.logged] == [10, 20, 30, 40]
