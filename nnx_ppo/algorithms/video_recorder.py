"""Evaluation episodes as videos: recorded on the device, drawn on a thread of their own."""

import functools
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax
from flax import nnx

from nnx_ppo.algorithms import rollout
from nnx_ppo.algorithms.compilation import compile_programs
from nnx_ppo.algorithms.config import VideoConfig
from nnx_ppo.algorithms.devices import copy_arrays, replicate, spans_processes
from nnx_ppo.algorithms.metrics import Part, throughput
from nnx_ppo.algorithms.types import VideoData
from nnx_ppo.algorithms.video_worker import VideoWorker, stack_frames

Network = tuple[nnx.State, nnx.State, jax.Array]
"""Parameters, other variables and the key of the episode."""


class VideoRecorder:
    """Records an episode, has it drawn and hands its frames to `video_fn`.

    Nothing waits for a video, so its program is compiled while training runs, and the video of the start is recorded
    then, from a copy of the network as it was.

    Args:
        env: has `render(trajectory, **render_kwargs)`.
        config: length of the episode and size of the frames.
        graphdef: the network's structure, in evaluation mode.
        shapes: what `record` is going to be called with, as arrays or their shapes.
        video_fn: gets the video, on a thread.
        tells: whether this process is the one of several that calls `video_fn`.
        timed: whether to measure, for which the device is waited for.
    """

    def __init__(
        self,
        env: Any,
        config: VideoConfig,
        graphdef: nnx.GraphDef,
        shapes: Network,
        video_fn: Callable[[VideoData], object],
        tells: bool,
        timed: bool,
    ):
        self._env, self._config, self._video_fn, self._tells, self._timed = env, config, video_fn, tells, timed
        self._graphdef, self._shapes = graphdef, shapes
        self._program: Future | None = None
        self._worker = VideoWorker()
        self._postponed: tuple[Network, int] | None = None

    def compile(self) -> Future:
        """The compiled program, once it is there; the first call begins to compile it."""
        if self._program is None:
            record = functools.partial(_record_episode, self._env, self._config.episode_length, self._graphdef)
            self._program = compile_programs({"video": (jax.jit(record), self._shapes)})["video"]
        return self._program

    def record(self, network: Network, steps: int) -> list[Part]:
        """The video of an episode, after `steps` environment steps of training."""
        self.record_postponed()
        program = self.compile().result()
        started = time.perf_counter()
        recording = program(*network)

        def draw() -> None:
            states = rollout.trajectory(recording)
            frames = stack_frames(self._env.render(states, **self._config.render_kwargs))
            self._video_fn(VideoData(frames, steps, float(recording.reward), int(recording.length)))

        if self._tells:
            self._worker.submit(draw)
        if not self._timed:
            return []
        length = int(recording.length)
        return [throughput("video", length, time.perf_counter() - started)]

    def postpone(self, network: Network, steps: int) -> None:
        """Like `record`, but later."""
        self._postponed = copy_arrays(network), steps

    def record_postponed(self, wait: bool = True) -> list[Part]:
        """Do what was postponed; without `wait` only if the program is there."""
        if self._postponed is None or not (wait or self._is_compiled()):
            return []
        (network, steps), self._postponed = self._postponed, None
        return self.record(network, steps)

    def close(self) -> None:
        """Finish the videos that are being drawn."""
        self._worker.close()

    def _is_compiled(self) -> bool:
        if self._program is None:
            return False
        # Of several processes all have to record in the same iteration, so they rather wait.
        return spans_processes() or self._program.done()


def _record_episode(*args: Any) -> rollout.Recording:
    """`rollout.record_episode`, with the recording whole on every device."""
    return replicate(rollout.record_episode(*args))
