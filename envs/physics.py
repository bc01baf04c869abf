"""Three physics engines behind one interface: MuJoCo's C engine, MJX and MJX-Warp.

``make_physics(mj_model, impl, fields)`` returns a ``Physics`` with two functions, both pure and
both usable under ``jit``, ``vmap`` and ``scan``:

    data = physics.init(qpos=qpos, qvel=qvel)          # state given, derived fields computed
    data = physics.step(data, ctrl, n_substeps)        # n_substeps calls of mj_step

``data`` is the same small pytree for every engine, so an environment is written once. It holds
the integration state (``qpos, qvel, act, ctrl, time, ...``) and, of the many quantities that
MuJoCo derives from it (``xpos, cvel, sensordata, ...``), those named in ``fields``. As with
``mj_step``, derived fields lag: after ``step`` they describe the state before the last substep.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import functools
import hashlib
import importlib.util
import io
import logging
import math
import os
import re
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, Protocol

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from jax.experimental.buffer_callback import buffer_callback
from mujoco.batch import DATA_FIELDS, Batch, SimulationError

from envs import host_call

Impl = Literal["jax", "warp", "native"]
IMPLS: tuple[Impl, ...] = ("jax", "warp", "native")

# The integration state in the order of MuJoCo's state vector (mjSTATE_INTEGRATION).
_STATE_COMPONENTS: dict[str, mujoco.mjtState] = {
    "time": mujoco.mjtState.mjSTATE_TIME,
    "qpos": mujoco.mjtState.mjSTATE_QPOS,
    "qvel": mujoco.mjtState.mjSTATE_QVEL,
    "act": mujoco.mjtState.mjSTATE_ACT,
    "history": mujoco.mjtState.mjSTATE_HISTORY,
    "qacc_warmstart": mujoco.mjtState.mjSTATE_WARMSTART,
    "ctrl": mujoco.mjtState.mjSTATE_CTRL,
    "qfrc_applied": mujoco.mjtState.mjSTATE_QFRC_APPLIED,
    "xfrc_applied": mujoco.mjtState.mjSTATE_XFRC_APPLIED,
    "eq_active": mujoco.mjtState.mjSTATE_EQ_ACTIVE,
    "mocap_pos": mujoco.mjtState.mjSTATE_MOCAP_POS,
    "mocap_quat": mujoco.mjtState.mjSTATE_MOCAP_QUAT,
    "userdata": mujoco.mjtState.mjSTATE_USERDATA,
    "plugin_state": mujoco.mjtState.mjSTATE_PLUGIN,
    "plastic": mujoco.mjtState.mjSTATE_PLASTIC,
}
# Zero in most tasks and as large as the rest together, so carried only by those who ask.
_OPTIONAL_STATE = frozenset({"qfrc_applied", "xfrc_applied", "userdata"})
# Warnings after which a simulation's numbers mean nothing.
_FATAL_WARNINGS = [
    int(mujoco.mjtWarning.mjWARN_BADQPOS),
    int(mujoco.mjtWarning.mjWARN_BADQVEL),
    int(mujoco.mjtWarning.mjWARN_BADQACC),
    int(mujoco.mjtWarning.mjWARN_BADCTRL),
]
# The others leave a valid state, computed without some of its constraints.
_MILD_WARNINGS = [i for i in range(int(mujoco.mjtWarning.mjNWARNING)) if i not in _FATAL_WARNINGS]

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where a field lies in a packed vector: ``vector[start:start + size]``, then its shape and type."""

    start: int
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Names, places and shapes of the fields in the two vectors of ``Data``."""

    state: tuple[tuple[str, Slot], ...]
    derived: tuple[tuple[str, Slot], ...]

    # jit hashes the layout at every call of a compiled function, so both are worked out once.
    @functools.cached_property
    def state_slots(self) -> dict[str, Slot]:
        """State fields by name."""
        return dict(self.state)

    @functools.cached_property
    def derived_slots(self) -> dict[str, Slot]:
        """Derived fields by name."""
        return dict(self.derived)

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.state, self.derived))

    def __hash__(self) -> int:
        return self._hash

    @property
    def n_state(self) -> int:
        """Length of the state vector."""
        return sum(slot.size for _, slot in self.state)

    @property
    def n_derived(self) -> int:
        """Length of the vector of derived fields."""
        return sum(slot.size for _, slot in self.derived)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Data:
    """State of one simulation, or with leading axes of many: MuJoCo's field names, float32.

    Read fields as attributes (``data.qpos``, ``data.xpos``); ``replace(qpos=...)`` returns a copy
    with state fields changed. Shapes are those of ``mjx.Data``: rotation matrices are ``(n, 3, 3)``.

    The fields are slices of two vectors. A training step carries, selects and donates whole
    states many times for each time it looks inside one, and two leaves are cheaper than twenty.
    """

    state: jax.Array
    derived: jax.Array
    layout: Layout = dataclasses.field(metadata={"static": True})

    def __getattr__(self, name: str) -> jax.Array:
        if name.startswith("__") or name in ("state", "derived", "layout"):
            raise AttributeError(name)
        layout = self.layout
        if name in layout.state_slots:
            vector, slot = self.state, layout.state_slots[name]
        elif name in layout.derived_slots:
            vector, slot = self.derived, layout.derived_slots[name]
        else:
            raise AttributeError(_missing_field_message(name, layout))
        values = vector[..., slot.start : slot.start + slot.size]
        return values.reshape(vector.shape[:-1] + slot.shape).astype(slot.dtype)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.layout.state_slots, *self.layout.derived_slots]

    def replace(self, **fields: Any) -> Data:
        """A copy with the given state fields changed; derived fields stay (see ``Physics.forward``)."""
        state = self.state
        for name, value in fields.items():
            slot = self.layout.state_slots.get(name)
            if slot is None:
                raise ValueError(_not_state_message(name, self.layout))
            lead = self.state.shape[:-1]
            if jnp.shape(value) != (*lead, *slot.shape):
                raise ValueError(f"{name!r} has shape {jnp.shape(value)}: it must be {(*lead, *slot.shape)}")
            flat = jnp.asarray(value, jnp.float32).reshape((*lead, slot.size))
            state = jnp.asarray(state).at[..., slot.start : slot.start + slot.size].set(flat)
        return dataclasses.replace(self, state=state)


class Physics(Protocol):
    """What an environment needs of a physics engine."""

    @property
    def impl(self) -> Impl:
        """Name of the engine."""
        ...

    @property
    def mj_model(self) -> mujoco.MjModel:
        """The model that is simulated."""
        ...

    @property
    def layout(self) -> Layout:
        """The fields of its ``Data``."""
        ...

    def init(self, **state: Any) -> Data:
        """Data of the model's default state with the given state fields, derived fields computed.

        Args:
          **state: state fields by MuJoCo's name, e.g. ``qpos`` (nq,), ``qvel`` (nv,), ``ctrl`` (nu,),
            ``mocap_pos`` (nmocap, 3).
        """
        ...

    def forward(self, data: Data) -> Data:
        """``data`` with derived fields computed at its state (``mj_forward``)."""
        ...

    def step(self, data: Data, ctrl: jax.Array, n_substeps: int = 1) -> Data:
        """Advance by ``n_substeps`` calls of ``mj_step`` with ``ctrl`` (nu,) held."""
        ...


def default_impl() -> Impl:
    """The fastest engine for JAX's default device: ``native`` on a CPU, ``warp`` on an NVIDIA GPU if
    it is installed, ``jax`` otherwise."""
    platform = jax.default_backend()
    if platform == "cpu":
        return "native"
    if platform in ("gpu", "cuda") and importlib.util.find_spec("warp") is not None:
        return "warp"
    return "jax"


def make_physics(
    mj_model: mujoco.MjModel,
    impl: str | None = None,
    fields: Sequence[str] = (),
    n_threads: int | None = None,
) -> Physics:
    """The physics of ``mj_model`` on the engine ``impl``.

    Args:
      mj_model: the compiled model. It is copied where an option has to change.
      impl: ``"jax"``, ``"warp"`` or ``"native"``; None chooses by device (``default_impl``).
      fields: derived fields to keep in ``Data``, and of ``qfrc_applied``, ``xfrc_applied`` and
        ``userdata`` those that are to be part of the state.
      n_threads: threads of the native engine; None means every CPU this process may use. The other
        engines ignore it. Results do not depend on it.

    Raises:
      ValueError: ``impl`` or a field is unknown, or the engine cannot simulate the model.
    """
    impl = default_impl() if impl is None else impl
    if impl == "native":
        return NativePhysics(mj_model, fields, n_threads)
    if impl in ("jax", "warp"):
        return MjxPhysics(mj_model, fields, "warp" if impl == "warp" else "jax")
    raise ValueError(
        f"unknown physics {impl!r}{_did_you_mean(impl, IMPLS)}: accepted are {', '.join(map(repr, IMPLS))}, "
        "or None to choose by device"
    )


def make_layout(mj_model: mujoco.MjModel, fields: Sequence[str]) -> Layout:
    """The layout of ``Data`` for a model and the fields that an environment named.

    Raises:
      ValueError: a field is not one that every simulation has at a fixed size.
    """
    template = mujoco.MjData(mj_model)
    fields = (fields,) if isinstance(fields, str) else fields
    for name in fields:
        if name not in DATA_FIELDS:
            raise ValueError(
                f"unknown data field {name!r}{_did_you_mean(name, DATA_FIELDS)}: `fields` takes names of MjData "
                "arrays of fixed size, such as 'xpos', 'cvel' or 'sensordata' (contacts and efc_* change size from "
                "step to step; use a sensor instead)"
            )

    def slots(named: list[tuple[str, tuple[int, ...], str]]) -> tuple[tuple[str, Slot], ...]:
        placed, start = [], 0
        for name, shape, dtype in named:
            placed.append((name, Slot(start, shape, dtype)))
            start += placed[-1][1].size
        return tuple(placed)

    state = [
        (name, np.shape(getattr(template, name)), "bool" if name == "eq_active" else "float32")
        for name in _STATE_COMPONENTS
        if name not in _OPTIONAL_STATE or name in fields
    ]
    derived = []
    for name in dict.fromkeys(fields):
        if name not in _STATE_COMPONENTS:
            value = np.asarray(getattr(template, name))
            shape = value.shape
            if name.endswith(("xmat", "ximat")):
                shape = (*shape[:-1], 3, 3)
            derived.append((name, shape, "float32" if value.dtype.kind == "f" else "int32"))
    return Layout(slots(state), slots(derived))


def initial_vector(mj_model: mujoco.MjModel, layout: Layout) -> np.ndarray:
    """The model's default state as a packed float32 vector of ``layout``."""
    data = mujoco.MjData(mj_model)
    parts = [np.asarray(getattr(data, name), np.float32).ravel() for name in layout.state_slots]
    return np.concatenate(parts)


