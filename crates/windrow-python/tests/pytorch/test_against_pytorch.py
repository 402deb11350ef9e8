"""Every operator of `windrow.torch` against PyTorch's own in f64, forward and all gradients, on random problems."""

import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import winograd_bound
from bounds import absolute, activated, before_activation, through
from common import ACTIVATIONS, each_device
from problems import DTYPES, SMALLEST, UNIT, Random, U, Wrong, compare, each_problem, wide
from torch import Tensor, nn
from windrow.torch import (
    causal_conv1d_fn,
    causal_conv1d_update,
    causal_conv1d_varlen_states,
    conv1d,
    conv2d,
    conv_transpose2d,
    gelu,
)

WIDTHS = [*range(1, 10), 16, 33, 70]


def autocast(r: Random, dtype: torch.dtype):
    """A context for the call, and the type that f32 is cast to in it."""
    if dtype == torch.float32 and r.maybe("autocast", 0.15):
        lower = r.choose("lower", [torch.bfloat16, torch.float16])
        return torch.autocast(r.device, lower), lower
    return nullcontext(), None


def cotangent(r: Random, y: Tensor, name: str, broadcast: bool = True) -> Tensor:
    dims = range(y.dim()) if broadcast else ()
    return r.tensor(name, list(y.shape), y.dtype, broadcast=dims)


def half(dtype: torch.dtype) -> bool:
    return dtype != torch.float32


# GELU


def check_gelu(r: Random) -> None:
    dtype = r.choose("dtype", DTYPES)
    shape = [r.choose(f"size {i}", [0, 1, 2, 3, 7, 16, 33, 65], [1] + [8] * 7) for i in range(r.below(4))]
    if len(shape) == 2 and r.maybe("long"):
        shape[1] = 515
    approximate = r.choose("approximate", ["none", "tanh"])
    make = partial(r.tensor, dtype=dtype, broadcast=range(len(shape)))
    tensors = {"x": make("x", shape, scale=r.choose("scale", [0.5, 3.0]))}
    tensors["bias"] = tensors["gate"] = None
    if shape and r.maybe("with bias", 0.4):
        tensors["bias"] = r.tensor("bias", shape[-1:], r.choose("bias type", [dtype, torch.float32]))
    if r.maybe("with gate", 0.4):
        tensors["gate"] = make("gate", shape)
    leaves = r.leaves(tensors)
    y = gelu(tensors["x"], approximate, bias=tensors["bias"], gate=tensors["gate"])
    dy = cotangent(r, y, "dy")
    grads = torch.autograd.grad(y, [tensors[n] for n in leaves], dy)

    x, bias, gate, dy = (wide(t) for t in (tensors["x"], tensors["bias"], tensors["gate"], dy))
    v = x if bias is None else x + bias
    gate = torch.ones_like(v) if gate is None else gate
    activation = "gelu" if approximate == "none" else "gelu_tanh"
    value = ACTIVATIONS[activation](v)
    slope = before_activation(activation, v, torch.zeros_like(v), torch.ones_like(v), False)[0]
    # The sum of x and bias is rounded; the operator is accurate relative to its value, which
    # PyTorch's own, in f64, is only to an absolute error in the tail.
    moved = U * v.abs() if bias is not None else torch.zeros_like(v)
    own = 11 * U + (5e-5 if half(dtype) else 0)
    error = slope.abs() * moved + moved**2 + own * value.abs() + v.abs() * 2.0**-52
    compare("y", y, value * gate, error * gate.abs())
    dv, dv_error = before_activation(activation, v, moved, dy * gate, half(dtype))
    for name, grad in zip(leaves, grads, strict=True):
        if name == "x":
            compare("dx", grad, dv, dv_error)
        elif name == "gate":
            compare("dgate", grad, dy * value, dy.abs() * error + U * (dy * value).abs())
        else:
            terms = v.numel() // max(1, v.shape[-1]) + 2
            total = lambda t: t.reshape(-1, t.shape[-1]).sum(0) if t.numel() else t.new_zeros(t.shape[-1])
            compare("dbias", grad, total(dv), total(dv_error + terms * U * dv.abs()))


# Causal conv1d


