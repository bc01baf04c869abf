"""Pictures of a MuJoCo model on machines with and without a display.

`render_frames` turns recorded positions into RGB frames; it needs no simulation state beyond them. Which
OpenGL it uses is found by `find_gl`: on Linux EGL (GPU or Mesa, no display needed), then OSMesa (software),
then GLFW (needs a display). Setting `MUJOCO_GL` overrides the search.
"""

import copy
import functools
import importlib
import os
import platform
import subprocess
import sys
from typing import Any

import mujoco
import numpy as np

# What a first rendering does, in a process of its own: OpenGL libraries can crash or hang, and PyOpenGL keeps
# the platform of its first import, so a failed try here would spoil the next one.
_PROBE = """
import importlib, sys
context = importlib.import_module("mujoco." + sys.argv[1]).GLContext(16, 16)
context.make_current()
import mujoco
pictures = mujoco.MjrContext(mujoco.MjModel.from_xml_string("<mujoco/>"), mujoco.mjtFontScale.mjFONTSCALE_100)
pictures.free()
context.free()
"""
_PROBE_SECONDS = 60

_ADVICE = (
    "Install one of them (Debian, Ubuntu: `apt install libegl1` with the driver's or Mesa's EGL, or "
    "`apt install libosmesa6`), or set MUJOCO_GL to egl, osmesa or glfw to choose one yourself."
)


class RenderingUnavailable(RuntimeError):
    """No OpenGL works here; the message says what was tried and what to install."""


def find_gl() -> str:
    """The OpenGL backend that renders on this machine: `egl`, `osmesa`, `glfw` or `cgl`.

    The first call may take some seconds (it tries the backends in a child process); ask it before a long run
    to learn early whether videos can be made.

    Raises:
        RenderingUnavailable: nothing works, or `MUJOCO_GL` names something that does not work here.
    """
    found = _search_gl()
    if isinstance(found, RenderingUnavailable):
        raise RenderingUnavailable(*found.args)
    return found


@functools.cache
def _search_gl() -> str | RenderingUnavailable:
    """What `find_gl` returns or raises; a failure is kept too, so that every video does not search again."""
    chosen = os.environ.get("MUJOCO_GL", "").lower().strip()
    if chosen in ("disable", "disabled", "off", "false", "0"):
        return RenderingUnavailable(f"Rendering is switched off by MUJOCO_GL={chosen}. Unset it to render.")
    if platform.system() == "Darwin":
        return "glfw" if chosen == "glfw" else "cgl"
    if platform.system() != "Linux":
        return "glfw"
    display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if chosen in ("egl", "osmesa", "glfw"):
        candidates = [chosen]
    elif chosen in ("", "enable", "enabled", "on", "true", "1", "glx"):
        # A window system's OpenGL is the last choice even where there is a display: frames are rendered on a
        # background thread, which GLFW does not promise to support.
        candidates = ["egl", "osmesa", *(["glfw"] if display else [])]
    else:
        return RenderingUnavailable(f"MUJOCO_GL={chosen!r} is not a backend. {_ADVICE}")
    failures = []
    for backend in candidates:
        failure = _try_backend(backend)
        if failure is None:
            return backend
        failures.append(f"  {backend}: {failure}")
    return RenderingUnavailable(
        "No OpenGL works on this machine"
        + (f" with MUJOCO_GL={chosen}" if chosen else "")
        + ", so nothing can be rendered. Tried:\n"
        + "\n".join(failures)
        + f"\n{_ADVICE}"
    )


def _try_backend(backend: str) -> str | None:
    """None if `backend` can draw in a fresh process like this one, else what went wrong."""
    environment = {**os.environ, "MUJOCO_GL": backend, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, backend],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_PROBE_SECONDS} s"
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    if done.returncode > 0 and lines:
        return lines[-1]
    return f"the try ended with exit code {done.returncode}"


def _gl_context(width: int, height: int) -> Any:
    """A new OpenGL context of the backend that `find_gl` chose, current in this thread."""
    backend = find_gl()
    try:
        # Not `mujoco.GLContext`: its backend was fixed by MUJOCO_GL when mujoco was first imported.
        context = importlib.import_module(f"mujoco.{backend}").GLContext(width, height)
        context.make_current()
    except Exception as error:
        raise RenderingUnavailable(
            f"OpenGL by {backend} works on this machine but not in this process ({type(error).__name__}: {error}). "
            f"If something else here uses OpenGL, start with MUJOCO_GL={backend} PYOPENGL_PLATFORM={backend}."
        ) from error
    return context