class NativePhysics:
    """MuJoCo's C engine on a pool of threads, called from compiled code.

    The call is a pure function of the state that it is given. Nothing is remembered between
    calls, so resets, ``vmap``, replays and checkpoints are exact, and results are bit-identical
    for any number of threads and any composition of the batch. It works in double precision
    inside and is not differentiable.

    A simulation that MuJoCo cannot advance (an error, or a state, control or acceleration that is
    not finite or beyond 1e10) comes back as NaN in every field, and only that one. MuJoCo's errors
    and its warnings of lesser trouble go to this module's logger, each once.
    """

    impl: Impl = "native"

    def __init__(self, mj_model: mujoco.MjModel, fields: Sequence[str] = (), n_threads: int | None = None):
        if n_threads is not None and n_threads < 1:
            raise ValueError(f"n_threads is {n_threads}: give at least 1, or None for every available CPU")
        self.mj_model = mj_model
        self.n_threads = n_threads or available_cpus()
        self.layout = make_layout(mj_model, fields)
        self._initial = initial_vector(mj_model, self.layout)
        self._model = copy.copy(mj_model)
        # Auto-reset would silently move an unstable simulation to its default state.
        self._model.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_AUTORESET)
        self._engine = _Engine.of(self._model, self.n_threads, self.layout)
        ctrl = self.layout.state_slots["ctrl"]
        self._ctrl = slice(ctrl.start, ctrl.start + ctrl.size)
        weakref.finalize(self, self._engine.leave)

    def init(self, **state: Any) -> Data:
        """See ``Physics``."""
        empty = jnp.zeros(self.layout.n_derived, jnp.float32)
        return self.forward(Data(jnp.asarray(self._initial), empty, self.layout).replace(**state))

    def forward(self, data: Data) -> Data:
        """See ``Physics``."""
        return self._call(data.state, data.state[..., self._ctrl], 0)

    def step(self, data: Data, ctrl: jax.Array, n_substeps: int = 1) -> Data:
        """See ``Physics``."""
        return self._call(data.state, jnp.asarray(ctrl, jnp.float32), n_substeps)

    def _call(self, state: jax.Array, ctrl: jax.Array, n_substeps: int) -> Data:
        lead = jnp.broadcast_shapes(state.shape[:-1], ctrl.shape[:-1])
        results = (
            jax.ShapeDtypeStruct((*lead, self.layout.n_state), jnp.float32),
            jax.ShapeDtypeStruct((*lead, self.layout.n_derived), jnp.float32),
        )
        if jax.default_backend() != "cpu":
            callback = functools.partial(self._run_on_copies, n_substeps)
            new_state, derived = jax.pure_callback(callback, results, state, ctrl, vmap_method="expand_dims")
        elif host_call.available():
            # Reads and writes XLA's own buffers, and leaves the program fit for the compilation cache.
            new_state, derived = host_call.host_call(self._engine.number, n_substeps, results, state, ctrl)
        else:
            # The next best. pure_callback wraps its arguments in JAX arrays first, which costs more and, seen with
            # JAX 0.10 and two host devices, can wait forever for a thread to copy them.
            callback = functools.partial(self._run_on_buffers, n_substeps)
            new_state, derived = buffer_callback(callback, results, vmap_method="expand_dims")(state, ctrl)
        return Data(new_state, derived, self.layout)

    def _run_on_buffers(self, n_substeps: int, _context: Any, out: tuple[Any, Any], state: Any, ctrl: Any) -> None:
        self._engine.run(n_substeps, np.asarray(state), np.asarray(ctrl), np.asarray(out[0]), np.asarray(out[1]))

    def _run_on_copies(self, n_substeps: int, state: Any, ctrl: Any) -> tuple[np.ndarray, np.ndarray]:
        state, ctrl = np.asarray(state), np.asarray(ctrl)
        lead = np.broadcast_shapes(state.shape[:-1], ctrl.shape[:-1])
        new_state = np.empty((*lead, self.layout.n_state), np.float32)
        derived = np.empty((*lead, self.layout.n_derived), np.float32)
        self._engine.run(n_substeps, state, ctrl, new_state, derived)
        return new_state, derived


