"""Hypothesis strategies for arrays, and producers of unusual DLPack capsules."""

import ctypes

import numpy as np
from hypothesis import strategies as st
from reference import DTYPES


def normal(shape, dtype=np.float32, seed=0):
    return np.asarray(np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


@st.composite
def strided(draw, shape, dtype):
    """An array of this shape whose memory order, gaps and directions are arbitrary."""
    rank = len(shape)
    order = draw(st.permutations(range(rank)))
    steps = draw(st.lists(st.sampled_from([1, 1, 1, 2, -1, -2]), min_size=rank, max_size=rank))
    offset = draw(st.integers(0, 3))
    memory = [shape[d] * abs(steps[d]) + offset for d in order]
    base = normal(memory, dtype, seed=draw(st.integers(0, 99)))
    base = base.transpose([order.index(d) for d in range(rank)])
    views = tuple(slice(offset, offset + n * abs(s)) for n, s in zip(shape, steps, strict=True))
    directions = tuple(slice(None, None, s) for s in steps)
    array = np.asarray(base[(*views, ...)][(*directions, ...)])
    assert array.shape == tuple(shape)
    return array


dtypes = st.sampled_from(DTYPES)


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [
        ("dl_tensor", _Tensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", _Tensor),
    ]


class Producer:
    """Exports a contiguous NumPy array as the arguments say, whatever it really is."""

    def __init__(
        self,
        array,
        *,
        version=None,
        flags=0,
        device=(1, 0),
        dtype=None,
        strides=None,
        byte_offset=0,
        shape=None,
        null=False,
    ):
        self.array, self.device, self.version = array, device, version
        shape = array.shape if shape is None else shape
        code = {"f": 2, "i": 0, "u": 1}[array.dtype.kind]
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        self.strides = strides and (ctypes.c_int64 * len(strides))(*strides)
        tensor = _Tensor(
            0 if null else array.ctypes.data - byte_offset,
            _Device(*device),
            len(shape),
            _Type(*(dtype or (code, 8 * array.dtype.itemsize, 1))),
            self.shape,
            self.strides,
            byte_offset,
        )
        if version is None:
            self.managed = _Managed(tensor)
        else:
            self.managed = _ManagedVersioned(*version, flags=flags, dl_tensor=tensor)

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **kwargs):
        if self.version is None and "max_version" in kwargs:
            raise TypeError("a producer from before DLPack 1.0 does not know max_version")
        name = b"dltensor" if self.version is None else b"dltensor_versioned"
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        # The name must live as long as the capsule.
        self.name = ctypes.create_string_buffer(name)
        return new(ctypes.addressof(self.managed), ctypes.cast(self.name, ctypes.c_char_p), None)
