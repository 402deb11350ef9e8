"""Decoders of videos of diffusers through `windrow.torch.patch`, `optimize` and `torch.compile(model, backend="windrow")`.

    python benchmarks/video_decoders.py OUT.json [--decoders NAME ...] [--ways NAME ...]
    python benchmarks/video_decoders.py OUT.json --device cuda:0 [--decoders NAME ...] [--ways NAME ...] [--modes NAME ...]

Random weights, few channels, small latents, f32 on the CPU. Each decoder computes its frames at once (`whole`) and as the
model itself divides them (`chunks`: one latent frame at a time with cached frames, or tiles of frames). Windrow's kernels
compute whatever they can, whatever is fastest. `error` is PyTorch's relative to the norm, beside f64, and `x` how many times
that the error of a way is: with accuracy "exact", and with Winograd's algorithm wherever it computes a convolution.
`convolutions`: all of the decoder, and those that a way took.

With `--device`: three of the decoders in the size that people use, see `video_decoders_cuda.py`. Results are written after
each case, and nothing is started after `--budget` seconds.

Ends with status 1 if an error with "exact" is more than 1.3 times PyTorch's, or another more than 4 times. Needs `windrow` on PYTHONPATH, and diffusers 0.36.
"""

import argparse
import copy
import importlib.metadata
import itertools
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import provenance
import torch
import video_decoders_cuda as cuda
import windrow.torch
from torch import Tensor, nn
from windrow.torch.backend import windrow as backend
from windrow.torch.choice import measure
from windrow.torch.choice.policy import PYTORCH, Seconds

ALLOWED = {"exact": 1.3, "winograd": 4.0}
WAYS = ("patched", "optimized", "compiled", "inductor")
_FOUR = (16, 16, 32, 32)
_CACHED = {"base_dim": 16, "z_dim": 4, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1, "temperal_downsample": [False, True, True]}
DECODERS: dict[str, dict[str, Any]] = {
    "AutoencoderKLWan": _CACHED,
    "AutoencoderKLQwenImage": _CACHED,
    "AutoencoderKLHunyuanVideo": {
        "latent_channels": 4, "block_out_channels": _FOUR, "layers_per_block": 1, "norm_num_groups": 4,
    },
    "AutoencoderKLCogVideoX": {
        "latent_channels": 4, "block_out_channels": _FOUR, "layers_per_block": 1, "norm_num_groups": 4,
        "down_block_types": ("CogVideoXDownBlock3D",) * 4, "up_block_types": ("CogVideoXUpBlock3D",) * 4,
    },
    "AutoencoderKLLTXVideo": {
        "latent_channels": 8, "block_out_channels": _FOUR, "decoder_block_out_channels": _FOUR,
        "layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 5,
        "spatio_temporal_scaling": (True, True, False, False), "decoder_spatio_temporal_scaling": (True, True, False, False),
        "decoder_inject_noise": (False,) * 5, "upsample_residual": (False,) * 4, "upsample_factor": (1,) * 4,
        "patch_size": 1, "patch_size_t": 1, "decoder_causal": True,
    },
}  # fmt: skip
FORMS = ("whole", "chunks")


class Told:
    """A report of compiled graphs: the convolutions that Windrow took, and why others were left."""

    def __init__(self) -> None:
        self.taken, self.why = 0, set[str]()
        # That of an optimized model, which fills at its first call.
        self.report: Any = None

    def fused(self, name: str, what: str) -> None:
        self.taken += 1

    def left(self, name: str, why: str) -> None:
        self.why.add(why)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", type=torch.device, help="decoders in usual sizes on this device")
    parser.add_argument("--modes", nargs="+", default=[*cuda.MODES], choices=[*cuda.MODES], help="with --device")
    parser.add_argument("--budget", type=float, default=math.inf, help="with --device")
    parser.add_argument("--small", action="store_true", help="with --device: an eighth of the height and width")
    parser.add_argument("--decoders", nargs="+", choices=[*DECODERS])
    parser.add_argument("--ways", nargs="+", choices=[*WAYS, *cuda.WAYS])
    parser.add_argument("out", type=Path, metavar="OUT.json")
    options = parser.parse_args()
    versions = {name: importlib.metadata.version(name) for name in ("torch", "diffusers")}
    if options.device is not None:
        return in_usual_sizes(options, versions)
    options.decoders, options.ways = options.decoders or [*DECODERS], options.ways or WAYS
    cases = [measured(name, form, options.ways) for name in options.decoders for form in FORMS]
    provenance.write(options.out, {**provenance.commit(), "cpu": provenance.cpu(), **versions, "cases": cases})
    sides = [(how, side) for case in cases for how in ALLOWED for side in case[how].values()]
    return int(any(side.get("x", 99.0) > ALLOWED[how] for how, side in sides))


