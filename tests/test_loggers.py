"""The Logger and its sinks on the local machine: what is delivered, what is lost, and who notices."""

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from nnx_ppo.loggers import Console, JsonLines, Logger, Memory, SinkUnavailable, TensorBoard, read_records, read_scalars
from nnx_ppo.loggers.writer import host_copy


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Recorder:
    """A threaded sink that keeps what it gets."""

    def __init__(self):
        self.got = []

    def __call__(self, metrics, steps):
        self.got.append((steps, metrics))


# Logger ----------------------------------------------------------------------------------------------


def test_every_sink_and_plain_callable_gets_every_record_in_order(tmp_path):
    sink, plain, memory = Recorder(), [], Memory()
    with Logger(JsonLines(tmp_path / "m.jsonl"), sink, memory, lambda metrics, steps: plain.append(steps)) as log:
        for i in range(50):
            log({"a": i / 7}, i * 10)
    assert plain == [i * 10 for i in range(50)]
    assert sink.got == [(i * 10, {"a": i / 7}) for i in range(50)]
    assert [(line["step"], line["a"]) for line in lines_of(tmp_path / "m.jsonl")] == [
        (i * 10, i / 7) for i in range(50)
    ]
    assert memory.records == [{"step": i * 10, "a": i / 7} for i in range(50)]


def test_without_a_sink_that_needs_one_there_is_no_thread(tmp_path):
    before = threading.active_count()
    with Logger(JsonLines(tmp_path / "m.jsonl"), Memory()), Logger():
        assert threading.active_count() == before


def test_threads_are_daemons_and_end_with_the_logger():
    before = set(threading.enumerate())
    log = Logger(Recorder(), Recorder())
    started = set(threading.enumerate()) - before
    assert len(started) == 2
    assert all(thread.daemon for thread in started)
    assert log.close()
    assert not any(thread.is_alive() for thread in started)


def test_metrics_are_on_disk_before_any_other_sink_sees_them(tmp_path):
    path, seen = tmp_path / "m.jsonl", []

    def sink(metrics, steps):
        seen.append(steps in [line["step"] for line in lines_of(path)])

    with Logger(sink, JsonLines(path)) as log:
        for step in range(20):
            log({}, step)
    assert seen == [True] * 20


def test_values_are_copied_before_the_call_returns():
    numpy_array, device_array, sink = np.arange(3.0), jnp.arange(3.0), Recorder()
    with Logger(sink) as log:
        log({"n": numpy_array, "d": device_array, "s": jnp.float32(0.1), "b": jnp.bool_(True), "i": np.int64(2**60)}, 1)
        numpy_array[:] = -1
        device_array.delete()
    metrics = sink.got[0][1]
    np.testing.assert_array_equal(metrics["n"], [0, 1, 2])
    np.testing.assert_array_equal(metrics["d"], [0, 1, 2])
    assert type(metrics["d"]) is np.ndarray
    assert metrics["s"] == float(np.float32(0.1))
    assert metrics["b"] is True
    assert metrics["i"] == 2**60


def test_a_host_copy_of_a_device_array_owns_its_memory():
    array = jnp.arange(1000.0)
    copied = host_copy({"x": array})["x"]
    assert not np.shares_memory(copied, np.asarray(array))


def test_a_sink_that_fails_now_and_then_still_gets_everything_once_and_in_order(caplog):
    calls, got = [], []

    def flaky(metrics, steps):
        calls.append(steps)
        if len(calls) % 3:
            raise ConnectionError("try again")
        got.append(steps)

    with Logger(flaky, backoff=0) as log:
        for step in range(5):
            log({}, step)
    assert got == [0, 1, 2, 3, 4]
    assert len(caplog.records) == 1
    assert "training goes on" in caplog.text


