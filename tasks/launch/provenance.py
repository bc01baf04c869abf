"""Where a run comes from: package versions and the state of the code. Imports no JAX."""

import dataclasses
import importlib.metadata
import platform
import subprocess
from pathlib import Path

PACKAGES = ("jax", "jaxlib", "flax", "optax", "mujoco", "mujoco-mjx", "brax", "numpy", "orbax-checkpoint")
"""Packages whose versions decide what a run does."""


def versions() -> dict[str, str]:
    """Versions of Python, this toolkit and the packages that decide what a run does."""
    found = {"python": platform.python_version()}
    for package in ("nnx-ppo-toolkit", *PACKAGES):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@dataclasses.dataclass(frozen=True)
class CodeState:
    """The git state of a folder's repository."""

    commit: str
    changed: bool
    """Whether tracked files differ from the commit."""
    diff: str
    """How they differ, as `git apply` takes it."""

    @property
    def short(self) -> str:
        """The commit as one word for people."""
        return self.commit[:9] + (" + uncommitted changes" if self.changed else "")


def code_state(folder: Path) -> CodeState | None:
    """The git state of the repository that holds `folder`; None without git or a repository."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    diff = _git(folder, "diff", "--binary", "HEAD") or ""
    return CodeState(commit.strip(), bool(diff), diff)


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=20,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
