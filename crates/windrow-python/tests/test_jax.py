"""JAX arrays in and out. Runs where JAX is installed."""

import numpy as np
import pytest
import reference
import windrow
from arrays import normal

jax = pytest.importorskip("jax")
jnp = jax.numpy
# Beside NumPy's arrays JAX's have to be in main memory; without this they are on a GPU where there is one.
jax.config.update("jax_default_device", jax.devices("cpu")[0])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_same_kind_comes_back(dtype):
    x = jnp.asarray(normal((5, 7)), dtype)
    y = windrow.gelu(x)
    assert isinstance(y, jax.Array) and y.dtype == x.dtype and y.shape == x.shape
    reference.assert_close(np.asarray(y), reference.gelu(np.asarray(x)))


def test_every_function():
    x, weight = jnp.asarray(normal((2, 6, 9))), jnp.asarray(normal((6, 4)))
    y, states = windrow.causal_conv1d(x, weight, activation="silu", return_final_states=True)
    assert isinstance(y, jax.Array) and isinstance(states, jax.Array)
    want = windrow.causal_conv1d(np.asarray(x), np.asarray(weight), activation="silu")
    assert (np.asarray(y) == want).all() and (np.asarray(states) == np.asarray(x)[:, :, -3:]).all()
    image, filters = jnp.asarray(normal((1, 3, 8, 8))), jnp.asarray(normal((4, 3, 3, 3)))
    assert windrow.conv2d(image, filters, padding=1).shape == (1, 4, 8, 8)


def test_beside_numpy():
    x = jnp.asarray(normal((2, 6, 9)))
    weight = normal((6, 4))
    want = windrow.causal_conv1d(np.asarray(x), weight)
    assert (np.asarray(windrow.causal_conv1d(x, weight)) == want).all()


def test_arrays_of_jax_are_never_written():
    x = jnp.asarray(normal((2, 3)))
    before = np.asarray(x).copy()
    with pytest.raises(ValueError, match="read-only"):
        windrow.gelu(x, out=x)
    assert (np.asarray(x) == before).all()


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="JAX has no GPU")
def test_arrays_on_a_gpu_stay_there():
    gpu = jax.devices("gpu")[0]
    x, weight = (jax.device_put(normal(shape), gpu) for shape in [(2, 6, 9), (6, 4)])
    y = windrow.causal_conv1d(x, weight, activation="silu")
    assert y.devices() == {gpu}
    reference.assert_close(np.asarray(y), *reference.causal_conv1d(x, weight, activation="silu"))
