"""`windrow.conv3d` and `windrow.torch.conv3d` against PyTorch in f64."""

import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import windrow
import windrow.torch
from common import DEVICES, each_device
from conv3d_problems import CHECKS, problem
from problems import SMALLEST, UNIT, Random, U, Wrong
from windrow.torch.choice import check
from windrow.torch.choice.problem import Options, aten

PROBLEMS = int(os.environ.get("WINDROW_TEST_PROBLEMS", 200))


@each_device
@pytest.mark.parametrize("compared", CHECKS)
def test_random_problems_agree_with_f64(device: str, compared) -> None:
    for seed in range(PROBLEMS):
        r = Random(seed, device)
        try:
            compared(r)
        except Wrong as wrong:
            raise Wrong(f"{seed}: {wrong}, {r.chosen}") from wrong


@each_device
def test_gradients_agree_with_f64(device: str) -> None:
    for seed in range(PROBLEMS // 4):
        r = Random(seed, device)
        tensors, options, _ = problem(r)
        given = [None if t is None else t.detach().requires_grad_() for t in tensors]
        wide = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
        y = windrow.torch.conv3d(*given, **options)
        dy = torch.randn(y.shape, generator=r.generator).to(y)
        (F.conv3d(*wide, **options) * dy.double()).sum().backward()
        y.backward(dy)
        sizes = [None if t is None else t.detach().double().abs().requires_grad_() for t in tensors]
        (F.conv3d(*sizes, **options) * dy.double().abs()).sum().backward()
        # On a GPU these gradients are PyTorch's own, which may be further off.
        theirs = [None if t is None else t.detach().requires_grad_() for t in tensors]
        if device != "cpu":
            F.conv3d(*theirs, **options).backward(dy)
        for got, want, scale, their in zip(given, wide, sizes, theirs, strict=True):
            if got is not None:
                terms = dy.numel() + tensors[1].numel()
                error = terms * U * scale.grad + UNIT[got.dtype] * want.grad.abs() + SMALLEST[got.dtype]
                if their.grad is not None:
                    error += (their.grad.double() - want.grad).abs()
                assert got.grad.dtype == got.dtype
                assert ((got.grad.double() - want.grad).abs() <= error).all(), f"{seed}: {r.chosen}"


def test_filter_gradients_of_many_videos_are_summed_in_f32() -> None:
    x = torch.ones(4096, 1, 1, 1, 1, dtype=torch.bfloat16)
    weight = torch.ones(1, 1, 1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    windrow.torch.conv3d(x, weight).sum().backward()
    assert weight.grad.item() == 4096


@each_device
def test_layouts_and_forms_of_arguments(device: str) -> None:
    x, weight = torch.randn(2, 8, 3, 6, 7, device=device), torch.randn(16, 8, 3, 3, 3, device=device)
    want = F.conv3d(x, weight, padding=1)
    torch.testing.assert_close(windrow.torch.conv3d(x, weight, padding=1), want, atol=1e-3, rtol=1e-3)
    same = windrow.torch.conv3d(x, weight, padding="same")
    torch.testing.assert_close(same, want, atol=1e-3, rtol=1e-3)
    last = windrow.torch.conv3d(x.to(memory_format=torch.channels_last_3d), weight, padding=(1, 1, 1))
    assert last.is_contiguous(memory_format=torch.channels_last_3d)
    torch.testing.assert_close(last, want, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(windrow.torch.conv3d(x[0], weight, padding=1), want[0], atol=1e-3, rtol=1e-3)
    y = windrow.conv3d(x.cpu().numpy(), weight.cpu().numpy(), padding=[1, 1, 1])
    np.testing.assert_allclose(y, want.cpu().numpy(), atol=1e-3, rtol=1e-3)


@each_device
def test_autocast_and_compiled_graphs(device: str) -> None:
    x, weight = torch.randn(1, 8, 3, 6, 7, device=device), torch.randn(16, 8, 3, 3, 3, device=device)
    with torch.autocast(device, torch.bfloat16):
        assert windrow.torch.conv3d(x, weight, padding=1).dtype == torch.bfloat16
    function = lambda x: windrow.torch.conv3d(x, weight, padding=1, activation="relu") * 2
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), function(x))


@each_device
def test_kept_filters_follow_their_values(device: str) -> None:
    x, weight = torch.randn(1, 8, 3, 6, 7, device=device), torch.nn.Parameter(torch.randn(16, 8, 3, 3, 3, device=device))
    with torch.no_grad():
        first = windrow.torch.conv3d(x, weight)
        weight.mul_(2)
        torch.testing.assert_close(windrow.torch.conv3d(x, weight), 2 * first)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("device, algorithm", [("cpu", "winograd_gemm_f4"), *((d, "im2col_gemm") for d in DEVICES)])
def test_chunks_have_the_bits_of_the_whole(device: str, algorithm: str, chunk: int) -> None:
    x, weight = torch.randn(2, 12, 7, 6, 7, device=device), torch.randn(16, 12, 3, 3, 3, device=device)
    options = {"padding": [0, 1, 1], "time_padding": "causal", "algorithm": algorithm}
    whole = windrow.conv3d(x, weight, **options)
    padded = F.pad(x, (0, 0, 0, 0, 2, 0))
    torch.testing.assert_close(whole, F.conv3d(padded, weight, padding=[0, 1, 1]), atol=1e-3, rtol=1e-3)
    state, parts = torch.zeros(2, 12, 2, 6, 7, device=device), []
    for frames in x.split(chunk, 2):
        parts.append(windrow.conv3d(frames, weight, initial_frames=state, final_frames=state, **options))
    assert torch.equal(torch.cat(parts, 2), whole)
    assert torch.equal(state, x[:, :, -2:])


def test_errors() -> None:
    x, weight = torch.randn(1, 8, 3, 6, 7), torch.randn(16, 8, 3, 3, 3)
    with pytest.raises(ValueError, match="`weight`|`w`"):
        windrow.torch.conv3d(x, weight[:, :7])
    with pytest.raises(ValueError, match="stride"):
        windrow.torch.conv3d(x, weight, stride=0)
    with pytest.raises(ValueError, match="expected an int, or one for each direction"):
        windrow.conv3d(x, weight, stride=[1, 1])
    with pytest.raises(TypeError):
        windrow.torch.conv3d(x.double(), weight.double())
    with pytest.raises(ValueError, match="causal"):
        windrow.conv3d(x, weight, initial_frames=x[:, :, :2])
    with pytest.raises(ValueError, match="time_padding"):
        windrow.conv3d(x, weight, time_padding="before")
    with pytest.raises(ValueError, match="algorithm"):
        windrow.torch.conv3d(x, weight, algorithm="unknown")


def test_a_check_looks_at_every_frame(monkeypatch) -> None:
    """Frame by frame, the reference is that of the whole; and no frame of a result may be wrong."""
    monkeypatch.setattr(check, "_AT_A_TIME", {})
    monkeypatch.setattr(check, "_SAMPLE", 64)
    for seed in range(PROBLEMS):
        r = Random(seed, "cpu")
        (x, weight, bias), given, _ = problem(r)
        x, weight, bias = (None if t is None else t.float() for t in (x, weight, bias))
        options = Options(*(given[name] for name in ("stride", "padding", "dilation", "groups")))
        y = aten(x, weight, bias, options)
        residual = torch.randn(y.shape, generator=r.generator) if r.maybe("with residual") else None
        right = y if residual is None else y + residual
        finish = lambda part, at, residual=residual: part if residual is None else part + residual[at]
        of = check.check_of(x, weight, bias, options, None, finish, residual)
        for size in (1, 2, 5):
            parts = [of.of(part)[0] for part in of._parts(size)]
            torch.testing.assert_close(torch.cat([value for value, _ in parts], 2), right, rtol=1e-4, atol=1e-4)
            assert all(scale.shape == value.shape for value, scale in parts)
        assert of.fault(right) is None, r.chosen
        for frame in range(y.shape[2]):
            wrong = right.clone()
            wrong[-1, 0, frame, -1, 0] += 1 + wrong.abs().max()
            assert "differs" in str(of.fault(wrong)), (frame, r.chosen)


def test_bytes() -> None:
    x, weight = torch.randn(1, 8, 3, 6, 7), torch.randn(16, 8, 3, 3, 3)
    named = {"stride": [1, 1, 1], "padding": [1, 1, 1], "dilation": [1, 1, 1], "groups": 1}
    named |= {"activation": None, "accuracy": None, "memory": None}
    kept, scratch = windrow._native.conv3d_bytes(x, weight, None, named, False, True)
    assert kept >= weight.nbytes and scratch >= 0
    with pytest.raises(ValueError, match="stride"):
        windrow._native.conv3d_bytes(x, weight, None, {**named, "stride": [0, 1, 1]}, False, True)
