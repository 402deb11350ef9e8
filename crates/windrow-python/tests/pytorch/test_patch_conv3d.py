"""`patch` of `nn.Conv3d`, whose decisions, report and gradients are those of `nn.Conv2d`."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from common import OURS, THEIRS, each_device
from torch import nn
from windrow.torch import Conv3d, UnsupportedAlgorithmError, decide, decisions, patch, unpatch
from windrow.torch.choice.policy import KEPT, PYTORCH, Seconds, is_step_worth_it

pytestmark = pytest.mark.usefixtures("nothing_decided")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(4, 8, 3, padding=1),
        nn.SiLU(),
        nn.Conv3d(8, 8, (3, 1, 1), stride=(2, 1, 1), groups=2, bias=False),
        nn.Conv3d(8, 6, (1, 3, 3), padding="same"),
        nn.Conv3d(6, 4, 3, padding=1, padding_mode="replicate"),
    )


def like(dtype: torch.dtype) -> dict:
    return {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}


@each_device
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_report_and_what_is_put_back(factor, dtype, device) -> None:
    model, x = net().to(device, dtype), torch.randn(2, 4, 5, 9, 8, dtype=dtype, device=device)
    with torch.no_grad():
        want = model(x)
        keys = [*model.state_dict()]
        report = patch(model)
        assert [*report.swapped] == ["0", "2", "3", "4"] and not report.left
        for form in (torch.contiguous_format, torch.channels_last_3d):
            for _ in range(3):
                given = x.contiguous(memory_format=form)
                torch.testing.assert_close(model(given), want, **like(dtype))
                torch.testing.assert_close(model(given[:1]), want[:1], **like(dtype))
        torch.testing.assert_close(model[0](x[0]), model[0](x)[0], **like(dtype))
    who = "Windrow" if factor == OURS else "PyTorch"
    name = str(dtype).removeprefix("torch.")
    on = "cpu" if device == "cpu" else "cuda:0"
    assert f"forward of {name} [2, 4, 5, 9, 8] on {on}: {who}" in str(report)
    assert {d.choice for d in decisions()} == {who}
    assert [*model.state_dict()] == keys
    again = copy.deepcopy(model)
    assert type(again[0]) is Conv3d
    unpatch(model)
    assert {type(m) for m in model if not isinstance(m, nn.SiLU)} == {nn.Conv3d}
    with torch.no_grad():
        torch.testing.assert_close(again(x), want, **like(dtype))


@each_device
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(factor, dtype, device) -> None:
    model = net().to(device, dtype)
    other = copy.deepcopy(model)
    patch(other)
    for _ in range(3):
        x = torch.randn(2, 4, 5, 9, 8).to(device, dtype).requires_grad_()
        theirs = x.detach().clone().requires_grad_()
        dy = torch.randn_like(model(x))
        model.zero_grad(), other.zero_grad()
        model(x).backward(dy), other(theirs).backward(dy)
        torch.testing.assert_close(x.grad, theirs.grad, **like(dtype))
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            near = {"atol": TOLERANCES[dtype] * float(one.grad.abs().max()), "rtol": TOLERANCES[dtype]}
            torch.testing.assert_close(one.grad, two.grad, **near)
    assert not any("gradient" in d.what for d in decisions())


def test_filter_gradients_of_many_videos_are_summed_in_f32(times) -> None:
    times(OURS)
    model = nn.Conv3d(1, 1, 1, bias=False, dtype=torch.bfloat16)
    patch(model)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(4096, 1, 1, 1, 1, dtype=torch.bfloat16)).sum().backward()
        assert model.weight.grad.item() == 4096


@each_device
def test_hooks_and_autocast(factor, device) -> None:
    model, x = net().to(device), torch.randn(1, 4, 5, 9, 8, device=device)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        want = model(x)
        patch(model)
        seen = []
        model[0].register_forward_hook(lambda module, args, y: seen.append(y.dtype))
        for _ in range(3):
            torch.testing.assert_close(model(x), want, **like(torch.bfloat16))
    assert seen == [torch.bfloat16] * 3


def test_what_windrow_cannot_compute_is_pytorchs(times) -> None:
    times(OURS)
    model, x = nn.Conv3d(4, 8, 3).double(), torch.randn(1, 4, 5, 9, 8, dtype=torch.float64)
    want = model(x)
    patch(model)
    assert torch.equal(model(x), want)
    empty = patch(nn.Conv3d(4, 8, 3)).model(torch.randn(0, 4, 5, 9, 8))
    assert empty.shape == (0, 8, 3, 7, 6)
    with pytest.raises(ValueError, match="x has 5 channels"):
        patch(nn.Conv3d(4, 8, 3)).model(torch.randn(1, 5, 5, 9, 8))


def test_decisions_by_hand(times) -> None:
    times(THEIRS)
    model, x = nn.Conv3d(4, 8, 3, padding=1, dilation=(2, 1, 1)), torch.randn(1, 4, 6, 9, 8)
    patch(model)
    with torch.no_grad():
        want = model(x)
        (decision,) = decisions()
        assert decision.choice == "PyTorch" and "dilation [2, 1, 1]" in decision.problem
        decide(decision, "im2col_gemm")
        torch.testing.assert_close(model(x), want, **like(torch.float32))
        (decision,) = decisions()
        assert decision.choice == "Windrow" and decision.algorithm == "im2col_gemm" and decision.is_final
        with pytest.raises(UnsupportedAlgorithmError):
            decide(decision, "implicit_gemm")


def test_a_module_of_its_own() -> None:
    module = Conv3d(4, 8, 3, padding=1)
    module.activation = "relu"
    x = torch.randn(1, 4, 5, 9, 8)
    want = F.relu(F.conv3d(x, module.weight, module.bias, padding=1))
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(module(x), want, **like(torch.float32))
        with pytest.raises(ValueError, match="`weight`"):
            module(x[:, :3])
    module(x).sum().backward()
    assert module.weight.grad is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(module)
    torch.testing.assert_close(scripted(x), want, **like(torch.float32))


@pytest.mark.parametrize("seconds, is_ours", [(1e-2, True), (1e-4, False)])
def test_a_step_on_a_gpu_gains_more_than_autograd_takes(seconds, is_ours) -> None:
    """Gradients are PyTorch's, so a step gains what its forward pass does."""
    times = {PYTORCH: Seconds(seconds), KEPT: Seconds(seconds / 2)}
    assert is_step_worth_it([(True, times), (False, {})], True, False) == is_ours
    assert is_step_worth_it([(True, times)], True, False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("is_allowed", [True, False])
def test_tf32_on_a_gpu_only_where_pytorch_allows_it(is_allowed, times, monkeypatch) -> None:
    times(OURS)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", is_allowed)
    model = nn.Conv3d(64, 64, 3, padding=1).cuda()
    x = torch.randn(1, 64, 4, 20, 24, device="cuda")
    want = F.conv3d(x.double(), model.weight.double(), model.bias.double(), padding=1)
    patch(model)
    with torch.no_grad():
        error = [float((model(x) - want).norm() / want.norm()) for _ in range(2)]
    # TF32 rounds operands to 11 bits. The error of f32, by which Windrow may compute it too, is hundreds of times smaller.
    assert all(e < (2e-3 if is_allowed else 2e-5) for e in error)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured(factor) -> None:
    model, x = net().cuda(), torch.randn(2, 4, 5, 9, 8, device="cuda")
    with torch.no_grad():
        want = model(x)
        patch(model)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                model(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        for _ in range(2):
            graph.replay()
            torch.testing.assert_close(y, want, **like(torch.float32))
