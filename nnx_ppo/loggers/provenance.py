"""What a run was made with: package versions and the state of the code."""

import importlib.metadata
import os
import platform
import subprocess

PACKAGES = ("nnx-ppo-toolkit", "jax", "jaxlib", "flax", "optax", "numpy", "mujoco", "mujoco-mjx", "warp-lang", "brax")


def versions() -> dict[str, str]:
    """Version by package, of Python and of the installed ones among those that shape a result."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_state(directory: str | os.PathLike[str] = ".") -> dict[str, str | bool]:
    """`{"commit": hash, "dirty": whether tracked files differ from it}`; empty outside a repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", os.fspath(directory), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return {}
