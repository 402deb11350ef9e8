"""Outputs of causal convolutions with some of the channels each: `split`."""

import pytest
import torch
import windrow.sglang
import windrow.vllm
from common import compare_with_f64, each_device, each_dtype, leaf
from torch.utils.flop_counter import FlopCounterMode
from windrow.torch import causal_conv1d_fn

SPLITS = [[24], [8, 16], [1, 23], [8, 8, 8], [3, 20, 1]]
BAD = [[], [0, 24], [24, 0], [23], [8, 8, 9], [-1, 25], [6, 6, 6, 6]]
EXPECTED = "expected one to three numbers of at least one channel whose sum is 24"


def equal(got, whole, split, dim=1):
    """Each part has the bits of its channels, and lies without gaps in the order of the whole."""
    want = whole.split(list(split), dim)
    assert isinstance(got, tuple) and len(got) == len(want)
    for part, of_whole in zip(got, want, strict=True):
        assert part.dtype == whole.dtype and torch.equal(part, of_whole)
        assert part.is_contiguous() or part.transpose(-1, -2).is_contiguous() and not whole.is_contiguous()


@each_device
@each_dtype
@pytest.mark.parametrize("layout", [(0, 1, 2), (0, 2, 1)])
@pytest.mark.parametrize("split", SPLITS)
def test_bits_are_those_of_one_output(device, dtype, layout, split):
    for width, length in [(4, 37), (4, 1), (1, 5), (20, 70)]:
        x = leaf(2, 24, length, dtype=dtype, device=device, layout=layout, grad=False)
        weight, bias = (leaf(*s, device=device, grad=False) for s in [(24, width), (24,)])
        state = leaf(2, 24, width - 1, dtype=dtype, device=device, grad=False)
        seq_idx = torch.arange(length, device=device, dtype=torch.int32).div(9, rounding_mode="floor") - 1
        for more in [{}, {"initial_states": state}, {"seq_idx": seq_idx.expand(2, -1).contiguous()}]:
            options = {"activation": "silu", **more}
            ys = causal_conv1d_fn(x, weight, bias, split=split, **options)
            equal(ys, causal_conv1d_fn(x, weight, bias, **options), split)
    ys, last = causal_conv1d_fn(x, weight, bias, initial_states=state, return_final_states=True, split=tuple(split))
    whole, want = causal_conv1d_fn(x, weight, bias, initial_states=state, return_final_states=True)
    equal(ys, whole, split)
    assert torch.equal(last, want)


def test_dense_and_packed():
    x, weight = leaf(1, 3, 12, grad=False), leaf(5, 3, 4, grad=False)
    starts = torch.tensor([0, 2, 2, 9, 12])
    ys = causal_conv1d_fn(x, weight, cu_seqlens=starts, split=[2, 2, 1])
    equal(ys, causal_conv1d_fn(x, weight, cu_seqlens=starts), [2, 2, 1])


@pytest.mark.parametrize("shape", [(0, 24, 5), (2, 24, 0)])
def test_nothing_to_compute(shape):
    ys = causal_conv1d_fn(torch.randn(shape), torch.randn(24, 4), split=[8, 16])
    assert [y.shape for y in ys] == [(shape[0], n, shape[2]) for n in (8, 16)]


@pytest.mark.parametrize("split", BAD)
def test_bad_splits(split):
    x, weight = leaf(2, 24, 5, grad=False), leaf(24, 4, grad=False)
    with pytest.raises(ValueError, match=EXPECTED):
        causal_conv1d_fn(x, weight, split=split)
    with pytest.raises(ValueError, match="`split` is"):
        torch.ops.windrow.causal_conv1d_split(x, weight, None, None, None, None, split, None, False)
    states, starts = torch.zeros(1, 24, 3), torch.tensor([0, 5])
    for engine in (windrow.vllm, windrow.sglang):
        with pytest.raises(ValueError, match=EXPECTED):
            engine.causal_conv1d_fn(x[0], weight, None, states, starts, split=split)
        with pytest.raises(ValueError, match=EXPECTED):
            engine.causal_conv1d_update(x[:1, :, 0], states, weight, split=split)
    assert (states == 0).all()


