"""Ready `video_fn`s for `train_ppo`: mp4 files, and videos in a Weights & Biases run.

Both encode with the ffmpeg of `imageio-ffmpeg`, so no system ffmpeg is needed. They raise when that fails;
`train_ppo` calls them on its `VideoWorker`, where a failure costs one message and the video, never the run.
For `log_fn`s see `nnx_ppo.loggers`.
"""

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from nnx_ppo.loggers.mp4 import write_mp4
from nnx_ppo.loggers.wandb_sink import log_video

if TYPE_CHECKING:
    from nnx_ppo.algorithms.types import VideoData


class file_video_fn:
    """A `video_fn` that writes `<directory>/step_{step:010d}.mp4`, whole or not at all.

    Args:
        directory: Where the videos go; it is made when the first video is written.
        fps: Frames per second.

    Calling it returns the path of the video, which is also kept in `last_path` (None before the first).
    """

    def __init__(self, directory: str | os.PathLike[str], fps: float = 30):
        self.directory = Path(directory)
        self.fps = fps
        self.last_path: Path | None = None

    def __call__(self, video: "VideoData") -> Path:
        """Writes the video and returns its path; raises as `write_mp4` does."""
        self.last_path = write_mp4(self.directory / f"step_{video.step:010d}.mp4", video.frames, self.fps)
        return self.last_path


class wandb_video_fn:
    """A `video_fn` that logs each video to the live W&B run (`wandb.init()` comes first), as an mp4 file.

    The video lies on the axis `env_steps`, like the metrics of `nnx_ppo.loggers.Wandb`, so that it is kept
    whatever was logged before it; its caption gives the episode's return and length.

    Args:
        key: The name of the panel in W&B.
        fps: Frames per second.
    """

    def __init__(self, key: str = "eval_video", fps: float = 30):
        self.key = key
        self.fps = fps

    def __call__(self, video: "VideoData") -> None:
        """Encodes the video and logs it; raises as `write_mp4` and `log_video` do."""
        with tempfile.TemporaryDirectory() as directory:
            path = write_mp4(Path(directory) / f"step_{video.step:010d}.mp4", video.frames, self.fps)
            log_video(path, video, key=self.key)
