"""Patched modules that others have changed: wrapped, parametrized, given another class, or whose class was changed."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.utils.parametrize as parametrize
from common import leaf
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from windrow.torch import Conv2d, GELU, patch, patched, unpatch

pytestmark = pytest.mark.usefixtures("nothing_decided")

MODULES = {
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3), (2, 4, 9, 8)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(4, 6, 3, 2), (2, 4, 9)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(4, 6, 3, 2), (2, 4, 9, 8)),
    "gelu": (lambda: nn.GELU("tanh"), (2, 4, 9)),
    "group_norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 9, 8)),
    "batch_norm": (lambda: nn.BatchNorm2d(4).eval(), (2, 4, 9, 8)),
}
each_module = pytest.mark.parametrize("kind", MODULES)
CONVOLUTIONS = [kind for kind in MODULES if kind.startswith("conv")]


def made(kind):
    make, shape = MODULES[kind]
    return nn.Sequential(make()), leaf(*shape, grad=False)


def patched_and_called(model, x):
    patch(model)
    with torch.no_grad():
        for _ in range(3):
            model(x)


@each_module
@pytest.mark.parametrize("is_called", [False, True])
def test_a_forward_on_the_instance_outlives_unpatch(kind, is_called, factor):
    model, x = made(kind)
    want = 2 * model(x)
    if is_called:
        patched_and_called(model, x)
    else:
        patch(model)
    inner = model[0].forward
    model[0].forward = lambda t: 2 * inner(t)
    torch.testing.assert_close(model(x), want, atol=1e-4, rtol=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unpatch(model)
    assert torch.equal(model(x), want)
    # The method that was there before, put back as hooks do it.
    model[0].forward = inner
    assert torch.equal(2 * model(x), want)
    copied = copy.deepcopy(model)
    assert torch.equal(2 * copied(x), want)


def test_a_kept_method_takes_an_output_size():
    model, x = made("conv_transpose2d")
    patch(model)
    kept = model[0].forward
    unpatch(model)
    assert torch.equal(kept(x, [20, 18]), model[0](x, [20, 18]))


def of_hooks(parametrization):
    return {"weight_norm": weight_norm, "spectral_norm": spectral_norm}[parametrization]


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize("parametrization", ["weight_norm", "spectral_norm"])
def test_unpatch_of_a_parametrized_module(kind, parametrization, factor):
    model, x = made(kind)
    pytorchs = type(model[0])
    patched_and_called(model, x)
    of_hooks(parametrization)(model[0]).eval()
    for _ in range(3):
        model(x)
    assert "is Windrow's already" in str(patch(model))
    copied = copy.deepcopy(model)
    for some in (model, copied):
        want = some(x)
        unpatch(some)
        assert type(some[0]).__mro__[1] is pytorchs and type(some[0]).__name__ == f"Parametrized{pytorchs.__name__}"
        assert parametrize.is_parametrized(some[0], "weight")
        torch.testing.assert_close(some(x), want, atol=1e-4, rtol=1e-4)
        parametrize.remove_parametrizations(some[0], "weight")
        assert type(some[0]) is pytorchs
        torch.testing.assert_close(some(x), want, atol=1e-4, rtol=1e-4)
        assert not [name for name in vars(some[0]) if name in ("_was_patched", "algorithm", "_known", "_remembered")]
        assert [*patch(some).swapped] == ["0"]


class Sharded:
    """As `fully_shard` mixes it in."""

    def unshard(self):
        return type(self).__mro__[2]


def test_unpatch_of_classes_made_on_the_way(factor):
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3), nn.GELU())
    x = leaf(2, 4, 9, 8, grad=False)
    want = model(x)
    patch(model)
    # Of one class for all, and of more than one base.
    made = type("ShardedConv2d", (Sharded, Conv2d), {})
    for module in model[:2]:
        module.__class__ = made
    model[2].__class__ = type("ShardedGELU", (Sharded, GELU), {})
    torch.testing.assert_close(model(x), want, atol=1e-4, rtol=1e-4)
    unpatch(model)
    assert type(model[0]) is type(model[1]) is not made
    assert type(model[0]).__bases__ == (Sharded, nn.Conv2d) and model[0].unshard() is nn.Conv2d
    assert type(model[2]).__bases__ == (Sharded, nn.GELU)
    assert torch.equal(model(x), want)


def test_fully_shard(tmp_path):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard") or not torch.distributed.is_gloo_available():
        pytest.skip("no fully_shard")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model, x = made("conv2d")
        patch(model)
        fsdp.fully_shard(model[0], mesh=mesh)
        want = model(x).detach()
        unpatch(model)
        assert isinstance(model[0], fsdp.FSDPModule) and not isinstance(model[0], Conv2d)
        torch.testing.assert_close(model(x).detach(), want, atol=1e-4, rtol=1e-4)
    finally:
        torch.distributed.destroy_process_group()


class Scaled(Conv2d):
    def forward(self, input):
        return 2 * super().forward(input)


def test_a_class_that_somebody_wrote_stays_and_that_is_said():
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    x = leaf(2, 4, 9, 8, grad=False)
    want = model[1](2 * model[0](x))
    patch(model)
    model[0].__class__ = Scaled
    with pytest.warns(UserWarning, match="`0`, whose class Scaled derives from Windrow's"):
        unpatch(model)
    assert type(model[0]) is Scaled and type(model[1]) is nn.Conv2d
    torch.testing.assert_close(model(x), want, atol=1e-4, rtol=1e-4)
    model[0].__class__ = Conv2d
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unpatch(model)
    assert type(model[0]) is nn.Conv2d
    with pytest.warns(UserWarning, match="unpatch leaves"), patched(model):
        model[0].__class__ = Scaled


@each_module
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_put_into_pytorchs_class_is_seen(kind, when, monkeypatch, factor):
    model, x = made(kind)
    pytorchs, want = type(model[0]), 3 * model(x)
    calls, theirs = [], pytorchs.forward

    def replaced(self, *args):
        calls.append(self)
        return 3 * theirs(self, *args)

    if when == "before":
        monkeypatch.setattr(pytorchs, "forward", replaced)
    patched_and_called(model, x)
    if when == "after":
        assert not calls
        monkeypatch.setattr(pytorchs, "forward", replaced)
    calls.clear()
    with torch.no_grad():
        torch.testing.assert_close(model(x), want, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(model(x), want, atol=1e-3, rtol=1e-4)
    assert calls == [model[0]] * 2
    monkeypatch.undo()
    calls.clear()
    torch.testing.assert_close(3 * model(x), want, atol=1e-3, rtol=1e-4)
    assert not calls


@pytest.mark.parametrize("kind", ["conv1d", "conv2d"])
def test_a_conv_forward_put_into_pytorchs_class_is_seen(kind, monkeypatch, factor):
    model, x = made(kind)
    pytorchs, want = type(model[0]), 3 * model(x)
    patched_and_called(model, x)
    theirs = pytorchs._conv_forward
    monkeypatch.setattr(pytorchs, "_conv_forward", lambda *args: 3 * theirs(*args))
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(model(x), want, atol=1e-3, rtol=1e-4)
    model[0].activation = "relu"
    torch.testing.assert_close(model(x), want.relu(), atol=1e-3, rtol=1e-4)


def test_a_transposed_one_with_an_activation(monkeypatch):
    model, x = made("conv_transpose2d")
    want = (3 * model(x)).relu()
    patch(model)
    model[0].activation, theirs = "relu", nn.ConvTranspose2d.forward
    monkeypatch.setattr(nn.ConvTranspose2d, "forward", lambda *args: 3 * theirs(*args))
    torch.testing.assert_close(model(x), want, atol=1e-3, rtol=1e-4)


def test_compiled_models_see_it(monkeypatch):
    model, x = made("conv2d")
    model.append(nn.GELU())
    want = 3 * model(x)
    patch(model)
    theirs = nn.GELU.forward
    monkeypatch.setattr(nn.GELU, "forward", lambda self, t: 3 * theirs(self, t))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), want, atol=1e-3, rtol=1e-4)


@each_module
def test_copies_and_pickles_can_be_taken_back(kind, factor):
    model, x = made(kind)
    want = model(x)
    patched_and_called(model, x)
    for some in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(some(x), want, atol=1e-4, rtol=1e-4)
        unpatch(some)
        assert type(some[0]).__module__.startswith("torch.nn")
        assert torch.equal(some(x), want)


def odd(name):
    """A tensor whose memory nobody can ask for."""
    if name == "lazy":
        return nn.LazyLinear(10)
    module = nn.Linear(4, 4)
    if name == "sparse":
        module.weight = nn.Parameter(module.weight.detach().to_sparse(), requires_grad=False)
    else:
        del module.weight
        module.register_buffer("weight", torch.randn(4, 4).to_mkldnn())
    return module


@pytest.mark.parametrize("name", ["lazy", "sparse", "mkldnn"])
def test_the_first_patch_of_a_process(name, monkeypatch):
    """That takes down how much memory is in use."""
    if name == "mkldnn" and not torch.backends.mkldnn.is_available():
        pytest.skip("no MKL-DNN")
    monkeypatch.setattr("windrow.torch.choice.budget._base", None)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), odd(name))
    report = patch(model)
    assert [*report.swapped] == ["0"] and type(model[0]) is Conv2d


def test_all_or_nothing(monkeypatch):
    """Where something fails on the way, no module is swapped."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))

    def fail():
        raise RuntimeError("fails")

    monkeypatch.setattr(model[1], "extra_repr", fail)
    with pytest.raises(RuntimeError, match="fails"):
        patch(model)
    assert [type(m) for m in model] == [nn.Conv2d, nn.Conv2d]


def test_all_or_nothing_while_modules_are_changed(monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8))
    before = [(type(m), dict(vars(m))) for m in model]
    set_one = Conv2d.__setattr__

    def fail(self, name, value):
        if self is model[2] and name == "accuracy":
            raise RuntimeError("fails")
        set_one(self, name, value)

    monkeypatch.setattr(Conv2d, "__setattr__", fail)
    for call in (patch, lambda model: patched(model).__enter__()):
        with pytest.raises(RuntimeError, match="fails"):
            call(model)
        assert [(type(m), dict(vars(m))) for m in model] == before
    monkeypatch.undo()
    assert len(patch(model).swapped) == 4
