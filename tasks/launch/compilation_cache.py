"""JAX's persistent compilation cache: a second start of the same run compiles nothing."""

import os
import sys
from pathlib import Path

VARIABLE = "NNX_PPO_CACHE_DIR"


def cache_folder() -> Path | None:
    """Where compiled programs are kept; None if switched off by an empty `NNX_PPO_CACHE_DIR`."""
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        return Path(chosen).expanduser() if chosen else None
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "nnx_ppo" / "xla"


def use_compilation_cache() -> Path | None:
    """Switch the cache on, before anything is compiled; JAX's own variable `JAX_COMPILATION_CACHE_DIR` goes first.

    Returns:
      The folder, or None if the cache is off or its folder cannot be made.
    """
    import jax

    chosen = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if chosen:
        return Path(chosen)
    folder = cache_folder()
    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    return folder