@each_device
@pytest.mark.parametrize("split", [[9], [4, 5], [2, 3, 4]])
def test_gradients(device, split):
    x, weight, bias = (leaf(*s, device=device) for s in [(2, 9, 11), (9, 4), (9,)])
    initial = leaf(2, 9, 3, device=device)

    def reference(x, w, b, s):
        inputs = torch.cat([s, x], 2)
        y = torch.nn.functional.silu(torch.nn.functional.conv1d(inputs, w[:, None], b, groups=9))
        return *y.split(split, 1), inputs[..., -3:]

    def ours(x, w, b, s):
        ys, last = causal_conv1d_fn(
            x, w, b, initial_states=s, return_final_states=True, activation="silu", split=split
        )
        return *ys, last

    compare_with_f64(ours, reference, (x, weight, bias, initial))


def test_a_part_without_a_gradient():
    x, weight = leaf(2, 24, 5), leaf(24, 4)
    _, k, _ = causal_conv1d_fn(x, weight, activation="silu", split=[8, 8, 8])
    whole = causal_conv1d_fn(x, weight, activation="silu")[:, 8:16]
    got = torch.autograd.grad(k.square().sum(), (x, weight))
    torch.testing.assert_close(got, torch.autograd.grad(whole.square().sum(), (x, weight)))


def test_double_backward_is_refused():
    x, weight = leaf(2, 24, 6), leaf(24, 4)
    y = causal_conv1d_fn(x, weight, split=[8, 16])[0].sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward: windrow.torch.causal_conv1d"):
        dx.sum().backward()


def test_autocast():
    x, weight = leaf(2, 24, 6), leaf(24, 4)
    with torch.autocast("cpu", torch.bfloat16):
        ys = causal_conv1d_fn(x, weight, activation="silu", split=[8, 16])
    assert [y.dtype for y in ys] == [torch.bfloat16] * 2
    ys[1].float().sum().backward()
    assert x.grad.dtype == torch.float32


@pytest.mark.parametrize("grad", [False, True])
def test_compiled(grad):
    def function(x, weight):
        q, k, v = causal_conv1d_fn(x + 1, weight, activation="silu", split=[4, 4, 16])
        return q * 2, k, v + 1

    compiled = torch.compile(function, fullgraph=True)
    for layout in [(0, 1, 2), (0, 2, 1)]:
        for length in [6, 6, 11]:
            tensors = [leaf(2, 24, length, grad=grad, layout=layout), leaf(24, 4, grad=grad)]
            got, want = compiled(*tensors), function(*tensors)
            torch.testing.assert_close(got, want)
            assert [g.stride() for g in got] == [w.stride() for w in want]
            if grad:
                ours = torch.autograd.grad([g.sum() for g in got], tensors)
                theirs = torch.autograd.grad([w.sum() for w in want], tensors)
                torch.testing.assert_close(ours, theirs)


@each_device
def test_opcheck(device):
    x, weight, bias = (leaf(*s, device=device) for s in [(2, 24, 6), (24, 4), (24,)])
    channel_last = leaf(2, 24, 6, device=device, layout=(0, 2, 1))
    operator = torch.ops.windrow.causal_conv1d_split.default
    for given, split, states in [(x, [8, 16], False), (channel_last, [3, 20, 1], True), (x, [24], True)]:
        torch.library.opcheck(operator, (given, weight, bias, None, None, None, split, "silu", states))


def test_batched_and_counted():
    x, weight = leaf(3, 2, 24, 6, grad=False), leaf(24, 4, grad=False)
    got = torch.vmap(lambda x: causal_conv1d_fn(x, weight, split=[8, 16]))(x)
    equal(got, causal_conv1d_fn(x.flatten(0, 1), weight).unflatten(0, (3, 2)), [8, 16], 2)
    with FlopCounterMode(display=False) as counter:
        causal_conv1d_fn(x[0], weight, split=[8, 16])
    assert counter.get_total_flops() == 2 * 2 * 6 * 24 * 4


