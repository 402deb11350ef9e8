"""The short way of a swapped module's later calls: what it may not hide."""

import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from common import OURS, THEIRS, each_device, each_dtype, each_winner, known, leaf
from torch import nn
from windrow.torch import Conv1d, Conv2d, ConvTranspose2d, freeze, patch
from windrow.torch.choice import candidates

pytestmark = pytest.mark.usefixtures("nothing_decided")


@each_device
def test_what_is_remembered_hides_no_option(device, times):
    times(THEIRS)
    module = nn.Conv2d(3, 4, 3, padding=1).to(device)
    patch(nn.ModuleList([module]))
    x = leaf(1, 3, 6, 6, device=device)
    for _ in range(3):
        y = module(x)
        y.sum().backward()
    assert known(module) == [None]
    module.activation = "relu"
    torch.testing.assert_close(module(x), F.relu(y))
    module.activation, module.padding = None, (0, 0)
    assert module(x).shape == (1, 4, 4, 4)


@each_winner
def test_the_module_finds_pytorchs_by_itself(factor, times):
    times(factor)
    model = nn.Sequential(nn.Conv2d(4, 4, 1))
    patch(model)
    x = leaf(1, 4, 6, 6, grad=False)
    with torch.no_grad():
        for _ in range(3):
            model(x)
    (run,) = known(model[0])
    assert (run is None) == (factor == THEIRS)


@each_device
@each_dtype
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_way_of_later_calls(device, dtype, frozen, layout, times):
    times(OURS)
    module = nn.Conv2d(4, 6, 3, padding=1).to(device, dtype, memory_format=layout).requires_grad_(False)
    patch(nn.ModuleList([module]))
    module.frozen = frozen
    images = [torch.randn(n, 4, 7, 8, device=device, dtype=dtype) for n in (1, 2)]
    images = [x.contiguous(memory_format=layout) for x in images]
    # cuDNN's and oneDNN's sums, and ours.
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}

    def agrees(module, x, **how):
        y = module(x)
        options = {"padding": module.padding, **how}
        want = F.conv2d(x, module.weight, module.bias, **options)
        torch.testing.assert_close(y, want, **tolerance)
        assert y.stride() == want.stride()

    def is_there(module):
        return any(run is not None for run in known(module))

    # cuDNN has nothing to gain from itself: there is no call of ours to remember.
    decided_for_ours = False
    for x in images:
        for _ in range(4):
            agrees(module, x)
        decided_for_ours |= is_there(module)
    if device == "cpu":
        assert decided_for_ours
    x = images[1]
    # A copy begins anew.
    other = copy.deepcopy(module)
    assert not is_there(other)
    agrees(other, x)
    # Other memory, also where the module was told that the filter stays as it is.
    module.weight.data = torch.randn_like(module.weight)
    agrees(module, x)
    module.weight.data = module.weight.data.clone(memory_format=torch.preserve_format)
    for _ in range(3):
        agrees(module, x)
    if not frozen:
        module.weight.data.mul_(2)
        agrees(module, x)
    module.bias = None
    for _ in range(3):
        agrees(module, x)
    # Gradients and options.
    leaf = x.clone().requires_grad_()
    module(leaf).sum().backward()
    assert leaf.grad is not None
    agrees(module, x)
    module.padding = (0, 1)
    for _ in range(3):
        agrees(module, x)
    other_format = torch.contiguous_format if layout is torch.channels_last else torch.channels_last
    for _ in range(3):
        agrees(module, x.contiguous(memory_format=other_format))
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        module(x.double())
    module.activation = "relu"
    torch.testing.assert_close(module(x), F.relu(F.conv2d(x, module.weight, padding=(0, 1))), **tolerance)


