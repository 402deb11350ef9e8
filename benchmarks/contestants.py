"""A network in one mode: what is timed, and how far its result is from that in f64."""

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache

import networks
import torch
import torch.nn.functional as F
import windrow.torch
from networks import Network
from torch import Tensor, nn


@dataclass(frozen=True)
class Mode:
    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    tf32: bool = False
    # What a step of training computes convolutions in.
    autocast: torch.dtype | None = None


MODES = {
    "f32": Mode(),
    "f32_cl": Mode(channels_last=True),
    "tf32": Mode(tf32=True),
    "tf32_cl": Mode(channels_last=True, tf32=True),
    "f16": Mode(torch.float16),
    "f16_cl": Mode(torch.float16, channels_last=True),
    "bf16": Mode(torch.bfloat16),
    "bf16_cl": Mode(torch.bfloat16, channels_last=True),
    "amp_bf16": Mode(autocast=torch.bfloat16),
    "amp_f16": Mode(autocast=torch.float16),
}
# By kind and kind of device; those that say most come first.
MODES_OF = {
    ("infer", "cuda"): ["f32", "bf16_cl", "f16_cl", "tf32_cl", "f32_cl", "bf16", "f16", "tf32"],
    ("infer", "cpu"): ["f32", "f32_cl", "bf16", "bf16_cl"],
    ("train", "cuda"): ["f32", "amp_bf16", "amp_f16", "f32_cl"],
    ("train", "cpu"): ["f32", "f32_cl", "amp_bf16"],
}


@lru_cache(maxsize=1)
def original(network: Network, mode: Mode, device: torch.device) -> nn.Module:
    """The network on its device, of which the sides get copies."""
    model = copy.deepcopy(networks.built(network)).to(device, mode.dtype)
    return model.to(memory_format=torch.channels_last) if mode.channels_last else model


# PyTorch's modules as they are and compiled by it; the same patched, and optimized, with Windrow's defaults.
PYTORCH, COMPILED, PATCHED, OPTIMIZED = "pytorch", "compiled", "windrow", "optimized"
# PyTorch's modules compiled with `backend="windrow"`, with Inductor for the rest and without it.
BACKEND, BACKEND_EAGER = "backend", "backend, eager"
COMPILERS = [COMPILED, BACKEND, BACKEND_EAGER]


def sides(kind: str, others: Iterable[str] = ()) -> list[str]:
    """All that take turns, with `others`."""
    optimized = [OPTIMIZED] * (kind == "infer" and hasattr(windrow.torch, "optimize"))
    return [PYTORCH, *others, PATCHED, *optimized]


def tensors(result: object) -> list[Tensor]:
    """A network's results as a list: PyTorch's, or arrays of another library."""
    return [torch.as_tensor(t) for t in result] if isinstance(result, tuple | list) else [result]  # type: ignore[list-item]


def whole(results: list[Tensor]) -> Tensor:
    """All results as one vector in f64."""
    return torch.cat([t.double().flatten() for t in results])


@dataclass(frozen=True)
class Case:
    network: Network
    name: str
    mode: Mode
    batch: int
    kind: str
    device: torch.device
    # Of the network's batches, whose memory and errors are measured.
    first: bool = True
    # As `accuracy` of patch and optimize.
    accuracy: str | None = None

    def set_flags(self) -> None:
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = self.mode.tf32
        torch.backends.cuda.matmul.allow_tf32 = self.mode.tf32

    def model(self, side: str) -> nn.Module:
        model = copy.deepcopy(original(self.network, self.mode, self.device))
        if self.kind == "train":
            model.train().requires_grad_(True)
        return self.made(model, side)

    def made(self, model: nn.Module, side: str) -> nn.Module:
        """What a side makes of PyTorch's module, which may be changed."""
        if side == PATCHED:
            windrow.torch.patch(model, **self.how)
        if side == OPTIMIZED:
            model = windrow.torch.optimize(model, **self.how)
        if side == COMPILED:
            model = torch.compile(model)
        if side in (BACKEND, BACKEND_EAGER):
            from windrow.torch.backend import windrow as backend

            rest = {"rest": "eager"} if side == BACKEND_EAGER else {}
            model = torch.compile(model, backend=backend, options={**rest, **self.how})
        return model

    @property
    def how(self) -> dict[str, str]:
        return {"accuracy": self.accuracy} if self.accuracy else {}

    def input(self, batch: int, size: int, seed: int = 1) -> Tensor:
        x = networks.example(self.network, batch, size, seed).to(self.device, self.mode.dtype)
        if self.mode.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        return x

    def start(self, side: str) -> Callable[[], object]:
        """The call that is timed: the network's result, or a step of training."""
        self.set_flags()
        model, x = self.model(side), self.input(self.batch, self.network.size[self.device.type])
        if self.kind == "train":
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

            def step() -> None:
                optimizer.zero_grad()
                self.loss(model, x).backward()
                optimizer.step()

            return step

        def infer() -> Tensor:
            with torch.inference_mode():
                return model(x)

        return infer

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        mixed = self.mode.autocast and x.dtype != torch.float64
        with torch.autocast(x.device.type, self.mode.autocast) if mixed else nullcontext():
            y = model(x)
        target = torch.arange(len(x), device=x.device)
        return F.cross_entropy(y.double() if y.dtype == torch.float64 else y.float(), target)

    def gradients(self, model: nn.Module, seed: int) -> Tensor:
        """The gradients of all weights for two small inputs, as one vector in f64."""
        x = self.input(2, self.network.small, seed)
        if next(model.parameters()).dtype == torch.float64:
            x = x.double()
        grads = torch.autograd.grad(self.loss(model, x), list(model.parameters()))
        return torch.cat([g.double().flatten() for g in grads])

    def result_in_f64(self) -> Tensor:
        """The result of the call that is timed, computed in f64 image by image."""
        model, x = self.model(PYTORCH).double(), self.input(self.batch, self.network.size[self.device.type])
        with torch.inference_mode():
            return whole([torch.cat(parts) for parts in zip(*(tensors(model(image.double())) for image in x.split(1)))])

    def result_errors(self, results: dict[str, Tensor], exact: dict[tuple, Tensor]) -> dict[str, float]:
        """Relative error of each side's result, given on the CPU: root mean square of the difference from f64 over that of the
        result.
        `exact` keeps the results in f64, which modes of one type share."""
        self.set_flags()
        torch.backends.cudnn.benchmark = False
        key = (self.name, self.batch, self.mode.dtype)
        if key not in exact:
            # On the CPU: there the results of all cases may stay.
            exact[key] = self.result_in_f64().cpu()
        want = exact[key]
        return {side: ((y - want).norm() / want.norm()).item() for side, y in results.items()}

    def gradient_errors(self, exact: dict[tuple, Tensor]) -> dict[str, float]:
        """Relative error of each side's gradients; the least over five inputs, since for about half of all a rounding
        somewhere switches a ReLU, with either side, and the error of that is 1e-3 to 1e-2."""
        self.set_flags()
        # Trials of algorithms would take longer than the results.
        torch.backends.cudnn.benchmark = False
        found: dict[str, list[float]] = {}
        for seed in range(1, 6):
            key = (self.name, self.mode.dtype, seed)
            if key not in exact:
                exact[key] = self.gradients(self.model(PYTORCH).double(), seed).cpu()
            want = exact[key].to(self.device)
            for side in sides(self.kind):
                error = (self.gradients(self.model(side), seed) - want).norm() / want.norm()
                found.setdefault(side, []).append(error.item())
        return {side: min(errors) for side, errors in found.items()}