def convolved(x, weight, bias, initial_states, seq_idx, cu_seqlens) -> Tensor:
    """What comes before the activation."""
    width = weight.shape[-1]
    if cu_seqlens is not None:
        pieces = []
        for i, (start, end) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)):
            states = None if initial_states is None else initial_states[i : i + 1]
            pieces.append(convolved(x[:, :, start:end], weight, bias, states, None, None))
        return torch.cat(pieces, dim=2)
    joined, seen = joined_with_states(x, width, initial_states, seq_idx)
    if seq_idx is None and x.shape[2] > 0:
        return plain_conv1d(joined, weight, bias)
    l, y = x.shape[2], 0.0
    for k in range(width):
        taken = joined[:, :, k : k + l]
        if seq_idx is not None:
            taken = taken * (seen[:, k : k + l] == seq_idx)[:, None]
        if weight.dim() == 3:
            y = y + torch.einsum("od,bdl->bol", weight[:, :, k], taken)
        else:
            y = y + weight[:, k, None] * taken
    y = y if bias is None else y + bias[:, None]
    return y if seq_idx is None else y * (seq_idx >= 0)[:, None]


def plain_conv1d(joined, weight, bias) -> Tensor:
    if weight.dim() == 3:
        return F.conv1d(joined, weight, bias)
    # F.conv1d with a group for each channel takes a hundred times as long in f64.
    y = torch.einsum("bdlk,dk->bdl", joined.unfold(2, weight.shape[1], 1), weight)
    return y if bias is None else y + bias[:, None]


def joined_with_states(x, width, initial_states, seq_idx) -> tuple[Tensor, Tensor | None]:
    """The states, or zeros, before x, and the number of the sequence that each belongs to."""
    states = x.new_zeros(x.shape[0], x.shape[1], width - 1) if initial_states is None else initial_states
    seen = None
    if seq_idx is not None:
        seen = torch.cat([seq_idx[:, :1].expand(-1, width - 1), seq_idx], dim=1)
    return torch.cat([states, x], dim=2), seen


def last_inputs(x, width, initial_states, seq_idx, cu_seqlens) -> Tensor:
    """The final states."""
    if cu_seqlens is not None:
        parts = []
        for i, (start, end) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)):
            states = None if initial_states is None else initial_states[i : i + 1]
            parts.append(last_inputs(x[:, :, start:end], width, states, None, None))
        return torch.cat(parts)
    joined, seen = joined_with_states(x, width, initial_states, seq_idx)
    last = joined[:, :, x.shape[2] :]
    if seq_idx is None:
        return last
    own = seq_idx[:, -1:]
    return last * ((seen[:, x.shape[2] :] == own) & (own >= 0))[:, None]


def sequence_numbers(r: Random, b: int, l: int) -> Tensor:
    """Runs of tokens of one number each, some of them padding."""
    rows = []
    for _ in range(b):
        row: list[int] = []
        while len(row) < l:
            length = 1 + r.below(r.choose("longest", [3, 17, 80]))
            number = -1 if r.below(6) == 0 else len(row) + r.below(3) * l
            row += [number] * length
        rows.append(row[:l])
    return torch.tensor(rows, dtype=torch.int32).reshape(b, l).to(r.device)


def gradients_of(outputs: list[Tensor], inputs: list[Tensor], cotangents: list[Tensor]):
    """Also where an output does not depend on any input."""
    pairs = [(y, dy) for y, dy in zip(outputs, cotangents, strict=True) if y.requires_grad]
    ys, dys = zip(*pairs, strict=True)
    return torch.autograd.grad(ys, inputs, dys, allow_unused=True, materialize_grads=True)


