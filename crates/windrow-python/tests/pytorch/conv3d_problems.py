"""Random convolutions of videos beside PyTorch in f64.

    python tests/pytorch/conv3d_problems.py [--problems 2000] [--device cpu] [--seed 0]

Filters, strides, dilations, paddings, groups, layouts, types, activations and residuals are drawn, and, for half of the
problems, frames before the video with the state after it. The first go through `windrow.torch.conv3d`, those with frames
through `windrow.conv3d`. The exit status is 1 if a result differs by more than roundings can explain. A failure names the
seed that repeats it with `--problems 1`. The tests of conv3d draw their problems here, too.
"""

import argparse
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
import windrow
import windrow.torch
from common import ACTIVATIONS
from problems import DTYPES, SMALLEST, UNIT, Random, U, Wrong
from torch import Tensor

# The error of Winograd's largest tile, relative to the scale of its tile.
WINOGRAD = 2e-5
# Tensor cores cut off what they add, and multiply f32 in two parts of 22 bits.
CUT_OFF, PARTS = 2, 2.0**-20


def bound(x: Tensor, weight: Tensor, bias: Tensor | None, options: dict, want: Tensor, dtype: torch.dtype) -> Tensor:
    """How far roundings can move the sums: those of f32, those of Winograd's tiles, which mix the pixels that they read,
    and that of the result."""
    bias = None if bias is None else bias.abs()
    scale = F.conv3d(x.abs(), weight.abs(), bias, **options)
    terms = weight[0].numel() + 4
    sums = terms * U if x.device.type == "cpu" else CUT_OFF * terms * U + PARTS
    error = sums * scale + UNIT[dtype] * want.abs() + SMALLEST[dtype]
    if list(weight.shape[3:]) == [3, 3] and options["groups"] == 1 and x.numel():
        near = F.max_pool3d(x.abs(), (1, 15, 15), stride=1, padding=(0, 7, 7))
        error = error + WINOGRAD * F.conv3d(near, weight.abs().amax((3, 4), True).expand_as(weight), None, **options) * 9
    return error


def problem(r: Random) -> tuple[list[Tensor | None], dict, str | None]:
    dtype = r.choose("dtype", DTYPES)
    groups = r.choose("groups", [1, 2, 3], [6, 1, 1])
    n, c, k = r.choose("n", [1, 2]), r.choose("c", [1, 2, 3, 8, 20, 40]), r.choose("k", [1, 3, 8, 16, 33])
    filter = r.choose("filter", [[3, 3, 3], [1 + r.below(3), 3, 3], [3, 1, 1], [1 + r.below(4) for _ in "thw"]])
    stride = r.choose("stride", [[1, 1, 1], [1 + r.below(3) for _ in "thw"]], [2, 1])
    dilation = r.choose("dilation", [[1, 1, 1], [1 + r.below(2) for _ in "thw"]], [2, 1])
    padding = [r.below(3) for _ in "thw"]
    spans = [(f - 1) * d + 1 for f, d in zip(filter, dilation, strict=True)]
    least = [max(1, span - 2 * p) for span, p in zip(spans, padding, strict=True)]
    size = [m + r.below(more) for m, more in zip(least, (4, 9, 14), strict=True)]
    r.chosen |= {"padding": padding, "size": size}
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    x = r.tensor("x", [n, c * groups, *size], dtype)
    weight = r.tensor("weight", [k * groups, c, *filter], dtype)
    bias = r.tensor("bias", [k * groups], dtype) if r.maybe("with bias") else None
    return [x, weight, bias], options, r.choose("activation", list(ACTIVATIONS), [4] + [1] * (len(ACTIVATIONS) - 1))


