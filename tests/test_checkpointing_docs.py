"""The examples of docs/checkpointing.md, run in order."""

import dataclasses
import re
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx
from probe_envs import Counter
from test_policy import make_run

from nnx_ppo.algorithms.config import EvalConfig, PPOConfig, TrainConfig
from nnx_ppo.networks.factories import make_mlp_actor_critic
from nnx_ppo.wrappers.episode_wrapper import EpisodeWrapper
from tasks.launch.command_line import Options
from tasks.launch.nonfinite import KEPT

TEXT = (Path(__file__).parent.parent / "docs" / "checkpointing.md").read_text()


@pytest.fixture(scope="module")
def after(tmp_path_factory):
    """What the examples leave behind."""
    folder = tmp_path_factory.mktemp("docs")
    make_networks = lambda: make_mlp_actor_critic(2, 1, [4], [4], nnx.Rngs(0))
    names = {
        "dataclasses": dataclasses,
        "env": EpisodeWrapper(Counter(3), 10),
        "make_networks": make_networks,
        "networks": make_networks(),
        "config": TrainConfig(
            ppo=PPOConfig(n_envs=100, total_steps=8_000, n_epochs=1), eval=EvalConfig(n_envs=2, max_episode_length=10)
        ),
        "folder": folder / "all",
        "other_folder": folder / "small",
        "run": make_run(folder)[0],
        "observation": jnp.zeros(3),
    }
    for block in re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL):
        exec(compile(block, "docs/checkpointing.md", "exec"), names)
    return names


def test_the_examples_save_and_go_on(after):
    assert sorted(path.name for path in after["folder"].iterdir()) == ["step_0000004000", "step_0000008000"]
    assert after["loaded"]["step"] == 8_000
    assert after["result"].total_steps == 16_000


def test_the_examples_keep_a_small_checkpoint_and_read_arrays(after):
    (small,) = after["other_folder"].iterdir()
    assert small.name == "step_0000016000"
    assert after["arrays"]["iteration"] == 4


def test_the_examples_load_a_policy(after):
    assert after["action"].shape == (2,)


def test_the_numbers_in_the_text_are_those_of_the_code():
    assert Options().keep_checkpoints == 3
    assert "The newest three checkpoints stay" in TEXT
    assert KEPT == 10
    assert "first ten such episodes" in TEXT
    assert PPOConfig().max_skipped_updates == 64
    assert "64 skipped in a row" in TEXT


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", TEXT):
        assert (Path(__file__).parent.parent / "docs" / target).exists(), target
