"""mp4 files and the worker that makes them."""

import logging
import re
import subprocess
import sys
import threading

import imageio_ffmpeg
import numpy as np
import pytest

from nnx_ppo.algorithms.callbacks import file_video_fn, wandb_video_fn
from nnx_ppo.algorithms.types import VideoData
from nnx_ppo.algorithms.video_worker import VideoWorker, stack_frames
from nnx_ppo.loggers import Logger
from nnx_ppo.loggers.mp4 import EncodingUnavailable, write_mp4

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def stripes(n_frames, height=48, width=96):
    """Red, green and blue thirds, and a white bar at the top that grows by one row a frame."""
    frames = np.zeros((n_frames, height, width, 3), np.uint8)
    for i, colour in enumerate((RED, GREEN, BLUE)):
        frames[:, :, i * width // 3 : (i + 1) * width // 3] = colour
    for t in range(n_frames):
        frames[t, : t + 1] = 255
    return frames


def video_of(frames, step=1234):
    return VideoData(frames=frames, step=step, episode_reward=12.5, episode_length=len(frames) - 1)


def ffmpeg(*arguments):
    return subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", *arguments], capture_output=True)


def describe(path):
    """What ffmpeg says of the video stream: codec, pixel format, size, rate."""
    lines = ffmpeg("-i", path).stderr.decode().splitlines()
    return next(line for line in lines if "Video:" in line)


def decode(path):
    """RGB frames `[T, H, W, 3]`, by ffmpeg's own reading of the file's colour tags."""
    width, height = map(int, re.search(r" (\d+)x(\d+)[, ]", describe(path)).groups())
    raw = ffmpeg("-v", "error", "-i", path, "-f", "rawvideo", "-pix_fmt", "rgb24", "-fps_mode", "passthrough", "-")
    return np.frombuffer(raw.stdout, np.uint8).reshape(-1, height, width, 3)


def test_an_mp4_has_the_colours_size_rate_and_every_frame_of_its_input(tmp_path):
    frames = stripes(11)
    path = write_mp4(tmp_path / "a.mp4", frames, fps=24)
    decoded = decode(path)
    assert decoded.shape == frames.shape
    assert " 24 fps" in describe(path)
    assert "h264 (High)" in describe(path)
    for i, colour in enumerate((RED, GREEN, BLUE)):
        middle = decoded[:, 30:40, i * 32 + 10 : i * 32 + 20].reshape(-1, 3)
        np.testing.assert_allclose(middle, np.broadcast_to(colour, middle.shape), atol=12)
    # Frame t has t + 1 white rows, so the frames are all there, and in order.
    white_rows = (decoded[:, :, 5:25].astype(int).mean(axis=(2, 3)) > 160).sum(axis=1)
    np.testing.assert_allclose(white_rows, np.arange(1, 12), atol=1)


def test_colours_are_stored_and_tagged_as_bt709(tmp_path):
    path = write_mp4(tmp_path / "a.mp4", stripes(3))
    assert "yuv420p(tv, bt709, progressive)" in describe(path)
    raw = ffmpeg("-v", "error", "-i", path, "-f", "rawvideo", "-pix_fmt", "yuv420p", "-").stdout
    luma = np.frombuffer(raw, np.uint8)[: 48 * 96].reshape(48, 96)
    # BT.709 luma of pure red, green and blue in studio range: 16 + 219 * (0.2126, 0.7152, 0.0722).
    np.testing.assert_allclose(luma[35, [15, 47, 80]], [62.6, 172.6, 31.8], atol=4)


def test_odd_sides_are_padded_by_their_last_row_and_column(tmp_path):
    frames = stripes(2, height=47, width=95)
    decoded = decode(write_mp4(tmp_path / "odd.mp4", frames))
    assert decoded.shape == (2, 48, 96, 3)
    np.testing.assert_allclose(decoded[0, 40, 95], BLUE, atol=12)
    np.testing.assert_allclose(decoded[0, 47, 5], RED, atol=12)


@pytest.mark.parametrize("n_frames", [1, 2, 61])
def test_the_number_of_frames_is_kept_whatever_it_is(tmp_path, n_frames):
    decoded = decode(write_mp4(tmp_path / "n.mp4", np.zeros((n_frames, 16, 16, 3), np.uint8), fps=1 / 0.015))
    assert len(decoded) == n_frames


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (np.zeros((0, 4, 4, 3), np.uint8), "at least one"),
        (np.zeros((2, 4, 4, 3), np.float32), "float32"),
        (np.zeros((2, 4, 4), np.uint8), r"\(H, W, 3\)"),
        ([np.zeros((4, 4, 3), np.uint8), np.zeros((4, 6, 3), np.uint8)], "one size"),
    ],
)
def test_what_is_no_video_is_refused_and_leaves_no_file(tmp_path, frames, message):
    with pytest.raises(ValueError, match=message):
        write_mp4(tmp_path / "x.mp4", frames)
    assert list(tmp_path.iterdir()) == []


