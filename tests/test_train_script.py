"""`scripts/train.py` as its users start it, and the parts it is made of."""

import dataclasses
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import jax
import pytest

from envs.physics import available_cpus
from nnx_ppo.algorithms.config import LoggingLevel, PPOConfig, TrainConfig, VideoConfig
from tasks import load_task, task_names
from tasks.launch.command_line import UsageError, changed_fields, command_to_copy, parse, smoke_config
from tasks.launch.compilation_cache import cache_folder
from tasks.launch.devices import devices_of_run
from tasks.launch.run_folder import RunFolder, RunFolderError, RunRecord, check_disk

SCRIPT = Path(__file__).parents[1] / "scripts" / "train.py"

POINT_TASK = '''
"""A point on a line: no physics, so that it compiles in seconds."""
import dataclasses
from typing import Any
import jax, jax.numpy as jnp
from nnx_ppo.algorithms.config import EvalConfig, PPOConfig, TrainConfig
from nnx_ppo.networks.factories import make_mlp_actor_critic
from nnx_ppo.wrappers.episode_wrapper import EpisodeWrapper
from tasks import Task


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    obs: Any
    reward: Any
    done: Any
    metrics: Any
    info: Any

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)


class Point:
    observation_size, action_size = 1, 1

    def reset(self, rng):
        return State(jax.random.uniform(rng, (1,)), jnp.zeros(()), jnp.zeros(()), {}, {})

    def step(self, state, action):
        obs = state.obs + 0.1 * action
        return state.replace(obs=obs, reward=-jnp.abs(obs[0]))


def make_networks(env, rngs):
    return make_mlp_actor_critic(1, 1, [8], [8], rngs)


TASK = Task(
    "point", "A point goes to zero", lambda physics: EpisodeWrapper(Point(), 20), make_networks,
    TrainConfig(
        PPOConfig(n_envs=8, rollout_length=4, n_minibatches=2, n_epochs=1, total_steps=1_000_000_000),
        EvalConfig(every_steps=3200, n_envs=2, max_episode_length=20),
        checkpoint_every_steps=320_000_000,
    ),
)
'''


def train(*words: str, cwd: Path, timeout: float = 240) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout)


def script_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def steps_logged(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def wait_for(condition, seconds: float, process: subprocess.Popen) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.1)


# --- whole runs -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smoke_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smoke")
    done = train("--task", "cartpole_swingup", "--smoke", "--seed", "5", "--out", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run", done.stdout


def test_a_smoke_run_leaves_metrics_checkpoints_a_curve_and_tensorboard_events(smoke_run):
    run, _ = smoke_run
    config = RunFolder.open(run).read_record().config
    batch = config.ppo.n_envs * config.ppo.rollout_length
    assert steps_logged(run) == [0, batch, 2 * batch, 3 * batch, 4 * batch]
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == [
        f"step_{steps:010d}" for steps in (0, 2 * batch, 4 * batch)
    ]
    assert (run / "plots" / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))


def test_a_smoke_run_leaves_videos_where_there_is_an_opengl(smoke_run):
    from envs.rendering import RenderingUnavailable, find_gl

    run, output = smoke_run
    try:
        find_gl()
    except RenderingUnavailable as error:
        assert "OpenGL" in output
        pytest.skip(str(error))
    assert min(path.name for path in (run / "videos").iterdir()) == "step_0000000000.mp4"


def test_config_json_holds_what_rebuilds_the_run(smoke_run):
    run, _ = smoke_run
    record = RunFolder.open(run).read_record()
    tuned = load_task("cartpole_swingup").config
    assert record.task == "cartpole_swingup"
    assert record.task_file is None
    assert record.physics == "native"
    assert record.config.seed == 5
    assert {**vars(record.config), "seed": tuned.seed} == vars(smoke_config(tuned))
    assert "--seed" in record.command
    assert {"python", "jax", "mujoco"} <= record.versions.keys()


