"""What a program on PyTorch's tensors looks like: checked by mypy and pyright, and run."""

import torch
import windrow
import windrow.torch as wt
from torch import Tensor, nn
from torch.distributed import ProcessGroup


def loss_of(x: Tensor) -> Tensor:
    convolution = wt.Conv2d(3, 8, 3, padding=1)
    model = nn.Sequential(convolution, wt.GELU("tanh"))
    y: Tensor = wt.conv2d(x, convolution.weight, padding=[1, 1], activation="silu")
    y = wt.gelu(y, "tanh") + wt.conv2d(x, convolution.weight, padding="same")
    up = wt.ConvTranspose2d(8, 3, 2, stride=2)
    image: Tensor = wt.conv_transpose2d(y, up.weight, up.bias, stride=[2, 2], output_padding=1)
    line: Tensor = wt.conv1d(y[0, :, 0], torch.ones(8, 1, 3), padding="same", groups=8)
    loss: Tensor = (model(x) + y).sum() + image.sum() + up(y, [12, 13]).sum() + wt.Conv1d(8, 2, 3)(line).sum()
    return loss


def decode(x: Tensor, taps: Tensor, *, with_states: bool) -> Tensor:
    y: Tensor = wt.causal_conv1d_fn(x, taps, activation="silu")
    y, states = wt.causal_conv1d_fn(x, taps, return_final_states=True)
    either = wt.causal_conv1d_fn(x, taps, return_final_states=with_states)
    assert isinstance(either, tuple) == with_states
    group: ProcessGroup | None = None
    y = wt.causal_conv1d_fn(x, taps, cp_group=group)
    return y[:, :, 0] + wt.causal_conv1d_update(x[:, :, 0], states, taps)


def main() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU())
    report: wt.PatchReport = wt.patch(model)
    restored: nn.Module = wt.unpatch(wt.freeze(report.model))
    with wt.patched(restored) as report:
        assert "0" in report.swapped and not report.left
    fast: nn.Module = wt.optimize(restored, accuracy="fp32")
    assert fast(torch.ones(1, 3, 6, 6)).shape == (1, 8, 4, 4)
    loss_of(torch.ones(1, 3, 6, 6))
    assert decode(torch.ones(1, 4, 8), torch.ones(4, 3), with_states=True).shape == (1, 4)
    for decision in wt.decisions():
        microseconds: dict[str, float] = decision.microseconds
        words: tuple[str, str, str, str] = (decision.problem, decision.device, decision.choice, decision.reason)
        assert all(words) and all(of > 0 for of in microseconds.values())
        if decision.is_final and decision.source == "measured":
            wt.decide(decision, "pytorch")
    wt.forget()
    plain: Tensor = windrow.gelu(torch.ones(3))
    assert plain.shape == (3,)


if __name__ == "__main__":
    main()
