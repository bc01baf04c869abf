"""A run that is killed again and again ends as one that was left alone: same parameters, same records, each once."""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from nnx_ppo.algorithms.checkpointing import CheckpointError, checkpoints, load_network, read_arrays

resource = pytest.importorskip("resource", reason="these tests kill and limit processes as POSIX does")
limits_other_processes = pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="Linux only")

SCRIPT = Path(__file__).parents[1] / "scripts" / "train.py"

TASK = """
import jax, jax.numpy as jnp, numpy as np
from probe_envs import ProbeState, recurrent_actor_critic
from nnx_ppo.algorithms.config import EvalConfig, PPOConfig, TrainConfig, VideoConfig
from nnx_ppo.wrappers.episode_wrapper import EpisodeWrapper
from tasks import Task


class Noisy:
    observation_size, action_size = 2, 1

    def reset(self, rng):
        return ProbeState(jax.random.normal(rng, (2,)), jnp.zeros(()), jnp.zeros(()), {"rng": rng})

    def step(self, state, action):
        key, draw = jax.random.split(state.info["rng"])
        obs = 0.9 * state.obs + 0.3 * jax.random.normal(draw, (2,)) + action
        return state.replace(obs=obs, reward=-jnp.sum(obs**2), info={**state.info, "rng": key})

    def render(self, trajectory, **kwargs):
        return [np.zeros((32, 32, 3), np.uint8) for _ in trajectory]


def make_env(physics):
    return EpisodeWrapper(Noisy(), 7)


TASK = Task(
    "noisy", "Stay at zero", make_env, lambda env, rngs: recurrent_actor_critic(2, 1, rngs),
    TrainConfig(
        PPOConfig(n_envs=8, rollout_length=5, n_minibatches=2, n_epochs=1, total_steps=ITERATIONS * 40),
        EvalConfig(every_steps=120, n_envs=2, max_episode_length=7),
        VideoConfig(enabled=True, every_steps=200, episode_length=7),
        checkpoint_every_steps=80,
    ),
)
"""
MEASURED = ("time", "time/", "throughput/")
"""Entries of a record that no two runs share."""


NOISY = ("--task", "noisy_task.py", "--seed", "3")


class Runs:
    """Starts, kills and resumes runs in one folder."""

    def __init__(self, folder: Path, iterations: int = 4, words: tuple[str, ...] = NOISY):
        self.folder = folder
        self.words = words
        folder.mkdir(exist_ok=True)
        (folder / "noisy_task.py").write_text(TASK.replace("ITERATIONS", str(iterations)))

    def start(self, *words: str) -> subprocess.Popen:
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parent),
            "NNX_PPO_CACHE_DIR": str(self.folder.parent / "cache"),
        }
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), *words, "--wandb", "disabled"],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def new(self, name: str) -> subprocess.Popen:
        return self.start(*self.words, "--out", name)

    def records(self, name: str) -> list[dict]:
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        return [
            {key: value for key, value in json.loads(line).items() if not key.startswith(MEASURED)} for line in lines
        ]

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        return read_arrays(checkpoints(self.folder / name / "checkpoints")[-1])


def kill_after(process: subprocess.Popen, run: Path, seconds: float) -> bool:
    """SIGKILL some time after the run has its folder; whether it was still alive."""
    while process.poll() is None and not (run / "config.json").is_file():
        time.sleep(0.01)
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    alive = process.poll() is None
    kill(process)
    return alive