def test_header_and_footer_say_what_ran_and_where_everything_is(smoke_run):
    _, output = smoke_run
    header, footer = output.split("compiling")[0], output.split("finished")[1]
    for word in (
        "cartpole_swingup",
        "seed",
        "5",
        "native",
        "parameters",
        "actor",
        "--smoke",
        "jax ",
        "W&B",
        "disabled",
    ):
        assert word in header
    for word in ("final return", "best return", "steps/s", "run/plots/learning_curve.png", "--resume run"):
        assert word in footer


def test_ctrl_c_saves_and_the_run_resumes_where_it_stopped(tmp_path, monkeypatch, capsys):
    (tmp_path / "point.py").write_text(POINT_TASK)
    run = tmp_path / "run"
    command = [sys.executable, str(SCRIPT), "--task", "point.py", "--out", "run"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: (run / "metrics.jsonl").is_file() and len(steps_logged(run)) > 3, 120, process)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "interrupted by SIGINT" in output
    assert "SIGINT: stopping after this iteration" in errors
    stopped_at = max(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").iterdir())
    assert stopped_at == steps_logged(run)[-1]

    # What a kill leaves behind: metrics beyond the last checkpoint, and half a line.
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": stopped_at + 32, "old": True}) + '\n{"step": 9')
    resumed = train("--resume", "run", "--ppo.total-steps", str(stopped_at + 64), cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert steps_logged(run)[-3:] == [stopped_at, stopped_at + 32, stopped_at + 64]
    assert "old" not in (run / "metrics.jsonl").read_text()

    monkeypatch.chdir(tmp_path)
    assert script_module().main(["--resume", "run", "--ppo.total-steps", str(stopped_at + 64)]) == 2
    assert "the end of its training" in capsys.readouterr().err


def test_physics_that_is_not_installed_is_refused_without_a_traceback_or_a_folder(tmp_path, monkeypatch, capsys):
    def refuse(physics):
        raise ValueError(f"physics {physics!r} needs Warp, which is not installed")

    task = dataclasses.replace(load_task("humanoid"), make_env=refuse)
    monkeypatch.setattr("tasks.launch.command_line.load_task", lambda name: task)
    out = tmp_path / "run"
    assert script_module().main(["--task", "humanoid", "--physics", "warp", "--out", str(out)]) == 2
    assert "error: physics 'warp' needs Warp" in capsys.readouterr().err
    assert not out.exists()


def test_a_second_ctrl_c_exits_at_once():
    code = (
        "import time\n"
        "from tasks.launch.interrupt import StopOnSignal\n"
        "with StopOnSignal() as stop:\n"
        "    print('ready', flush=True)\n"
        "    while True: time.sleep(0.05); stop(0) and print('asked', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "stopped at once" in errors


def test_sigterm_asks_for_a_stop_and_gives_143_and_the_old_handlers_come_back():
    from tasks.launch.interrupt import StopOnSignal

    before = signal.getsignal(signal.SIGTERM)
    with StopOnSignal() as stop:
        assert not stop(0)
        assert stop.exit_code == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop(0)
    assert stop.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before


# --- the command line -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--help"], ["--task", "humanoid", "--help"], ["--list"], ["--task", "humanoyd"]])
def test_help_list_and_wrong_names_answer_without_importing_jax(words):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['train.py', *{words!r}]\n"
        "try: runpy.run_path(%r, run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print('heavy:', sorted({'jax', 'mujoco', 'wandb', 'matplotlib', 'flax'} & set(sys.modules)))\n"
    ) % str(SCRIPT)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "heavy: []" in done.stdout, done.stdout + done.stderr


def test_list_shows_every_task_with_its_summary(tmp_path):
    done = train("--list", cwd=tmp_path)
    assert done.returncode == 0
    for name in task_names():
        assert re.search(rf"^{name} +{re.escape(load_task(name).summary)}$", done.stdout, re.MULTILINE)


def test_help_shows_the_tasks_tuned_values(tmp_path):
    done = train("--task", "humanoid", "--help", cwd=tmp_path)
    assert done.returncode == 0
    text = " ".join(done.stdout.replace("│", " ").split())
    assert f"(default: {load_task('humanoid').config.ppo.n_envs})" in text
    assert "--ppo.learning-rate FLOAT" in text
    assert "Environments stepped in parallel." in text


def config_of(*words: str) -> TrainConfig:
    command = parse(["--task", "humanoid", *words])
    assert command is not None
    return command.config


def test_without_flags_the_configuration_is_the_tuned_one():
    assert config_of() == load_task("humanoid").config


def test_every_field_of_the_configuration_is_a_flag():
    config = config_of(
        *("--ppo.n-envs", "24", "--ppo.n_minibatches", "3", "--ppo.weight-decay", "0.1", "--ppo.gradient-clipping"),
        *("none", "--ppo.logging-level", "losses", "grad_norm", "--eval.logging-percentiles", "1", "99.5"),
        *("--video.no-enabled", "--video.render-kwargs.height", "32", "--seed", "4", "--eval.logging-level", "NONE"),
    )
    assert (config.ppo.n_envs, config.ppo.n_minibatches, config.seed) == (24, 3, 4)
    assert config.ppo.weight_decay == 0.1
    assert config.ppo.gradient_clipping is None
    assert config.ppo.logging_level == LoggingLevel.LOSSES | LoggingLevel.GRAD_NORM
    assert config.eval.logging_percentiles == (1, 99.5)
    assert config.eval.logging_level == LoggingLevel.NONE
    assert config.video.render_kwargs["height"] == 32
    assert not config.video.enabled


def test_a_flag_beats_smoke():
    assert config_of("--smoke", "--ppo.total-steps", "123").ppo.total_steps == 123
    assert config_of("--smoke").ppo.total_steps < 50_000


def test_a_smoke_run_evaluates_saves_and_records_within_four_iterations():
    config = smoke_config(TrainConfig(PPOConfig(n_envs=4096, n_minibatches=32, rollout_length=10)))
    batch = config.ppo.n_envs * config.ppo.rollout_length
    assert config.ppo.n_envs == 64
    assert config.ppo.total_steps == 4 * batch
    assert config.eval.every_steps == config.checkpoint_every_steps == 2 * batch
    assert config.video.every_steps == 4 * batch


def test_a_smoke_run_of_many_minibatches_still_divides_its_environments():
    config = smoke_config(TrainConfig(PPOConfig(n_envs=300, n_minibatches=100)))
    assert config.ppo.n_envs == 100


def test_smoke_shrinks_pictures_only_where_they_have_a_size():
    assert smoke_config(TrainConfig(video=VideoConfig(render_kwargs={"camera": "side"}))).video.render_kwargs == {
        "camera": "side"
    }


def test_changed_fields_are_named_with_both_values():
    tuned = TrainConfig()
    used = TrainConfig(PPOConfig(learning_rate=1.0), seed=3)
    assert changed_fields(tuned, used) == {"ppo.learning_rate": (1e-4, 1.0), "seed": (17, 3)}
    assert changed_fields(tuned, tuned) == {}


def test_commands_to_copy_are_run_as_this_one_was(monkeypatch):
    monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)
    assert command_to_copy("scripts/train.py", "--out", "a b") == "python scripts/train.py --out 'a b'"
    monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")
    assert command_to_copy("scripts/train.py") == "uv run scripts/train.py"


def test_wandb_is_off_unless_logged_in_or_asked_for(monkeypatch, tmp_path):
    script = script_module()
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    assert script.default_wandb_mode(smoke=False) == "disabled"
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert script.default_wandb_mode(smoke=False) == "online"
    assert script.default_wandb_mode(smoke=True) == "disabled"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert script.default_wandb_mode(smoke=False) == "offline"


def test_the_cache_folder_is_the_users_and_can_be_named_or_switched_off(monkeypatch, tmp_path):
    monkeypatch.delenv("NNX_PPO_CACHE_DIR", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "nnx_ppo" / "xla"
    monkeypatch.setenv("NNX_PPO_CACHE_DIR", "/elsewhere")
    assert cache_folder() == Path("/elsewhere")
    monkeypatch.setenv("NNX_PPO_CACHE_DIR", "")
    assert cache_folder() is None


# --- the run folder -------------------------------------------------------------------------------------------


def record(**changes) -> RunRecord:
    fields = {
        "task": "humanoid",
        "task_file": None,
        "physics": "native",
        "config": TrainConfig(PPOConfig(weight_decay=0.1, logging_percentiles=(1, 99.5))),
        "command": ("train.py", "--task", "humanoid"),
        "versions": {"jax": "0"},
        "git": {"commit": "abc", "dirty": True},
        "device": "cpu",
        "started": "2026-01-01T00:00:00+00:00",
        "wandb_id": "01234567",
    }
    return RunRecord(**{**fields, **changes})


def test_a_record_is_read_back_as_it_was_written(tmp_path):
    run = RunFolder(tmp_path / "a" / "b")
    run.create(record(), git_diff="a diff")
    assert RunFolder.open(run.path).read_record() == record()
    assert run.git_diff.read_text() == "a diff"


def test_a_new_run_is_named_for_task_time_and_seed_and_nothing_is_made_yet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = RunFolder.plan(None, "humanoid", 7)
    assert re.fullmatch(r"runs/humanoid/\d{8}-\d{6}-7", str(run.path))
    assert list(tmp_path.iterdir()) == []


def test_two_runs_of_one_second_get_different_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = RunFolder.plan(None, "humanoid", 7)
    for second in range(3):
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(time.time() + second))
        (tmp_path / "runs" / "humanoid" / f"{stamp}-7").mkdir(parents=True, exist_ok=True)
    assert not RunFolder.plan(None, "humanoid", 7).path.exists()
    assert first.path != RunFolder.plan(None, "humanoid", 7).path


def test_the_disk_check_leaves_nothing_behind(tmp_path):
    check_disk(tmp_path / "deep" / "run")
    assert list(tmp_path.iterdir()) == []


def test_an_outside_task_is_kept_with_the_run_and_a_changed_one_is_refused(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("TASK = 1\n")
    run = RunFolder(tmp_path / "run")
    run.create(record(task_file=file))
    assert run.task_file(run.read_record()) == file
    file.write_text("TASK = 2\n")
    with pytest.raises(RunFolderError, match=r"has changed since the run started.*task_file\.py"):
        run.task_file(run.read_record())
    file.unlink()
    assert run.task_file(run.read_record()) == run.task_copy


@pytest.mark.parametrize("words", [("--ppo.learning-rate", "1"), ("--seed", "99"), ("--out", "x"), ("--task", "point")])
def test_what_makes_a_run_what_it_is_cannot_change_on_resume(tmp_path, words):
    RunFolder(tmp_path / "run").create(record())
    with pytest.raises(UsageError, match=r"resumed run keeps|leave --task out"):
        parse(["--resume", str(tmp_path / "run"), *words])


def test_a_resumed_run_has_its_recorded_configuration_and_may_go_on_longer(tmp_path):
    RunFolder(tmp_path / "run").create(record())
    words = ["--ppo.total-steps", "999", "--eval.n-envs", "3", "--physics", "jax"]
    command = parse(["--resume", str(tmp_path / "run"), *words])
    assert command is not None
    assert command.options.physics == "jax"
    assert changed_fields(record().config, command.config) == {
        "ppo.total_steps": (512_000, 999),
        "eval.n_envs": (64, 3),
    }


# --- devices --------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class On:
    """An environment on some physics engine."""

    impl: str


@pytest.mark.parametrize(
    ("asked", "impl", "expected"),
    [(None, "native", 1), (2, "native", 2), (1, "jax", 1)],
)
def test_the_native_engine_has_one_device_and_everything_has_as_many_as_are_asked_for(asked, impl, expected):
    config = PPOConfig(n_envs=32, n_minibatches=1)
    assert devices_of_run(asked, On(impl), None, config) == jax.devices()[:expected]


@pytest.mark.parametrize(
    ("asked", "n_envs", "message"),
    [(3, 9, r"--devices 3: JAX sees 2 "), (2, 9, r"--devices 2 cannot share 9 .* --ppo\.n-envs 12")],
)
def test_devices_that_are_not_there_or_do_not_share_evenly_are_refused_with_a_number_that_fits(asked, n_envs, message):
    with pytest.raises(UsageError, match=message):
        devices_of_run(asked, On("native"), None, PPOConfig(n_envs=n_envs, n_minibatches=3))
    devices_of_run(2, On("native"), None, PPOConfig(n_envs=12, n_minibatches=3))


@pytest.fixture
def one_device_unless_asked(monkeypatch):
    """As outside of the tests, where a CPU has as many devices as cores."""
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"].replace("--xla_force_host_platform_device_count=2", ""))


@pytest.mark.slow
def test_a_run_on_two_devices_says_so_and_goes_on_there(tmp_path, one_device_unless_asked):
    (tmp_path / "point.py").write_text(POINT_TASK)
    run = train("--task", "point.py", "--smoke", "--devices", "2", "--out", "run", cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"device +cpu \(\d+ cores, 2 devices\)", run.stdout)
    end = str(2 * steps_logged(tmp_path / "run")[-1])
    on = train("--resume", "run", "--ppo.total-steps", end, cwd=tmp_path)
    assert on.returncode == 0, on.stdout + on.stderr
    assert ", 2 devices)" in on.stdout
    words = ("--task", "point.py", "--smoke", "--devices", "2", "--ppo.total-steps", end, "--out", "whole")
    assert train(*words, cwd=tmp_path).returncode == 0

    def last(name):
        record = json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])
        return {key: value for key, value in record.items() if key.startswith(("losses", "eval", "step"))}

    assert len(last("run")) > 5
    assert last("run") == last("whole")