def check_causal_conv1d(r: Random) -> None:
    dtype = r.choose("dtype", DTYPES)
    b, d = r.choose("b", [1, 2, 3]), r.choose("d", [1, 2, 3, 4, 8, 16, 24, 33, 64, 130])
    l = r.choose("l", [0, 1, 2, 3, 5, 8, 13, 15, 16, 17, 31, 64, 65, 130, 257], [1] + [4] * 14)
    width = r.choose("width", WIDTHS, [6] * 9 + [3, 2, 1])
    activation = r.choose("activation", list(ACTIVATIONS))
    dense = r.maybe("dense", 0.15)
    d_out = r.choose("d_out", [1, 5, 16, 40]) if dense else d
    packed = r.choose("packed", [None, "seq_idx", "cu_seqlens"], [2, 2, 1]) if l else None
    context, lower = autocast(r, dtype)
    wide_type = r.choose("weight type", [dtype, torch.float32])
    seq_idx = cu_seqlens = None
    sequences = b
    if packed == "seq_idx":
        seq_idx = sequence_numbers(r, b, l)
    elif packed == "cu_seqlens":
        b, sequences = 1, 1 + r.below(5)
        ends = sorted(r.below(l + 1) for _ in range(sequences - 1))
        kind = r.choose("cu_seqlens type", [torch.int32, torch.int64])
        cu_seqlens = torch.tensor([0, *ends, l], dtype=kind, device=r.device)
    shape = [d_out, d, width] if dense else [d, width]
    scale = (width * (d if dense else 1)) ** -0.5
    tensors = {
        "x": r.tensor("x", [b, d, l], dtype, broadcast=range(3)),
        "weight": r.tensor("weight", shape, wide_type, scale, broadcast=range(len(shape))),
        "bias": r.tensor("bias", [d_out], wide_type) if r.maybe("with bias") else None,
        "initial_states": None,
    }
    if r.maybe("with states", 0.4):
        tensors["initial_states"] = r.tensor("states", [sequences, d, width - 1], dtype)
    finals = r.maybe("final states", 0.4)
    leaves = r.leaves(tensors)

    def call():
        with context:
            return causal_conv1d_fn(
                **tensors,
                seq_idx=seq_idx,
                cu_seqlens=cu_seqlens,
                activation=activation,
                return_final_states=finals,
            )

    results = call() if finals else (call(),)
    cotangents = [cotangent(r, t, f"d{i}") for i, t in enumerate(results)]
    grads = torch.autograd.grad(results, [tensors[n] for n in leaves], cotangents, allow_unused=True)

    # Autocast leaves no f32 argument.
    exact = {n: wide(t, lower) for n, t in tensors.items()}
    marks = [None if m is None else m.long().cpu() for m in (seq_idx, cu_seqlens)]
    linear = partial(convolved, seq_idx=marks[0], cu_seqlens=marks[1])
    is_half = half(results[0].dtype)
    terms = width * (d if dense else 1)
    v, scale = linear(**exact), linear(**absolute(exact))
    error = (terms + 2) * U * scale
    compare("y", results[0], ACTIVATIONS[activation](v), activated(activation, v, error, scale, is_half))
    states = partial(last_inputs, width=width, seq_idx=marks[0], cu_seqlens=marks[1])
    kept = {n: exact[n] for n in ("x", "initial_states")}
    if finals:
        compare("final states", results[1], states(**kept), torch.zeros(()))

    dy = wide(cotangents[0])
    dv, dv_error = before_activation(activation, v, error, dy, False)
    additions = {"x": width * (d_out if dense else 1), "initial_states": width * d_out, "weight": b * l, "bias": b * l}
    inputs = {n: t.requires_grad_() for n, t in exact.items() if n in leaves}
    outputs = [linear(**exact)] + ([states(**kept)] if finals else [])
    wanted = [dv] + ([wide(cotangents[1])] if finals else [])
    plain = gradients_of(outputs, list(inputs.values()), wanted)
    for name, grad, want in zip(leaves, grads, plain, strict=True):
        bound = through(linear, exact, name, dv_error + (additions[name] + 4) * U * dv.abs())
        if finals and name in kept:
            bound = bound + 4 * U * through(states, kept, name, wanted[1].abs())
        rounded = lower if lower and tensors[name].dtype == torch.float32 else None
        got = torch.zeros_like(tensors[name]) if grad is None else grad
        compare(f"d{name}", got, want, bound, rounded)


