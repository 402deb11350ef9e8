"""What the torch tests share."""

import pytest
import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
each_device = pytest.mark.parametrize("device", DEVICES)


def assert_close(got, want, scale=None):
    """`want` is f64; at most the type's tolerance times `scale`, by default the largest value."""
    assert got.shape == want.shape
    scale = want.abs().max().clamp(min=1e-3) if scale is None else scale
    error = (got.double() - want).abs()
    assert (error <= TOLERANCE[got.dtype] * scale).all(), (error / scale).max()


def leaf(*shape, dtype=torch.float32, device="cpu", layout=None, grad=True):
    """A random leaf tensor; `layout` is the order of its dimensions in memory."""
    order = layout or range(len(shape))
    t = torch.randn([shape[d] for d in order], dtype=torch.float32).to(device, dtype)
    inverse = sorted(range(len(shape)), key=lambda i: list(order)[i])
    return t.permute(inverse).requires_grad_(grad)


def compare_with_f64(function, reference, tensors):
    """Results and gradients of `function` against the plain formulation in f64."""
    wide = [
        t if t is None or not t.is_floating_point() else t.detach().double().requires_grad_()
        for t in tensors
    ]
    got, want = function(*tensors), reference(*wide)
    got, want = (r if isinstance(r, tuple) else (r,) for r in (got, want))
    for g, w in zip(got, want, strict=True):
        assert_close(g.detach(), w.detach())
    wanted = [w for t, w in zip(tensors, wide, strict=True) if t is not None and t.requires_grad]
    generator = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(r.shape, generator=generator).to(r.device, r.dtype) for r in got]
    ours = torch.autograd.grad(got, [t for t in tensors if t is not None and t.requires_grad], cotangents)
    plain = torch.autograd.grad(want, wanted, [c.double() for c in cotangents])
    for g, w in zip(ours, plain, strict=True):
        assert_close(g, w)