def packed(device, dtype, channel_last):
    """Three prompts, of which one is padding, and tokens of none."""
    x = torch.randn(50, 24).to(device, dtype)
    states = torch.randn(7, 3, 24).to(device, dtype)
    x, states = x.T, states.transpose(1, 2)
    if not channel_last:
        x, states = x.contiguous(), states.contiguous()
    starts = torch.tensor([0, 20, 23, 46], dtype=torch.int32, device=device)
    indices = torch.tensor([5, -1, 2], dtype=torch.int32, device=device)
    flags = torch.tensor([True, True, False], device=device)
    weight, bias = torch.randn(24, 4).to(device, dtype), torch.randn(24).to(device, dtype)
    return (x, weight, bias), states, (starts, indices, flags)


@each_device
@each_dtype
@pytest.mark.parametrize("channel_last", [True, False])
@pytest.mark.parametrize("split", SPLITS)
def test_prompts(device, dtype, channel_last, split):
    filters, states, (starts, indices, flags) = packed(device, dtype, channel_last)
    for engine, more in [(windrow.vllm, {}), (windrow.sglang, {"seq_lens_cpu": [20, 3, 23]})]:
        kept, given = states.clone(), states.clone()
        more |= {"cache_indices": indices, "has_initial_state": flags}
        whole = engine.causal_conv1d_fn(*filters, kept, starts, **more)
        ys = engine.causal_conv1d_fn(*filters, given, starts, split=split, **more)
        equal(ys, whole, split, 0)
        assert torch.equal(kept, given) and not torch.equal(kept, states)


@each_device
@each_dtype
@pytest.mark.parametrize("split", SPLITS)
def test_steps(device, dtype, split):
    (x, weight, bias), states, _ = packed(device, dtype, True)
    indices = torch.tensor([5, -1, 2], dtype=torch.int32, device=device)
    rows = x.T[:6].view(3, 2, 24).transpose(1, 2)
    for engine in (windrow.vllm, windrow.sglang):
        # The second call finds the plan of the first one.
        for tokens in (rows[..., 0], rows[..., 0], rows, rows.contiguous()):
            kept, given, own = states.clone(), states.clone(), tokens.clone()
            whole = engine.causal_conv1d_update(tokens.clone(), kept, weight, bias, "silu", conv_state_indices=indices)
            ys = engine.causal_conv1d_update(own, given, weight, bias, "silu", conv_state_indices=indices, split=split)
            for y, want in zip(ys, whole.split(split, 1), strict=True):
                assert torch.equal(y, want)
            assert torch.equal(kept, given) and torch.equal(own, tokens)


def test_steps_of_drafts_and_of_another_type():
    (x, weight, bias), states, (starts, indices, _) = packed("cpu", torch.float32, True)
    tokens, accepted = x.T[:46], torch.tensor([1, 1, 1])
    options = {"query_start_loc": torch.tensor([0, 1, 1, 2]), "conv_state_indices": indices}
    options["num_accepted_tokens"] = accepted
    kept, given = states.clone(), states.clone()
    whole = windrow.vllm.causal_conv1d_update(tokens[:2].clone(), kept, weight, bias, "silu", **options)
    ys = windrow.vllm.causal_conv1d_update(tokens[:2], given, weight, bias, "silu", **options, split=[8, 16])
    equal(ys, whole, [8, 16], 1)
    assert torch.equal(kept, given)
    half = states.to(torch.bfloat16)
    ys = windrow.vllm.causal_conv1d_update(tokens[:3], half, weight, bias, "silu", indices, split=[8, 16])
    assert [y.dtype for y in ys] == [torch.float32] * 2
    ys = windrow.vllm.causal_conv1d_fn(x, weight, bias, half, starts, indices, split=[8, 16])
    assert [y.dtype for y in ys] == [torch.float32] * 2
    with pytest.raises(ValueError, match="`out` is given, expected None with `split`"):
        windrow.vllm.causal_conv1d_update(tokens[:3], half, weight, out=tokens[:3].clone(), split=[8, 16])