def check_causal_conv1d_update(r: Random) -> None:
    dtype = r.choose("dtype", DTYPES)
    b, d = r.choose("b", [1, 2, 3, 5]), r.choose("d", [1, 3, 4, 8, 16, 33, 64, 130])
    width = r.choose("width", WIDTHS, [6] * 9 + [3, 2, 1])
    activation = r.choose("activation", list(ACTIVATIONS))
    length = max(1, width - 1) + r.choose("longer", [0, 1, 5])
    ring = r.maybe("ring")
    steps = r.choose("steps", [None, 1, 2, 3, 7])
    if ring and steps is not None:
        steps = min(steps, length)
    pool = b
    indices = None
    if r.maybe("pool"):
        pool = b + r.below(4)
        order = torch.randperm(pool, generator=r.generator)[:b]
        order[torch.rand(b, generator=r.generator) < 0.2] = -1
        indices = order.to(torch.int32)
    seqlens = None
    if ring:
        seqlens = torch.tensor([r.below(3 * length) for _ in range(b)], dtype=torch.int32)
    wide_type = r.choose("weight type", [dtype, torch.float32])
    x = r.tensor("x", [b, d] if steps is None else [b, d, steps], dtype, broadcast=range(2))
    state = r.tensor("state", [pool, d, length], dtype)
    weight = r.tensor("weight", [d, width], wide_type, width**-0.5)
    bias = r.tensor("bias", [d], wide_type) if r.maybe("with bias") else None

    tokens = wide(x if steps is not None else x[:, :, None])
    history, taps, shift = wide(state), wide(weight), wide(bias)
    y, scale = torch.zeros_like(tokens), torch.zeros_like(tokens)
    for i in range(b):
        entry = i if indices is None else int(indices[i])
        if entry < 0:
            continue
        first = 0 if seqlens is None else int(seqlens[i])
        old = history[entry]
        if ring:
            old = old[:, [(first + j) % length for j in range(length)]]
        joined = torch.cat([old, tokens[i]], dim=1)
        seen = joined[:, length - (width - 1) :]
        y[i] = plain_conv1d(seen[None], taps, shift)[0]
        absolutes = None if shift is None else shift.abs()
        scale[i] = plain_conv1d(seen.abs()[None], taps.abs(), absolutes)[0]
        new = joined[:, joined.shape[1] - length :]
        if ring:
            slots = [(first + tokens.shape[2] + j) % length for j in range(length)]
            history[entry][:, slots] = new
        else:
            history[entry] = new
    to = lambda t: None if t is None else t.to(r.device)
    got = causal_conv1d_update(x, state, weight, bias, activation, to(seqlens), to(indices))
    error = activated(activation, y, (width + 2) * U * scale, scale, half(dtype))
    want = ACTIVATIONS[activation](y)
    compare("y", got if steps is not None else got[:, :, None], want, error)
    compare("conv_state", state, history, torch.zeros(()))


def check_causal_conv1d_varlen_states(r: Random) -> None:
    total, d = r.below(60), r.choose("d", [1, 5, 16])
    x = r.tensor("x", [total, d], r.choose("dtype", DTYPES), broadcast=range(2))
    ends = sorted(r.below(total + 1) for _ in range(r.below(6)))
    kind = r.choose("cu_seqlens type", [torch.int32, torch.int64])
    cu_seqlens = torch.tensor([0, *ends, total], dtype=kind, device=r.device)
    length = r.choose("state_len", [1, 3, 4, 9])
    states = causal_conv1d_varlen_states(x, cu_seqlens, length)
    bounds = cu_seqlens.tolist()
    want = [F.pad(wide(x)[a:b].T, (length, 0))[:, -length:] for a, b in zip(bounds, bounds[1:])]
    compare("states", states, torch.stack(want), torch.zeros(()))


# Convolutions


