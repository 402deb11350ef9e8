"""The backend for flash-linear-attention, registered with a stand-in for its registry."""

import sys
from types import ModuleType

import pytest
import torch
import windrow.fla
from torch.nn.functional import conv1d, silu


@pytest.fixture
def backend(monkeypatch):
    """What fla would call; its registry alone is ours, with the names that are used."""

    class Registry:
        def register(self, backend):
            self.backend = backend

    class BaseBackend:
        pass

    names = ["fla", "fla.modules", "fla.modules.backends", "fla.ops", "fla.ops.backends"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    registry = Registry()
    sys.modules["fla.modules.backends"].modules_registry = registry
    sys.modules["fla.ops.backends"].BaseBackend = BaseBackend
    windrow.fla.register()
    assert isinstance(registry.backend, BaseBackend)
    assert registry.backend.backend_type == "windrow" and registry.backend.env_var == "FLA_WINDROW"
    return registry.backend


def reference(x, weight, bias, residual, state, lengths, activation):
    """Sequence by sequence: outputs and final states of `width` columns."""
    width, outputs, states = weight.shape[1], [], []
    rows = x.split(lengths, 1) if lengths else [row[None] for row in x]
    for i, row in enumerate(rows):
        before = row.new_zeros(1, x.shape[2], width) if state is None else state[i : i + 1]
        whole = torch.cat([before, row.transpose(1, 2)], 2)
        y = conv1d(whole[..., 1:], weight[:, None], bias, groups=x.shape[2])
        outputs.append((silu(y) if activation else y).transpose(1, 2))
        states.append(whole[..., -width:])
    y = torch.cat(outputs, 1 if lengths else 0)
    return (y if residual is None else y + residual), torch.cat(states)


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("lengths", [None, [7, 1, 2, 5]])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("options", [(3, True, None, True), (4, False, "swish", False), (1, True, "silu", True)])
@pytest.mark.parametrize("time", [15, 2])
def test_forward_and_gradients(backend, lengths, with_state, options, time):
    width, biased, activation, with_residual = options
    batch, channels = (1, 10) if lengths else (3, 10)
    if lengths and time == 2:
        lengths = [1, 1]
    x, weight = leaf(batch, time, channels), leaf(channels, width)
    bias = leaf(channels) if biased else None
    residual = leaf(batch, time, channels) if with_residual else None
    sequences = len(lengths) if lengths else batch
    state = leaf(sequences, channels, width) if with_state else None
    y, final = reference(x, weight, bias, residual, state, lengths, activation)
    dy, dfinal = torch.randn_like(y), torch.randn_like(final)
    leaves = {"x": x, "w": weight, "b": bias, "r": residual, "h": state}
    given = {n: t for n, t in leaves.items() if t is not None}
    want = dict(zip(given, torch.autograd.grad([y, final], given.values(), [dy, dfinal]), strict=True))

    def single(tensor):
        return None if tensor is None else tensor.detach().float()

    cu_seqlens = None
    if lengths:
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    got_y, got_final = backend.causal_conv1d_fwd(
        x=single(x),
        weight=single(weight),
        bias=single(bias),
        residual=single(residual),
        initial_state=single(state),
        output_final_state=True,
        activation=activation,
        cu_seqlens=cu_seqlens,
        chunk_indices=None,
    )
    torch.testing.assert_close(got_y.double(), y.detach(), atol=1e-5, rtol=1e-5)
    assert torch.equal(got_final, single(final))
    got = backend.causal_conv1d_bwd(
        x=single(x),
        dy=single(dy),
        dht=single(dfinal),
        weight=single(weight),
        bias=single(bias),
        residual=single(residual),
        initial_state=single(state),
        activation=activation,
        cu_seqlens=cu_seqlens,
    )
    for name, grad in zip("xwbrh", got, strict=True):
        if name not in given:
            assert grad is None
        else:
            torch.testing.assert_close(grad.double(), want[name], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", [[8, 8], [3, 10, 3]])
def test_sequences_packed_over_a_batch(backend, lengths):
    """As one row of all: fla's kernels do not look at the batch then."""
    x, weight, state = torch.randn(2, 8, 6), torch.randn(6, 4), torch.randn(len(lengths), 6, 4)
    residual, dy, dht = torch.randn_like(x), torch.randn_like(x), torch.randn_like(state)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)

    def both(*tensors):
        x, residual, dy = tensors
        more = {"initial_state": state, "cu_seqlens": cu_seqlens, "activation": "silu"}
        y, final = backend.causal_conv1d_fwd(x, weight, None, residual, output_final_state=True, **more)
        grads = backend.causal_conv1d_bwd(x, dy, dht, weight, None, residual, **more)
        return [y, final, *grads]

    packed = both(*(t.reshape(1, 16, 6) for t in (x, residual, dy)))
    for got, want in zip(both(x, residual, dy), packed, strict=True):
        assert got is want is None or torch.equal(got, want.view(got.shape))
    assert both(x, residual, dy)[0].shape == both(x, residual, dy)[2].shape == x.shape


@pytest.mark.parametrize("shape", [(5, 12), (1, 5, 12), (5, 1, 12)])
def test_decoding(backend, shape):
    x, weight, bias = torch.randn(shape), torch.randn(12, 4), torch.randn(12)
    residual, cache = torch.randn(shape), torch.randn(5, 12, 4)
    whole = torch.cat([cache[..., 1:], x.reshape(5, 12, 1)], 2)
    want = silu((whole * weight).sum(2) + bias).view(shape) + residual
    y, same = backend.causal_conv1d_update(x, cache, residual, weight, bias, "silu")
    assert same is cache and torch.equal(cache, whole)
    torch.testing.assert_close(y, want, atol=1e-5, rtol=1e-5)


def test_channels_of_several_dimensions(backend):
    x, weight = torch.randn(2, 6, 3, 4), torch.randn(12, 4)
    y, final = backend.causal_conv1d_fwd(x, weight)
    assert y.shape == x.shape and final is None
    flat, _ = backend.causal_conv1d_fwd(x.flatten(2), weight)
    assert torch.equal(y.flatten(2), flat)


def test_what_is_left_to_fla(backend):
    assert backend.causal_conv1d_fwd_verifier(torch.randn(1, 2, 3))[0] is False
    assert backend.causal_conv1d_fwd_verifier(torch.randn(1, 2, 3), torch.randn(3, 4)) == (True, None)


@pytest.mark.parametrize("types", [(torch.float32, torch.float16), (torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_filters_of_another_type(backend, types):
    """As good as the same numbers in f32; gradients have the types of what they are of."""
    x, dy = (torch.randn(2, 8, 6).to(types[0]) for _ in range(2))
    state, dht = (torch.randn(2, 6, 4).to(types[1]) for _ in range(2))
    given = [torch.randn(6, 4).to(types[1]), torch.randn(6).to(types[1])]
    wide = [t.float() for t in given]

    def forward(filters):
        return backend.causal_conv1d_fwd(x, *filters, None, state, True, "silu")

    def backward(filters):
        return backend.causal_conv1d_bwd(x, dy, dht, *filters, None, state, "silu")

    def step(filters):
        return backend.causal_conv1d_update(x[:, :1], state.to(types[0]), None, *filters, "silu")[:1]

    for function in (forward, step):
        for got, want in zip(function(given), function(wide), strict=True):
            assert got.dtype == types[0] and torch.equal(got, want)
    of_given, of_wide = backward(given), backward(wide)
    assert [g.dtype for g in of_given if g is not None] == [types[0], types[1], types[1], types[1]]
    for got, want in zip(of_given, of_wide, strict=True):
        assert (got is None and want is None) or torch.equal(got, want.to(got.dtype))
