"""PyTorch: its own kernels, oneDNN beneath."""

import cases
import torch
import torch.nn.functional as F


def versions() -> dict[str, str]:
    return {"torch": torch.__version__}


def calls(case) -> dict:
    match case:
        case cases.Conv2d():
            x = case.x.to(memory_format=torch.channels_last)
            weight = case.weight.to(memory_format=torch.channels_last)
            return {
                "torch": lambda: F.conv2d(case.x, case.weight),
                "torch channels_last": lambda: F.conv2d(x, weight),
            }
        case cases.Gelu():
            out = torch.empty_like(case.x)
            into = torch.ops.aten.gelu.out
            return {
                "torch out=": lambda: into(case.x, approximate=case.approximate, out=out),
                "torch": lambda: F.gelu(case.x, approximate=case.approximate),
            }
        case cases.Decode():
            state, x = case.state.clone(), case.x

            def step():
                window = torch.cat([state, x], dim=2)
                state.copy_(window[:, :, 1:])
                return F.silu((window * case.weight).sum(-1) + case.bias)

            return {"torch": step}
        case cases.CausalConv1d():
            weight = case.weight[:, None]

            def forward():
                y = F.conv1d(case.x, weight, case.bias, padding=3, groups=case.d)
                return F.silu(y[:, :, : case.l])

            return {"torch": forward}
        case cases.Overhead():
            x = torch.randn(1, 8)
            return {"torch F.silu": lambda: F.silu(x)}
    return {}
