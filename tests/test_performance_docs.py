"""The page on performance: its examples run, and its commands exist."""

import json
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from probe_envs import Counter
from test_devices import CONFIG, mlp

from nnx_ppo.algorithms.ppo import train_ppo
from nnx_ppo.wrappers.episode_wrapper import EpisodeWrapper

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "performance.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def names():
    env = EpisodeWrapper(Counter(4), 3)
    task = types.SimpleNamespace(make_networks=lambda env, rngs: mlp(env), config=CONFIG)
    return {
        "jax": jax,
        "env": env,
        "networks": mlp(env),
        "config": CONFIG,
        "task": task,
        "train_ppo": train_ppo,
        "logger": None,
        "save": None,
    }


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.strip().splitlines()[-1][:40])
def test_the_examples_run(block, monkeypatch):
    # What has to happen before JAX starts has happened; test_distributed.py has processes that start it.
    asked = []
    monkeypatch.setattr(jax.config, "update", lambda *args: asked.append(args))
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: asked.append(args))
    found = names()
    exec(block, found)
    if "result" in found:
        assert found["result"].eval_history["eval/episode_reward/mean"].shape == (5, 4)
        assert np.all(np.asarray(found["result"].training_state(3).iteration) == 3)
    else:
        assert asked


SLOW_MODES = [pytest.param(mode, marks=pytest.mark.slow) for mode in ("seeds", "devices", "memory")]


@pytest.mark.parametrize("mode", ["iteration", *SLOW_MODES])
def test_the_benchmark_measures_what_the_page_shows(mode):
    assert f"benchmark.py {mode} " in PAGE
    sizes = ["--n-envs", "8", "--rounds", "2", "--warm-up", "1", "--seeds", "2"]
    out = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "benchmark.py"), mode, "--env", "reach", *sizes],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert out.returncode == 0, out.stderr[-2000:]
    assert "reach, " in out.stdout
    assert re.search(r"\d steps/s|\d bytes|\d%", out.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["here", "brax"])
def test_learning_is_measured_until_the_target_is_reached(who):
    assert "scripts/benchmark_learning.py" in PAGE
    script = str(ROOT / "scripts" / "benchmark_learning.py")
    limits = ["--target", "1", "--steps", "25600"]
    out = subprocess.run([sys.executable, script, "--who", who, *limits], capture_output=True, text=True, check=True)
    found = json.loads(out.stdout.splitlines()[-1])
    assert found["solved"]
    assert found["return"] >= 1
    assert found["seconds"] > 0
