"""Parameters that do not count writes: their changes are seen, and one comparison is of many."""

import gc
import weakref

import pytest
import torch
from common import OURS, each_device, normal
from torch import nn
from windrow.torch import optimize
from windrow.torch.backend import _constants, _options, windrow

pytestmark = [
    pytest.mark.usefixtures("nothing_decided"),
    pytest.mark.skipif(torch.__version__ < _options.OLDEST, reason="an old PyTorch, which the backend refuses"),
]


@pytest.fixture
def computed(monkeypatch, times):
    """The constants of each time that some were computed."""
    times(OURS)
    found, own = [], _constants.ConstantsCache._computed

    def compute(*args):
        of = own(*args)
        found.append(of.constants)
        return of

    monkeypatch.setattr(_constants.ConstantsCache, "_computed", compute)
    return found


def made(device="cpu", dtype=torch.float32, is_made=True):
    """A network whose tensors are from inference_mode, and an image."""
    with torch.inference_mode(is_made):
        layers = [layer for _ in range(3) for layer in (nn.Conv2d(5, 5, 3, padding=1), nn.BatchNorm2d(5), nn.SiLU())]
        return normal(nn.Sequential(*layers)).to(device, dtype), torch.randn(1, 5, 6, 7, device=device, dtype=dtype)


def compiled(model):
    options = {"rest": "eager", "accuracy": "exact", "check": False}
    return torch.compile(model, backend=windrow, options=options)


CHANGES = {
    "one value": lambda m: m[3].weight.view(-1)[7:8].add_(1),
    "the last value": lambda m: m[6].bias[-1:].add_(1),
    "the first value": lambda m: m[0].weight.view(-1)[:1].mul_(-1),
    "statistics": lambda m: m[1].running_mean.add_(1),
    "data": lambda m: m[4].weight.data.mul_(-2),
    "a state": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}),
    "assigned": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}, assign=True),
    "a low rank": lambda m: m[0].weight.flatten(1).addmm_(torch.ones(5, 1).to(m[0].weight), torch.ones(1, 45).to(m[0].weight)),
    "another parameter": lambda m: setattr(m[3], "weight", nn.Parameter(m[3].weight * 2)),
    "order": lambda m: m[3].weight.copy_(m[3].weight.flip(0)),
}


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_are_seen(change, dtype, device, computed):
    model, x = made(device, dtype)
    fast, tolerance = compiled(model), 1e-4 if dtype == torch.float32 else 5e-2
    with torch.inference_mode():
        for _ in range(3):
            before = fast(x)
        assert len(computed) == 1
        change(model)
        for _ in range(2):
            y, want = fast(x), model(x)
            torch.testing.assert_close(y, want, rtol=tolerance, atol=tolerance * float(want.abs().max()))
        assert len(computed) == 2 and not torch.equal(y, before)


def test_tensors_that_share_memory(computed):
    """Slices of one buffer that begin and end inside a word of memory, and one of every second column."""
    model, x = made(dtype=torch.bfloat16)
    with torch.inference_mode():
        buffer, place = torch.zeros(1000, dtype=torch.bfloat16), 1
        for layer in (model[0], model[3], model[6]):
            own = buffer[place : place + layer.weight.numel()].view_as(layer.weight).copy_(layer.weight)
            layer.weight, place = nn.Parameter(own), place + layer.weight.numel() + 1
        wide = torch.randn(5, 2).bfloat16()
        model[0].bias = nn.Parameter(wide[:, 1])
        fast = compiled(model)
        before = fast(x)
        for change in (lambda: wide[4:, 1].add_(4), lambda: model[6].weight.view(-1)[-1:].add_(8)):
            change()
            y, want = fast(x), model(x)
            torch.testing.assert_close(y, want, rtol=5e-2, atol=5e-2 * float(want.abs().max()))
            assert not torch.equal(y, before)
            before = y
        assert len(computed) == 3


def test_nan_is_no_change(computed):
    model, x = made()
    with torch.inference_mode():
        model[0].weight[0, 0, 0, 0] = torch.nan
        fast = compiled(model)
        for _ in range(3):
            fast(x)
        model[0].weight[0, 0, 0, 0] = 1
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
    assert len(computed) == 2


