"""What is wrong is refused at once with what was given, what is accepted, what to do: tables of (input, message)."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from nnx_ppo.algorithms.config import EvalConfig, PPOConfig, TrainConfig, VideoConfig
from nnx_ppo.algorithms.ppo import train_ppo
from nnx_ppo.networks.factories import make_mlp_actor_critic
from tasks.launch.command_line import UsageError, parse
from tasks.launch.run_folder import RunFolder, RunFolderError, RunRecord

# --- the command line -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", r"which task\? Give --task NAME, where NAME is one of humanoid, "),
        ("--task humanoyd", r"no task 'humanoyd' \(did you mean 'humanoid'\?\)\. Accepted: humanoid, "),
        ("--task /no/where.py", r"no task file '/no/where\.py'.*defines TASK = Task"),
        ("--task humanoid --devices 0", r"--devices 0: at least 1, or leave it out"),
        ("--resume /no/run", r"'/no/run' does not exist, so it is no run folder"),
    ],
)
def test_a_command_that_cannot_be_carried_out_says_what_would_be(words, message):
    with pytest.raises(UsageError, match=message):
        parse(words.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--task humanoid --ppo.learning-rte 1", "Perhaps you meant: --ppo.learning-rate"),
        ("--tsk humanoid", "Perhaps you meant: --task"),
        ("--task humanoid --ppo.learning-rate fast", "Error parsing --ppo.learning-rate"),
        ("--task humanoid --physics mjx", "invalid choice 'mjx' for argument '--physics'. Expected one of"),
        ("--task humanoid --ppo.logging-level loses", "has no member 'loses' (did you mean 'LOSSES'?)"),
        ("--task humanoid --ppo.n-minibatches 7", "n_minibatches=7 does not divide n_envs="),
        ("--task humanoid --ppo.n-envs 0", "a whole number of at least 1 is accepted"),
        ("--task humanoid --ppo.discounting-factor 1.5", "a number from 0 to 1 is accepted"),
        ("--task humanoid --wandb on", "invalid choice 'on' for argument '--wandb'. Expected one of"),
    ],
)
def test_a_wrong_flag_or_value_is_named_with_what_is_accepted(words, message, capsys):
    with pytest.raises(SystemExit) as exit:
        parse(words.split())
    assert exit.value.code == 2
    shown = "".join(capsys.readouterr().err.replace("│", " ").split())
    assert "".join(message.split()) in shown


# --- the disk -------------------------------------------------------------------------------------------------


def an_existing_run(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def a_file_in_the_way(path: Path) -> Path:
    path.write_text("")
    return path / "run"


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda path: path.mkdir() or path, "exists already. Nothing is overwritten: give another --out"),
        (an_existing_run, "exists already. To continue that run, use --resume"),
        (a_file_in_the_way, "is a file. Give another place with --out"),
        (lambda path: Path("/proc/run"), "nothing can be written in '/proc'"),
    ],
)
def test_a_place_that_cannot_take_a_run_is_refused_before_anything_is_written(prepare, message, tmp_path):
    out = prepare(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunFolderError) as error:
        RunFolder.plan(out, "humanoid", 0)
    assert message in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_nearly_full_disk_is_refused_with_what_is_left_and_what_is_needed(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=5 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(RunFolderError, match=r"has 5 MB left, and a run needs 200 MB\. Make room"):
        RunFolder.plan(tmp_path / "run", "humanoid", 0)
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_disk_is_refused_with_what_the_system_says(tmp_path, monkeypatch):
    def read_only(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryDirectory", read_only)
    with pytest.raises(RunFolderError, match=r"nothing can be written in .*: Read-only file system\. Give another"):
        RunFolder.plan(tmp_path / "run", "humanoid", 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is damaged"),
        ('{"format": 1}', "is damaged"),
        ('{"format": 99}', "newer version of the toolkit"),
    ],
)
def test_a_damaged_or_newer_record_is_refused(content, message, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(RunFolderError, match=message):
        RunFolder.open(tmp_path).read_record()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda plain: plain.pop("task"), "task"),
        (lambda plain: plain.update(task=5), "task is 5"),
        (lambda plain: plain.update(physics=["native"]), "physics is"),
        (lambda plain: plain.update(format="newest"), "'str' and 'int'"),
        (lambda plain: plain.update(extra=1), "unexpected keyword argument 'extra'"),
        (lambda plain: plain.update(config=5), "TrainConfig is read from a dict"),
        (lambda plain: plain["config"]["ppo"].update(n_envs="many"), "n_envs='many': a whole number"),
        (lambda plain: plain["config"]["ppo"].update(n_env=5), "no field 'n_env' .did you mean 'n_envs'"),
        (lambda plain: plain["config"]["ppo"].update(logging_level=["LOSSE"]), "did you mean 'LOSSES'"),
    ],
)
def test_a_record_edited_by_hand_is_refused_naming_what_is_wrong(edit, message, tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create(RunRecord("humanoid", None, "native", TrainConfig(), (), {}, {}, "cpu", ""))
    plain = json.loads(run.config_json.read_text())
    edit(plain)
    run.config_json.write_text(json.dumps(plain))
    with pytest.raises(RunFolderError, match=f"is damaged .*{message}"):
        run.read_record()


# --- environments and networks --------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    obs: Any
    reward: Any
    done: Any
    metrics: Any
    info: Any

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class Env:
    """An environment whose step changes what it is told to change."""

    changes: tuple[tuple[str, Any], ...] = ()

    def reset(self, rng):
        return State(jax.random.normal(rng, (3,)), jnp.zeros(()), jnp.zeros(()), {"a": jnp.zeros(())}, {})

    def step(self, state, action):
        return state.replace(**{name: make(state) for name, make in self.changes})


CONFIG = TrainConfig(
    PPOConfig(n_envs=4, rollout_length=2, n_minibatches=2, total_steps=8), EvalConfig(enabled=False), VideoConfig()
)


@pytest.mark.parametrize(
    ("env", "obs_size", "error", "message"),
    [
        (Env(), 5, ValueError, r"built for inputs of shape.*5.*got.*3.*env\.observation_size"),
        (
            *(Env((("obs", lambda s: s.obs[:2]),)), 3, TypeError),
            r"state\.obs is float32\[3\] at reset and float32\[2\] after a step.*fix reset or step",
        ),
        (
            *(Env((("metrics", lambda s: {**s.metrics, "b": s.reward}),)), 3, TypeError),
            r"state.*metrics.*b.* after a step|state.*metrics.*b.*step",
        ),
    ],
)
def test_an_environment_and_a_network_that_do_not_fit_are_refused_before_compiling(env, obs_size, error, message):
    networks = make_mlp_actor_critic(obs_size, 1, [4], [4], nnx.Rngs(0))
    with pytest.raises(error, match=message):
        train_ppo(env, networks, CONFIG)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("<mujoco><worldbody><geom/></worldbody></mujoco>", "size 0 must be positive in geom"),
        ("nowhere.xml", "no model file 'nowhere.xml'.*give the path of an MJCF file"),
        (("no_such_package", "a.xml"), "package 'no_such_package' is not installed"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_refused_with_its_reason(model, message):
    from envs.base import load_model

    with pytest.raises(ValueError, match=message):
        load_model(model)


UNSUPPORTED_BY_MJX = """
<mujoco>
  <worldbody>
    <body pos="0 0 1"><freejoint/><geom name="can" type="cylinder" size="0.1 0.2"/></body>
    <geom name="table" type="box" size="1 1 0.1"/>
  </worldbody>
</mujoco>
"""


def test_a_model_that_mjx_cannot_take_is_refused_with_the_elements_that_are_in_the_way():
    import mujoco

    from envs.physics import make_physics

    mj_model = mujoco.MjModel.from_xml_string(UNSUPPORTED_BY_MJX)
    with pytest.raises(ValueError, match=r"(?s)can.*table|table.*can") as error:
        make_physics(mj_model, "jax", ())
    assert "native" in str(error.value)