def kill(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()


def kill_until_done(runs: Runs, kills: int, rng: random.Random) -> int:
    """Returns how many kills met a living process."""
    met, run = 0, runs.folder / "killed"
    process = runs.new("killed")
    for _ in range(kills):
        met += kill_after(process, run, rng.uniform(0.0, 7.0))
        for path in checkpoints(run / "checkpoints"):
            # Whatever has the name of a checkpoint can be read.
            read_arrays(path)
        if process.returncode == 0:
            break
        if checkpoints(run / "checkpoints"):
            process = runs.start("--resume", "killed")
        else:
            run.rename(runs.folder / f"stillborn_{met}")
            process = runs.new("killed")
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return met


def check_killed_run(runs: Runs, kills: int, seed: int, least: int = 2) -> None:
    """`least` kills must meet a living process."""
    said, _ = (undisturbed := runs.new("undisturbed")).communicate(timeout=900)
    assert undisturbed.returncode == 0, said
    assert kill_until_done(runs, kills, random.Random(seed)) >= least
    expected, found = runs.arrays("undisturbed"), runs.arrays("killed")
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    steps = [record["step"] for record in runs.records("killed")]
    assert steps == list(range(0, steps[-1] + 1, steps[1]))
    assert runs.records("killed") == runs.records("undisturbed")
    assert not list((runs.folder / "killed" / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_as_an_undisturbed_one(tmp_path):
    check_killed_run(Runs(tmp_path / "runs", iterations=120), kills=3, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_run_killed_many_times_ends_as_an_undisturbed_one(tmp_path, seed):
    check_killed_run(Runs(tmp_path / "runs", iterations=400), kills=15, seed=seed, least=8)


SMOKE = ("--task", "cartpole_balance", "--smoke", "--checkpoint-every-steps", "1", "--ppo.total-steps", "20000")


@pytest.mark.parametrize("physics", ["native", pytest.param("jax", marks=pytest.mark.slow)])
def test_a_task_on_mujoco_killed_in_training_ends_as_an_undisturbed_one(tmp_path, physics):
    runs = Runs(tmp_path / "runs", words=(*SMOKE, "--physics", physics))
    said, _ = (undisturbed := runs.new("undisturbed")).communicate(timeout=900)
    assert undisturbed.returncode == 0, said
    process = runs.new("killed")
    while process.poll() is None and len(checkpoints(runs.folder / "killed" / "checkpoints")) < 2:
        time.sleep(0.01)
    kill(process)
    assert process.returncode == -signal.SIGKILL
    said, _ = (process := runs.start("--resume", "killed")).communicate(timeout=900)
    assert process.returncode == 0, said
    for name, array in runs.arrays("undisturbed").items():
        np.testing.assert_array_equal(runs.arrays("killed")[name], array, err_msg=name)
    assert runs.records("killed") == runs.records("undisturbed")


def test_a_run_folder_that_is_in_use_is_refused_and_is_free_once_its_process_was_killed(tmp_path):
    runs = Runs(tmp_path / "runs", 1_000_000)
    first = runs.new("run")
    try:
        while first.poll() is None and not checkpoints(runs.folder / "run" / "checkpoints"):
            time.sleep(0.05)
        second = runs.start("--resume", "run")
        said, _ = second.communicate(timeout=120)
        assert second.returncode == 2, said
        assert f"process {first.pid} on {socket.gethostname()} is writing to the run folder 'run'" in " ".join(
            said.split()
        )
    finally:
        kill(first)
    third = runs.start("--resume", "run")
    while third.poll() is None and not (runs.folder / "run" / "lock").read_text().startswith(f"{third.pid} on "):
        time.sleep(0.05)
    assert third.poll() is None, third.communicate()
    kill(third)


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 80])
def test_a_run_that_only_has_an_early_checkpoint_left_repeats_the_rest_with_every_record_once(tmp_path, step):
    runs = Runs(tmp_path / "runs", 6, (*NOISY, "--keep-checkpoints", "none"))
    said, _ = (process := runs.new("run")).communicate(timeout=300)
    assert process.returncode == 0, said
    arrays, records = runs.arrays("run"), runs.records("run")
    for path in checkpoints(runs.folder / "run" / "checkpoints"):
        if path.name > f"step_{step:010d}":
            shutil.rmtree(path)
    said, _ = (process := runs.start("--resume", "run")).communicate(timeout=300)
    assert process.returncode == 0, said
    for name, array in runs.arrays("run").items():
        np.testing.assert_array_equal(array, arrays[name], err_msg=name)
    assert runs.records("run") == records


def fill_disk(process: subprocess.Popen, largest_file: int, file: Path) -> None:
    """Once `file` is there, let no file of the process grow beyond a size, which is an OSError as a full disk is."""
    while process.poll() is None and not file.is_file():
        time.sleep(0.01)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (largest_file, largest_file))


@pytest.mark.slow
@limits_other_processes
def test_a_disk_that_fills_up_while_metrics_are_written_does_not_end_the_run(tmp_path):
    runs = Runs(tmp_path / "runs", 200)
    process = runs.new("run")
    fill_disk(process, 2**15, runs.folder / "run" / "metrics.jsonl")
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    said = " ".join(said.split())
    assert "JsonLines failed and is tried again with the next record; training goes on. OSError" in said
    assert re.search(r"JsonLines did not get \d+ record", said)
    steps = [record["step"] for record in runs.records("run")]
    assert steps == [40 * i for i in range(len(steps))]
    assert 20 < len(steps) < 200
    assert checkpoints(runs.folder / "run" / "checkpoints")[-1].name == f"step_{200 * 40:010d}"


@limits_other_processes
def test_a_disk_without_room_for_the_first_checkpoint_ends_the_run_at_once_with_a_reason(tmp_path):
    runs = Runs(tmp_path / "runs", 200)
    process = runs.new("run")
    fill_disk(process, 2000, runs.folder / "run" / "config.json")
    said, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "first checkpoint cannot be written" in said
    assert "Traceback" not in said
    assert not checkpoints(runs.folder / "run" / "checkpoints")


@pytest.mark.slow
def test_an_extended_run_that_is_stopped_goes_on_by_the_plain_command(tmp_path):
    runs = Runs(tmp_path / "runs", 4, (*NOISY, "--keep-checkpoints", "none"))
    said, _ = (process := runs.new("run")).communicate(timeout=300)
    assert process.returncode == 0, said
    process = runs.start("--resume", "run", "--ppo.total-steps", "8000")
    while process.poll() is None and len(runs.records("run")) < 20:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 143, said
    assert "resume with" in said
    said, _ = (process := runs.start("--resume", "run")).communicate(timeout=300)
    assert process.returncode == 0, said
    assert "nothing has changed: it goes on to the bit" in said
    assert [record["step"] for record in runs.records("run")] == [40 * i for i in range(201)]
    # Keeping all was said once, at the start.
    assert len(checkpoints(runs.folder / "run" / "checkpoints")) > 90


def test_a_configuration_edited_after_the_checkpoint_is_refused_by_name_and_an_honest_resume_lists_what_changed(
    tmp_path,
):
    runs = Runs(tmp_path / "runs", 4)
    said, _ = (process := runs.new("run")).communicate(timeout=300)
    assert process.returncode == 0, said
    config = runs.folder / "run" / "config.json"
    before = config.read_text()
    plain = json.loads(before)
    plain["config"]["ppo"]["n_envs"] = 4
    config.write_text(json.dumps(plain))
    said, _ = (process := runs.start("--resume", "run", "--ppo.total-steps", "320")).communicate(timeout=300)
    assert process.returncode == 2, said
    assert "not what the checkpoint was trained with: ppo.n_envs differ" in said
    plain = json.loads(before)
    plain["versions"]["jax"] = "0.0.1"
    config.write_text(json.dumps(plain))
    said, _ = (process := runs.start("--resume", "run", "--ppo.total-steps", "320")).communicate(timeout=300)
    assert process.returncode == 0, said
    assert re.search(
        r"since then\s+ppo.total_steps 160 -> 320\n\s+jax 0.0.1 -> \S+\n.*not necessarily to the bit", said
    )
    assert [record["step"] for record in runs.records("run")] == [40 * i for i in range(9)]


def test_a_newest_checkpoint_that_is_damaged_is_passed_over_for_an_older_one(tmp_path):
    runs = Runs(tmp_path / "runs", 8)
    said, _ = (process := runs.new("run")).communicate(timeout=300)
    assert process.returncode == 0, said
    expected, newest = runs.arrays("run"), checkpoints(runs.folder / "run" / "checkpoints")[-1]
    for file in (newest / "arrays").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CheckpointError):
        load_network(newest, None)  # type: ignore[arg-type]
    said, _ = (process := runs.start("--resume", "run")).communicate(timeout=300)
    assert process.returncode == 0, said
    assert f"It is now damaged_{newest.name}; an older one is tried" in " ".join(said.split())
    assert newest.with_name(f"damaged_{newest.name}").is_dir()
    for name, array in runs.arrays("run").items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    assert [record["step"] for record in runs.records("run")] == [40 * i for i in range(9)]