def test_a_sink_that_always_fails_is_reported_once_and_its_losses_at_the_end(caplog, tmp_path):
    tries, sink = [], Recorder()

    def broken(metrics, steps):
        tries.append(steps)
        raise ConnectionError("no route")

    log = Logger(broken, sink, JsonLines(tmp_path / "m.jsonl"), attempts=3, backoff=0)
    for step in range(4):
        log({}, step)
    assert log.close() is False
    assert tries == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert len(sink.got) == len(lines_of(tmp_path / "m.jsonl")) == 4
    first, last = [record.message for record in caplog.records]
    assert "broken failed and is tried again; training goes on. ConnectionError: no route" in first
    assert "broken did not get 4 record(s)" in last
    assert "no route" in last


def test_pauses_between_tries_double_and_closing_cuts_them_short():
    waits = []

    def broken(metrics, steps):
        raise ConnectionError

    log = Logger(broken, attempts=4, backoff=0.5)
    closing = log._lanes[0]._closing
    closing.wait = lambda seconds: waits.append(seconds)
    log({}, 0)
    log.flush()
    assert waits == [0.5, 1.0, 2.0]
    del closing.wait
    log({}, 1)
    start = time.monotonic()
    log.close()
    assert time.monotonic() - start < 1


def test_a_sink_that_hangs_holds_up_neither_training_nor_the_others(caplog):
    hang, entered, sink = threading.Event(), threading.Event(), Recorder()

    def hung(metrics, steps):
        entered.set()
        hang.wait()

    log = Logger(hung, sink, capacity=20)
    log({}, -1)
    entered.wait()
    for step in range(10):
        log({}, step)
    log._lanes[1].wait_until_idle(10)
    assert [step for step, _ in sink.got] == [-1, *range(10)]
    assert log.close(timeout=0.05) is False
    assert "hung did not get 11 record(s). It did not finish in time." in caplog.text
    hang.set()


def test_a_full_queue_drops_its_oldest_and_says_how_many(caplog):
    go_on, entered, got = threading.Event(), threading.Event(), []

    def slow(metrics, steps):
        entered.set()
        go_on.wait()
        got.append(steps)

    log = Logger(slow, capacity=3)
    log({}, 0)
    entered.wait()
    for step in range(1, 8):
        log({}, step)
    go_on.set()
    assert log.close() is False
    assert got == [0, 5, 6, 7]
    assert "did not get 4 record(s)" in caplog.text


def test_a_sink_that_can_never_work_is_said_to_be_off_once_and_not_tried_again(caplog):
    tries = []

    def absent(metrics, steps):
        tries.append(steps)
        raise SinkUnavailable("install it")

    log = Logger(absent)
    for step in range(5):
        log({}, step)
        log.flush()
    assert log.close() is False
    assert tries == [0]
    assert [record.message for record in caplog.records] == [
        f"{absent.__qualname__} is off; training goes on. SinkUnavailable: install it"
    ]


def test_sinks_are_closed_on_their_own_thread_and_a_failing_close_is_contained(caplog):
    closed_on = []

    class Sink(Recorder):
        def close(self):
            closed_on.append(threading.current_thread())
            raise OSError("no")

    log = Logger(Sink(), attempts=1)
    log({}, 0)
    log.close()
    log.close()
    assert len(closed_on) == 1
    assert closed_on[0] is not threading.current_thread()
    assert "OSError: no" in caplog.text


def test_a_disk_that_is_full_for_a_while_loses_nothing(tmp_path, caplog):
    class Full(JsonLines):
        full = False

        def __call__(self, metrics, steps):
            if self.full:
                raise OSError(28, "No space left on device")
            super().__call__(metrics, steps)

    sink = Full(tmp_path / "m.jsonl")
    with Logger(sink) as log:
        log({}, 0)
        sink.full = True
        log({}, 1)
        log({}, 2)
        assert [line["step"] for line in lines_of(tmp_path / "m.jsonl")] == [0]
        sink.full = False
        log({}, 3)
    assert [line["step"] for line in lines_of(tmp_path / "m.jsonl")] == [0, 1, 2, 3]
    assert len(caplog.records) == 1


