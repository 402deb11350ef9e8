"""A Mamba block on Windrow: prefill, then decode token by token, equal to prefill of the whole.

The block is that of "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (Gu and Dao,
2023), with the scan as a plain loop. Its convolution is `causal_conv1d_fn` for a whole prompt and
`causal_conv1d_update` for one token; the state that the first leaves behind is what the second goes
on with.

    python examples/mamba_block.py
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from windrow.torch import causal_conv1d_fn, causal_conv1d_update


@dataclass
class State:
    """What a block remembers of the tokens so far."""

    conv: Tensor  # [batch, inner, width - 1]: the last inputs of the convolution
    scan: Tensor  # [batch, inner, states]


class MambaBlock(nn.Module):
    """[batch, length, dim] -> [batch, length, dim]."""

    def __init__(self, dim: int, states: int = 16, width: int = 4, expand: int = 2) -> None:
        super().__init__()
        self.inner, self.states, self.width = expand * dim, states, width
        self.rank = max(dim // 16, 1)
        self.project_in = nn.Linear(dim, 2 * self.inner, bias=False)
        self.conv_weight = nn.Parameter(torch.randn(self.inner, width) / width)
        self.conv_bias = nn.Parameter(torch.zeros(self.inner))
        self.project_x = nn.Linear(self.inner, self.rank + 2 * states, bias=False)
        self.project_dt = nn.Linear(self.rank, self.inner)
        self.log_a = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(self.inner, 1))
        self.d = nn.Parameter(torch.ones(self.inner))
        self.project_out = nn.Linear(self.inner, dim, bias=False)

    def empty_state(self, batch: int) -> State:
        """The state before the first token."""
        weight = self.conv_weight
        return State(
            weight.new_zeros(batch, self.inner, self.width - 1),
            weight.new_zeros(batch, self.inner, self.states),
        )

    def scan_step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One token x [batch, inner] through the state space: its output and the next state."""
        dt, b, c = self.project_x(x).split([self.rank, self.states, self.states], dim=-1)
        dt = F.softplus(self.project_dt(dt))[..., None]
        state = torch.exp(-dt * self.log_a.exp()) * state + dt * b[:, None] * x[..., None]
        return (state * c[:, None]).sum(-1) + self.d * x, state

    def forward(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """A whole prompt [batch, length, dim]."""
        x, gate = self.project_in(tokens).chunk(2, dim=-1)
        # [batch, inner, length] as a view: the convolution reads the channels-last tensor in place.
        x, conv = causal_conv1d_fn(
            x.transpose(1, 2),
            self.conv_weight,
            self.conv_bias,
            initial_states=state.conv,
            return_final_states=True,
            activation="silu",
        )
        scan, outputs = state.scan, []
        for t in range(x.shape[2]):
            y, scan = self.scan_step(x[:, :, t], scan)
            outputs.append(y)
        y = torch.stack(outputs, dim=1) * F.silu(gate)
        return self.project_out(y), State(conv, scan)

    def step(self, token: Tensor, state: State) -> tuple[Tensor, State]:
        """One token [batch, dim]; `state.conv` is updated in place."""
        x, gate = self.project_in(token).chunk(2, dim=-1)
        x = causal_conv1d_update(x, state.conv, self.conv_weight, self.conv_bias, "silu")
        y, scan = self.scan_step(x, state.scan)
        return self.project_out(y * F.silu(gate)), State(state.conv, scan)


def check(block: MambaBlock, forward, step, name: str) -> None:  # noqa: ANN001
    """Compares prefill and decode with prefill of the whole."""
    tokens = torch.randn(2, 24, block.project_in.in_features)
    whole, _ = block(tokens, block.empty_state(2))
    prompt, state = forward(tokens[:, :10], block.empty_state(2))
    pieces = [prompt]
    for t in range(10, tokens.shape[1]):
        y, state = step(tokens[:, t], state)
        pieces.append(y[:, None])
    error = (torch.cat(pieces, dim=1) - whole).abs().max().item()
    print(f"{name:10} prefill of 10 and 14 steps: largest difference to the whole {error:.1e}")
    if not error < 1e-5:
        raise SystemExit("decode differs from prefill")


def main() -> None:
    """Eager, then compiled without graph break."""
    torch.manual_seed(0)
    block = MambaBlock(dim=32)
    with torch.inference_mode():
        check(block, block.forward, block.step, "eager")
    with torch.no_grad():
        forward = torch.compile(block.forward, fullgraph=True)
        step = torch.compile(block.step, fullgraph=True)
        check(block, forward, step, "compiled")


if __name__ == "__main__":
    main()