@each_device
@each_winner
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_way_of_later_steps_of_training(device, factor, layout, times):
    times(factor)
    plain = nn.Conv2d(4, 6, 3, padding=1, device=device).to(memory_format=layout)
    module = patch(copy.deepcopy(nn.ModuleList([plain]))).model[0]
    images = [torch.randn(2, 4, 7, 8, device=device) for _ in range(2)]
    images[1] = images[1].contiguous(memory_format=layout)

    def step(conv, x, wants_x):
        x = x.clone().requires_grad_(wants_x)
        conv.zero_grad()
        y = conv(x)
        y.square().sum().backward()
        kept = conv.bias is not None and conv.bias.grad is not None
        return y, x.grad, conv.weight.grad, conv.bias.grad if kept else None

    def agree(times=3):
        for x in images:
            for wants_x in (False, True):
                if not (wants_x or plain.weight.requires_grad):
                    continue
                for _ in range(times):
                    for got, want in zip(*(step(c, x, wants_x) for c in (module, plain)), strict=True):
                        assert (got is None) == (want is None)
                        if got is not None:
                            torch.testing.assert_close(got, want, atol=2e-3, rtol=1e-4)
                            assert got.stride() == want.stride()

    agree()
    _, _, remembered = module._remembered
    is_ours = any(type(found.run).__name__ == "Training" for found in remembered.values())
    if device == "cpu":
        assert is_ours == (factor == OURS)
    # A filter that an optimizer writes, one whose memory is another, one that nobody trains, no bias.
    with torch.no_grad():
        module.weight.mul_(2), plain.weight.mul_(2)
    agree(1)
    module.weight.data, plain.weight.data = (c.weight.data.clone() for c in (module, plain))
    agree(2)
    for convolution in (module, plain):
        convolution.bias.requires_grad_(False)
    agree(2)
    for convolution in (module, plain):
        convolution.weight.requires_grad_(False)
        convolution.bias.requires_grad_(True)
    agree()
    for convolution in (module, plain):
        convolution.weight.requires_grad_(True)
        convolution.bias = None
    agree()
    with torch.autograd.profiler.profile():
        agree(1)
    x = images[0].clone().requires_grad_()
    with torch.inference_mode():
        torch.testing.assert_close(module(images[0]), plain(images[0]), atol=1e-3, rtol=1e-4)
    (dx,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    if is_ours:
        with pytest.raises(NotImplementedError, match="double backward: windrow.torch.conv2d"):
            dx.sum().backward()


def test_the_way_of_later_calls_ends_with_the_memory(times):
    times(OURS)
    module = nn.Conv2d(4, 4, 3).requires_grad_(False)
    patch(nn.ModuleList([module]))
    x = leaf(1, 4, 6, 6, grad=False)
    for _ in range(3):
        module(x)
    (call,) = known(module)
    weight, bias = module.weight, module.bias
    assert torch.equal(call(x, weight, bias), module(x))
    assert call(x[:, :, 1:], weight, bias) is None
    assert call(x, weight.clone(), bias) is None
    assert call(x, weight, None) is None
    assert call(x.double(), weight, bias) is None
    assert call(x.clone().requires_grad_(), weight, bias) is None
    storage = weakref.ref(weight.untyped_storage())
    weight.data = weight.data.clone()
    assert storage() is None and call(x, weight, bias) is None


def test_later_calls_bring_images_into_the_layout_of_the_filter_once(times, monkeypatch):
    times(OURS)
    module = nn.Conv2d(4, 4, 3).requires_grad_(False).to(memory_format=torch.channels_last)
    patch(nn.ModuleList([module]))
    x = leaf(2, 4, 6, 6, grad=False)
    for _ in range(3):
        module(x)
    copies = []
    bring = candidates.in_layout
    monkeypatch.setattr(candidates, "in_layout", lambda *a: copies.append(a) or bring(*a))
    y = module(x)
    assert len(copies) == 1 and y.is_contiguous(memory_format=torch.channels_last)
    want = F.conv2d(x, module.weight, module.bias)
    torch.testing.assert_close(y, want, atol=1e-5, rtol=1e-5)
    # Images of other strides are not of this way.
    (call,) = known(module)
    assert call(x.contiguous(memory_format=torch.channels_last), module.weight, module.bias) is None
    for other in (x.contiguous(memory_format=torch.channels_last), x.transpose(2, 3)):
        want = F.conv2d(other, module.weight, module.bias)
        torch.testing.assert_close(module(other), want, atol=1e-5, rtol=1e-5)


def test_parameters_that_become_others(times):
    """A module of PyTorch's looks for them on each call, where `nn.utils` may have put a property."""
    times(THEIRS)
    module = nn.Conv2d(8, 8, 3)
    patch(nn.ModuleList([module]))
    x = leaf(1, 8, 9, 9, grad=False)
    with torch.no_grad():
        for _ in range(3):
            module(x)
        assert known(module) == [None]
        weight = nn.utils.parametrizations.weight_norm(module)
        module.parametrizations.weight.original0.mul_(2)
        for _ in range(3):
            want = F.conv2d(x, weight.weight, module.bias)
            torch.testing.assert_close(module(x), want, atol=1e-5, rtol=1e-5)


@each_device
@each_dtype
@pytest.mark.parametrize("frozen", [False, True])
def test_modules_of_our_own(device, dtype, frozen):
    """Those that no `patch` has made: what their first call has found out serves later ones."""
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    convolutions = [
        (Conv2d(4, 6, 3, padding=1, groups=2), F.conv2d, (2, 4, 7, 8), True),
        (Conv1d(4, 6, 3, padding=2, dilation=2), F.conv1d, (2, 4, 9), True),
        (ConvTranspose2d(4, 6, 3, stride=2), F.conv_transpose2d, (2, 4, 5, 5), False),
        (Conv2d(4, 6, 3, padding=1, padding_mode="circular"), None, (2, 4, 7, 8), False),
    ]
    for module, function, shape, is_straight in convolutions:
        module = module.to(device, dtype).requires_grad_(False)
        if frozen:
            freeze(module)
        plain = getattr(nn, type(module).__name__)
        images = [torch.randn(n, *shape[1:], device=device, dtype=dtype) for n in (1, 2, 1)]
        images[2] = images[2].transpose(1, -1).contiguous().transpose(1, -1)

        def agree():
            for x in images * 2:
                y = plain.forward(module, x) if function is None else None
                if function is not None:
                    names = ("stride", "padding", "dilation", "groups")
                    y = function(x, module.weight, module.bias, **{name: getattr(module, name) for name in names})
                torch.testing.assert_close(module(x), y.relu() if module.activation else y, **tolerance)
            calls = known(module)
            assert bool(calls) == is_straight and None not in calls

        agree()
        module.weight.data = module.weight.data.clone()
        agree()
        module.activation = "relu" if function is not None else None
        agree()


def test_what_modules_of_our_own_do_not_hide():
    module = Conv2d(4, 6, 3)
    x = leaf(2, 4, 7, 8, grad=False)
    with torch.no_grad():
        for _ in range(3):
            want = module(x)
        assert len(known(module)) == 1
        # No image for the short way: one without memory, one negated lazily, none at all, a single one, another type.
        assert module.to("meta")(x.to("meta")).shape == want.shape
        module = Conv2d(4, 6, 3)
        module(x)
        torch.testing.assert_close(torch.func.vmap(module)(x[:, None])[:, 0], module(x), atol=1e-5, rtol=1e-5)
        lazy = torch.complex(x, -x).conj().imag
        assert lazy.is_neg()
        torch.testing.assert_close(module(lazy), module(x), atol=1e-5, rtol=1e-5)
        assert module(x[:0]).shape == (0, 6, 5, 6)
        torch.testing.assert_close(module(x[0]), module(x)[0], atol=1e-5, rtol=1e-5)
        with torch.autocast("cpu", torch.bfloat16):
            assert module(x).dtype == torch.bfloat16
        for wrong in (x.double(), x[:, :3]):
            with pytest.raises((TypeError, ValueError), match="`(input|weight)`"):
                module(wrong)
        module.activation = "tanh"
        with pytest.raises(ValueError, match="`activation` is 'tanh'"):
            module(x)
    module.activation = None
    module(x).sum().backward()
    assert module.weight.grad is not None


def test_a_bias_that_becomes_another(times):
    times(THEIRS)
    module = nn.Conv2d(8, 8, 3)
    patch(nn.ModuleList([module]))
    x = leaf(1, 8, 9, 9, grad=False)

    class Twice(nn.Module):
        def forward(self, bias):
            return 2 * bias

    with torch.no_grad():
        for _ in range(3):
            module(x)
        bias = module.bias.clone()
        nn.utils.parametrize.register_parametrization(module, "bias", Twice())
        for _ in range(3):
            torch.testing.assert_close(module(x), F.conv2d(x, module.weight, 2 * bias), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("algorithm", [None, "fastest"])
@each_winner
def test_classes_derived_from_ours(algorithm, factor, times):
    """They may do more than to compute, on the way to the filter that a later call would take straight."""
    times(factor)

    class Doubled(Conv2d):
        def _conv_forward(self, input, weight, bias):
            return super()._conv_forward(input, 2 * weight, bias)

    class Padded(Conv2d):
        def _conv_forward(self, input, weight, bias):
            return super()._conv_forward(F.pad(input, (1, 1, 1, 1)), weight, bias)

    x = leaf(2, 4, 6, 6, grad=False)
    for kind in (Doubled, Padded):
        module = kind(4, 6, 3).requires_grad_(False)
        module.algorithm = algorithm
        for image in (x, F.pad(x, (1, 1, 1, 1))) * 4:
            weight, padding = (2 * module.weight, 0) if kind is Doubled else (module.weight, 1)
            want = F.conv2d(image, weight, module.bias, padding=padding)
            torch.testing.assert_close(module(image), want, atol=1e-5, rtol=1e-5)
        assert not known(module)
