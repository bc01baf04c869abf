"""The W&B sink against the real package, offline, with what it wrote read back."""

import builtins
import json
import struct
import subprocess
import sys
import time

import numpy as np
import pytest

from nnx_ppo.algorithms.callbacks import wandb_video_fn
from nnx_ppo.algorithms.types import VideoData
from nnx_ppo.loggers import JsonLines, Logger, SinkUnavailable, Wandb, read_scalars, wandb_sink

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)  # of wandb's own sockets and pipes


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder for W&B in which no account or run of the user's is seen."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_RUN_ID", "WANDB_PROJECT", "WANDB_DIR", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    return tmp_path


def records(run_file):
    """The protocol buffers of a `.wandb` file: LevelDB's log format after a 7-byte header.

    Blocks of 32 KiB; in each, chunks of checksum (4), length (2), type (1: whole, 2: first, 3: middle, 4: last).
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts = run_file.read_bytes(), 7, b""
    while position + 7 <= len(data):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield Record.FromString(parts)
            parts = b""


def read_run(folder):
    """`(history, metric definitions, config, id, media files)` of the one offline run below `folder`."""
    (run_file,) = folder.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 20
    # wandb's own process may write the file a moment after `finish` returns.
    while not any(record.HasField("exit") for record in records(run_file)) and time.monotonic() < deadline:
        time.sleep(0.05)
    history, metrics, config, run_id = [], [], {}, None
    for record in records(run_file):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            items = {}
            for item in record.history.item:
                *path, last = item.nested_key or [item.key]
                place = items
                for part in path:
                    place = place.setdefault(part, {})
                place[last] = json.loads(item.value_json)
            history.append(items)
        elif kind == "metric":
            metrics.append(record.metric)
        elif kind == "run":
            run_id = record.run.run_id
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "config":
            config |= {item.key: json.loads(item.value_json) for item in record.config.update}
    return history, metrics, config, run_id, sorted(run_file.parent.glob("files/media/videos/**/*.mp4"))


def video(n_frames=5, step=300):
    frames = np.zeros((n_frames, 32, 48, 3), np.uint8)
    frames[..., 1] = 255
    return VideoData(frames=frames, step=step, episode_reward=1234.5, episode_length=n_frames - 1)


def test_a_run_holds_every_record_and_video_on_the_env_steps_axis_with_config_versions_and_git(folder):
    sink = Wandb("a-project", {"ppo": {"n_envs": 8}, "task": "probe"}, mode="offline", directory=folder, name="seed 1")
    with Logger(sink, JsonLines(folder / "metrics.jsonl")) as log:
        for i in range(4):
            log({"losses/total": i / 3, "weights": np.array([0.0, 1.0, np.nan])}, i * 100)
        # Late, as rendering is: records of later steps have gone out before it.
        log.flush()
        log.video_fn(video(step=100))
        log({"losses/total": float("nan")}, 400)
    history, metrics, config, run_id, videos = read_run(folder)

    assert [row["env_steps"] for row in history] == [0, 100, 200, 300, 100, 400]
    logged = [(row["env_steps"], row["losses/total"]) for row in history if "losses/total" in row]
    assert logged[:4] == [(i * 100, i / 3) for i in range(4)]
    assert str(logged[4][1]).lower() == "nan"
    steps, values = read_scalars(folder)["losses/total"]
    assert list(zip(steps, values, strict=True))[:4] == logged[:4]
    assert [row["weights"]["_type"] for row in history if "weights" in row] == ["histogram"] * 4
    assert sum(history[0]["weights"]["values"]) == 2

    assert {(metric.name or metric.glob_name, metric.step_metric) for metric in metrics} >= {
        ("*", "env_steps"),
        ("eval_video", "env_steps"),
    }
    assert config["ppo"] == {"n_envs": 8}
    assert config["versions"]["jax"]
    assert "git" in config
    assert run_id == sink.run_id

    (row,) = [row for row in history if "eval_video" in row]
    assert row["eval_video"]["_type"] == "video-file"
    assert row["eval_video"]["caption"] == "return 1,234.5, 4 steps"
    assert row["env_steps"] == 100
    (path,) = videos
    assert path.as_posix().endswith(row["eval_video"]["path"])
    assert path.read_bytes()[4:8] == b"ftyp"


def test_wandb_video_fn_logs_into_the_live_run_of_a_script(folder):
    import wandb

    run = wandb.init(mode="offline", dir=str(folder), settings=wandb.Settings(silent=True, console="off"))
    run.log({"mine": 1, "env_steps": 500})
    wandb_video_fn(key="clip", fps=50)(video(step=300))
    run.finish()
    history, metrics, _, _, videos = read_run(folder)
    assert history[-1]["env_steps"] == 300
    assert history[-1]["clip"]["_type"] == "video-file"
    assert ("clip", "env_steps") in {(metric.name, metric.step_metric) for metric in metrics}
    assert len(videos) == 1


def test_a_run_id_given_is_the_id_of_the_run_and_one_not_given_is_known_before_it_starts(folder):
    assert Wandb(mode="offline").run_id != Wandb(mode="offline").run_id
    sink = Wandb(mode="offline", directory=folder, run_id="abc123")
    assert sink.start().id == "abc123"
    assert sink.start() is sink.run
    sink.close()
    assert read_run(folder)[3] == "abc123"


def test_making_the_sink_starts_nothing_and_imports_nothing():
    code = "import sys; from nnx_ppo.loggers import Wandb; Wandb(mode='offline'); print('wandb' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_without_wandb_one_line_says_so_and_the_rest_works(folder, monkeypatch, caplog):
    real_import = builtins.__import__

    def no_wandb(name, *arguments, **options):
        if name.split(".")[0] == "wandb":
            raise ImportError("No module named 'wandb'")
        return real_import(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", no_wandb)
    with Logger(Wandb(mode="online"), JsonLines(folder / "metrics.jsonl")) as log:
        for step in range(3):
            log({"a": step}, step)
            log.flush()
    (message,) = [record.message for record in caplog.records]
    assert "pip install wandb" in message
    assert len(read_scalars(folder)["a"][0]) == 3


def test_online_without_a_key_is_refused_instead_of_asking_on_the_terminal(folder):
    with pytest.raises(SinkUnavailable, match=r"wandb login.*WANDB_API_KEY.*offline"):
        Wandb(mode="online", directory=folder).start()


def test_a_key_is_found_in_the_environment_and_in_netrc(folder, monkeypatch):
    assert not wandb_sink.logged_in()
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert wandb_sink.logged_in()
    monkeypatch.delenv("WANDB_API_KEY")
    netrc = folder / "no-netrc"
    netrc.write_text("machine other.example login user password secret\n")
    assert not wandb_sink.logged_in()
    netrc.write_text("machine api.wandb.ai login user password secret\n")
    assert wandb_sink.logged_in()
    monkeypatch.setenv("WANDB_BASE_URL", "https://other.example:8080")
    assert not wandb_sink.logged_in()


def test_the_mode_comes_from_the_argument_then_the_environment_and_is_checked(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert Wandb()._mode == "offline"
    assert Wandb(mode="online")._mode == "online"
    with pytest.raises(ValueError, match=r"'onlin'.*'offline'"):
        Wandb(mode="onlin")  # pyright: ignore
