"""Arrays in and out: what is taken in place, what comes back, what is refused."""

import gc
import threading

import numpy as np
import pytest
import reference
import windrow
from arrays import Producer, normal


def test_numpy_in_numpy_out():
    x = normal((3, 4))
    y = windrow.gelu(x)
    assert type(y) is np.ndarray and y.dtype == x.dtype and y.flags.writeable
    reference.assert_close(y, reference.gelu(x))


def test_result_outlives_everything():
    y = windrow.gelu(normal((100, 1000)))
    want = y.copy()
    gc.collect()
    # Would take the memory if it had been given back.
    others = [windrow.gelu(normal((100, 1000), seed=i)) for i in range(5)]
    assert (y == want).all() and len(others) == 5


def test_bfloat16_of_numpy_comes_back_as_such():
    x = normal((5, 7), reference.BF16)
    y = windrow.gelu(x)
    assert y.dtype == reference.BF16 and y.flags.writeable
    out = np.zeros_like(x)
    assert windrow.gelu(x, out=out) is out
    assert (out == y).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, reference.BF16])
def test_another_byte_order_is_refused(dtype):
    x = normal((5, 7), dtype)
    other = x.astype(np.dtype(dtype).newbyteorder("S"))
    with pytest.raises(ValueError, match="native byte order"):
        windrow.gelu(other)
    with pytest.raises(ValueError, match="native byte order"):
        windrow.gelu(x, out=other)
    assert (windrow.gelu(other.astype(dtype)) == windrow.gelu(x)).all()


def test_read_only_input_is_taken_and_output_is_not():
    x = normal((3, 4))
    x.flags.writeable = False
    reference.assert_close(windrow.gelu(x), reference.gelu(x))
    with pytest.raises(ValueError, match="`out` is read-only"):
        windrow.gelu(normal((3, 4)), out=x)
    with pytest.raises(ValueError, match="`conv_state` is read-only"):
        state = np.zeros((1, 2, 3), np.float32)
        state.flags.writeable = False
        windrow.causal_conv1d_update(normal((1, 2)), state, normal((2, 4)))


def test_out_is_written_by_its_strides():
    x = normal((4, 6))
    memory = np.zeros((6, 8), np.float32)
    out = memory.T[::2]
    assert windrow.gelu(x, out=out) is out
    reference.assert_close(out, reference.gelu(x))
    assert (memory.T[1::2] == 0).all()


@pytest.mark.parametrize("version", [None, (1, 0), (1, 3)])
def test_capsules_of_every_version(version):
    x = normal((2, 3, 5))
    for given in [
        Producer(x, version=version),
        Producer(x, version=version, strides=(15, 5, 1)),
        Producer(x, version=version, byte_offset=64),
        Producer(x, version=version, device=(3, 0)),  # pinned host memory
    ]:
        y = windrow.gelu(given)
        # Of the producer's kind nothing is known: the result is ours, and anybody can take it.
        assert type(y) is windrow.Tensor and y.shape == (2, 3, 5) and y.dtype == "f32"
        reference.assert_close(np.from_dlpack(y), reference.gelu(x))
    back = windrow.gelu(Producer(x, version=version, strides=(0, -5, 1), byte_offset=0, shape=(4, 1, 5)))
    assert np.from_dlpack(back).shape == (4, 1, 5)


def test_capsule_flags():
    x, y = normal((2, 3)), np.zeros((2, 3), np.float32)
    windrow.gelu(x, out=Producer(y, version=(1, 0)))
    reference.assert_close(y, reference.gelu(x))
    with pytest.raises(ValueError, match="read-only"):
        windrow.gelu(x, out=Producer(y, version=(1, 0), flags=1))
    with pytest.raises(BufferError, match="version 2"):
        windrow.gelu(Producer(x, version=(2, 0)))


def test_what_no_kernel_can_take():
    x = normal((2, 3))
    with pytest.raises(ValueError, match="device of DLPack type 8"):
        windrow.gelu(Producer(x, device=(8, 0)))
    with pytest.raises(TypeError, match="complex64"):
        windrow.gelu(Producer(x, dtype=(5, 64, 1)))
    with pytest.raises(TypeError, match="float32x2"):
        windrow.gelu(Producer(x, dtype=(2, 32, 2)))
    with pytest.raises(TypeError, match="bool"):
        windrow.gelu(x > 0)
    with pytest.raises(TypeError, match="`x` is f64, expected"):
        windrow.gelu(x.astype(np.float64))
    with pytest.raises(TypeError, match="uint16"):
        windrow.gelu(x.astype(np.uint16))
    with pytest.raises(TypeError, match="`x` is list, expected an array with `__dlpack__`"):
        windrow.gelu([1.0, 2.0])
    with pytest.raises(ValueError, match="no memory"):
        windrow.gelu(Producer(x, null=True))
    with pytest.raises(ValueError, match="no multiple of its element size"):
        windrow.gelu(np.frombuffer(b"\0" * 9, np.float32, 2, 1))
    with pytest.raises(ValueError, match="9 dimensions"):
        windrow.gelu(Producer(x, shape=(1,) * 9))
    with pytest.raises(ValueError, match="overflow"):
        windrow.gelu(Producer(x, shape=(2**40, 2**40), strides=(0, 0)))
    with pytest.raises(ValueError, match="overflow"):
        windrow.gelu(Producer(x, shape=(-1, 3)))
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        windrow.gelu()


def test_memory_that_cannot_be_had():
    x = Producer(normal((1, 1)), shape=(2**50, 2), strides=(0, 0))
    with pytest.raises(MemoryError, match="out of memory on cpu: 9007199254740992 bytes"):
        windrow.gelu(x)


def test_empty_and_scalar():
    for shape in [(0,), (3, 0, 2), ()]:
        x = np.ones(shape, np.float32)
        y = windrow.gelu(x)
        assert y.shape == shape
        reference.assert_close(y, reference.gelu(x))


def test_a_tensor_of_ours_goes_anywhere():
    y = windrow.gelu(Producer(normal((2, 3))))
    assert y.__dlpack_device__() == (1, 0)
    assert "dltensor_versioned" in repr(y.__dlpack__(max_version=(1, 0)))
    assert 'dltensor"' in repr(y.__dlpack__())
    with pytest.raises(BufferError, match="no stream"):
        y.__dlpack__(stream=1)
    with pytest.raises(BufferError, match="in place"):
        y.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="in place"):
        y.__dlpack__(dl_device=(2, 0))
    reference.assert_close(windrow.gelu(y, out=np.zeros((2, 3), np.float32)), reference.gelu(np.from_dlpack(y)))


def test_other_threads_run_meanwhile():
    x = normal((512, 4096))
    want = windrow.gelu(x)
    results = [None] * 4

    def work(i):
        for _ in range(5):
            results[i] = windrow.gelu(x)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all((r == want).all() for r in results)


def test_device_by_name():
    x = normal((2, 3))
    assert (windrow.gelu(x, device="cpu") == windrow.gelu(x)).all()
    with pytest.raises(ValueError, match="`device` is mars"):
        windrow.gelu(x, device="mars")
    with pytest.raises(RuntimeError, match="no device cuda"):
        windrow.gelu(x, device="cuda:4000")
