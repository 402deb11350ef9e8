"""Split outputs of causal convolutions that are divided by the L2 norm of their heads: `norm_head`."""

import pytest
import torch
import windrow.sglang
import windrow.vllm
from common import compare_with_f64, each_device, each_dtype, leaf
from windrow.torch import causal_conv1d_fn

SPLITS = [([256], 128), ([128, 128], 64), ([128, 64, 64], 32), ([8, 16, 232], 8), ([60, 180, 16], 12)]


def divided(ys, head, eps=1e-6, dim=1):
    """The norm behind the convolution, in f64."""
    of = lambda y: y.double().unflatten(dim, (-1, head))
    norm = lambda y: (of(y) / (of(y).square().sum(dim + 1, keepdim=True) + eps).sqrt()).flatten(dim, dim + 1)
    return [norm(y) for y in ys[:2]] + [y.double() for y in ys[2:]]


def close(got, want):
    """Up to a rounding to the type of the result, and those of f32."""
    for y, wanted in zip(got, want, strict=True):
        unit = {torch.float32: 4e-6, torch.float16: 5.1e-4, torch.bfloat16: 4e-3}[y.dtype]
        torch.testing.assert_close(y.double(), wanted, rtol=unit, atol=1e-7)


@each_device
@each_dtype
@pytest.mark.parametrize("layout", [(0, 1, 2), (0, 2, 1)])
@pytest.mark.parametrize(("split", "head"), SPLITS)
def test_values(device, dtype, layout, split, head):
    for width, length in [(4, 37), (4, 1), (20, 70)]:
        x = leaf(2, 256, length, dtype=dtype, device=device, layout=layout, grad=False)
        weight, bias = (leaf(*s, device=device, grad=False) for s in [(256, width), (256,)])
        state = leaf(2, 256, width - 1, dtype=dtype, device=device, grad=False)
        for more in [{}, {"initial_states": state}]:
            options = {"activation": "silu", "split": split, **more}
            want = divided(causal_conv1d_fn(x, weight, bias, **options), head, 1e-3)
            close(causal_conv1d_fn(x, weight, bias, norm_head=head, norm_eps=1e-3, **options), want)


@each_device
@each_dtype
@pytest.mark.parametrize(("split", "head"), SPLITS)
def test_serving_has_the_bits_of_whole_sequences(device, dtype, split, head):
    x = torch.randn(70, 256).to(device, dtype).T
    weight, bias = torch.randn(256, 4).to(device, dtype), torch.randn(256).to(device, dtype)
    norm = {"split": split, "norm_head": head}
    whole = causal_conv1d_fn(x[None], weight, bias, activation="silu", batch_invariant=True, **norm)
    for engine in (windrow.vllm, windrow.sglang):
        states = torch.zeros(3, 3, 256, device=device, dtype=dtype).transpose(1, 2)
        starts, indices = (torch.tensor(t, dtype=torch.int32, device=device) for t in ([0, 60], [2]))
        flags = torch.tensor([False], device=device)
        more = {"cache_indices": indices, "has_initial_state": flags}
        prompt = engine.causal_conv1d_fn(x[:, :60], weight, bias, states, starts, **more, **norm)
        parts = [list(prompt)]
        for t in range(60, 70):
            step = engine.causal_conv1d_update(
                x[:, t][None], states, weight, bias, "silu", conv_state_indices=indices, **norm
            )
            parts.append([y.T for y in step])
        for got, want in zip(zip(*parts, strict=True), whole, strict=True):
            assert torch.equal(torch.cat(got, 1), want[0])


@each_device
@pytest.mark.parametrize(("split", "head"), [([9], 3), ([4, 5], 1), ([3, 3, 3], 3)])
def test_gradients(device, split, head):
    x, weight, bias = (leaf(*s, device=device) for s in [(2, 9, 11), (9, 4), (9,)])

    def reference(x, w, b):
        inputs = torch.nn.functional.pad(x, (3, 0))
        ys = torch.nn.functional.silu(torch.nn.functional.conv1d(inputs, w[:, None], b, groups=9)).split(split, 1)
        of = lambda y: y.unflatten(1, (-1, head))
        norm = lambda y: (of(y) / (of(y).square().sum(2, keepdim=True) + 1e-2).sqrt()).flatten(1, 2)
        return *(norm(y) for y in ys[:2]), *ys[2:]

    def ours(x, w, b):
        return causal_conv1d_fn(x, w, b, activation="silu", split=split, norm_head=head, norm_eps=1e-2)

    compare_with_f64(ours, reference, (x, weight, bias))


def test_compiled():
    def function(x, weight):
        q, k, v = causal_conv1d_fn(x + 1, weight, activation="silu", split=[4, 4, 16], norm_head=2)
        return q * 2, k, v + 1

    compiled = torch.compile(function, fullgraph=True)
    for grad in [False, True]:
        tensors = [leaf(2, 24, 6, grad=grad, layout=(0, 2, 1)), leaf(24, 4, grad=grad)]
        got, want = compiled(*tensors), function(*tensors)
        torch.testing.assert_close(got, want)
        assert [g.requires_grad for g in got] == [grad] * 3


@pytest.mark.parametrize("head", [0, -1, 5, 16])
def test_bad_heads(head):
    x, weight = leaf(2, 24, 5, grad=False), leaf(24, 4, grad=False)
    split = [8, 8, 8]
    states, starts = torch.zeros(1, 24, 3), torch.tensor([0, 5])
    with pytest.raises(ValueError, match=r"`norm_head` is .*expected a divisor of the first two of \[8, 8, 8\]"):
        causal_conv1d_fn(x, weight, split=split, norm_head=head)
    for engine in (windrow.vllm, windrow.sglang):
        with pytest.raises(ValueError, match="expected a divisor of the first two"):
            engine.causal_conv1d_fn(x[0], weight, None, states, starts, split=split, norm_head=head)
        with pytest.raises(ValueError, match="expected a divisor of the first two"):
            engine.causal_conv1d_update(x[:1, :, 0], states, weight, split=split, norm_head=head)


def test_what_needs_a_split_or_has_no_gradient():
    x, weight = leaf(2, 24, 5), leaf(24, 4)
    with pytest.raises(ValueError, match="expected None without `split`"):
        causal_conv1d_fn(x, weight, norm_head=8)
    with pytest.raises(ValueError, match="epsilon -1"):
        causal_conv1d_fn(x.detach(), weight.detach(), split=[24], norm_head=8, norm_eps=-1.0)
    operator = torch.ops.windrow.causal_conv1d_split
    y = operator(x, weight, None, None, None, None, [24], None, False, False, 1, 8)[0]
    with pytest.raises(NotImplementedError, match="call `causal_conv1d_fn`"):
        y.sum().backward()


@each_device
def test_opcheck(device):
    x, weight = (leaf(*s, device=device, grad=False) for s in [(2, 24, 6), (24, 4)])
    operator = torch.ops.windrow.causal_conv1d_split.default
    given = (x, weight, None, None, None, None, [8, 16], "silu", True, False, 1, 4, 1e-3)
    torch.library.opcheck(operator, given)
