"""Settings for all tests: CPU, and compiled programs kept between test runs."""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Also for the scripts that tests start as processes of their own.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"nnx_ppo_tests_xla_{os.getuid()}")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
# Tests compile much and compute little. Two devices are there for those that share environments out.
_FLAGS = "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=2"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()
# Whoever runs the tests may be logged in to W&B; tests are not to write there.
os.environ["WANDB_MODE"] = "disabled"
