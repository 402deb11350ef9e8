"""`windrow.gelu` against the f64 reference."""

import numpy as np
import pytest
import reference
import windrow
from arrays import dtypes, normal, strided
from hypothesis import given
from hypothesis import strategies as st

shapes = st.lists(st.integers(0, 9), min_size=0, max_size=4).map(tuple)
approximations = st.sampled_from(["none", "tanh"])


@given(st.data(), shapes, dtypes, approximations)
def test_any_strides(data, shape, dtype, approximate):
    x = data.draw(strided(shape, dtype))
    reference.assert_close(windrow.gelu(x, approximate=approximate), reference.gelu(x, approximate))


@given(st.data(), shapes.filter(len), dtypes, approximations, st.booleans(), st.booleans())
def test_bias_and_gate(data, shape, dtype, approximate, with_gate, wide_bias):
    x = data.draw(strided(shape, dtype))
    bias = normal(shape[-1:], np.float32 if wide_bias else dtype)
    gate = data.draw(strided(shape, dtype)) if with_gate else None
    y = windrow.gelu(x, bias, gate, approximate=approximate)
    want = reference.gelu(reference.f64(x) + reference.f64(bias), approximate)
    # The sum may cancel, which f32 arithmetic pays with an error of the summands' size.
    scale = np.abs(want) + np.abs(reference.f64(x)) + np.abs(reference.f64(bias))
    if with_gate:
        want, scale = want * reference.f64(gate), scale * np.abs(reference.f64(gate))
    reference.assert_close(y, want, scale)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [np.float16, reference.BF16])
def test_every_half_value(dtype, approximate):
    x = np.arange(2**16, dtype=np.uint16).view(dtype)
    y = windrow.gelu(x, approximate=approximate)
    finite = np.isfinite(reference.f64(x))
    reference.assert_close(y[finite], reference.gelu(x[finite], approximate))
    nan = np.isnan(reference.f64(x))
    assert np.isnan(reference.f64(y[nan])).all()
    infinite = reference.f64(y[np.isinf(reference.f64(x))])
    assert sorted(infinite) == [0.0, np.inf]


def test_in_place():
    x = normal((33, 70))
    want = reference.gelu(x)
    assert windrow.gelu(x, out=x) is x
    reference.assert_close(x, want)
    with pytest.raises(ValueError, match="shares memory"):
        windrow.gelu(x[:-1], out=x[1:])


def test_errors():
    x = normal((2, 3))
    with pytest.raises(ValueError, match="approximate"):
        windrow.gelu(x, approximate="erf")
    with pytest.raises(ValueError, match=r"`bias` has shape \[2\], expected"):
        windrow.gelu(x, normal((2,)))
    with pytest.raises(ValueError, match="`gate` has shape"):
        windrow.gelu(x, gate=normal((3, 2)))
    with pytest.raises(TypeError, match="`bias` is f16"):
        windrow.gelu(x, normal((3,), np.float16))
    with pytest.raises(ValueError, match="has shape"):
        windrow.gelu(x, out=normal((2, 4)))
    with pytest.raises(TypeError, match="is f16, expected f32"):
        windrow.gelu(x, out=normal((2, 3), np.float16))
    with pytest.raises(ValueError, match="several elements to the same memory"):
        windrow.gelu(x, out=np.lib.stride_tricks.as_strided(x, (2, 3), (0, 4)))
