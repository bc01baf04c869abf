"""Frames to an mp4 file that every browser plays."""

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np


class EncodingUnavailable(RuntimeError):
    """No ffmpeg can be run; the message says how to get one."""


def write_mp4(path: str | os.PathLike[str], frames: np.ndarray | Iterable[np.ndarray], fps: float = 30) -> Path:
    """Encodes RGB frames as H.264 and puts the finished file at `path`.

    The file appears whole or not at all: it is written beside `path` and renamed. Colours are stored as
    BT.709 and tagged so, which is what players assume. H.264 that browsers play has even sides, so an odd
    height or width is padded by repeating the last row or column (5x7 frames become a 6x8 video).

    Args:
        path: Where the video goes, ending in `.mp4`; missing folders are made.
        frames: `(T, H, W, 3)` uint8, or any iterable of `(H, W, 3)` uint8 frames of one size. One frame
            becomes exactly one frame of the video.
        fps: Frames per second.

    Returns:
        `path`.

    Raises:
        EncodingUnavailable: no ffmpeg was found.
        ValueError: there are no frames, or they are not uint8 RGB of one size.
        RuntimeError, OSError: ffmpeg or the disk failed; nothing is left at `path`.
    """
    path = Path(path)
    frames = iter(frames)
    first = next(frames, None)
    if first is None:
        raise ValueError(f"There are no frames for {path}: a video needs at least one (H, W, 3) uint8 frame.")
    shape = np.shape(first)
    padding = _check_and_pad(first, shape)
    ffmpeg = _find_ffmpeg()

    import mediapy  # Slow to import: it brings in IPython and Matplotlib.

    mediapy.set_ffmpeg(ffmpeg)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.stem}.unfinished.mp4")
    size = (shape[0] + padding[0][1], shape[1] + padding[1][1])
    # crf 20 looks like the original at a few hundred kB for a typical episode; faststart lets a browser play
    # before it has the whole file.
    arguments = (
        "-vf scale=out_color_matrix=bt709:out_range=tv,"
        "setparams=colorspace=bt709:color_primaries=bt709:color_trc=bt709:range=tv -movflags +faststart"
    )
    try:
        with mediapy.VideoWriter(
            unfinished, size, fps=fps, crf=20, ffmpeg_args=arguments, encoded_format="yuv420p"
        ) as writer:
            frame: np.ndarray | None = first
            while frame is not None:
                _check_and_pad(frame, shape)
                writer.add_image(np.pad(frame, padding, mode="edge"))
                frame = next(frames, None)
        os.replace(unfinished, path)
    except BrokenPipeError as error:
        raise OSError(f"{ffmpeg} ended before it had all frames of {path}; is the disk full?") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _check_and_pad(frame: np.ndarray, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The padding that makes both sides of `frame` even; `ValueError` if it is no RGB frame of `shape`."""
    if frame.ndim != 3 or frame.shape[-1] != 3 or frame.dtype != np.uint8 or 0 in frame.shape:
        raise ValueError(f"A frame is {frame.dtype} of shape {frame.shape}; a video takes uint8 of shape (H, W, 3).")
    if frame.shape != shape:
        raise ValueError(f"A frame of shape {frame.shape} follows frames of shape {shape}; one video has one size.")
    return (0, shape[0] % 2), (0, shape[1] % 2), (0, 0)


def _find_ffmpeg() -> str:
    """The ffmpeg that `imageio-ffmpeg` ships (or finds on this system)."""
    advice = "Install one with `pip install imageio-ffmpeg`, or set IMAGEIO_FFMPEG_EXE to an ffmpeg executable."
    try:
        import imageio_ffmpeg

        executable = imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError) as error:
        raise EncodingUnavailable(f"Videos cannot be encoded, there is no ffmpeg ({error}). {advice}") from error
    import shutil

    if shutil.which(executable) is None:
        raise EncodingUnavailable(f"Videos cannot be encoded, {executable!r} is not an executable file. {advice}")
    return executable