def test_an_encoder_that_fails_leaves_the_old_video_and_no_other_file(tmp_path):
    path = write_mp4(tmp_path / "a.mp4", stripes(2))
    before = path.read_bytes()

    def frames():
        yield np.zeros((16, 16, 3), np.uint8)
        raise OSError("the frames end here")

    with pytest.raises(OSError, match="end here"):
        write_mp4(path, frames())
    assert [file.name for file in tmp_path.iterdir()] == ["a.mp4"]
    assert path.read_bytes() == before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # mediapy leaves the dead one's pipes
def test_an_ffmpeg_that_dies_is_named_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", "/bin/false")
    with pytest.raises((OSError, RuntimeError), match=r"/bin/false ended|Error writing"):
        write_mp4(tmp_path / "x.mp4", np.zeros((30, 480, 640, 3), np.uint8))
    assert list(tmp_path.iterdir()) == []


def test_without_ffmpeg_the_error_says_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "nothing"))
    with pytest.raises(EncodingUnavailable, match="pip install imageio-ffmpeg"):
        write_mp4(tmp_path / "x.mp4", stripes(2))


def test_file_video_fn_names_the_video_by_its_step_and_remembers_its_path(tmp_path):
    video_fn = file_video_fn(tmp_path / "videos", fps=30)
    assert video_fn.last_path is None
    path = video_fn(video_of(stripes(4), step=3_000_000_000))
    assert path == video_fn.last_path == tmp_path / "videos" / "step_3000000000.mp4"
    assert len(decode(path)) == 4


def test_wandb_video_fn_without_a_run_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"wandb\.init"):
        wandb_video_fn()(video_of(stripes(2)))


class VideoSink:
    """A sink that keeps the bytes of the files it is given."""

    def __init__(self):
        self.videos = []

    def __call__(self, metrics, steps):
        pass

    def log_video(self, path, video):
        self.videos.append((path.read_bytes()[4:8], video.step, video.episode_reward, len(video.frames)))


def test_a_logger_encodes_a_video_once_for_its_folder_and_all_its_sinks(tmp_path):
    sinks = VideoSink(), VideoSink()
    with Logger(*sinks, print, video_directory=tmp_path / "videos", fps=30) as logger:
        path = logger.video_fn(video_of(stripes(4), step=20))
    assert path == logger.last_video == tmp_path / "videos" / "step_0000000020.mp4"
    assert len(decode(path)) == 4
    # The frames themselves, hundreds of megabytes, do not wait in queues.
    assert [sink.videos for sink in sinks] == [[(b"ftyp", 20, 12.5, 0)]] * 2


def test_a_logger_without_a_video_folder_keeps_a_video_until_its_sinks_have_it():
    sink = VideoSink()
    with Logger(sink) as logger:
        path = logger.video_fn(video_of(stripes(4), step=20))
        logger.flush()
        assert path.exists()
    assert not path.exists()
    assert sink.videos[0][0] == b"ftyp"


def test_a_logger_that_nobody_takes_videos_from_encodes_none(monkeypatch):
    monkeypatch.setattr("nnx_ppo.loggers.writer.write_mp4", lambda *_: pytest.fail("encoded"))
    with Logger(print) as logger:
        assert logger.video_fn(video_of(stripes(2))) is None


