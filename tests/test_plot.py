"""Learning curves from run folders to PNG."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nnx_ppo.loggers import plot_learning_curve
from nnx_ppo.loggers.plotting import COLOURS, _mean_and_spread, _read

SCRIPT = Path(__file__).parent.parent / "scripts" / "plot.py"
RETURN = "eval/episode_reward/mean"


def make_run(folder, steps, values, std=None):
    folder.mkdir(parents=True)
    with open(folder / "metrics.jsonl", "w") as file:
        for i, (step, value) in enumerate(zip(steps, values, strict=True)):
            record = {"step": int(step), "time": 1000.0 + 30 * i, "losses/total": 1.0, RETURN: value}
            if std is not None:
                record["eval/episode_reward/std"] = std
            file.write(json.dumps(record) + "\n")
            file.write(json.dumps({"step": int(step) + 1, "time": 1001.0 + 30 * i, "losses/total": 0.5}) + "\n")
    return folder


def colours_in(path):
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    return {f"#{r:02X}{g:02X}{b:02X}" for r, g, b in np.unique(pixels, axis=0)}


def test_a_run_becomes_a_png_with_its_curve(tmp_path):
    run = make_run(tmp_path / "humanoid" / "1", range(0, 100, 10), range(10), std=2.0)
    out = plot_learning_curve(run, tmp_path / "new" / "curve.png")
    assert out == tmp_path / "new" / "curve.png"
    with Image.open(out) as image:
        assert image.format == "PNG"
        assert image.width > image.height > 400
    assert COLOURS[0] in colours_in(out)
    assert COLOURS[1] not in colours_in(out)


def test_each_task_has_a_colour_of_its_own(tmp_path):
    runs = [make_run(tmp_path / task / "1", [0, 10], [0, 1]) for task in ("a", "b", "c")]
    found = colours_in(plot_learning_curve(runs, tmp_path / "curve.png"))
    assert set(COLOURS[:3]) <= found
    assert COLOURS[3] not in found


def test_tasks_of_one_name_in_different_folders_are_not_mixed(tmp_path):
    runs = [make_run(tmp_path / root / "humanoid" / "1", [0, 10], [0, 1]) for root in ("before", "after")]
    assert set(COLOURS[:2]) <= colours_in(plot_learning_curve(runs, tmp_path / "curve.png"))


def test_runs_are_averaged_where_all_have_values_and_between_their_steps():
    first = (np.array([0.0, 10, 20]), np.array([0.0, 10, 20]), None)
    second = (np.array([5.0, 15, 30]), np.array([4.0, 4, 4]), None)
    (positions, mean), spread = _mean_and_spread([first, second])
    np.testing.assert_array_equal(positions, [5, 10, 15, 20])
    np.testing.assert_array_equal(mean, [4.5, 7, 9.5, 12])
    np.testing.assert_array_equal(spread, [0.5, 3, 5.5, 8])


def test_of_a_single_run_the_spread_is_that_over_its_episodes(tmp_path):
    run = _read(make_run(tmp_path / "a", [0, 10], [1, 2], std=0.5), RETURN, "steps")
    (positions, mean), spread = _mean_and_spread([run])
    np.testing.assert_array_equal(positions, [0, 10])
    np.testing.assert_array_equal(mean, [1, 2])
    np.testing.assert_array_equal(spread, [0.5, 0.5])


def test_time_is_minutes_since_the_first_record_and_nulls_are_left_out(tmp_path):
    folder = make_run(tmp_path / "a", [0, 10, 20], [1, None, 3])
    minutes, values, spread = _read(folder, RETURN, "time")
    np.testing.assert_array_equal(minutes, [0, 1])
    np.testing.assert_array_equal(values, [1, 3])
    assert spread is None


def test_a_metric_that_was_never_logged_gets_a_did_you_mean(tmp_path):
    run = make_run(tmp_path / "a", [0], [1])
    with pytest.raises(ValueError, match=r"eval/episode_rewards/mean.*Did you mean: eval/episode_reward/mean"):
        plot_learning_curve(run, tmp_path / "x.png", metric="eval/episode_rewards/mean")
    with pytest.raises(ValueError, match="'steps' or 'time'"):
        plot_learning_curve(run, tmp_path / "x.png", x="epochs")  # pyright: ignore
    with pytest.raises(ValueError, match="no run"):
        plot_learning_curve([], tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


def test_the_script_draws_runs_and_prints_where(tmp_path, capsys):
    main = runpy.run_path(str(SCRIPT))["main"]
    runs = [str(make_run(tmp_path / "t" / seed, [0, 10], [0, 1])) for seed in "12"]
    out = tmp_path / "curve.png"
    assert main([*runs, "--out", str(out), "--x", "time", "--metric", "losses/total"]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert COLOURS[0] in colours_in(out)


def test_the_script_says_in_one_line_what_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(SCRIPT.parent.parent))
    done = subprocess.run([sys.executable, SCRIPT, tmp_path / "nothing"], capture_output=True, text=True)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "nothing" in done.stderr
