"""Metrics and videos in a Weights & Biases run. (Not named `wandb.py`: that is the package it talks to.)"""

import importlib.util
import netrc
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlparse

import numpy as np

from nnx_ppo.loggers.provenance import git_state, versions
from nnx_ppo.loggers.writer import SinkUnavailable

if TYPE_CHECKING:
    from nnx_ppo.algorithms.types import VideoData

STEP = "env_steps"


class Wandb:
    """Logs to one W&B run: scalars, arrays as histograms, videos as mp4 files.

    The number of environment steps is logged as `env_steps`, the horizontal axis of every panel; W&B's own step
    counter, which silently drops what comes late, is left to itself. The run starts with the first record, or with
    `start`, on the thread that calls; behind a `Logger` that is the sink's own, so training does not wait for it.

    Args:
        project: The W&B project.
        config: Nested plain data to store as the run's configuration.
        mode: `"online"`, `"offline"` (upload later with `wandb sync`) or `"disabled"` (a run that keeps nothing);
            by default what WANDB_MODE says, else online.
        directory: Where W&B makes its folder `wandb`; the working directory by default.
        name: The run's name on the page.
        group: The group of runs it belongs to, such as the seeds of one task.
        run_id: The id of a run to resume. A new run's id is chosen at construction: keep the attribute `run_id`
            (with the checkpoints, say) to resume it later.
        video_key: The panel of videos.
        **init: Further arguments of `wandb.init`.
    """

    def __init__(
        self,
        project: str = "nnx_ppo",
        config: Mapping[str, Any] | None = None,
        *,
        mode: Literal["online", "offline", "disabled"] | None = None,
        directory: str | os.PathLike[str] | None = None,
        name: str | None = None,
        group: str | None = None,
        run_id: str | None = None,
        video_key: str = "eval_video",
        **init: Any,
    ):
        chosen: Any = mode or os.environ.get("WANDB_MODE", "online")
        if chosen not in ("online", "offline", "disabled"):
            raise ValueError(f"mode={chosen!r} (argument or WANDB_MODE): accepted are 'online', 'offline', 'disabled'.")
        self.run_id = run_id or secrets.token_hex(4)
        self.run: Any = None
        self._mode = chosen
        self._video_key = video_key
        self._config = dict(config or {})
        self._init = {"project": project, "dir": directory, "name": name, "group": group, **init}

    def start(self) -> Any:
        """Starts the run, once, and returns it (a `wandb.Run`; its `url` is the page of an online run).

        Raises:
            SinkUnavailable: wandb is not installed, or online mode has no API key.
        """
        if self.run is not None:
            return self.run
        try:
            import wandb
        except ImportError as error:
            raise SinkUnavailable(
                f"Nothing goes to W&B, wandb cannot be imported ({error}). Install it with `pip install wandb`."
            ) from error
        if self._mode == "online" and not logged_in():
            # wandb would ask for the key on a terminal that the progress bar holds, from a thread.
            raise SinkUnavailable(
                "Nothing goes to W&B, no API key was found. Run `wandb login`, set WANDB_API_KEY, "
                "or use mode='offline'."
            )
        settings = wandb.Settings(
            console="off",  # wandb's capture of the terminal and a progress bar garble each other.
            quiet=True,
            silent=True,
        )
        directory = self._init["dir"]
        if directory is not None:
            Path(directory).mkdir(parents=True, exist_ok=True)
            self._init["dir"] = str(directory)
        self.run = wandb.init(
            id=self.run_id,
            resume="allow",
            mode=self._mode,  # pyright: ignore[reportArgumentType]
            config={"versions": versions(), "git": git_state(), **self._config},
            **{"settings": settings, **self._init},  # pyright: ignore[reportArgumentType]
        )
        self.run.define_metric(STEP)
        self.run.define_metric("*", step_metric=STEP)
        return self.run

    def __call__(self, metrics: Mapping[str, Any], steps: int) -> None:
        """Logs one record; NaN stays NaN, of an array the finite values are counted, text stays text."""
        run = self.start()
        values = {tag: _wandb_value(value) for tag, value in metrics.items()}
        run.log({tag: value for tag, value in values.items() if value is not None} | {STEP: int(steps)})

    def log_video(self, path: Path, video: "VideoData") -> None:
        """Logs an mp4 file, of which W&B takes a copy."""
        self.start()
        log_video(path, video, key=self._video_key, run=self.run)

    def close(self) -> None:
        """Ends the run; online, waits until it is uploaded."""
        if self.run is not None:
            self.run.finish()


def log_video(path: Path, video: "VideoData", *, key: str, run: Any = None) -> None:
    """Logs the mp4 at `path` to `run` (by default the live one), on the axis `env_steps`.

    The caption gives the return and length of `video`'s episode.

    Raises:
        RuntimeError: no run is given and none is live.
    """
    import wandb

    run = run or wandb.run
    if run is None:
        raise RuntimeError("There is no live W&B run to log a video to; call wandb.init(...) before training.")
    run.define_metric(STEP)
    run.define_metric(key, step_metric=STEP)
    caption = f"return {float(video.episode_reward):,.1f}, {int(video.episode_length):,} steps"
    run.log({key: wandb.Video(str(path), caption=caption, format="mp4"), STEP: int(video.step)})


def logged_in() -> bool:
    """Whether wandb is installed and has an API key (environment or netrc), found without importing it."""
    if importlib.util.find_spec("wandb") is None:
        return False
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    for path in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        try:
            if path and netrc.netrc(os.path.expanduser(path)).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _wandb_value(value: Any) -> Any:
    """A number or text as it is, an array as a histogram, None for an array without finite values."""
    if np.ndim(value) == 0 or np.asarray(value).dtype.kind not in "biuf":
        return value
    import wandb

    values = np.asarray(value, dtype=np.float64)
    values = values[np.isfinite(values)]
    return wandb.Histogram(np_histogram=np.histogram(values, bins=64)) if values.size else None
