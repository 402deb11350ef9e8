"""Activation checkpoints of patched models: what a forward saves does not depend on who computes it."""

import copy

import pytest
import torch
from common import leaf
from torch import nn
from torch.utils.checkpoint import checkpoint
from windrow.torch import patch

pytestmark = [
    pytest.mark.usefixtures("nothing_decided"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
]

LAYERS = {
    "conv2d": (lambda: nn.Conv2d(4, 4, 3, padding=1), (2, 4, 9, 8)),
    "conv2d without bias": (lambda: nn.Conv2d(4, 4, 3, padding=1, bias=False), (2, 4, 9, 8)),
    "same": (lambda: nn.Conv2d(4, 4, 4, padding="same"), (2, 4, 9, 8)),
    "circular": (lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), (2, 4, 9, 8)),
    "groups": (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=2), (2, 4, 9, 8)),
    "conv1d": (lambda: nn.Conv1d(4, 4, 3, padding=1), (2, 4, 9)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 4, 3, padding=1), (2, 4, 9, 8)),
    "transposed line": (lambda: nn.ConvTranspose1d(4, 4, 3, padding=1), (2, 4, 9)),
    "normalised": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.GroupNorm(2, 4)), (2, 4, 9, 8)),
}
each_layer = pytest.mark.parametrize("layer", LAYERS)


def saved(call):
    """What the call of a layer saves: type and shape."""
    packed = []

    def pack(t):
        packed.append((t.dtype, t.shape))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call()
    return packed


@each_layer
@pytest.mark.parametrize("autocast", [False, True])
def test_what_is_saved(layer, autocast, factor):
    make, shape = LAYERS[layer]
    plain, x = make(), leaf(*shape)
    patched = copy.deepcopy(plain)
    patch(patched)
    frozen = [[], ["weight"], ["bias"]] if isinstance(plain, nn.modules.conv._ConvNd) else [[]]
    for names in frozen:
        for model in (plain, patched):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name not in names)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            want = saved(lambda: plain(x))
            # Undecided, then decided.
            for _ in range(4):
                assert saved(lambda: patched(x)) == want
                patched(x).float().sum().backward()


@each_layer
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_three_equal_layers(layer, autocast, use_reentrant, factor):
    """The first backward pass decides who computes the gradients, and with them the layer of the passes that follow."""
    make, shape = LAYERS[layer]
    plain = nn.ModuleList(make() for _ in range(3))
    patched = copy.deepcopy(plain)
    patch(patched)

    def gradients(layers):
        x = torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape).requires_grad_()
        y = x
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for module in layers:
                y = checkpoint(module, y.tanh(), use_reentrant=use_reentrant)
        return torch.autograd.grad(y.float().square().mean(), x) if not use_reentrant else backward(y, x, layers)

    def backward(y, x, layers):
        layers.zero_grad()
        y.float().square().mean().backward()
        return [x.grad, *[p.grad for p in layers.parameters()]]

    tolerance = 2e-2 if autocast else 1e-4
    for _ in range(3):
        got, want = gradients(patched), gradients(plain)
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def test_a_bias_that_changes_before_the_backward_pass(factor):
    """PyTorch's operator saves none of it either."""
    model = nn.Conv2d(4, 4, 3)
    patch(nn.ModuleList([model]))
    x = leaf(1, 4, 8, 8)
    for _ in range(3):
        y = model(x)
        with torch.no_grad():
            model.bias.zero_()
        y.sum().backward()


@pytest.mark.parametrize("listed", ["aten", "windrow"])
def test_selective_checkpoints(listed, factor):
    """These look for each operator of the second pass among those of the first."""
    module = pytest.importorskip("torch.utils.checkpoint")
    if not hasattr(module, "create_selective_checkpoint_contexts"):
        pytest.skip("before PyTorch 2.5")
    kept = {"aten": torch.ops.aten.convolution.default, "windrow": torch.ops.windrow.conv2d.default}[listed]
    layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
    patch(layers)
    for _ in range(3):
        y = x = leaf(2, 4, 9, 8)
        contexts = lambda: module.create_selective_checkpoint_contexts([kept])
        for layer in layers:
            y = checkpoint(layer, y.tanh(), use_reentrant=False, context_fn=contexts)
        y.mean().backward()
        with torch.no_grad():
            layers[0](x.detach())