def in_usual_sizes(options: argparse.Namespace, versions: dict[str, str]) -> int:
    device, start, cases = options.device, time.monotonic(), []
    on = torch.cuda.get_device_name(device) if device.type == "cuda" else provenance.cpu()
    for mode, name in itertools.product(options.modes, options.decoders or cuda.LATENTS):
        if time.monotonic() - start < options.budget:
            cases.append(cuda.measured(name, mode, options.ways or cuda.WAYS, device, options.small))
            provenance.write(options.out, {**provenance.commit(), "device": on, **versions, "cases": cases})
    return 0


def measured(name: str, form: str, ways: list[str]) -> dict[str, Any]:
    import diffusers

    torch.manual_seed(0)
    model = getattr(diffusers, name)(**DECODERS[name]).eval().requires_grad_(False)
    z = torch.randn(1, model.config.get("latent_channels") or model.config.z_dim, 3, 4, 6)
    want = decoded(copy.deepcopy(model).double(), z.double(), form)
    error = off(decoded(model, z, form), want)
    convolutions = sum(isinstance(m, nn.Conv3d) for m in model.decoder.modules())
    case: dict[str, Any] = {"decoder": name, "form": form, "error": error, "convolutions": convolutions}
    case |= {how: {} for how in ALLOWED}
    measure.times_of = lambda _, runs: {name: Seconds(1.0 if name == PYTORCH else 0.5) for name in runs}
    for how, way in itertools.product(ALLOWED, ways):
        windrow.torch.forget()
        torch.compiler.reset()
        candidate, told = copy.deepcopy(model), Told()
        try:
            _WAYS[way](candidate, told, "exact" if how == "exact" else None)
            errors = [off(decoded(candidate, z, form), want) for _ in range(2)]
            if told.report is not None:
                told.taken = len(told.report.fused)
                told.why |= {*told.report.left.values()}
            side = {"x": float(f"{max(errors) / error:.3g}"), "taken": told.taken, "left": sorted(told.why)[:4]}
        except Exception as failure:
            side = {"raised": f"{type(failure).__name__}: {failure}"[:300]}
        case[how][way] = side
        print(name, form, f"{error:.1e}", how, way, side, flush=True)
    return case


def decoded(model: Any, z: Tensor, form: str) -> Tensor:
    with torch.inference_mode():
        is_whole = form == "whole"
        if hasattr(model, "clear_cache"):
            # Frames are cached one latent frame at a time.
            return model.decoder(model.post_quant_conv(z)) if is_whole else model.decode(z, return_dict=False)[0]
        if hasattr(model, "num_latent_frames_batch_size"):
            model.num_latent_frames_batch_size = z.shape[2] if is_whole else 1
        else:
            # Tiles of two latent frames, of which one is in the next tile too.
            model.use_framewise_decoding = not is_whole
            model.tile_sample_min_num_frames = 2 * model.temporal_compression_ratio
            model.tile_sample_stride_num_frames = model.temporal_compression_ratio
        return model.decode(z, return_dict=False)[0]


def off(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def _patched(model: Any, told: Told, accuracy: str | None) -> None:
    report = windrow.torch.patch(model.decoder, accuracy)
    told.taken = sum("Conv3d" in what for what in report.swapped.values())
    told.why |= {why for why in report.left.values() if "Conv3d" in why}


def _optimized(model: Any, told: Told, accuracy: str | None) -> None:
    model.decoder = windrow.torch.optimize(model.decoder, accuracy=accuracy)
    told.report = model.decoder.windrow_report


def _compiled(rest: str) -> Callable[[Any, Told, str | None], None]:
    def compile(model: Any, told: Told, accuracy: str | None) -> None:
        model.decoder = torch.compile(model.decoder, backend=backend, options={"rest": rest, "report": told, "accuracy": accuracy})

    return compile


_WAYS: dict[str, Callable[[Any, Told, str | None], None]] = {
    "patched": _patched,
    "optimized": _optimized,
    "compiled": _compiled("eager"),
    "inductor": _compiled("inductor"),
}

if __name__ == "__main__":
    sys.exit(main())
