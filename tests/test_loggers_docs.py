"""The examples of docs/logging.md, run in order."""

import re
from pathlib import Path

import flax.struct
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from nnx_ppo.algorithms.config import EvalConfig, PPOConfig, TrainConfig
from nnx_ppo.algorithms.metrics import EVALUATION_GLOSSARY, GLOSSARY
from nnx_ppo.algorithms.ppo import train_ppo
from nnx_ppo.loggers import read_scalars
from nnx_ppo.networks.factories import make_mlp_actor_critic

TEXT = (Path(__file__).parent.parent / "docs" / "logging.md").read_text()


@flax.struct.dataclass
class State:
    obs: jax.Array
    reward: jax.Array
    done: jax.Array
    info: dict
    metrics: dict


class Constant:
    """Ten steps that each give 1."""

    observation_size = 1
    action_size = 1

    def reset(self, rng):
        return State(jnp.zeros(1), jnp.zeros(()), jnp.zeros(()), {"truncated": jnp.zeros(())}, {})

    def step(self, state, action):
        count = state.obs + 0.1
        return state.replace(obs=count, reward=jnp.ones(()), done=(count[0] > 0.95).astype(jnp.float32))


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # wandb's
def test_the_examples_run_and_log_what_they_say(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    config = TrainConfig(
        ppo=PPOConfig(n_envs=4, rollout_length=10, total_steps=120, n_minibatches=2, n_epochs=1),
        eval=EvalConfig(every_steps=40, n_envs=2, max_episode_length=20),
    )
    names = {
        "env": Constant(),
        "networks": make_mlp_actor_critic(1, 1, [4], [4], nnx.Rngs(0)),
        "config": config,
        "train_ppo": train_ppo,
    }
    for block in re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL):
        exec(compile(block, "docs/logging.md", "exec"), names)
    for run in ("runs/demo", "runs/wandb-demo"):
        steps, returns = read_scalars(run)["eval/episode_reward/mean"]
        assert steps[-1] == 120
        assert returns.tolist() == [10.0] * len(steps)
    assert (tmp_path / "runs/demo/curve.png").stat().st_size > 10_000
    assert list(tmp_path.glob("runs/demo/wandb/offline-run-*"))
    assert "120 of 120 (100%) steps" in capsys.readouterr().out


def test_the_page_names_every_public_thing_of_the_loggers():
    import nnx_ppo.loggers

    unexplained = {"SinkUnavailable", "read_records"}
    assert [name for name in nnx_ppo.loggers.__all__ if name not in TEXT and name not in unexplained] == []


def test_the_page_lists_every_key_under_its_level_as_the_glossary_explains_it():
    tables = [(f"`{level.name}`", entries) for level, entries in GLOSSARY.items()]
    for title, entries in [*tables, ("Evaluation, only in iterations that evaluated", EVALUATION_GLOSSARY)]:
        rows = "".join(f"| `{key}` | {meaning} |\n" for key, meaning in entries.items())
        assert f"\n{title}\n\n| key | meaning |\n|---|---|\n{rows}\n" in TEXT
