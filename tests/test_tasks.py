"""Every registered task is complete and fits together; outside files are tasks too."""

import datetime
import subprocess
import sys
from pathlib import Path

import pytest

from nnx_ppo.algorithms.config import TrainConfig
from tasks import Evidence, Task, load_task, task_names
from tasks.registry import TASKS, TaskNotFound


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def make_task(**changes) -> Task:
    fields = {"name": "t", "summary": "s", "make_env": lambda physics: None, "make_networks": lambda env, rngs: None}
    return Task(**{**fields, **changes})


@pytest.mark.parametrize("name", task_names())
def test_a_task_is_registered_under_its_own_name_with_a_one_line_summary(name):
    task = load_task(name)
    assert task.name == name
    assert 10 < len(task.summary) < 100
    assert "\n" not in task.summary


@pytest.mark.parametrize("name", task_names())
def test_a_task_records_video_and_evaluates_whole_episodes(name):
    from tasks.launch.command_line import smoke_config

    config = load_task(name).config
    assert config.video.enabled
    assert config.eval.enabled
    assert 0 < config.eval.every_steps <= config.ppo.total_steps / 5
    smoke = smoke_config(config)
    assert smoke.ppo.total_steps < 50_000
    assert smoke.video.enabled


@pytest.mark.parametrize("name", task_names())
def test_a_tasks_network_acts_in_its_environment(name):
    import jax
    import numpy as np
    from flax import nnx

    task = load_task(name)
    env = task.make_env(None)
    assert env.max_len == task.config.eval.max_episode_length
    network = task.make_networks(env, nnx.Rngs(0))
    states = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 2))
    out = network(network.initialize_state(2), states.obs).output
    assert out.actions.shape == (2, env.action_size)
    assert out.value_estimates.shape == (2,)
    states = jax.vmap(env.step)(states, out.actions)
    assert np.isfinite(np.asarray(states.reward)).all()


@pytest.mark.parametrize("name", task_names())
def test_evidence_names_a_command_that_trains_this_task(name):
    evidence = load_task(name).evidence
    if evidence is None:
        pytest.skip("not measured yet")
    assert f"--task {name}" in evidence.command
    assert len(evidence.seeds) >= 3
    datetime.date.fromisoformat(evidence.date)


def test_looking_at_every_task_imports_no_jax():
    code = "import sys, tasks; [tasks.load_task(n) for n in tasks.task_names()]; print('jax' in sys.modules)"
    assert run_python(code).strip() == "False"


def test_a_file_of_ones_own_is_a_task_and_may_import_what_lies_beside_it(tmp_path):
    (tmp_path / "my_numbers.py").write_text("STEPS = 777\n")
    file = tmp_path / "mine.py"
    file.write_text(
        "from my_numbers import STEPS\n"
        "from nnx_ppo.algorithms.config import PPOConfig, TrainConfig\n"
        "from tasks import Task\n"
        "def build(*_): ...\n"
        "TASK = Task('mine', 'My own task', build, build, TrainConfig(PPOConfig(total_steps=STEPS)))\n"
    )
    task = load_task(str(file))
    assert task.name == "mine"
    assert task.config.ppo.total_steps == 777


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("humanoyd", "did you mean 'humanoid'"),
        ("cartpole_swing_up", "did you mean 'cartpole_swingup'"),
        ("xyz", "Accepted: humanoid, cartpole_swingup"),
    ],
)
def test_an_unknown_task_is_refused_with_the_nearest_name(name, message):
    with pytest.raises(TaskNotFound, match=message):
        load_task(name)


def test_a_missing_task_file_is_refused_with_the_nearest_file(tmp_path):
    (tmp_path / "reach.py").write_text("")
    with pytest.raises(TaskNotFound, match=r"did you mean 'reach\.py'"):
        load_task(str(tmp_path / "reech.py"))


def test_a_task_file_without_a_task_is_refused_with_what_it_lacks(tmp_path):
    file = tmp_path / "empty.py"
    file.write_text("TASK = 3\n")
    with pytest.raises(TaskNotFound, match=r"defines TASK of type int.*must define TASK = Task\("):
        load_task(str(file))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "reach-target"}, "name of letters, digits and underscores"),
        ({"make_env": 3}, "make_env=3: a function is accepted"),
        ({"config": {}}, "a TrainConfig is accepted"),
    ],
)
def test_an_impossible_task_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_task(**changes)


def test_a_task_takes_the_default_configuration_and_has_no_evidence_unless_told():
    task = make_task()
    assert task.config == TrainConfig()
    assert task.evidence is None


def test_evidence_needs_a_score_for_each_seed_and_gives_their_mean():
    fields = {"steps": 1, "minutes": 1.0, "device": "cpu", "date": "2026-01-01", "versions": {}, "command": "c"}
    assert Evidence(scores=(1.0, 3.0), seeds=(0, 1), **fields).score == 2.0
    with pytest.raises(ValueError, match="1 scores for 2 seeds"):
        Evidence(scores=(1.0,), seeds=(0, 1), **fields)


def test_the_registry_points_at_modules_of_this_package():
    for name, module in TASKS.items():
        assert module == f"tasks.{name}"
        assert (Path(__file__).parents[1] / "tasks" / f"{name}.py").is_file()