def near(y: Tensor, want: Tensor, error: Tensor, activation: str | None) -> None:
    """Raises `Wrong` if `y` is not `activation(want)`, of which the sums may have this error."""
    if activation is not None:
        # The steepest slope is hardswish's 1.5, or below 1.13; the activation's own roundings are a few units of f32 and one
        # of the type.
        error = (1.5 if activation == "hardswish" else 1.2) * error + (16 * U + UNIT[y.dtype]) * want.abs() + 1e-6
        want = ACTIVATIONS[activation](want)
    if y.shape != want.shape:
        raise Wrong(f"{list(y.shape)} instead of {list(want.shape)}")
    # NaN is not within any bound.
    wrong = ~((y.double() - want).abs() <= error)
    if wrong.any():
        raise Wrong(f"{activation}: {int(wrong.sum())} of {wrong.numel()} wrong, most by {(y.double() - want).abs().max():.3g}")


def check(r: Random) -> None:
    """A convolution of a whole video, with and without an activation."""
    tensors, options, activation = problem(r)
    wide = [None if t is None else t.double() for t in tensors]
    want = F.conv3d(*wide, **options)
    error = bound(*wide, options, want, tensors[0].dtype)
    for act in {None, activation}:
        y = windrow.torch.conv3d(*tensors, **options, activation=act)
        if y.dtype != tensors[0].dtype:
            raise Wrong(f"{y.dtype} instead of {tensors[0].dtype}")
        near(y, want, error, act)


def check_causal(r: Random) -> None:
    """A causal convolution with the frames before the video, and those that the next chunk reads."""
    (x, weight, bias), options, activation = problem(r)
    stride, dilation = (options[name][0] for name in ("stride", "dilation"))
    count, dtype = (weight.shape[2] - 1) * dilation, x.dtype
    n, c, t, h, w = x.shape
    # A chunk is whole strides.
    x = x[:, :, : max(t // stride, 1) * stride] if t >= stride else r.tensor("x", [n, c, stride, h, w], dtype)
    kind = r.choose("before", ["zeros", "first", "initial"])
    initial = r.tensor("initial", [n, c, count, h, w], dtype) if kind == "initial" and count > 0 else None
    before = initial
    if initial is None:
        first = x[:, :, :1].expand(n, c, count, h, w)
        before = first if kind == "first" else torch.zeros_like(first)
    whole = torch.cat([before, x], 2).double()
    options["padding"] = [0, *options["padding"][1:]]
    wide = [whole, weight.double(), None if bias is None else bias.double()]
    want = F.conv3d(*wide, **options)
    residual = r.choose("with residual", [False, True], [3, 1])
    final = torch.full([n, c, count, h, w], float("nan"), dtype=dtype, device=x.device)
    named = {"time_padding": "causal_repeat" if kind == "first" else "causal", "initial_frames": initial}
    named |= options | {"final_frames": final if count > 0 else None, "activation": activation}
    if residual:
        like = windrow.conv3d(x, weight, None, **options | {"time_padding": "causal"})
        named["residual"] = torch.empty_like(like).copy_(torch.randn(like.shape, generator=r.generator))
        want = want + named["residual"].double()
    error = bound(*wide, options, want, dtype) + U * want.abs()
    y = windrow.conv3d(x, weight, bias, **named)
    near(y, want, error, activation)
    if count > 0 and not torch.equal(final, whole[:, :, whole.shape[2] - count :].to(dtype)):
        raise Wrong("the final frames are not the last ones")


CHECKS: list[Callable[[Random], None]] = [check, check_causal]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=2000)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seed", type=int, default=0, help="of the first problem")
    args = parser.parse_args()
    failures = 0
    for seed in range(args.seed, args.seed + args.problems):
        r = Random(seed, args.device)
        try:
            CHECKS[seed % len(CHECKS)](r)
        except Exception as error:  # noqa: BLE001: whatever it is, it has to name its problem
            failures += 1
            print(f"--seed {seed} --problems 1: {type(error).__name__}: {error}\n{r.chosen}", flush=True)
        done = seed - args.seed + 1
        if done % 100 == 0 or done == args.problems:
            print(f"{done} problems, {failures} failed", file=sys.stderr, flush=True)
    print(f"{args.problems} problems on {args.device}, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