def test_importing_the_callbacks_imports_none_of_what_they_use():
    code = (
        "import sys, nnx_ppo.algorithms.callbacks, nnx_ppo.algorithms.video_worker, nnx_ppo.loggers;"
        "heavy = {'wandb', 'tensorboardX', 'mediapy', 'matplotlib', 'rich', 'imageio_ffmpeg', 'mujoco', 'jax'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_the_worker_runs_jobs_in_order_on_one_other_thread():
    worker, seen = VideoWorker(), []
    assert worker._thread is None
    for i in range(2):
        worker.submit(lambda i=i: seen.append((i, threading.current_thread())))
    assert worker.close()
    assert [i for i, _ in seen] == [0, 1]
    assert len({thread for _, thread in seen}) == 1
    assert seen[0][1] is not threading.current_thread()
    assert not seen[0][1].is_alive()


def test_a_failing_video_costs_one_message_and_the_next_is_made(caplog):
    worker, made = VideoWorker(), []

    def fail():
        raise OSError("disk full")

    for job in (fail, fail, lambda: made.append(1)):
        worker.submit(job)
        worker.drain()
    worker.close()
    assert made == [1]
    assert worker.failed == 2
    assert [record.message for record in caplog.records] == ["A video was lost, training goes on. OSError: disk full"]


def test_when_videos_are_due_faster_than_made_the_oldest_waiting_one_is_skipped(caplog):
    worker, started, go_on, made = VideoWorker(waiting=2), threading.Event(), threading.Event(), []

    def slow():
        started.set()
        go_on.wait()
        made.append(0)

    worker.submit(slow)
    started.wait()
    for i in (1, 2, 3):
        worker.submit(lambda i=i: made.append(i))
    go_on.set()
    worker.close()
    assert made == [0, 2, 3]
    assert worker.skipped == 1
    assert "skipped" in caplog.text


def test_a_job_that_the_thread_has_not_taken_up_yet_takes_no_place_from_those_that_wait(monkeypatch):
    worker, made, begin = VideoWorker(waiting=2), [], threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    for i in range(4):
        worker.submit(lambda i=i: made.append(i))
        assert worker.skipped == (1 if i == 3 else 0)
    begin(worker._thread)
    worker.close()
    assert made == [1, 2, 3]


def test_closing_does_not_wait_for_ever_and_says_what_is_lost(caplog):
    worker, go_on = VideoWorker(), threading.Event()
    worker.submit(go_on.wait)
    worker.submit(go_on.wait)
    assert worker.drain(timeout=0.01) is False
    assert worker.close(timeout=0.01) is False
    assert "2 video(s)" in caplog.text
    with pytest.raises(RuntimeError, match="closed"):
        worker.submit(go_on.wait)
    go_on.set()


def test_a_job_is_let_go_when_it_is_done():
    import gc
    import weakref

    class Frames:
        pass

    worker, frames = VideoWorker(), Frames()
    alive = weakref.ref(frames)
    worker.submit(lambda frames=frames: None)
    del frames
    worker.drain()
    gc.collect()
    assert alive() is None
    worker.close()


def test_frames_that_are_rows_of_one_array_are_stacked_without_a_copy():
    whole = stripes(3)
    assert stack_frames(list(whole)) is whole
    for other in (list(whole)[::-1], list(whole)[:2], [frame.copy() for frame in whole]):
        stacked = stack_frames(other)
        assert stacked.base is not whole
        assert stacked is not whole
        np.testing.assert_array_equal(stacked, np.stack(other))


def test_a_video_made_on_the_worker_is_logged_nowhere_but_in_its_file(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    video_fn = file_video_fn(tmp_path)
    with VideoWorker() as worker:
        worker.submit(lambda: video_fn(video_of(stripes(3), step=7)))
    assert [path.name for path in tmp_path.iterdir()] == ["step_0000000007.mp4"]
    assert caplog.text == ""