def _draws_in_software() -> bool:
    """Whether the current OpenGL context draws on the CPU (Mesa's llvmpipe, OSMesa)."""
    if find_gl() not in ("egl", "osmesa"):
        return False
    from OpenGL import GL

    renderer = (GL.glGetString(GL.GL_RENDERER) or b"").decode(errors="replace").lower()
    return any(name in renderer for name in ("llvmpipe", "softpipe", "swrast", "swr"))


def render_frames(
    mj_model: mujoco.MjModel,
    qpos: np.ndarray,
    *,
    mocap_pos: np.ndarray | None = None,
    mocap_quat: np.ndarray | None = None,
    height: int = 480,
    width: int = 640,
    camera: str | int | mujoco.MjvCamera | None = None,
    scene_option: mujoco.MjvOption | None = None,
) -> list[np.ndarray]:
    """Draws one RGB frame per row of `qpos`.

    May be called from any thread; all OpenGL state is made, used and freed within the call. `mj_model` is left
    as it is: where the frames exceed its offscreen buffer, or the robot leaves a floor of finite size, a copy
    is adapted. Without a GPU a frame costs much CPU time, so there it is drawn without antialiasing and
    mirroring and with coarser shadows, in a third of the time (humanoid, 480x640: some 65 instead of 215 ms of CPU).

    Args:
        mj_model: The model.
        qpos: `[T, nq]` joint positions.
        mocap_pos: `[T, nmocap, 3]` positions of mocap bodies; the model's own if absent.
        mocap_quat: `[T, nmocap, 4]` their orientations; the model's own if absent.
        height: Rows of a frame.
        width: Columns of a frame.
        camera: Name or index of a camera of the model, or a `MjvCamera`. By default the camera named `track`,
            else `side`, else the first that follows a body; if there is none a free camera that shows the
            whole model and follows the first floating body.
        scene_option: What is drawn (contacts, sites, ...); MuJoCo's defaults if absent.

    Returns:
        T frames, `[height, width, 3]` uint8, rows of one array.

    Raises:
        RenderingUnavailable: there is no working OpenGL.
        ValueError: the positions do not fit the model, or it has no such camera.
    """
    qpos = np.asarray(qpos, dtype=np.float64)
    if qpos.ndim != 2 or qpos.shape[1] != mj_model.nq:
        raise ValueError(f"qpos has shape {qpos.shape}; this model takes (T, {mj_model.nq}).")
    mocap_pos = _mocap(mocap_pos, "mocap_pos", (len(qpos), mj_model.nmocap, 3))
    mocap_quat = _mocap(mocap_quat, "mocap_quat", (len(qpos), mj_model.nmocap, 4))
    if height < 1 or width < 1:
        raise ValueError(f"height={height}, width={width}: a frame has at least one row and one column.")
    view = camera if isinstance(camera, mujoco.MjvCamera) else _choose_camera(mj_model, camera)
    option = scene_option or mujoco.MjvOption()
    rectangle = mujoco.MjrRect(0, 0, width, height)
    frames = np.empty((len(qpos), height, width, 3), np.uint8)
    gl = _gl_context(width, height)
    try:
        software = _draws_in_software()
        model = _model_to_draw(mj_model, qpos, height, width, software)
        data = mujoco.MjData(model)
        scene = mujoco.MjvScene(model, maxgeom=10_000)
        if software:
            scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = False
        # Not `mujoco.Renderer`: it takes its OpenGL from the MUJOCO_GL of mujoco's import.
        pictures = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)
        try:
            mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, pictures)
            for t, frame in enumerate(frames):
                data.qpos[:] = qpos[t]
                if mocap_pos is not None:
                    data.mocap_pos[:] = mocap_pos[t]
                if mocap_quat is not None:
                    data.mocap_quat[:] = mocap_quat[t]
                _place(model, data)
                mujoco.mjv_updateScene(model, data, option, None, view, mujoco.mjtCatBit.mjCAT_ALL, scene)
                mujoco.mjr_render(rectangle, scene, pictures)
                mujoco.mjr_readPixels(frame, None, rectangle, pictures)
                frame[:] = frame[::-1].copy()  # OpenGL's first row is the lowest.
        finally:
            pictures.free()
    finally:
        gl.free()
    return list(frames)