class _Engine:
    """The host side of ``NativePhysics``: arrays in, arrays out. Those of one number share one engine.

    It stays for good, because compiled programs may outlive whatever made them; its simulations, which are what takes
    memory, do not outlive the last ``NativePhysics``, and are made anew if a program still asks for them.
    """

    _all: ClassVar[dict[int, _Engine]] = {}

    @classmethod
    def of(cls, model: mujoco.MjModel, n_threads: int, layout: Layout) -> _Engine:
        """The engine of a model, for one more user."""
        number = _number_of(model, n_threads, layout)
        if number not in cls._all:
            engine = cls._all[number] = cls(model, n_threads, layout, number)
            host_call.register(number, lambda n_substeps, arrays, results: engine.run(n_substeps, *arrays, *results))
        cls._all[number]._users += 1
        cls._all[number]._told.clear()
        return cls._all[number]

    def leave(self) -> None:
        """One user less."""
        self._users -= 1
        if self._users == 0:
            self.pool.clear()

    def __init__(self, model: mujoco.MjModel, n_threads: int, layout: Layout, number: int):
        self.layout, self.number = layout, number
        self._users = 0
        self.pool = _BatchPool(model, n_threads, tuple(layout.derived_slots))
        try:
            with self.pool.batch(1):
                pass
        except (ValueError, mujoco.FatalError) as error:
            raise ValueError(f"physics 'native' cannot simulate this model: {error}") from error
        self._runs = _copy_plan(self.pool, layout)
        self._told: set[str] = set()

    def run(
        self, n_substeps: int, state: np.ndarray, ctrl: np.ndarray, new_state: np.ndarray, derived: np.ndarray
    ) -> None:
        """``n_substeps`` of mj_step, or mj_forward if that is 0. NumPy only.

        Calling into JAX from here could deadlock.

        Args:
          n_substeps: physics steps.
          state: (..., n_state) packed states.
          ctrl: (..., nu) controls, leading axes broadcast against those of ``state``.
          new_state: (..., n_state) float32, written.
          derived: (..., n_derived) float32, written.
        """
        lead = new_state.shape[:-1]
        count = math.prod(lead)
        if count == 0:
            return
        with self.pool.batch(count) as batch, np.errstate(all="ignore"):
            rows = batch.state.reshape(*lead, -1)
            for ours, theirs in self._runs:
                rows[..., theirs] = state[..., ours]
            rows[..., self.pool.ctrl] = ctrl
            finite = np.isfinite(batch.state.sum(axis=1))
            # MuJoCo prints and logs a warning when its counter leaves zero. Starting at one keeps
            # standard error and the user's folder clean, and the counter still tells.
            batch.warning[:] = 1
            bad = ~finite
            try:
                ids = None if finite.all() else np.flatnonzero(finite)
                if n_substeps:
                    batch.step(ids, n_substeps)
                else:
                    batch.forward(ids)
            except SimulationError as error:
                bad[error.ids] = True
                self._tell_once("error", f"{error}\nSuch simulations come back as NaN.")
            for ours, theirs in self._runs:
                new_state[..., ours] = rows[..., theirs]
            for name, slot in self.layout.derived:
                derived[..., slot.start : slot.start + slot.size] = batch.bind(name).reshape(*lead, slot.size)
            counts = batch.warning[..., 1] > 1
            if counts.any():
                bad |= counts[:, _FATAL_WARNINGS].any(axis=1)
                for kind in _MILD_WARNINGS:
                    if counts[:, kind].any():
                        info = int(batch.warning[counts[:, kind], kind, 0][0])
                        self._tell_once(f"warning {kind}", mujoco.mju_warningText(kind, info))
        if bad.any():
            new_state[bad.reshape(lead)] = np.nan
            derived[bad.reshape(lead)] = np.nan

    def _tell_once(self, kind: str, message: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            _logger.warning("MuJoCo: %s (said once)", message)


class _BatchPool:
    """Batches ready for use, by number of simulations.

    With several host devices callbacks run concurrently, and a ``Batch`` serves one caller at a
    time, so each call takes one out of the pool and puts it back.
    """

    def __init__(self, model: mujoco.MjModel, n_threads: int, derived: tuple[str, ...]):
        self._model = model
        self._n_threads = n_threads
        self._derived = derived
        # Garbage collection may clear the pool in the midst of what the lock protects.
        self._lock = threading.RLock()
        self._free: dict[int, list[Batch]] = defaultdict(list)
        self.ctrl = self.component("ctrl")

    def component(self, name: str) -> slice:
        """Columns of a state field in a batch's rows."""
        before, bit = 0, int(_STATE_COMPONENTS[name])
        for other in _STATE_COMPONENTS.values():
            if int(other) < bit:
                before += mujoco.mj_stateSize(self._model, int(other))
        return slice(before, before + mujoco.mj_stateSize(self._model, bit))

    @contextlib.contextmanager
    def batch(self, count: int) -> Iterator[Batch]:
        with self._lock:
            free = self._free[count]
            batch = free.pop() if free else None
        if batch is None:
            batch = Batch(self._model, count, min(self._n_threads, count))
            for name in self._derived:
                batch.bind(name)
        yield batch
        # Not after an exception: what state the batch is in is then unknown.
        with self._lock:
            self._free[count].append(batch)

    def clear(self) -> None:
        """Let go of all batches that are not in use."""
        with self._lock:
            self._free.clear()


def _number_of(model: mujoco.MjModel, n_threads: int, layout: Layout) -> int:
    """A number for all that a simulation's results depend on besides its arguments; the same in every process."""
    content = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, content)
    digest = hashlib.blake2b(content.tobytes(), digest_size=8)
    digest.update(repr((mujoco.__version__, n_threads, layout.state, layout.derived)).encode())
    return int.from_bytes(digest.digest()) >> 1


