"""Windrow through Python: results allocated by the call, and written into `out=`."""

import cases
import torch
import windrow
import windrow.torch
from torch import nn


def versions() -> dict[str, str]:
    return {"windrow": windrow.__version__}


def conv2d(x: torch.Tensor, weight: torch.Tensor) -> dict:
    plan = windrow.Conv2dPlan(x, weight)
    packed, out = plan.pack(weight), plan(x, weight)
    parameter = nn.Parameter(weight)
    return {
        "windrow out=": lambda: plan(x, packed, out=out),
        "windrow": lambda: windrow.torch.conv2d(x, parameter),
    }


def calls(case) -> dict:
    match case:
        case cases.Conv2d():
            last = {"memory_format": torch.channels_last}
            row_major = conv2d(case.x, case.weight)
            channels_last = conv2d(case.x.to(**last), case.weight.to(**last))
            return row_major | {f"{name} channels_last": c for name, c in channels_last.items()}
        case cases.Gelu():
            out = torch.empty_like(case.x)
            return {
                "windrow out=": lambda: windrow.gelu(case.x, approximate=case.approximate, out=out),
                "windrow": lambda: windrow.torch.gelu(case.x, case.approximate),
            }
        case cases.Decode():
            state = case.state.clone()
            x = case.x[:, :, 0]
            update = windrow.torch.causal_conv1d_update
            return {"windrow": lambda: update(x, state, case.weight, case.bias, "silu")}
        case cases.CausalConv1d():
            tensors, out = (case.x, case.weight, case.bias), torch.empty_like(case.x)
            forward = windrow.torch.causal_conv1d_fn
            return {
                "windrow out=": lambda: windrow.causal_conv1d(*tensors, activation="silu", out=out),
                "windrow": lambda: forward(*tensors, activation="silu"),
            }
        case cases.Overhead():
            x, state = torch.randn(1, 8), torch.zeros(1, 8, 3)
            weight = torch.randn(8, 4)
            update = windrow.torch.causal_conv1d_update
            return {"windrow": lambda: update(x, state, weight, None, "silu")}
    return {}