@pytest.mark.parametrize("most", [1 << 18, 500])
def test_one_comparison_of_many(most, computed, monkeypatch):
    monkeypatch.setattr(_constants, "_COMPARED", (most, most))
    model, x = made()
    fast, compared = compiled(model), []
    with torch.inference_mode():
        fast(x)
        # The last tensors that are compared, too.
        for change in (lambda: None, lambda: model[7].running_var.mul_(2), lambda: model[0].weight.mul_(2)):
            change()
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
        equal = torch.equal
        monkeypatch.setattr(torch, "equal", lambda *args: compared.append(1) or equal(*args))
        fast(x)
    # A filter has 900 bytes, and is compared alone if only 500 are at once.
    assert (len(compared) == 1 if most > 500 else len(compared) >= 4) and len(computed) == 3


def test_memory_is_not_held(computed):
    """The views of what is compared do not keep it alive."""
    model, x = made()
    with torch.inference_mode():
        compiled(model)(x)
        gone = [weakref.ref(parameter.untyped_storage()) for parameter in model.parameters()]
        model.to(torch.float64)
        assert all(of() is None for of in gone)


def doubled(layer):
    layer.weight.data = layer.weight.data * 2


def laid_otherwise(layer):
    layer.weight.data = (layer.weight.data * 2).contiguous(memory_format=torch.channels_last)


def in_pieces(layer):
    """Every second number of its memory."""
    layer.weight.data = torch.stack([layer.weight.data * 2, layer.weight.data], -1)[..., 0]


@pytest.mark.parametrize("change", [lambda layer: layer.weight.mul_(2), doubled, laid_otherwise, in_pieces])
def test_parameters_are_read_where_they_lie(change, computed):
    """What nothing is folded into is no copy, as long as it lies as it did. Nobody writes to memory that is not a
    parameter's any more."""
    model = normal(nn.Sequential(nn.Conv2d(5, 5, 3), nn.SiLU(), nn.Flatten(), nn.Linear(5 * 4 * 5, 7)))
    fast, x = compiled(model), torch.randn(1, 5, 6, 7)
    lie_at = lambda: {t.data_ptr() for t in model.parameters()}
    with torch.no_grad():
        fast(x)
        assert {t.data_ptr() for t in computed[-1]} == lie_at() and len(computed) == 1
        for layer in (model[0], model[3]):
            if layer.weight.dim() < 4 and change is laid_otherwise:
                continue
            before = layer.weight.data
            kept = before.clone()
            change(layer)
            for _ in range(2):
                torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
            is_same_memory = before.data_ptr() == layer.weight.data_ptr()
            torch.testing.assert_close(before, 2 * kept if is_same_memory else kept, rtol=0, atol=0)
        assert len(computed) == (2 if change is laid_otherwise else 3)
    gone = [weakref.ref(parameter.untyped_storage()) for parameter in model.parameters()]
    del before, layer, model, fast
    computed.clear()
    gc.collect()
    assert all(of() is None for of in gone)


def test_parameters_that_are_replaced_live_until_the_next_call(computed):
    """So a call that another thread has begun reads no memory that is freed."""
    model, x = normal(nn.Sequential(nn.Conv2d(5, 5, 3), nn.SiLU())), torch.randn(1, 5, 6, 7)
    fast = compiled(model)
    with torch.no_grad():
        fast(x)
        computed.clear()
        held = weakref.ref(model[0].weight.untyped_storage())
        doubled(model[0])
        assert held() is not None
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
        assert held() is None


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_graphs_share_parameters(mode, computed, runs_uncompiled):
    """A filter that nothing is folded into is not copied for each size of the image; CUDA graphs hold copies."""
    model, sizes = nn.Sequential(nn.Conv2d(5, 5, 3), nn.SiLU(), nn.Conv2d(5, 4, 1)).eval(), (6, 9)
    options = {"rest": "inductor", "accuracy": "exact", "check": False, "mode": mode}
    fast = torch.compile(model, backend=windrow, dynamic=False, options=options)
    images = [torch.randn(2, 5, size, size) for size in sizes]
    held = [weakref.ref(parameter) for parameter in model.parameters()]
    with torch.no_grad():
        for change in (lambda: None, lambda: model[0].weight.mul_(2), lambda: model[2].bias.add_(1)):
            change()
            for x in (*images, *images):
                torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
    assert {len(constants) for constants in computed} == {0 if mode is None else 4}
    assert len(computed) == 3 * len(sizes)
    torch._dynamo.reset()
    del model, fast
    gc.collect()
    assert all(of() is None for of in held)


def test_an_optimized_model_counts_writes(computed):
    model, x = made()
    with torch.inference_mode():
        fast = optimize(model, check=False)
        assert not any(t.is_inference() for t in fast.state_dict(keep_vars=True).values())
        for _ in range(3):
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
        for of in (model, fast):
            of[4].running_mean.add_(1)
            of[3].weight.view(-1)[5:6].add_(1)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
    assert len(computed) == 2