def _copy_plan(pool: _BatchPool, layout: Layout) -> list[tuple[slice, slice]]:
    """Pairs of (columns of our vector, columns of a batch row), neighbours joined."""
    plan: list[tuple[slice, slice]] = []
    for name, slot in layout.state:
        if slot.size == 0:
            continue
        ours, theirs = slice(slot.start, slot.start + slot.size), pool.component(name)
        if plan and plan[-1][0].stop == ours.start and plan[-1][1].stop == theirs.start:
            plan[-1] = (slice(plan[-1][0].start, ours.stop), slice(plan[-1][1].start, theirs.stop))
        else:
            plan.append((ours, theirs))
    return plan


class MjxPhysics:
    """MJX (``impl="jax"``) or MJX-Warp (``impl="warp"``) behind the interface.

    ``mjx.Data`` is built anew from the carried state in each call and reduced to the named fields
    at its end. All else in it is worked out again by every physics step anyway. What is carried
    has one row per environment throughout, so that choosing between two states by ``jnp.where``
    is right for Warp too, whose own data shares buffers between environments.
    """

    def __init__(self, mj_model: mujoco.MjModel, fields: Sequence[str] = (), impl: Impl = "jax"):
        self.impl: Impl = impl
        self.mj_model = mj_model
        self.layout = make_layout(mj_model, fields)
        self._initial = initial_vector(mj_model, self.layout)
        self.mjx_model = put_model(mj_model, impl)
        self._template = _make_mjx_data(mj_model, impl)
        for name, slot in self.layout.state + self.layout.derived:
            if slot.size and _mjx_field(self._template, name) is None:
                raise ValueError(
                    f"physics {impl!r} does not compute the data field {name!r}: leave it out of `fields`, or use "
                    "physics='native'"
                )
        self._advance = self._advance_sharing_buffers() if impl == "warp" else self._advance_one

    def init(self, **state: Any) -> Data:
        """See ``Physics``."""
        empty = jnp.zeros(self.layout.n_derived, jnp.float32)
        return self.forward(Data(jnp.asarray(self._initial), empty, self.layout).replace(**state))

    def forward(self, data: Data) -> Data:
        """See ``Physics``."""
        return self.step(data, data.ctrl, 0)

    def step(self, data: Data, ctrl: jax.Array, n_substeps: int = 1) -> Data:
        """See ``Physics``."""
        advance = functools.partial(self._advance, n_substeps)
        # mjx.step is written for one simulation: leading axes become vmaps.
        for _ in range(data.state.ndim - 1):
            advance = jax.vmap(advance)
        ctrl = jnp.broadcast_to(jnp.asarray(ctrl, jnp.float32), (*data.state.shape[:-1], self.mj_model.nu))
        state, derived = advance(data.state, ctrl)
        return Data(state, derived, self.layout)

    def _advance_one(
        self, n_substeps: int, state: jax.Array, ctrl: jax.Array, template: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        """``n_substeps`` of mj_step, or mj_forward if that is 0, on packed vectors of one simulation."""
        mjx = import_mjx()
        packed = Data(state, jnp.zeros(self.layout.n_derived), self.layout).replace(ctrl=ctrl)
        data = _as_constants(self._template if template is None else template)
        present = {name: getattr(packed, name) for name, slot in self.layout.state if slot.size}
        data = data.replace(**{name: value.astype(_mjx_field(data, name).dtype) for name, value in present.items()})
        if n_substeps == 0:
            data = mjx.forward(self.mjx_model, data)
        else:
            data = jax.lax.fori_loop(0, n_substeps, lambda _, d: mjx.step(self.mjx_model, d), data)
        return self._pack(data, self.layout.state), self._pack(data, self.layout.derived)

    def _pack(self, data: Any, slots: tuple[tuple[str, Slot], ...]) -> jax.Array:
        parts = [jnp.ravel(_mjx_field(data, name)).astype(jnp.float32) for name, slot in slots if slot.size]
        return jnp.concatenate(parts) if parts else jnp.zeros(0, jnp.float32)

    def _advance_sharing_buffers(self) -> Any:
        """``_advance_one`` for Warp, whose contact buffer is one for all environments of a batch.

        Its size is fixed when the data are made, so it has to grow with the batch. The size of the
        batch is known where ``vmap`` is applied, so that is where the data are made.
        """
        templates: dict[int, Any] = {}

        def many(n_substeps: int, states: jax.Array, ctrls: jax.Array) -> tuple[jax.Array, jax.Array]:
            n_envs = states.shape[0]
            if n_envs not in templates:
                templates[n_envs] = _make_mjx_data(self.mj_model, "warp", n_envs)
            one = functools.partial(self._advance_one, n_substeps, template=templates[n_envs])
            return jax.vmap(one)(states, ctrls)

        @functools.cache
        def batched(n_substeps: int) -> Any:
            @jax.custom_batching.custom_vmap
            def call(states: jax.Array, ctrls: jax.Array) -> tuple[jax.Array, jax.Array]:
                return many(n_substeps, states, ctrls)

            @call.def_vmap
            def _(axis_size: int, in_batched: Any, states: jax.Array, ctrls: jax.Array) -> Any:
                states, ctrls = _all_batched(axis_size, in_batched, states, ctrls)
                outer, inner = states.shape[:2]
                flat = call(*(x.reshape(outer * inner, x.shape[-1]) for x in (states, ctrls)))
                return tuple(x.reshape(outer, inner, x.shape[-1]) for x in flat), (True, True)

            return call

        @functools.cache
        def single(n_substeps: int) -> Any:
            @jax.custom_batching.custom_vmap
            def call(state: jax.Array, ctrl: jax.Array) -> tuple[jax.Array, jax.Array]:
                new_states, derived = batched(n_substeps)(state[None], ctrl[None])
                return new_states[0], derived[0]

            @call.def_vmap
            def _(axis_size: int, in_batched: Any, state: jax.Array, ctrl: jax.Array) -> Any:
                return batched(n_substeps)(*_all_batched(axis_size, in_batched, state, ctrl)), (True, True)

            return call

        return lambda n_substeps, state, ctrl: single(n_substeps)(state, ctrl)


def _all_batched(axis_size: int, in_batched: Sequence[bool], *arrays: jax.Array) -> list[jax.Array]:
    return [
        x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
        for x, batched in zip(arrays, in_batched, strict=True)
    ]


def _mjx_field(data: Any, name: str) -> Any:
    """A field of ``mjx.Data``, wherever the implementation keeps it; None if it has none."""
    value = vars(data).get(name)
    return vars(data._impl).get(name) if value is None else value


def import_mjx() -> Any:
    """``mujoco.mjx``, imported on first use (it takes seconds) and without its message about a missing Warp."""
    with contextlib.redirect_stdout(io.StringIO()):
        from mujoco import mjx
    return mjx


def put_model(mj_model: mujoco.MjModel, impl: Impl) -> Any:
    """``mj_model`` as an ``mjx.Model``.

    Raises:
      ValueError: Warp is not installed, or MJX lacks something that the model uses; the message
        names the element.
    """
    if impl == "warp":
        if importlib.util.find_spec("warp") is None:
            raise ValueError(
                "physics 'warp' needs Warp, which is not installed: install the extra `warp` (mujoco-mjx[warp])"
            )
        import warp  # pyright: ignore[reportMissingImports]

        # At its default it prints a banner and a line per kernel.
        warp.config.log_level = max(warp.config.log_level, warp.LOG_WARNING)
    mjx = import_mjx()
    try:
        model = mjx.put_model(mj_model, impl=impl)
        return _silence_iteration_limits(model) if impl == "warp" else model
    except NotImplementedError as error:
        raise ValueError(_unsupported_message(mj_model, impl, error)) from error


def _silence_iteration_limits(warp_model: Any) -> Any:
    """Keeps Warp from printing a line per physics step that uses all solver iterations.

    Few iterations are a choice (the humanoid makes one), so reaching their number is no news.
    """
    from mujoco.mjx.third_party.mujoco_warp import OverflowType

    silenced = int(OverflowType.ITERATIONS | OverflowType.LS_ITERATIONS)
    flags = int(warp_model.opt._impl.warn_overflow) & ~silenced
    return warp_model.tree_replace({"opt._impl.warn_overflow": flags})


def _make_mjx_data(mj_model: mujoco.MjModel, impl: Impl, n_envs: int = 1) -> Any:
    """``mjx.Data`` of the default state in NumPy; for Warp with room for the contacts of ``n_envs`` environments."""
    mjx = import_mjx()
    try:
        # Perhaps called while something else is being traced, which this is no part of.
        with jax.ensure_compile_time_eval():
            data = mjx.make_data(mj_model, impl=impl)
            if impl == "warp" and n_envs > 1:
                # Warp's own guess for one environment, so many times.
                contacts = _mjx_field(data, "contact__dist").shape[0]
                data = mjx.make_data(mj_model, impl=impl, naconmax=n_envs * contacts)
            return jax.device_get(data)
    except NotImplementedError as error:
        raise ValueError(_unsupported_message(mj_model, impl, error)) from error


def _as_constants(data: Any) -> Any:
    """NumPy leaves as JAX arrays, those of one value by that value: buffers for thousands of environments are
    zeros, and as arrays they would be written out in the compiled program."""

    def constant(leaf: Any) -> jax.Array:
        leaf = np.asarray(leaf)
        if leaf.size and (leaf == leaf.flat[0]).all():
            return jnp.full(leaf.shape, leaf.flat[0], leaf.dtype)
        return jnp.asarray(leaf)

    return jax.tree.map(constant, data)


def available_cpus() -> int:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# MuJoCo's enumerations in MJX's error messages, the MjModel field that holds them, and whose they are.
_TYPED_ELEMENTS = {
    "mjGEOM": (mujoco.mjtGeom, "geom_type", "geom", mujoco.mjtObj.mjOBJ_GEOM),
    "mjSENS": (mujoco.mjtSensor, "sensor_type", "sensor", mujoco.mjtObj.mjOBJ_SENSOR),
    "mjEQ": (mujoco.mjtEq, "eq_type", "equality", mujoco.mjtObj.mjOBJ_EQUALITY),
    "mjTRN": (mujoco.mjtTrn, "actuator_trntype", "actuator", mujoco.mjtObj.mjOBJ_ACTUATOR),
    "mjDYN": (mujoco.mjtDyn, "actuator_dyntype", "actuator", mujoco.mjtObj.mjOBJ_ACTUATOR),
    "mjGAIN": (mujoco.mjtGain, "actuator_gaintype", "actuator", mujoco.mjtObj.mjOBJ_ACTUATOR),
    "mjBIAS": (mujoco.mjtBias, "actuator_biastype", "actuator", mujoco.mjtObj.mjOBJ_ACTUATOR),
}


def _unsupported_message(mj_model: mujoco.MjModel, impl: Impl, error: NotImplementedError) -> str:
    """MJX's refusal in terms of the MJCF: which elements it is about."""
    elements = []
    for word in dict.fromkeys(re.findall(r"mj[A-Z]+_\w+", str(error))):
        enum, field, tag, kind = _TYPED_ELEMENTS.get(word.split("_")[0], (None, "", "", None))
        if enum is None or not hasattr(enum, word):
            continue
        for i in np.flatnonzero(getattr(mj_model, field) == int(getattr(enum, word))):
            name = mujoco.mj_id2name(mj_model, kind, int(i))
            elements.append(f"<{tag} name={name!r}>" if name else f"<{tag}> number {i}")
    if "Flex" in str(error):
        elements += [f"<flex> number {i}" for i in range(mj_model.nflex)]
    listed = ", ".join(dict.fromkeys(elements[:8])) + (", ..." if len(elements) > 8 else "")
    where = f" It concerns {listed}." if elements else ""
    reason = str(error).rstrip(".")
    return (
        f"physics {impl!r} cannot simulate this model: {reason}.{where} Use physics='native', which takes every MJCF, "
        "or change the model"
    )


def _missing_field_message(name: str, layout: Layout) -> str:
    kept = ", ".join([*layout.state_slots, *layout.derived_slots])
    if name in DATA_FIELDS:
        return (
            f"this environment's data does not hold {name!r}: add it to the `fields` that the environment passes to "
            f"MjxEnv.__init__, e.g. fields=(..., {name!r}). It holds: {kept}"
        )
    return f"data has no field {name!r}{_did_you_mean(name, DATA_FIELDS)}. It holds: {kept}"


def _not_state_message(name: str, layout: Layout) -> str:
    settable = ", ".join(layout.state_slots)
    if name in _OPTIONAL_STATE:
        return f"{name!r} is not part of this data's state: add it to the environment's `fields`. Settable: {settable}"
    if name in layout.derived_slots or name in DATA_FIELDS:
        return f"{name!r} is computed by the physics: set state fields and call physics.forward. Settable: {settable}"
    return f"data has no field {name!r}{_did_you_mean(name, layout.state_slots)}. Settable: {settable}"


def _did_you_mean(name: str, names: Any) -> str:
    close = difflib.get_close_matches(str(name), list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
