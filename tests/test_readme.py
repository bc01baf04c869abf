"""What the README shows is true: its code runs, its table of tasks is the registry, its links lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tasks import load_task, task_names

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SHELL = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL))


def test_the_python_example_trains_and_is_short(capsys):
    example = PYTHON[0]
    assert len([line for line in example.splitlines() if line]) <= 12
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert float(printed[-1]) > 0


def test_the_task_written_in_three_steps_trains_by_the_command_that_is_shown(tmp_path):
    file = tmp_path / "pendulum.py"
    file.write_text("\n".join(PYTHON[1:]))
    assert "scripts/train.py --task pendulum.py --smoke" in SHELL
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), "--task", "pendulum.py", "--smoke"]
    without_opengl = {**os.environ, "MUJOCO_GL": "disabled"}
    done = subprocess.run(command, cwd=tmp_path, env=without_opengl, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout
    shown = " ".join(done.stdout.split())
    assert shown.count("Rendering is switched off by MUJOCO_GL=disabled") == 1, "training goes on, said once"
    (run,) = (tmp_path / "runs" / "pendulum").iterdir()
    assert (run / "task_file.py").read_text() == file.read_text()
    assert (run / "metrics.jsonl").is_file()


def test_the_table_of_tasks_is_the_registry():
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", README, re.MULTILINE)
    assert [(name, text) for name, text in rows] == [(name, load_task(name).summary) for name in task_names()]


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_link_into_the_repository_leads_somewhere(document):
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / document).read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_flag_that_is_shown_exists():
    from tasks.launch.command_line import parse

    commands = re.findall(r"scripts/train\.py (--task (?:humanoid|NAME)[^#\n`]*)", README)
    assert len(commands) >= 4
    for command in commands:
        words = [word for word in command.split() if word != "--help"]
        parsed = parse(words)
        assert parsed is not None
        assert parsed.task.name == "humanoid"


def test_ci_runs_exactly_the_test_command_that_the_readme_shows():
    test_command = "uv run pytest"
    assert test_command in SHELL.splitlines()
    assert (ROOT / ".ci" / "run").read_text().rstrip().splitlines()[-1] == f"step {test_command}"


def test_ci_runs_the_same_checks_as_pre_commit():
    hooks = re.findall(r"entry: (.+)", (ROOT / ".pre-commit-config.yaml").read_text())
    ci = (ROOT / ".ci" / "run").read_text()
    assert [hook for hook in hooks if f"step {hook}" not in ci] == []
