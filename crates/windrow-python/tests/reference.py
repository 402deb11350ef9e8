"""Plain f64 versions of the operators, and what counts as close to them."""

import math

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float32), np.dtype(np.float16), BF16]

TOLERANCE = {np.dtype(np.float32): 1e-5, np.dtype(np.float16): 2e-3, BF16: 1.6e-2}
# Half the spacing of the smallest numbers: what rounding alone may change near zero.
SMALLEST = {np.dtype(np.float32): 1e-45, np.dtype(np.float16): 3e-8, BF16: 4.6e-41}


def f64(x):
    with np.errstate(invalid="ignore"):  # ml_dtypes says so of NaN
        return np.asarray(x).astype(np.float64)


def assert_close(got, want, scale=None):
    """Element by element: at most the type's tolerance times `scale`, which is the value itself or
    the sum of the absolute products that make it."""
    dtype = np.asarray(got).dtype
    got, scale = f64(got), np.abs(want) if scale is None else scale
    assert got.shape == want.shape
    assert (np.isnan(got) == np.isnan(want)).all()
    bad = np.abs(got - want) > TOLERANCE[dtype] * scale + SMALLEST[dtype]
    assert not bad.any(), (
        f"{bad.sum()} of {bad.size} wrong; first at {np.argwhere(bad)[0]}: "
        f"{got[bad][0]} instead of {want[bad][0]}, scale {np.broadcast_to(scale, got.shape)[bad][0]}"
    )


def gelu(x, approximate="none"):
    x = f64(x)
    if approximate == "tanh":
        # By the logistic function, which does not cancel where 1 + tanh does.
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        with np.errstate(over="ignore"):
            return x / (1 + np.exp(-2 * inner))
    return 0.5 * x * np.vectorize(math.erfc, otypes=[float])(-x / math.sqrt(2))


def activate(x, activation):
    with np.errstate(over="ignore"):
        return {
            None: lambda: x,
            "relu": lambda: np.maximum(x, 0),
            "relu6": lambda: np.clip(x, 0, 6),
            "leaky_relu": lambda: np.where(x > 0, x, 0.01 * x),
            "leaky_relu(-0.5)": lambda: np.where(x > 0, x, -0.5 * x),
            "hardswish": lambda: x * np.clip(x / 6 + 0.5, 0, 1),
            "silu": lambda: x / (1 + np.exp(-x)),
            "gelu": lambda: gelu(x),
            "gelu_tanh": lambda: gelu(x, "tanh"),
        }[activation]()


def causal_conv1d(x, weight, bias=None, activation=None, seq_idx=None, initial_states=None):
    """Returns y and the sums of absolute products."""
    x, weight = f64(x), f64(weight)
    b, d, l = x.shape
    width = weight.shape[1]
    before = np.zeros((b, d, width - 1)) if initial_states is None else f64(initial_states)
    y, scale = np.zeros_like(x), np.zeros_like(x)
    for i in range(b):
        row = np.zeros(l, int) if seq_idx is None else np.asarray(seq_idx[i])
        for t in range(l):
            if row[t] < 0:
                continue
            for k in range(width):
                s = t - (width - 1) + k
                if s < 0:
                    same = row[0] == row[t]
                    value = before[i, :, s + width - 1]
                else:
                    same = row[s] == row[t]
                    value = x[i, :, s]
                if same:
                    y[i, :, t] += weight[:, k] * value
                    scale[i, :, t] += np.abs(weight[:, k] * value)
    if bias is not None:
        y += f64(bias)[:, None]
        scale += np.abs(f64(bias))[:, None]
    y = activate(y, activation)
    if seq_idx is not None:
        y *= (np.asarray(seq_idx) >= 0)[:, None, :]
    return y, scale


def conv2d(
    x,
    weight,
    bias=None,
    stride=1,
    padding=0,
    dilation=1,
    groups=1,
    residual=None,
    activation=None,
):
    """Returns y and the sums of absolute products."""
    pair = lambda n: (n, n) if isinstance(n, int) else n
    (sh, sw), (ph, pw), (dh, dw) = pair(stride), pair(padding), pair(dilation)
    x, weight = f64(x), f64(weight)
    x = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    n, c, h, w = x.shape
    k, cg, r, s = weight.shape
    oh, ow = (h - dh * (r - 1) - 1) // sh + 1, (w - dw * (s - 1) - 1) // sw + 1
    y, scale = np.zeros((n, k, oh, ow)), np.zeros((n, k, oh, ow))
    kg = k // groups
    for g in range(groups):
        xg, wg = x[:, g * cg : (g + 1) * cg], weight[g * kg : (g + 1) * kg]
        for i in range(r):
            for j in range(s):
                part = xg[:, :, i * dh : i * dh + sh * oh : sh, j * dw : j * dw + sw * ow : sw]
                part = part[:, :, :oh, :ow]
                y[:, g * kg : (g + 1) * kg] += np.einsum("kc,nchw->nkhw", wg[:, :, i, j], part)
                scale[:, g * kg : (g + 1) * kg] += np.einsum(
                    "kc,nchw->nkhw", np.abs(wg[:, :, i, j]), np.abs(part)
                )
    if bias is not None:
        y += f64(bias)[:, None, None]
        scale += np.abs(f64(bias))[:, None, None]
    if residual is not None:
        y += f64(residual)
        scale += np.abs(f64(residual))
    return activate(y, activation), scale