def test_the_logger_refuses_records_after_it_is_closed():
    log = Logger()
    log.close()
    with pytest.raises(RuntimeError, match="closed"):
        log({}, 0)


def test_without_configured_logging_a_failure_is_reported_on_stderr():
    code = (
        "from nnx_ppo.loggers import Logger\n"
        "def bad(metrics, steps): raise ValueError('oh')\n"
        "with Logger(bad, attempts=1) as log: log({}, 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert "bad failed" in done.stderr
    assert done.stdout == ""


FLAT_SCRIPT = """
import itertools, sys
from nnx_ppo.loggers import Console, JsonLines, Logger, TensorBoard
folder = sys.argv[1]
with Logger(JsonLines(folder + "/metrics.jsonl"), TensorBoard(folder), Console()) as log:
    for i in itertools.count() if len(sys.argv) == 2 else range(int(sys.argv[2])):
        log({"losses/total": 0.5 * i}, i)
        print("done", i, flush=True)
"""


def test_two_processes_started_from_one_flat_script_both_log(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    started = [
        subprocess.Popen([sys.executable, "-c", FLAT_SCRIPT, folder, "20"], stdout=subprocess.DEVNULL)
        for folder in folders
    ]
    assert [process.wait() for process in started] == [0, 0]
    for folder in folders:
        assert len(read_records(folder)) == 20
        assert len(read_scalars(folder, "tfevents")["losses/total"][0]) == 20


def test_killed_at_any_moment_a_run_has_every_finished_record(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", FLAT_SCRIPT, tmp_path], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("done 137"):
            break
    process.send_signal(signal.SIGKILL)
    rest = process.communicate()[0]
    finished = max(map(int, re.findall(r"done (\d+)$", rest, re.MULTILINE)), default=137)
    steps, values = read_scalars(tmp_path)["losses/total"]
    assert len(steps) - 1 in (finished, finished + 1)
    np.testing.assert_array_equal(steps, np.arange(len(steps)))
    np.testing.assert_array_equal(values, 0.5 * steps)


# JSON Lines --------------------------------------------------------------------------------------------


def test_a_json_line_is_the_exact_record_with_null_for_what_is_not_finite(tmp_path):
    sink, before = JsonLines(tmp_path / "deep" / "m.jsonl"), time.time()
    metrics = {
        "f32": np.float32(0.1), "pi": np.pi, "int": 2**60 + 1, "bool": np.bool_(True), "nan": float("nan"),
        "inf": np.float32(-np.inf), "array": np.array([[1.5, np.nan], [np.inf, 2]]), "device": jnp.arange(2),
        "text": "é",
    }  # fmt: skip
    sink(metrics, 2**40)
    sink.close()
    text = sink.path.read_text()
    (record,) = lines_of(sink.path)
    assert list(record)[:2] == ["step", "time"]
    assert before - 1 <= record.pop("time") <= time.time() + 1
    assert record == {
        "step": 2**40, "f32": float(np.float32(0.1)), "pi": np.pi, "int": 2**60 + 1, "bool": True, "nan": None,
        "inf": None, "array": [[1.5, None], [None, 2.0]], "device": [0, 1], "text": "é",
    }  # fmt: skip
    assert text.endswith("\n")
    assert "NaN" not in text


def test_each_record_is_on_disk_when_the_call_returns(tmp_path):
    sink = JsonLines(tmp_path / "m.jsonl")
    for i in range(3):
        sink({"a": i}, i)
        assert len(lines_of(sink.path)) == i + 1
    sink.close()


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('{"step": 1}\n{"step": 2, "a": 0.', [1]),
        ('{"step": 1}\n{"step": 2}', [1, 2]),
        ('{"step": 1}\n', [1]),
        ('{"st', []),
        ("", []),
        ('{"step": 1}\n' + '{"step": 2, "a": "' + "x" * 200_000, [1]),
        ('{"step": 1, "a": "' + "x" * 200_000 + '"}\n{"', [1]),
        ('{"step": 1}\n17', [1]),
    ],
)
def test_a_torn_last_line_is_repaired_when_the_file_is_continued(tmp_path, text, kept):
    path = tmp_path / "m.jsonl"
    path.write_text(text)
    sink = JsonLines(path)
    sink({}, 9)
    sink.close()
    assert [line["step"] for line in lines_of(path)] == [*kept, 9]


def test_a_write_that_fails_half_way_leaves_whole_lines(tmp_path):
    code = (
        "import resource, sys, signal\n"
        "from nnx_ppo.loggers import JsonLines\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))\n"
        "sink = JsonLines(sys.argv[1])\n"
        "failures = 0\n"
        "for i in range(100):\n"
        "    try: sink({'a': i}, i)\n"
        "    except OSError: failures += 1\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "sink({'a': -1}, 1000)\n"
        "print(failures)\n"
    )
    path = tmp_path / "m.jsonl"
    failures = int(subprocess.check_output([sys.executable, "-c", code, path]))
    records = lines_of(path)
    assert 0 < failures < 100
    assert len(records) == 100 - failures + 1
    assert records[-1]["step"] == 1000


def test_a_folder_that_cannot_be_written_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        JsonLines(tmp_path / "file" / "m.jsonl")


# Reading back --------------------------------------------------------------------------------------------


def test_scalars_read_back_are_the_ones_logged_from_either_source(tmp_path):
    with Logger(JsonLines(tmp_path / "metrics.jsonl"), TensorBoard(tmp_path / "tensorboard")) as log:
        for i in range(10):
            metrics = {"loss": i / 3, "hist": np.arange(i + 1.0)}
            log(metrics | ({"eval/episode_reward/mean": 100.0 * i} if i % 5 == 0 else {}), 2**31 + i)
    for source, tolerance in (("jsonl", 0), ("tfevents", 1e-6)):
        scalars = read_scalars(tmp_path, source)
        assert set(scalars) == {"loss", "eval/episode_reward/mean"}
        steps, values = scalars["loss"]
        np.testing.assert_array_equal(steps, 2**31 + np.arange(10))
        np.testing.assert_allclose(values, np.arange(10) / 3, rtol=tolerance)
        steps, values = scalars["eval/episode_reward/mean"]
        np.testing.assert_array_equal(steps, [2**31, 2**31 + 5])
        np.testing.assert_array_equal(values, [0, 500])


@pytest.mark.parametrize("source", ["jsonl", "tfevents"])
def test_reading_stops_before_a_torn_last_record_wherever_it_is_torn(tmp_path, source):
    with Logger(JsonLines(tmp_path / "metrics.jsonl"), TensorBoard(tmp_path)) as log:
        for i in range(3):
            log({"a": float(i)}, i)
    (path,) = tmp_path.glob("metrics.jsonl" if source == "jsonl" else "events*")
    whole = path.read_bytes()
    counts = []
    for length in range(len(whole) - 60, len(whole) + 1):
        path.write_bytes(whole[:length])
        counts.append(len(read_scalars(tmp_path, source)["a"][0]))
    assert counts[-1] == 3
    assert counts == sorted(counts)
    assert counts[0] < 3


@pytest.mark.parametrize("source", ["jsonl", "tfevents"])
def test_what_a_resumed_run_repeats_replaces_what_it_had_logged_before(tmp_path, source):
    for first, value in ((0, 1.0), (3, 2.0)):  # Killed after step 5, resumed from a checkpoint at step 2.
        with Logger(JsonLines(tmp_path / "metrics.jsonl"), TensorBoard(tmp_path)) as log:
            for step in range(first, first + 6):
                log({"a": value}, step)
    steps, values = read_scalars(tmp_path, source)["a"]
    np.testing.assert_array_equal(steps, np.arange(9))
    np.testing.assert_array_equal(values, [1, 1, 1, 2, 2, 2, 2, 2, 2])


def test_null_reads_as_nan_and_records_of_one_step_are_merged(tmp_path):
    with Logger(JsonLines(tmp_path / "metrics.jsonl")) as log:
        log({"a": float("nan"), "b": 1}, 5)
        log({"c": True}, 5)
    assert [{**record, "time": 0} for record in read_records(tmp_path)] == [
        {"step": 5, "time": 0, "a": None, "b": 1, "c": True}
    ]
    assert np.isnan(read_scalars(tmp_path)["a"][1]).all()


def test_reading_says_what_is_missing_or_broken(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl"):
        read_scalars(tmp_path)
    with pytest.raises(FileNotFoundError, match="no TensorBoard events"):
        read_scalars(tmp_path, "tfevents")
    with pytest.raises(ValueError, match="'jsonl' and 'tfevents'"):
        read_scalars(tmp_path, "csv")  # pyright: ignore
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\noops\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_scalars(tmp_path)


def test_nothing_here_needs_tensorflow(tmp_path):
    code = (
        "import sys; sys.modules['tensorflow'] = None\n"
        "from nnx_ppo.loggers import TensorBoard, read_scalars\n"
        f"sink = TensorBoard({str(tmp_path)!r}); sink({{'a': 1.0}}, 1); sink.close()\n"
        f"print(read_scalars({str(tmp_path)!r}, 'tfevents')['a'][1])\n"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[1.]"


# Memory, TensorBoard, Console ----------------------------------------------------------------------------


def test_memory_keeps_arrays_by_tag():
    memory = Memory()
    for i in range(4):
        memory({"x": jnp.full(3, i)} | ({"rare": i} if i == 2 else {}), i * 100)
    steps, values = memory.series("x")
    np.testing.assert_array_equal(steps, [0, 100, 200, 300])
    np.testing.assert_array_equal(values, np.arange(4)[:, None] * np.ones(3))
    np.testing.assert_array_equal(memory.series("rare")[0], [200])
    with pytest.raises(KeyError, match="rare"):
        memory.series("rear")


def test_tensorboard_is_flushed_at_every_evaluation(tmp_path):
    sink = TensorBoard(tmp_path)
    for step in range(3):
        sink({"a": 1.0}, step)
    sink({"a": 1.0, "eval/episode_reward/mean": 5.0}, 3)
    np.testing.assert_array_equal(read_scalars(tmp_path, "tfevents")["a"][0], [0, 1, 2, 3])
    sink.close()


def test_tensorboard_takes_arrays_as_histograms_and_leaves_out_what_it_cannot_draw(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    from nnx_ppo.loggers.reading import _tfrecords

    sink = TensorBoard(tmp_path)
    sink({"h": np.array([1.0, 2.0, np.nan]), "text": "hello", "all_nan": np.full(3, np.nan), "b": True}, 7)
    sink.close()
    (path,) = tmp_path.iterdir()
    values = {v.tag: v for data in _tfrecords(path.read_bytes()) for v in Event.FromString(data).summary.value}
    assert set(values) == {"h", "b"}
    assert (values["h"].histo.num, values["h"].histo.sum) == (2, 3)
    assert values["b"].simple_value == 1


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_off_a_terminal_the_console_writes_plain_lines_at_evaluations_and_every_interval():
    file, clock = io.StringIO(), Clock()
    console = Console(10_000, file=file, interval=10, clock=clock)
    for second in range(26):
        clock.now = second
        evaluation = {"eval/episode_reward/mean": 1234.56, "eval/lifespan/mean": 87.0} if second == 3 else {}
        console({"losses/total": 1.0} | evaluation, second * 100)
    console.close()
    assert file.getvalue().splitlines() == [
        "0 of 10,000 (0%) steps",
        "300 of 10,000 (3%) steps  100 steps/s  1:37 left  return 1,234.6  length 87.0",
        "1,300 of 10,000 (13%) steps  100 steps/s  1:27 left  return 1,234.6  length 87.0",
        "2,300 of 10,000 (23%) steps  100 steps/s  1:17 left  return 1,234.6  length 87.0",
        "2,500 of 10,000 (25%) steps  100 steps/s  1:15 left  return 1,234.6  length 87.0",
    ]


def test_the_console_needs_no_total_and_takes_a_median_length():
    file, clock = io.StringIO(), Clock()
    console = Console(file=file, clock=clock)
    for clock.now, steps in ((0.0, 0), (60.0, 100)):  # Compiling took a minute, which is not held against the speed.
        console({}, steps)
    clock.now = 62.0
    console({"eval/episode_reward/mean": 1.0, "eval/lifespan/p50": 9.0}, 600)
    console.close()
    assert file.getvalue().splitlines()[2] == "600 steps  250 steps/s  return 1.0  length 9.0"


def test_speed_is_that_of_the_last_half_minute_and_of_this_process_only():
    file, clock = io.StringIO(), Clock()
    console = Console(2_000_000, file=file, interval=0, clock=clock)
    for second in range(0, 100, 10):
        clock.now = second
        console({}, 1_000_000 + second * (100 if second <= 50 else 200))  # Resumed at a million.
    assert " 0 steps/s" not in file.getvalue()
    # 30 s back from 90 s: from 60 s * 200 to 90 s * 200.
    assert "  200 steps/s  1:21:50 left" in file.getvalue().splitlines()[-1]


def test_on_a_terminal_the_console_is_one_live_bar_with_a_line_for_each_evaluation(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    file, clock = Terminal(), Clock()
    console = Console(1000, file=file, clock=clock)
    for second in range(5):
        clock.now = second
        console(
            {"eval/episode_reward/mean": 10.0 * second, "eval/lifespan/mean": 5.0} if second % 2 else {}, second * 100
        )
    console.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    assert "100 steps  return 10.0  length 5.0" in text
    assert "300 steps  return 30.0  length 5.0" in text
    last = text.strip().splitlines()[-1]
    assert "400 steps" in last
    assert "40%" in last
    assert "100 steps/s  0:06 left" in last
    assert file.getvalue().endswith("\x1b[?25h") or "\x1b[?25h" in file.getvalue()  # The cursor is shown again.


def test_a_sink_that_sleeps_does_not_slow_the_caller():
    def sleepy(metrics, steps):
        time.sleep(0.02)

    with Logger(sleepy) as log:
        start = time.monotonic()
        for step in range(20):
            log({"a": 1.0}, step)
        spent = time.monotonic() - start
    assert spent < 0.2  # Half of what the sink slept.


def test_loggers_do_not_import_environments_or_tasks():
    code = "import sys, nnx_ppo.loggers; print([m for m in sys.modules if m.split('.')[0] in ('envs', 'tasks')])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.fixture(autouse=True)
def _warnings_are_captured(caplog):
    caplog.set_level(logging.WARNING)


@pytest.fixture(autouse=True)
def _subprocesses_find_the_package(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


def test_a_sink_that_was_left_behind_says_nothing_more(caplog):
    left_behind, finished = threading.Event(), threading.Event()

    def hangs(metrics, steps):
        left_behind.wait(10)
        finished.set()
        raise RuntimeError("too late")

    logger = Logger(hangs, attempts=1)
    logger({"a": 1.0}, 1)
    logger.close(timeout=0.05)
    left_behind.set()
    assert finished.wait(10)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.name.startswith("log"):
            thread.join(1)
    assert [record.getMessage() for record in caplog.records if "too late" in record.getMessage()] == []
    assert len(caplog.records) == 1
