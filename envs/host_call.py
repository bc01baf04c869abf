"""Calling Python from a compiled program by a number that means the same in the next process.

JAX's own callbacks write the address of a Python object into the program, so such a program is never kept in the
compilation cache: each start of a run on the native engine would compile everything again. Here the program holds a
number that the caller derives from what the function does, and the function is looked up when it is called.

The other side is XLA's foreign function interface, a C interface that is described by ``xla/ffi/api/c_api.h`` in
``jax.ffi.include_dir()``. Only the parts of its structures that are needed are declared, and sizes are checked before
anything is read, so that a version with another layout is refused instead of misread.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any

import jax
import numpy as np

HostFunction = Callable[[int, list[np.ndarray], list[np.ndarray]], None]
"""Takes a number, the arguments and the results, which it writes. It must not call JAX."""

_logger = logging.getLogger(__name__)
_TARGET = "nnx_ppo_host_call"
_FUNCTIONS: dict[int, HostFunction] = {}
_FLOAT32, _METADATA, _EXECUTE, _INTERNAL_ERROR = 11, 1, 3, 13


def register(number: int, function: HostFunction) -> None:
    """Have ``host_call(number, ...)`` call ``function``, also in programs that were compiled before.

    Args:
      number: stands for everything that the results depend on besides the arguments; below 2**63.
      function: the function. It is kept for good: compiled programs may need it at any time.
    """
    _FUNCTIONS[number] = function


def host_call(number: int, argument: int, results: Sequence[jax.ShapeDtypeStruct], *arrays: jax.Array) -> Any:
    """Call a registered function with float32 arrays from compiled code; under ``vmap`` once for all.

    Leading axes of length 1 stand for arrays that a ``vmap`` does not map over.
    """
    call = jax.ffi.ffi_call(_TARGET, results, vmap_method="expand_dims")
    return call(*arrays, function=np.int64(number), argument=np.int64(argument))


@functools.cache
def available() -> bool:
    """Whether this version of JAX takes the handler; registers it at the first call."""
    if not hasattr(jax, "ffi"):
        return False
    try:
        jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(ctypes.cast(_HANDLER, c_void_p)), platform="cpu")
        # Said to work only after it has worked.
        register(0, lambda factor, arrays, results: np.copyto(results[0], factor * arrays[0]))
        shape = jax.ShapeDtypeStruct((2,), np.float32)
        with jax.ensure_compile_time_eval(), jax.default_device(jax.local_devices(backend="cpu")[0]):
            (found,) = jax.jit(lambda x: host_call(0, 3, [shape], x))(np.array([1, 2], np.float32))
            return np.array_equal(found, [3, 6])
    except Exception as error:
        _logger.info("programs on the native engine will not be cached: %s: %s", type(error).__name__, error)
        return False


# --- the C interface ------------------------------------------------------------------------------------------


class _Version(Structure):
    _fields_ = (("size", c_size_t), ("extension", c_void_p), ("major", c_int), ("minor", c_int))


class _Api(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("extension", c_void_p),
        ("version", _Version),
        ("internal", c_void_p),
        ("create_error", c_void_p),
    )


class _ErrorArgs(Structure):
    _fields_ = (("size", c_size_t), ("extension", c_void_p), ("message", c_char_p), ("code", c_int))


class _Metadata(Structure):
    _fields_ = (("size", c_size_t), ("version", _Version), ("traits", c_uint32))


class _Extension(Structure):
    _fields_ = (("size", c_size_t), ("type", c_int), ("next", c_void_p), ("metadata", POINTER(_Metadata)))


class _Buffer(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("extension", c_void_p),
        ("dtype", c_int),
        ("data", c_void_p),
        ("rank", c_int64),
        ("dims", POINTER(c_int64)),
    )


class _Buffers(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("extension", c_void_p),
        ("count", c_int64),
        ("types", c_void_p),
        ("buffers", POINTER(POINTER(_Buffer))),
    )


class _Text(Structure):
    _fields_ = (("start", c_void_p), ("length", c_size_t))


class _Scalar(Structure):
    _fields_ = (("dtype", c_int), ("value", POINTER(c_int64)))


class _Attributes(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("extension", c_void_p),
        ("count", c_int64),
        ("types", c_void_p),
        ("names", POINTER(POINTER(_Text))),
        ("values", POINTER(POINTER(_Scalar))),
    )


class _Frame(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("extension", POINTER(_Extension)),
        ("api", POINTER(_Api)),
        ("context", c_void_p),
        ("stage", c_int),
        ("args", _Buffers),
        ("results", _Buffers),
        ("attributes", _Attributes),
    )


def _handle(frame: Any) -> int | None:
    frame = frame.contents
    try:
        if frame.size < ctypes.sizeof(_Frame):
            raise TypeError(f"a call frame of {frame.size} bytes")
        if frame.extension and frame.extension.contents.type == _METADATA:
            metadata = frame.extension.contents.metadata.contents
            metadata.version.major, metadata.version.minor = _version(frame)
        elif frame.stage == _EXECUTE:
            numbers = _numbers(frame.attributes)
            function = _FUNCTIONS.get(numbers["function"])
            if function is None:
                raise KeyError("a compiled program calls a function that this process has not registered")
            function(numbers["argument"], _arrays(frame.args), _arrays(frame.results))
        return None
    except BaseException as error:  # Nothing may pass through C.
        return _error(frame, f"{type(error).__name__}: {error}")


def _version(frame: _Frame) -> tuple[int, int]:
    version = frame.api.contents.version
    return version.major, version.minor


def _numbers(attributes: _Attributes) -> dict[str, int]:
    found = {}
    for i in range(attributes.count):
        name = attributes.names[i].contents
        found[ctypes.string_at(name.start, name.length).decode()] = attributes.values[i].contents.value[0]
    return found


def _arrays(buffers: _Buffers) -> list[np.ndarray]:
    return [_array(buffers.buffers[i].contents) for i in range(buffers.count)]


def _array(buffer: _Buffer) -> np.ndarray:
    if buffer.size < ctypes.sizeof(_Buffer) or buffer.dtype != _FLOAT32:
        raise TypeError(f"a buffer of {buffer.size} bytes and dtype {buffer.dtype}")
    shape = tuple(buffer.dims[: buffer.rank])
    count = int(np.prod(shape, dtype=np.int64))
    if count == 0:
        return np.empty(shape, np.float32)
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(buffer.data)).reshape(shape)


def _error(frame: _Frame, message: str) -> int | None:
    create = ctypes.CFUNCTYPE(c_void_p, POINTER(_ErrorArgs))(frame.api.contents.create_error)
    return create(ctypes.byref(_ErrorArgs(ctypes.sizeof(_ErrorArgs), None, message.encode(), _INTERNAL_ERROR)))


_HANDLER = ctypes.CFUNCTYPE(c_void_p, POINTER(_Frame))(_handle)
