"""A stand-in for PyTorch's build for ROCm, whose tensors say that they are on "cuda", over the emulator of AMD's chips.

Run as a program in a process of its own: compares each function on such tensors with the same on NumPy's arrays.
"""

import ctypes
import math
import os
import sys
from types import ModuleType, SimpleNamespace

import numpy as np

hip = ctypes.CDLL(os.path.join(os.environ["WINDROW_HIP_PATH"], "libamdhip64.so"))
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
STREAM = 0


def checked(status):
    assert status == 0, status


class DType:
    def __init__(self, name):
        self.name, self.size = name, np.dtype(name).itemsize

    def __str__(self):
        return f"torch.{self.name}"


DTYPES = {name: DType(name) for name in ("float32", "float16", "int32", "int64")}


class Tensor:
    """What the package asks of a tensor of PyTorch before 2.10."""

    device = SimpleNamespace(type="cuda", index=0)
    requires_grad = False

    def __init__(self, shape, strides, dtype):
        self.shape, self._strides, self.dtype = tuple(shape), tuple(strides), dtype
        reach = 1 + sum((n - 1) * s for n, s in zip(self.shape, self._strides, strict=True))
        self.bytes = max(1, reach if math.prod(self.shape) else 0) * dtype.size
        memory = ctypes.c_void_p()
        checked(hip.hipMalloc(ctypes.byref(memory), ctypes.c_size_t(self.bytes)))
        self._address = memory.value

    def __del__(self):
        hip.hipFree(ctypes.c_void_p(self._address))

    def data_ptr(self):
        return self._address

    def stride(self):
        return self._strides

    def is_neg(self):
        return False

    def numpy(self):
        flat = np.empty(self.bytes // self.dtype.size, self.dtype.name)
        to, size = ctypes.c_void_p(flat.ctypes.data), ctypes.c_size_t(self.bytes)
        checked(hip.hipMemcpy(to, ctypes.c_void_p(self._address), size, DEVICE_TO_HOST))
        strides = [s * self.dtype.size for s in self._strides]
        return np.lib.stride_tricks.as_strided(flat, self.shape, strides).copy()


def empty_strided(shape, strides, *, device, dtype):
    assert device is Tensor.device
    made.append(shape)
    return Tensor(shape, strides, dtype)


def tensor(array):
    result = Tensor(array.shape, [s // array.itemsize for s in array.strides], DTYPES[array.dtype.name])
    size = ctypes.c_size_t(array.nbytes)
    checked(hip.hipMemcpy(ctypes.c_void_p(result.data_ptr()), ctypes.c_void_p(array.ctypes.data), size, HOST_TO_DEVICE))
    return result


def current_stream(index):
    assert index == 0
    return STREAM


def stand_in():
    """Puts modules named as PyTorch's in their place."""
    names = ("torch", "torch.autograd", "torch.autograd.profiler", "torch.autograd.forward_ad", "torch.autograd.graph")
    modules = {name: ModuleType(name) for name in names}
    torch, _, profiler, forward_ad, graph = modules.values()
    no = lambda: False
    torch.Tensor, torch.empty_strided, torch.is_grad_enabled = Tensor, empty_strided, no
    torch.version = SimpleNamespace(hip="6.4", cuda=None)
    torch.nn = SimpleNamespace(Parameter=type("Parameter", (Tensor,), {}))
    torch._C = SimpleNamespace(
        _cuda_getCurrentRawStream=current_stream,
        _is_any_autocast_enabled=no,
        _len_torch_function_stack=lambda: 0,
        _len_torch_dispatch_stack=lambda: 0,
        _is_tracing=no,
        _are_functorch_transforms_active=no,
    )
    for name, dtype in DTYPES.items():
        setattr(torch, name, dtype)
    profiler._is_profiler_enabled, forward_ad._current_level = False, -1
    graph.increment_version = changed.append
    sys.modules.update(modules)


made, changed = [], []
stand_in()

import windrow  # noqa: E402

rng = np.random.default_rng(0)


def random(*shape, dtype=np.float32):
    return rng.standard_normal(shape, np.float32).astype(dtype)


def compare(function, arrays, tolerance, **options):
    """Of arrays and tensors with the same values."""
    tensors = [tensor(a) for a in arrays]
    got, want = function(*tensors, **options), function(*arrays, **options)
    assert type(got) is Tensor and got.shape == want.shape, got
    for on_device, array in [(got, want), *zip(tensors, arrays, strict=True)]:
        np.testing.assert_allclose(on_device.numpy(), array, atol=tolerance, rtol=tolerance)
    return got


for dtype, tolerance in [(np.float32, 1e-5), (np.float16, 2e-3)]:
    compare(windrow.gelu, [random(3, 70, dtype=dtype)], tolerance)
    # Channels-last, as PyTorch lays it out.
    image = random(2, 6, 9, 8, dtype=dtype).transpose(0, 3, 1, 2)
    y = compare(windrow.conv2d, [image, random(4, 8, 3, 3, dtype=dtype)], 10 * tolerance, activation="relu")
    assert y.stride()[1] == 1
    compare(windrow.causal_conv1d, [random(2, 5, 33, dtype=dtype), random(5, 4, dtype=dtype)], 4 * tolerance)
    states = [random(2, 5, dtype=dtype), random(2, 5, 3, dtype=dtype), random(5, 4, dtype=dtype)]
    compare(windrow.causal_conv1d_update, states, 4 * tolerance)
assert made, "memory of results is PyTorch's"

out = tensor(np.zeros((3, 70), np.float32))
assert windrow.gelu(tensor(random(3, 70)), out=out) is out
assert changed[-1] is out and np.any(out.numpy())
try:
    windrow.gelu(tensor(random(4)), device="cuda:0")
except ValueError as error:
    assert "is on hip:0, expected cuda:0" in str(error), error
else:
    raise AssertionError("a tensor of ROCm is on no CUDA device")
# NumPy's arrays by way of the device.
x = random(4, 30)
np.testing.assert_allclose(windrow.gelu(x, device="hip:0"), windrow.gelu(x), atol=1e-5)
print("all as on the CPU")
