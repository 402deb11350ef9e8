"""ncnn's Winograd: packed inputs and outputs as between two layers, one image at a time."""

import tempfile
from importlib.metadata import version
from pathlib import Path

import cases
import ncnn
import torch

# Its own choice of tile, and each tile alone.
TILES = {"ncnn": (True, True, True), "ncnn f43": (False, True, False), "ncnn f63": (False, False, True)}


def versions() -> dict[str, str]:
    return {"ncnn": version("ncnn")}


def _network(case: cases.Conv2d, tiles: tuple[bool, bool, bool]):
    network = ncnn.Net()
    option = network.opt
    option.num_threads = torch.get_num_threads()
    for name in ("fp16_packed", "fp16_storage", "fp16_arithmetic", "bf16_storage", "bf16_packed"):
        setattr(option, f"use_{name}", False)
    option.use_winograd23_convolution, option.use_winograd43_convolution = tiles[:2]
    option.use_winograd63_convolution = tiles[2]
    with tempfile.TemporaryDirectory() as folder:
        parameters, model = Path(folder, "net.param"), Path(folder, "net.bin")
        parameters.write_text(
            "7767517\n2 2\n"
            f"Input input 0 1 x 0={case.w} 1={case.h} 2={case.c}\n"
            f"Convolution conv 1 1 x y 0={case.k} 1=3 6={case.weight.numel()}\n"
        )
        # Four bytes of zeros say that plain f32 numbers follow.
        model.write_bytes(bytes(4) + case.weight.numpy().tobytes())
        network.load_param(str(parameters))
        network.load_model(str(model))
    pack = next(p for p in (16, 8, 4, 1) if case.c % p == 0)
    images = []
    for image in case.x.numpy():
        # A Mat of an array borrows the array's memory; the clone owns its own.
        packed = ncnn.Mat()
        ncnn.convert_packing(ncnn.Mat(image).clone(), packed, pack, option)
        images.append(packed)

    def call():
        for image in images:
            extractor = network.create_extractor()
            extractor.input("x", image)
            # Type 1: the result stays packed.
            extractor.extract("y", 1)

    return call


def calls(case) -> dict:
    match case:
        case cases.Conv2d(dtype="f32"):
            return {name: _network(case, tiles) for name, tiles in TILES.items()}
    return {}
