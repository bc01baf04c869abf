"""Frames of known scenes, drawn without a display."""

import importlib.resources
import os
import subprocess
import sys
import threading

import mujoco
import numpy as np
import pytest

from envs import rendering
from envs.rendering import RenderingUnavailable, find_gl, render_frames

# A red ball on a rail before a blue wall, seen along y by a camera that stands still.
BALL = """
<mujoco>
  <visual><headlight ambient="1 1 1" diffuse="0 0 0" specular="0 0 0"/></visual>
  <worldbody>
    <camera name="front" pos="0 -4 0" xyaxes="1 0 0 0 0 1"/>
    <camera name="behind" pos="0 -4 20" xyaxes="1 0 0 0 0 1"/>
    <geom type="box" size="50 .1 8" pos="0 5 0" rgba="0 0 1 1"/>
    <body><joint type="slide" axis="1 0 0"/><geom type="sphere" size=".5" rgba="1 0 0 1"/></body>
  </worldbody>
</mujoco>
"""
WALKER = """
<mujoco>
  <asset>
    <texture name="t" type="2d" builtin="checker" rgb1="1 1 1" rgb2="1 1 1" width="8" height="8"/>
    <material name="floor" texture="t" texrepeat="60 60"/>
  </asset>
  <worldbody>
    <light directional="true" pos="0 0 3" dir="0 0 -1"/>
    <geom name="floor" type="plane" size="20 30 1" material="floor"/>
    <body pos="0 0 1"><freejoint/><geom type="sphere" size=".3" rgba="1 0 0 1"/></body>
  </worldbody>
</mujoco>
"""


@pytest.fixture(scope="module")
def ball():
    find_gl_or_skip()
    return mujoco.MjModel.from_xml_string(BALL)


def find_gl_or_skip():
    try:
        find_gl()
    except RenderingUnavailable as error:
        pytest.skip(str(error))


def red(frames):
    frames = np.asarray(frames).astype(int)
    return (frames[..., 0] > 150) & (frames[..., 2] < 80)


def blue(frames):
    frames = np.asarray(frames).astype(int)
    return (frames[..., 2] > 150) & (frames[..., 0] < 80)


def test_each_frame_shows_the_positions_of_its_row(ball):
    qpos = np.linspace(-1.5, 1.5, 7)[:, None]
    frames = render_frames(ball, qpos, height=120, width=160, camera="front")
    assert len(frames) == 7
    assert all(frame.shape == (120, 160, 3) and frame.dtype == np.uint8 for frame in frames)
    assert blue(frames).any(axis=(1, 2)).all()
    # A pinhole of 45 degrees (vertical) at distance 4: one metre is 60 / tan(22.5 deg) / 4 pixels wide.
    columns = [np.flatnonzero(red(frame).any(axis=0)).mean() for frame in frames]
    np.testing.assert_allclose(columns, 79.5 + qpos[:, 0] * 60 / np.tan(np.pi / 8) / 4, atol=2)


def test_frames_are_the_right_way_up(ball):
    model = mujoco.MjModel.from_xml_string(BALL.replace('axis="1 0 0"', 'axis="0 0 1"'))
    (frame,) = render_frames(model, np.array([[1.0]]), height=120, width=160, camera="front")
    assert np.flatnonzero(red(frame).any(axis=1)).mean() < 40


def test_frames_larger_than_the_models_buffer_are_drawn_and_the_model_is_left_alone(ball):
    assert ball.vis.global_.offwidth < 1000
    before = (ball.vis.global_.offwidth, ball.vis.global_.offheight, ball.vis.quality.shadowsize)
    (frame,) = render_frames(ball, np.zeros((1, 1)), height=601, width=1001, camera="front")
    assert frame.shape == (601, 1001, 3)
    assert red(frame)[300, 500]
    assert blue(frame)[[0, 0, -1, -1], [0, -1, 0, -1]].all()
    assert (ball.vis.global_.offwidth, ball.vis.global_.offheight, ball.vis.quality.shadowsize) == before


