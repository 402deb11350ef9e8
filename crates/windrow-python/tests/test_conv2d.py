"""`windrow.conv2d` and `Conv2dPlan` against the f64 reference."""

import numpy as np
import pytest
import reference
import windrow
from arrays import dtypes, normal, strided
from hypothesis import given
from hypothesis import strategies as st

small = st.integers(1, 12)
activations = st.sampled_from(
    [None, "silu", "relu", "relu6", "leaky_relu", "leaky_relu(-0.5)", "hardswish", "gelu", "gelu_tanh"]
)


@given(st.data(), st.integers(0, 3), small, small, small, small, dtypes, activations)
def test_3x3(data, n, c, h, w, k, dtype, activation):
    padding = data.draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    x = data.draw(strided((n, c, h, w), dtype))
    weight = data.draw(strided((k, c, 3, 3), dtype))
    bias = data.draw(st.none() | st.sampled_from([dtype, np.dtype(np.float32)]).map(lambda t: normal((k,), t)))
    y = windrow.conv2d(x, weight, bias, padding=padding, activation=activation)
    reference.assert_close(
        y, *reference.conv2d(x, weight, bias, padding=padding, activation=activation)
    )


@given(st.data(), st.integers(1, 3), dtypes)
def test_every_option(data, groups, dtype):
    pairs = lambda low, high: st.tuples(st.integers(low, high), st.integers(low, high))
    stride, padding, dilation = (data.draw(pairs(*r)) for r in [(1, 3), (0, 2), (1, 2)])
    r, s = data.draw(pairs(1, 5))
    h = data.draw(st.integers(dilation[0] * (r - 1) + 1, 14))
    w = data.draw(st.integers(dilation[1] * (s - 1) + 1, 14))
    c, k = groups * data.draw(st.integers(1, 3)), groups * data.draw(st.integers(1, 3))
    x = data.draw(strided((2, c, h, w), dtype))
    weight = normal((k, c // groups, r, s), dtype)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    reference.assert_close(
        windrow.conv2d(x, weight, **options), *reference.conv2d(x, weight, **options)
    )


@given(st.data(), small, small, small, st.integers(1, 3), dtypes, activations)
def test_residual(data, c, k, size, r, dtype, activation):
    x = data.draw(strided((2, c, size + 2, size), dtype))
    weight, bias = normal((k, c, r, r), dtype), normal((k,), dtype)
    options = {"padding": r // 2, "activation": activation}
    residual = windrow.conv2d(x, weight, **options)
    residual += normal(residual.shape, dtype)
    y = windrow.conv2d(x, weight, bias, residual=residual, **options)
    want = reference.conv2d(x, weight, bias, residual=residual, **options)
    reference.assert_close(y, *want)
    with pytest.raises(ValueError, match="`residual`"):
        windrow.conv2d(x, weight, bias, residual=residual[:1], **options)
    with pytest.raises(ValueError, match="`out` shares memory with `residual`"):
        windrow.conv2d(x, weight, bias, residual=residual, out=residual, **options)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("c, k, size", [(3, 8, 20), (32, 48, 17), (64, 64, 30)])
def test_every_algorithm(c, k, size, channels_last):
    x, weight, bias = normal((2, c, size, size)), normal((k, c, 3, 3)), normal((k,))
    if channels_last:
        x = np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    want, scale = reference.conv2d(x, weight, bias, padding=1, activation="relu")
    options = {"padding": 1, "activation": "relu", "accuracy": "half"}
    algorithms = windrow.Conv2dPlan(x, weight, bias, **options).algorithms
    assert {"direct", "im2col_gemm"} < set(algorithms)
    assert any(name.startswith("winograd") for name in algorithms)
    for algorithm in algorithms:
        plan = windrow.Conv2dPlan(x, weight, bias, algorithm=algorithm, **options)
        assert plan.algorithm == algorithm and algorithm.split("_")[0] in plan.explain()
        assert plan.workspace_bytes >= 0
        y = plan(x, weight, bias)
        assert (y.strides[1] < y.strides[3]) == channels_last
        reference.assert_close(y, want, scale)
        packed = plan.pack(weight)
        out = np.empty_like(y)
        assert plan(x, packed, bias, out=out) is out
        assert np.array_equal(out, y)
        direct = windrow.conv2d(x, weight, bias, algorithm=algorithm, **options)
        assert np.array_equal(direct, y)


def test_errors():
    x, weight = normal((1, 4, 8, 8)), normal((6, 4, 3, 3))
    with pytest.raises(ValueError, match="`x` has 3 dimensions"):
        windrow.conv2d(x[0], weight)
    with pytest.raises(ValueError, match="`w"):
        windrow.conv2d(x, normal((6, 5, 3, 3)))
    with pytest.raises(ValueError, match="stride"):
        windrow.conv2d(x, weight, stride=0)
    with pytest.raises(ValueError, match="groups"):
        windrow.conv2d(x, weight, groups=3)
    with pytest.raises(ValueError, match="`bias` has shape"):
        windrow.conv2d(x, weight, normal((5,)))
    with pytest.raises(TypeError, match="is f16, expected f32"):
        windrow.conv2d(x, weight.astype(np.float16))
    with pytest.raises(ValueError, match="accuracy"):
        windrow.conv2d(x, weight, accuracy="double")
    with pytest.raises(ValueError, match="algorithm"):
        windrow.conv2d(x, weight, algorithm="fft")
    with pytest.raises(NotImplementedError, match="stride|Winograd|winograd"):
        windrow.conv2d(x, weight, stride=2, algorithm="winograd_gemm_f4")
    with pytest.raises(ValueError, match="one for each direction"):
        windrow.conv2d(x, weight, stride=(1, 2, 3))
    with pytest.raises(ValueError, match="`padding` is -1"):
        windrow.conv2d(x, weight, padding=-1)
    plan = windrow.Conv2dPlan(x, weight)
    with pytest.raises(ValueError, match="`x` has shape"):
        plan(normal((1, 4, 9, 9)), weight)
    with pytest.raises(TypeError, match="`weight` is int"):
        plan(x, 3)
