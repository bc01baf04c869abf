"""The environments' page says nothing that does not run."""

import re
from pathlib import Path

import jax.numpy as jnp

import envs

PAGE = (Path(__file__).parent.parent / "docs" / "environments.md").read_text()


def test_the_code_on_the_page_runs():
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(compile(block, "docs/environments.md", "exec"), names)
    assert names["rewards"].shape == (10, 16)
    assert jnp.isfinite(names["state"].reward)
    assert set(names["state"].metrics) == {"reward/distance", "reward/effort", "distance"}


def test_the_table_lists_every_environment_with_its_sizes():
    rows = re.findall(r"^\| `(\w+)` \| .*? \| (\d+) \| (\d+) \| (\d+) ms", PAGE, flags=re.MULTILINE)
    assert {row[0] for row in rows} == set(envs.ENVIRONMENTS)
    for name, action, observation, milliseconds in rows:
        env = envs.make(name, physics="native")
        assert (env.action_size, env.observation_size) == (int(action), int(observation))
        assert round(1000 * env.dt) == int(milliseconds)
