"""`patch` of classes that derive from PyTorch's convolutions: their `forward` stays, and Windrow computes what it calls."""

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.nn.functional as F
from common import OURS, each_device
from torch import nn
from windrow.torch import Conv2d, Conv3d, decisions, freeze, patch, patched, unpatch

pytestmark = pytest.mark.usefixtures("nothing_decided")


class Causal(nn.Conv3d):
    """As autoencoders of video have it: zeros, or cached frames, before the first frame."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        t, h, w = self.padding
        self._padding = (w, w, h, h, 2 * t, 0)
        self.padding = (0, 0, 0)

    def forward(self, x, cache=None):
        padding = list(self._padding)
        if cache is not None and padding[4] > 0:
            x = torch.cat([cache, x], dim=2)
            padding[4] -= cache.shape[2]
        return super().forward(F.pad(x, padding))


class InParts(nn.Conv3d):
    """A large video part by part, with the name of the class in `super`."""

    def forward(self, x):
        return torch.cat([super(InParts, self).forward(part) for part in x.chunk(2, 1)], 1)


class Scaled(nn.Conv2d):
    """A filter that is another one in each call."""

    def forward(self, x):
        return self._conv_forward(x, self.weight * 2, self.bias)


class Plain(nn.Conv2d):
    pass


class Later(Plain):
    def forward(self, x):
        return Plain.forward(self, F.relu(x))


class ByFunction(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight, self.bias, self.stride, "same")


class OwnConvolution(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight, bias) * 2


class Activated(nn.Conv2d):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.activation = nn.SiLU()

    def forward(self, x):
        return self.activation(super().forward(x))


class Decorated(nn.Conv2d):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


class Picky(nn.Conv2d):
    def __init_subclass__(cls, *, needed, **kwargs):
        super().__init_subclass__(**kwargs)


def models(device):
    videos = nn.Sequential(Causal(4, 8, 3, padding=1), nn.SiLU(), Causal(8, 4, (3, 1, 1), padding=(1, 0, 0)))
    images = nn.Sequential(Scaled(4, 8, 3), Plain(8, 8, 3, padding=1, bias=False), Later(8, 4, 1))
    return [
        (videos.to(device), torch.randn(2, 4, 5, 9, 8, device=device), ["0", "2"]),
        (nn.Sequential(InParts(4, 4, 3)).to(device), torch.randn(1, 8, 3, 9, 8, device=device), ["0"]),
        (images.to(device), torch.randn(2, 4, 9, 8, device=device), ["0", "1", "2"]),
    ]


def close(got, want):
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@each_device
def test_results_copies_and_what_is_put_back(factor, device) -> None:
    for model, x, names in models(device):
        with torch.no_grad():
            want = model(x)
            kinds, keys, shown = [type(m) for m in model], [*model.state_dict()], str(model)
            report = patch(model)
            assert [*report.swapped] == names and not report.left
            assert str(model) == shown and [*model.state_dict()] == keys
            assert all(isinstance(m, kind) for m, kind in zip(model, kinds, strict=True))
            assert all(isinstance(model[int(name)], (Conv2d, Conv3d)) for name in names)
            for _ in range(3):
                close(model(x), want)
            assert not patch(model).swapped
            saved = io.BytesIO()
            torch.save(model, saved)
            saved.seek(0)
            for other in (copy.deepcopy(model), torch.load(saved, weights_only=False)):
                assert [type(m) for m in other] == [type(m) for m in model]
                freeze(other)
                close(other(x), want)
                close(unpatch(other)(x), want)
                assert [type(m) for m in other] == kinds
            assert unpatch(model) is model and [type(m) for m in model] == kinds
            with patched(model) as report:
                assert [*report.swapped] == names
            assert [type(m) for m in model] == kinds
            close(model(x), want)
    # A filter that is made for a call decides nothing that is kept.
    assert {d.choice for d in decisions()} == {"Windrow" if factor == OURS else "PyTorch"}


@each_device
def test_cached_frames(factor, device) -> None:
    model, x = Causal(4, 8, 3, padding=1).to(device), torch.randn(1, 4, 6, 7, 9, device=device)
    with torch.no_grad():
        want = model(x)
        patch(nn.Sequential(model))
        first = model(x[:, :, :2])
        close(torch.cat([first, model(x[:, :, 2:], x[:, :, :2])], 2), want)


@each_device
def test_gradients(factor, device) -> None:
    for model, x, _ in models(device):
        other = copy.deepcopy(model)
        patch(other)
        for _ in range(2):
            one, two = (x.clone().requires_grad_() for _ in range(2))
            y = model(one)
            dy = torch.randn_like(y)
            model.zero_grad(), other.zero_grad()
            y.backward(dy), other(two).backward(dy)
            close(two.grad, one.grad)
            for want, got in zip(model.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(got.grad, want.grad, atol=1e-3, rtol=1e-3)


def test_what_is_left_is_named_with_the_reason() -> None:
    made = type("Unnamed", (nn.Conv1d,), {"forward": lambda self, x: x})
    kinds = {"function": ByFunction, "convolution": OwnConvolution, "activation": Activated, "none": made}
    kinds["decorated"] = Decorated
    model = nn.ModuleDict({name: kind(2, 2, 3) for name, kind in kinds.items()})
    up = type("Up", (nn.ConvTranspose2d,), {})
    model["up"] = up(2, 2, 3)
    report = patch(model)
    assert not report.swapped
    assert {name: why.partition(" ")[2] for name, why in report.left.items()} == {
        "function": "has a forward in which no call of PyTorch's was found",
        "convolution": "has a `_conv_forward` of its own",
        "activation": "has a `activation` of its own",
        "none": "has a forward in which no call of PyTorch's was found",
        "decorated": "has a forward in which no call of PyTorch's was found",
        "up": "is a class of its own, whose forward may be another",
    }


def test_a_class_that_cannot_be_derived_from() -> None:
    class Chosen(Picky, needed=1):
        pass

    (why,) = patch(nn.Sequential(Chosen(2, 2, 3))).left.values()
    assert "cannot be derived from" in why and "needed" in why


def test_a_class_lives_as_long_as_its_modules() -> None:
    kind = type("Own", (nn.Conv2d,), {})
    model, seen = nn.Sequential(kind(2, 2, 3)), weakref.ref(kind)
    del kind
    patch(model)
    gc.collect()
    assert isinstance(model[0], Conv2d) and type(copy.deepcopy(model)[0]) is type(model[0])
    del model
    gc.collect(), gc.collect()
    assert seen() is None


def test_nothing_is_promised_of_a_forward_of_its_own() -> None:
    report = patch(nn.Sequential(Causal(2, 2, 3)), batch_invariant=True)
    assert not report.swapped and "Causal" in report.left["0"]
