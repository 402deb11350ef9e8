"""`patch` of modules that have names of Windrow's options in another meaning: they stay as they are."""

import copy

import pytest
import torch
import torch.nn.functional as F
from common import leaf
from torch import nn
from windrow.torch import Conv2d, patch, patched, unpatch

pytestmark = pytest.mark.usefixtures("nothing_decided")

MODULES = {
    "conv1d": (lambda: nn.Conv1d(4, 4, 3), (2, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 4, 3), (2, 4, 9, 8)),
    "conv3d": (lambda: nn.Conv3d(4, 4, 3), (2, 4, 3, 9, 8)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(4, 4, 3, 2), (2, 4, 9)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(4, 4, 3, 2), (2, 4, 9, 8)),
    "gelu": (lambda: nn.GELU(), (2, 4, 9)),
    "group_norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 9, 8)),
    "batch_norm": (lambda: nn.BatchNorm2d(4).eval(), (2, 4, 9, 8)),
}
OPTIONS = ["activation", "accuracy", "algorithm", "batch_invariant", "frozen", "_was_patched"]
INTO = {
    "attribute": lambda module, name: setattr(module, name, "relu"),
    "none": lambda module, name: setattr(module, name, None),
    "buffer": lambda module, name: module.register_buffer(name, torch.ones(2)),
    "parameter": lambda module, name: setattr(module, name, nn.Parameter(torch.ones(2))),
    "submodule": lambda module, name: setattr(module, name, nn.ReLU()),
}


def all_of(module):
    """What a module has, to compare."""
    parts = (module._buffers, module._parameters, module._modules)
    return type(module), {**vars(module)}, [{**part} for part in parts], [*module.state_dict()]


def assert_left(model, x, name):
    """The first module, and it alone, is left as it is."""
    want, before = model(x), all_of(model[0])
    report = patch(model)
    assert [*report.swapped] == ["1"] and report.left["0"].endswith(f" has a `{name}` of its own")
    assert f"left 0: {report.left['0']}" in str(report)
    torch.testing.assert_close(model(x), want, atol=1e-4, rtol=1e-4)
    unpatch(model)
    assert type(model[1]) is nn.GELU and all_of(model[0]) == before
    with patched(model) as report:
        assert [*report.swapped] == ["1"]
    assert type(model[1]) is nn.GELU and all_of(model[0]) == before
    assert torch.equal(model(x), want)


@pytest.mark.parametrize("into", INTO)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", MODULES)
def test_a_name_on_the_instance(kind, name, into):
    make, shape = MODULES[kind]
    model = nn.Sequential(make(), nn.GELU())
    INTO[into](model[0], name)
    assert_left(model, leaf(*shape, grad=False), name)


def test_a_method_on_the_instance():
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.GELU())
    theirs = model[0]._conv_forward
    model[0]._conv_forward = lambda *args: 2 * theirs(*args)
    assert_left(model, leaf(2, 4, 9, 8, grad=False), "_conv_forward")


class OwnAttribute(nn.Conv2d):
    activation = "relu"


class OwnNone(nn.Conv2d):
    frozen = None


class OwnProperty(nn.Conv2d):
    @property
    def algorithm(self):
        return F.relu

    def forward(self, x):
        return self.algorithm(super().forward(x))


class OwnMethod(nn.Conv2d):
    def accuracy(self):
        return 1.0


class OwnSlot(nn.Conv2d):
    __slots__ = ("activation",)


class Derived(OwnMethod):
    pass


class Mixin:
    activation = "relu"


class Before(Mixin, nn.Conv2d):
    pass


class Behind(nn.Conv2d, Mixin):
    def forward(self, x):
        return getattr(F, self.activation)(super().forward(x))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (OwnAttribute, "activation"),
        (OwnNone, "frozen"),
        (OwnProperty, "algorithm"),
        (OwnMethod, "accuracy"),
        (OwnSlot, "activation"),
        (Derived, "accuracy"),
        (Before, "activation"),
        (Behind, "activation"),
    ],
)
def test_a_name_of_the_class(kind, name):
    assert_left(nn.Sequential(kind(4, 4, 3), nn.GELU()), leaf(2, 4, 9, 8, grad=False), name)


@pytest.mark.parametrize("into", INTO)
def test_a_name_on_an_instance_of_a_derived_class(into):
    kind = type("Own", (nn.Conv2d,), {})
    model = nn.Sequential(kind(4, 4, 3), nn.GELU())
    INTO[into](model[0], "accuracy")
    assert_left(model, leaf(2, 4, 9, 8, grad=False), "accuracy")


def test_what_windrow_has_set_is_no_name_of_somebody_else():
    kind = type("Own", (nn.Conv2d,), {"note": 1})
    model, x = nn.Sequential(nn.Conv2d(4, 4, 3), kind(4, 4, 3), nn.BatchNorm2d(4).eval()), leaf(2, 4, 9, 8, grad=False)
    model[0].note = 1
    before = [all_of(m) for m in model]
    for _ in range(2):
        assert len(patch(model).swapped) == 3
        with torch.no_grad():
            for _ in range(3):
                model(x)
        assert all("is Windrow's already" in why for why in patch(model).left.values())
        other = unpatch(copy.deepcopy(model))
        assert len(patch(other).swapped) == 3 and isinstance(other[1], Conv2d)
        unpatch(model)
        assert [all_of(m) for m in model] == before