def test_a_step_with_an_open_loop_takes_every_core_without_being_asked(tmp_path, one_device_unless_asked):
    halved = "jax.lax.while_loop(lambda x: x > 2, lambda x: x / 2, jnp.abs(obs[0]))"
    (tmp_path / "point.py").write_text(POINT_TASK.replace("-jnp.abs(obs[0])", f"-{halved}"))
    words = ("--ppo.n-envs", "64", "--ppo.total-steps", "256", "--out", "run")
    run = train("--task", "point.py", "--smoke", *words, cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    cores = max(n for n in range(1, min(4, available_cpus()) + 1) if 64 % n == 0)
    assert (f", {cores} devices)" in run.stdout) == (cores > 1)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["devices"] == cores


# --- the second start -----------------------------------------------------------------------------------------

COUNTING = """
import importlib.util, sys
from jax import monitoring

counts = {"hits": 0, "misses": 0}
def count(event, **_):
    for name in counts:
        counts[name] += event == f"/jax/compilation_cache/cache_{name}"
monitoring.register_event_listener(count)
spec = importlib.util.spec_from_file_location("train", sys.argv[1])
train = importlib.util.module_from_spec(spec)
spec.loader.exec_module(train)
assert train.main(sys.argv[2:]) == 0
print(counts["hits"], counts["misses"])
"""


def test_the_second_start_of_a_run_on_native_physics_compiles_nothing(tmp_path):
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    found = []
    for name in ("first", "second"):
        words = ["--task", "cartpole_balance", "--smoke", "--video.no-enabled", "--out", str(tmp_path / name)]
        run = subprocess.run(
            [sys.executable, "-c", COUNTING, str(SCRIPT), *words],
            env={**os.environ, **settings},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        found.append([int(word) for word in run.stdout.split()[-2:]])
    (_, misses), second = found
    assert misses > 4
    assert second[0] >= misses
    assert second[1] == 0