def check_conv2d(r: Random) -> None:
    groups = r.choose("groups", [1, 2, 3, 4, 16], [6, 1, 1, 1, 1])
    sizes = [1, 2, 3, 4, 8, 16, 32, 40, 130] if groups == 1 else [1, 2, 4, 8]
    n, c, k = r.choose("n", [1, 2, 3]), r.choose("c/groups", sizes), r.choose("k/groups", sizes)
    filter = r.choose("filter", [[3, 3], [1, 1], [1 + r.below(7), 1 + r.below(7)]], [5, 1, 4])
    stride, dilation = steps(r, "stride"), steps(r, "dilation")
    padding = [r.below(r.choose("padding below", [1, 2, f + 3])) for f in filter]
    size = [m + beyond(r, i) for i, m in enumerate(least(filter, padding, dilation))]
    while n * c * groups * k * size[0] * size[1] * filter[0] * filter[1] > 5e6:
        c, k = max(1, c // 2), max(1, k // 2)
    winograd = filter == [3, 3] and stride == dilation == [1, 1] and groups == 1
    if stride == [1, 1] and r.maybe("same", 0.15):
        padding = "same"
    r.chosen |= {"padding": padding, "c/groups": c, "k/groups": k}
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    shapes = [n, c * groups, *size], [k * groups, c, *filter], [k * groups]
    check_convolution(r, conv2d, F.conv2d, shapes, options, winograd, [c, k])


def check_conv1d(r: Random) -> None:
    groups = r.choose("groups", [1, 2, 16], [2, 1, 1])
    c, k = r.choose("c/groups", [1, 1, 3, 8, 40]), r.choose("k/groups", [1, 1, 2, 8, 40])
    n, filter = r.choose("n", [1, 2, 3]), [1 + r.below(9)]
    stride, dilation = [s[0] for s in (steps(r, "stride"), steps(r, "dilation"))]
    padding = r.below(r.choose("padding below", [1, 2, filter[0] + 3]))
    size = least(filter, [padding], [dilation])[0] + r.choose("beyond", [0, 1, 3, 17, 64, 200])
    if stride == 1 and r.maybe("same", 0.15):
        padding = "same"
    r.chosen["padding"] = padding
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    shapes = [n, c * groups, size], [k * groups, c, *filter], [k * groups]
    check_convolution(r, conv1d, F.conv1d, shapes, options, False, [c, k])


def check_conv_transpose2d(r: Random) -> None:
    groups = r.choose("groups", [1, 2, 3, 16], [5, 1, 1, 1])
    sizes = [1, 2, 3, 8, 16, 32, 130] if groups == 1 else [1, 2, 4]
    n, c, k = r.choose("n", [1, 2, 3]), r.choose("c/groups", sizes), r.choose("k/groups", sizes)
    filter = r.choose("filter", [[3, 3], [2, 2], [4, 4], [1 + r.below(6), 1 + r.below(6)]], [4, 1, 1, 3])
    stride, dilation = steps(r, "stride", [2, 2, 1]), steps(r, "dilation")
    more = [r.below(max(pair)) for pair in zip(stride, dilation, strict=True)]
    size = [r.choose(f"size {i}", [1, 2, 3, 5, 9, 14]) for i in "hw"]
    reach = zip(size, stride, filter, dilation, more, strict=True)
    whole = [(m - 1) * s + (f - 1) * d + 1 + o for m, s, f, d, o in reach]
    padding = [min(r.below(r.choose("padding below", [1, 2, f + 1])), (w - 1) // 2) for f, w in zip(filter, whole)]
    while n * c * groups * k * size[0] * size[1] * filter[0] * filter[1] > 5e6:
        c, k = max(1, c // 2), max(1, k // 2)
    winograd = filter == [3, 3] and stride == dilation == [1, 1] and groups == 1
    r.chosen |= {"padding": padding, "output_padding": more, "c/groups": c, "k/groups": k}
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "output_padding": more}
    shapes = [n, c * groups, *size], [c * groups, k, *filter], [k * groups]
    check_convolution(r, conv_transpose2d, F.conv_transpose2d, shapes, options, winograd, [c, k])


def steps(r: Random, name: str, weights=(5, 1, 1)) -> list[int]:
    return [r.choose(f"{name} {i}", [1, 2, 3], list(weights)) for i in "hw"]


def least(filter: list[int], padding: list[int], dilation: list[int]) -> list[int]:
    """Of an image, for a result of one pixel."""
    reach = [(f - 1) * d + 1 for f, d in zip(filter, dilation, strict=True)]
    return [max(1, e - 2 * p) for e, p in zip(reach, padding, strict=True)]


def beyond(r: Random, i: int) -> int:
    return r.choose(f"beyond {i}", [0, 1, 3, 6, 11, 17, 30])


def check_convolution(
    r: Random, function, plain_function, shapes, options: dict, winograd: bool, channels: list[int]
) -> None:
    """`channels` in a group of the input and of the result."""
    dtype = r.choose("dtype", DTYPES)
    activation = r.choose("activation", list(ACTIVATIONS))
    accuracy = r.choose("accuracy", [None, "exact", "fp32", "tf32", "half"], [4, 1, 1, 1, 1])
    context, lower = autocast(r, dtype)
    winograd = winograd and accuracy != "exact"
    transposed = function is conv_transpose2d
    of_x, of_weight, of_bias = shapes
    (c, k), taps = channels, math.prod(of_weight[2:])
    one_image = of_x[0] == 1 and r.maybe("one image", 0.3)
    # Statistics of Winograd's roundings want independent numbers.
    shared = [0] if winograd else range(len(of_x))
    x = r.tensor("x", of_x, dtype, broadcast=shared)
    tensors = {
        "x": x[0] if one_image else x,
        "weight": r.tensor("weight", of_weight, dtype, (c * taps) ** -0.5, () if winograd else shared),
        "bias": r.tensor("bias", of_bias, dtype) if r.maybe("with bias") else None,
    }
    leaves = r.leaves(tensors)
    if "weight" in leaves and r.maybe("parameter"):
        tensors["weight"] = nn.Parameter(tensors["weight"].detach())

    def call() -> Tensor:
        with context:
            return function(
                tensors["x"], tensors["weight"], tensors["bias"], **options, activation=activation, accuracy=accuracy
            )

    y = call()
    with torch.no_grad():
        fused = call()
    dy = cotangent(r, y, "dy", broadcast=not winograd)
    grads = torch.autograd.grad(y, [tensors[name] for name in leaves], dy)

    exact = {name: wide(t, lower) for name, t in tensors.items()}
    linear = lambda x, weight, bias: plain_function(x, weight, bias, **options)
    cuda, computed = r.device == "cuda", lower or dtype
    # CUDA's tensor cores cut off where they would round; operands are rounded by accuracy.
    unit = U * (2 if cuda else 1)
    operand = operand_rounding(accuracy, computed) if cuda else 0.0
    relative = lambda count: (count + 2) * unit + 2 * operand

    def by_winograd(transposed_to: str | None, count: int, cotangent: Tensor | None = None) -> Tensor | float:
        """What Winograd's algorithm may add for this result."""
        if not winograd:
            return 0.0
        squares = {name: None if t is None else t.detach() ** 2 for name, t in exact.items()}
        if transposed_to is None:
            squares["bias"] = None
            variance = linear(**squares)
        else:
            variance = through(linear, squares, transposed_to, cotangent**2)
        largest = variance.max().item() if variance.numel() else 0.0
        return winograd_bound.error(count, unit, operand) * largest**0.5

    v, scale = linear(**exact), linear(**absolute(exact))
    error = relative(c * taps) * scale + by_winograd(None, c)
    is_half = half(computed)
    act = ACTIVATIONS[activation]
    has_bias = tensors["bias"] is not None
    # cuDNN writes its sums in f16 or bf16, as for PyTorch: bias and activation are applied to rounded sums, as they
    # always are behind a transposed convolution.
    is_stored = transposed or (cuda and is_half)
    sums = linear(exact["x"], exact["weight"], None)
    # Numbers below the normal range have a rounding of their own.
    rounding = lambda size: UNIT[computed] * size + SMALLEST[computed]
    stored = rounding(sums.abs() + error) if is_stored else torch.zeros_like(v)
    own = error + stored if has_bias or activation is not None else error
    if transposed and has_bias and activation is not None:
        own = own + rounding(v.abs() + own)
    compare("y without gradient", fused, act(v), activated(activation, v, own, scale, is_half), lower)
    if has_bias:
        error = error + stored
    if activation is not None:
        # It is applied to the rounded sum where a gradient is recorded.
        error = error + rounding(v.abs() + error)
    compare("y", y, act(v), activated(activation, v, error, scale, is_half), lower)
    dv, dv_error = before_activation(activation, v, error, wide(dy), is_half)
    if activation is not None:
        dv_error = dv_error + rounding(dv.abs() + dv_error)
    inputs = {name: t.requires_grad_() for name, t in exact.items() if name in leaves}
    plain = torch.autograd.grad(linear(**exact), list(inputs.values()), dv)
    # The filter meets each of its positions once.
    positions = dv.numel() // of_bias[0]
    met = exact["x"].numel() // of_x[1] if transposed else positions
    additions = {"x": k * taps, "weight": met, "bias": positions}
    for name, grad, want in zip(leaves, grads, plain, strict=True):
        bound = through(linear, exact, name, dv_error + relative(additions[name]) * dv.abs())
        if name != "bias":
            bound = bound + by_winograd(name, k if name == "x" else met, dv)
        compare(f"d{name}", grad, want, bound, lower)


def operand_rounding(accuracy: str | None, dtype: torch.dtype) -> float:
    """How an operand of a product is rounded on CUDA."""
    if accuracy == "exact":
        return 0.0
    if dtype == torch.float32:
        f32 = {"tf32": UNIT[torch.float16], "half": UNIT[torch.float16]}
        return f32.get(accuracy, 1.5 * 2.0**-22)
    # For f16 and bf16: transforms in these types, if the accuracy allows them.
    return 0.0 if accuracy == "fp32" else UNIT[dtype]


# With the number of problems, which take about 40 s on two cores.
OPERATORS = {
    "gelu": (check_gelu, 300),
    "causal_conv1d": (check_causal_conv1d, 400),
    "causal_conv1d_update": (check_causal_conv1d_update, 400),
    "causal_conv1d_varlen_states": (check_causal_conv1d_varlen_states, 100),
    "conv1d": (check_conv1d, 150),
    "conv2d": (check_conv2d, 250),
    "conv_transpose2d": (check_conv_transpose2d, 200),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@each_device
@pytest.mark.parametrize("operator", OPERATORS)
def test_random_problems(operator, device):
    check, problems = OPERATORS[operator]
    each_problem(operator, device, problems, check)
