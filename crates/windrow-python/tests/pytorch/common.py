"""What the torch tests share."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
each_device = pytest.mark.parametrize("device", DEVICES)

ACTIVATIONS = {
    None: lambda y: y,
    "relu": F.relu,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "leaky_relu(0.2)": lambda y: F.leaky_relu(y, 0.2),
    "hardswish": F.hardswish,
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
}

# What `times` (conftest.py) lets a measurement find: how long ours takes, of PyTorch's time.
OURS, THEIRS = 0.5, 2.0
each_winner = pytest.mark.parametrize("factor", [OURS, THEIRS], ids=["ours", "theirs"])


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


def exported(model, x, dynamo, folder):
    """What ONNX's own evaluation gives for the model as PyTorch exports it: by operators of ONNX alone."""
    onnx = pytest.importorskip("onnx")
    evaluation = pytest.importorskip("onnx.reference")
    if dynamo:
        pytest.importorskip("onnxscript")
    file = folder / "model.onnx"
    torch.onnx.export(model, (x,), file, dynamo=dynamo)
    graph = onnx.load(file)
    assert {node.domain for node in graph.graph.node} <= {"", "pkg.onnxscript.torch_lib"}
    session = evaluation.ReferenceEvaluator(graph)
    (y,) = session.run(None, {graph.graph.input[0].name: x.numpy()})
    return torch.from_numpy(y.copy())


def known(module):
    """What computes later calls of a module like those before: ours, and None for PyTorch."""
    return [None if of.flags is None else of.run for of in module._known.values()]


def normal(model):
    """In evaluation, with statistics that do something."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
            if module.affine:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
    return model.eval()


def needs_driver():
    """Whether fake tensors on CUDA are laid out beside a driver only, as by PyTorch 2.8 and 2.9."""
    try:
        with FakeTensorMode():
            torch.empty(1, 2, 2, 2, device="cuda").contiguous(memory_format=torch.channels_last)
    except RuntimeError:
        return True
    return False
