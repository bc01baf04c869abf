"""Whether someone is logged in to Weights & Biases, found without importing wandb (which takes seconds)."""

import netrc
import os
from pathlib import Path
from urllib.parse import urlparse


def default_wandb_mode(smoke: bool) -> str:
    """`WANDB_MODE` if set, else `online` for those logged in (not for a smoke run), else `disabled`."""
    mode = os.environ.get("WANDB_MODE", "").lower()
    if mode in ("online", "offline", "disabled"):
        return mode
    return "online" if not smoke and logged_in() else "disabled"


def logged_in() -> bool:
    """Whether there is an API key in the environment or in the netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    files = [Path(os.environ["NETRC"])] if "NETRC" in os.environ else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for file in files:
        try:
            if netrc.netrc(file.expanduser()).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