def _mocap(values: np.ndarray | None, name: str, shape: tuple[int, ...]) -> np.ndarray | None:
    if values is None:
        return None
    values = np.asarray(values, dtype=np.float64)
    if values.shape != shape:
        raise ValueError(f"{name} has shape {values.shape}; this model and qpos take {shape}.")
    return values


def _place(model: mujoco.MjModel, data: mujoco.MjData) -> None:
    """Computes from the positions what the scene shows, and nothing of the dynamics."""
    mujoco.mj_kinematics(model, data)
    mujoco.mj_comPos(model, data)  # What cameras and lights that track a centre of mass look at.
    mujoco.mj_camlight(model, data)
    mujoco.mj_flex(model, data)
    mujoco.mj_tendon(model, data)


def _choose_camera(model: mujoco.MjModel, camera: str | int | None) -> mujoco.MjvCamera:
    """The view that `camera` names, or the one that suits the model best."""
    names = [model.camera(i).name for i in range(model.ncam)]
    index = -1
    if isinstance(camera, str):
        if camera not in names:
            raise ValueError(f"The model has no camera {camera!r}; it has {names or 'none'}. None picks a view.")
        index = names.index(camera)
    elif camera is not None:
        if not -1 <= camera < model.ncam:
            raise ValueError(f"The model has no camera {camera}; it has {model.ncam}, and -1 is the free one.")
        index = int(camera)
    else:
        follows = [i for i in range(model.ncam) if model.cam_mode[i] != mujoco.mjtCamLight.mjCAMLIGHT_FIXED]
        named = [names.index(name) for name in ("track", "side") if name in names]
        index = [*named, *follows, -1][0]

    view = mujoco.MjvCamera()
    if index >= 0:
        view.type, view.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, index
        return view
    mujoco.mjv_defaultFreeCamera(model, view)
    floating = np.flatnonzero(model.jnt_type == mujoco.mjtJoint.mjJNT_FREE)
    if camera is None and floating.size:
        view.type, view.trackbodyid = mujoco.mjtCamera.mjCAMERA_TRACKING, model.jnt_bodyid[floating[0]]
        view.elevation = -20
    return view


def _model_to_draw(model: mujoco.MjModel, qpos: np.ndarray, height: int, width: int, software: bool) -> mujoco.MjModel:
    """A copy with an offscreen buffer of this size, a floor under everything that moves, and affordable quality."""
    model = copy.copy(model)
    model.vis.global_.offwidth = max(width, model.vis.global_.offwidth)
    model.vis.global_.offheight = max(height, model.vis.global_.offheight)
    if software:
        model.vis.quality.offsamples = 0
        model.vis.quality.shadowsize = min(2048, model.vis.quality.shadowsize)
    floors = _floors_that_end(model, qpos)
    for geom in floors:
        # In the physics a plane has no end, and size 0 draws it so. A texture that was repeated over the
        # whole plane keeps the size of its tiles by being repeated per metre.
        material = model.geom_matid[geom]
        if material >= 0 and not model.mat_texuniform[material]:
            model.mat_texrepeat[material] /= 2 * model.geom_size[geom, :2]
            model.mat_texuniform[material] = True
        model.geom_size[geom, :2] = 0
    if floors:
        # A fixed directional light casts shadows around its place only: let it follow the scene's centre of mass.
        travelling = (model.light_bodyid == 0) & (model.light_type == mujoco.mjtLightType.mjLIGHT_DIRECTIONAL)
        model.light_mode[travelling] = mujoco.mjtCamLight.mjCAMLIGHT_TRACKCOM
    return model


def _floors_that_end(model: mujoco.MjModel, qpos: np.ndarray) -> list[int]:
    """Level planes, fixed to the world, over whose drawn edge a body with a free joint goes."""
    addresses = model.jnt_qposadr[model.jnt_type == mujoco.mjtJoint.mjJNT_FREE]
    if not addresses.size or not len(qpos):
        return []
    places = np.concatenate([qpos[:, a : a + 2] for a in addresses])
    floors = []
    for geom in np.flatnonzero(model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE):
        level = abs(model.geom_quat[geom, 0]) > 1 - 1e-6
        half = model.geom_size[geom, :2]
        if model.geom_bodyid[geom] == 0 and level and (half > 0).all():
            # A metre or two before the edge the camera would already see it.
            reach = np.abs(places - model.geom_pos[geom, :2]).max(axis=0)
            if (reach > half - np.minimum(half / 2, 10)).any():
                floors.append(int(geom))
    return floors