def test_frames_are_the_same_from_any_thread_and_every_time(ball):
    results = {}

    def draw(name):
        results[name] = render_frames(ball, np.array([[0.3], [0.6]]), height=48, width=64, camera="front")

    draw("here")
    threads = [threading.Thread(target=draw, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    draw("again")
    assert len(results) == 5
    for frames in results.values():
        np.testing.assert_array_equal(frames, results["here"])


def test_frames_are_rows_of_one_array(ball):
    frames = render_frames(ball, np.zeros((3, 1)), height=8, width=8)
    assert all(frame.base is frames[0].base for frame in frames)


def test_no_rows_give_no_frames(ball):
    assert render_frames(ball, np.zeros((0, 1)), height=8, width=8) == []


def test_mocap_bodies_are_where_their_rows_say():
    find_gl_or_skip()
    model = mujoco.MjModel.from_xml_string(
        BALL.replace('<body><joint type="slide" axis="1 0 0"/>', '<body mocap="true">')
    )
    positions = np.array([[[-1.0, 0, 0]], [[1.0, 0, 0]]])
    frames = render_frames(model, np.zeros((2, 0)), mocap_pos=positions, height=120, width=160, camera="front")
    left, right = (np.flatnonzero(red(frame).any(axis=0)).mean() for frame in frames)
    assert left < 60
    assert right > 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qpos": np.zeros((3, 2))}, r"\(3, 2\).*\(T, 1\)"),
        ({"qpos": np.zeros(3)}, r"\(T, 1\)"),
        ({"camera": "fornt"}, "fornt.*front"),
        ({"camera": 2}, "camera 2"),
        ({"mocap_pos": np.zeros((3, 1, 3))}, "mocap_pos"),
        ({"height": 0}, "height=0"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_anything_is_drawn(change, message, monkeypatch):
    monkeypatch.setattr(rendering, "_gl_context", lambda *_: pytest.fail("drawn"))
    arguments = {"qpos": np.zeros((3, 1)), **change}
    with pytest.raises(ValueError, match=message):
        render_frames(mujoco.MjModel.from_xml_string(BALL), **arguments)


def camera_of(xml):
    return rendering._choose_camera(
        mujoco.MjModel.from_xml_string(f"<mujoco><worldbody>{xml}</worldbody></mujoco>"), None
    )


def test_the_default_camera_is_track_then_side_then_one_that_follows_then_a_free_one():
    body = "<body>{}<freejoint/><geom size='1'/></body>"
    fixed, track = '<camera name="a"/>', '<camera name="track" mode="trackcom"/>'
    assert camera_of(fixed + '<camera name="side"/>' + body.format(track)).fixedcamid == 2
    assert camera_of(fixed + '<camera name="side"/>').fixedcamid == 1
    assert camera_of(fixed + body.format('<camera name="b" mode="track"/>')).fixedcamid == 1
    following = camera_of(fixed + body.format(""))
    assert following.type == mujoco.mjtCamera.mjCAMERA_TRACKING
    assert following.trackbodyid == 1
    assert camera_of(fixed).type == mujoco.mjtCamera.mjCAMERA_FREE


def test_a_robot_that_leaves_its_floor_still_runs_on_one():
    find_gl_or_skip()
    model = mujoco.MjModel.from_xml_string(WALKER)
    qpos = np.tile(model.qpos0, (2, 1))
    qpos[1, 0] = 200
    near, far = render_frames(model, qpos, height=60, width=80)
    assert model.geom_size[0, 0] == 20
    assert (near[-10:] > 30).any(axis=-1).all()
    # The camera follows and the floor is uniform, so both frames look alike, shadow included.
    np.testing.assert_allclose(far[-30:].astype(int), near[-30:], atol=60)
    assert rendering._floors_that_end(model, qpos[:1]) == []
    drawn = rendering._model_to_draw(model, qpos, 60, 80, False)
    # Before: 60 tiles on 40 and on 60 metres.
    np.testing.assert_allclose(drawn.mat_texrepeat[0], [1.5, 1.0])


def test_the_humanoid_stands_lit_in_the_frame_on_a_floor():
    find_gl_or_skip()
    path = importlib.resources.files("brax") / "envs/assets/humanoid.xml"
    model = mujoco.MjModel.from_xml_path(str(path))
    (frame,) = render_frames(model, model.qpos0[None])
    pixels = frame.astype(int)
    brown = (pixels[..., 0] > pixels[..., 2] + 20) & (pixels[..., 0] > 40)
    rows, columns = np.nonzero(brown)
    assert 1500 < brown.sum() < 60_000
    assert rows.min() > 20
    assert rows.max() < 479
    assert abs(columns.mean() - 320) < 60
    floor = pixels[-60:].mean(axis=-1)
    assert floor.max() > 180
    assert floor.min() < 40


@pytest.mark.parametrize("chosen", ["", "osmesa"])
def test_which_gl_draws_does_not_depend_on_when_mujoco_was_imported(chosen, monkeypatch):
    for name in ("MUJOCO_GL", "PYOPENGL_PLATFORM", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    if any(rendering._try_backend(backend) for backend in ([chosen] if chosen else ["egl"])):
        pytest.skip(f"this machine has no {chosen or 'egl'}")
    code = (
        "import os, runpy, mujoco, numpy as np\n"
        f"names = runpy.run_path({rendering.__file__!r})\n"  # Not `envs`, which takes seconds to import JAX.
        "find_gl, render_frames = names['find_gl'], names['render_frames']\n"
        f"model = mujoco.MjModel.from_xml_string({BALL!r})\n"
        f"os.environ['MUJOCO_GL'] = {chosen!r}\n"
        "frame, = render_frames(model, np.zeros((1, 1)), height=48, width=64, camera='front')\n"
        "print(find_gl(), frame[24, 32].tolist())\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    out = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert out == f"{chosen or 'egl'} [255, 0, 0]\n"


@pytest.fixture
def fresh_search(monkeypatch):
    """`find_gl` as a process that has not asked yet sees it, on a Linux without a display."""
    for name in ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(rendering.platform, "system", lambda: "Linux")
    rendering._search_gl.cache_clear()
    yield monkeypatch
    rendering._search_gl.cache_clear()


def test_egl_is_tried_first_then_osmesa_and_a_window_system_last(fresh_search):
    tried = []

    def fail(backend):
        tried.append(backend)
        return "no"

    fresh_search.setattr(rendering, "_try_backend", fail)
    fresh_search.setenv("DISPLAY", ":0")
    with pytest.raises(RenderingUnavailable):
        find_gl()
    assert tried == ["egl", "osmesa", "glfw"]
    with pytest.raises(RenderingUnavailable):
        find_gl()
    assert len(tried) == 3  # A failure is remembered, too.
    rendering._search_gl.cache_clear()
    fresh_search.setattr(rendering, "_try_backend", lambda backend: None if backend == "osmesa" else "no")
    assert find_gl() == "osmesa"


def test_without_any_gl_the_error_says_what_was_tried_and_what_to_install(fresh_search):
    fresh_search.setattr(rendering, "_try_backend", lambda backend: f"lib{backend} is missing")
    with pytest.raises(RenderingUnavailable) as caught:
        find_gl()
    for part in ("egl: libegl is missing", "osmesa: libosmesa is missing", "libegl1", "libosmesa6", "MUJOCO_GL"):
        assert part in str(caught.value)
    assert "glfw:" not in str(caught.value)


@pytest.mark.parametrize(("value", "message"), [("off", "switched off"), ("eglx", "'eglx' is not a backend")])
def test_a_mujoco_gl_that_cannot_render_is_said(fresh_search, value, message):
    fresh_search.setenv("MUJOCO_GL", value)
    with pytest.raises(RenderingUnavailable, match=message):
        find_gl()


def test_a_try_that_crashes_or_hangs_is_a_failure_and_nothing_more(monkeypatch):
    monkeypatch.setattr(rendering, "_PROBE", "import os; os.abort()")
    assert "exit code -6" in rendering._try_backend("egl")
    monkeypatch.setattr(rendering, "_PROBE", "raise ImportError('no libEGL')")
    assert rendering._try_backend("egl") == "ImportError: no libEGL"
    monkeypatch.setattr(rendering, "_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(rendering, "_PROBE_SECONDS", 0.1)
    assert "no answer within 0.1 s" in rendering._try_backend("egl")
