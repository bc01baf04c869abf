"""The state of the code that a run was started with."""

import subprocess
from pathlib import Path


def describe_code(folder: Path) -> str:
    """The commit of the repository that holds `folder`, in a few words."""
    from nnx_ppo.loggers.provenance import git_state

    state = git_state(folder)
    if not state:
        return "not in a git repository"
    return str(state["commit"])[:9] + (" + uncommitted changes" if state["dirty"] else "")


def git_diff(folder: Path) -> str:
    """How the tracked files differ from the commit, as `git apply` takes it; empty outside a repository."""
    command = ["git", "-C", str(folder), "diff", "--binary", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
