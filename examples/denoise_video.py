"""Trains a small causal network to remove noise from videos, and then decodes a video chunk by chunk.

The videos are handwritten digits of scikit-learn that move over an image. The network is three causal convolutions of
videos. A chunk begins with the frames that the one before has kept, so chunks of any length give the bits of the whole
video. Written: a picture whose rows are the frames without noise, with noise, and as the network decodes them.

    python examples/denoise_video.py [denoised.png]
"""

import struct
import sys
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import windrow
import windrow.torch
from sklearn.datasets import load_digits
from torch import Tensor

SIDE, FRAMES, NOISE, STEPS = 24, 12, 0.4, 120
CHANNELS = [1, 24, 24, 1]
CHUNKS = [1, 2, 3, 4, 2]


def videos(images: np.ndarray, count: int, random: np.random.Generator) -> Tensor:
    """Videos [n, 1, frames, SIDE, SIDE] in 0..1 of a digit of 16 x 16 pixels, which comes back at the border."""
    all_frames = np.zeros((count, 1, FRAMES, SIDE, SIDE), np.float32)
    most = SIDE - 16
    for video in all_frames[:, 0]:
        digit = np.kron(images[random.integers(len(images))], np.ones((2, 2)))
        start, speed = random.integers(0, most, 2), random.integers(-3, 4, 2)
        for t, frame in enumerate(video):
            y, x = most - abs((start + t * speed) % (2 * most) - most)
            frame[y : y + 16, x : x + 16] = digit
    return torch.from_numpy(all_frames)


def trained(images: np.ndarray, random: np.random.Generator) -> list[tuple[Tensor, Tensor]]:
    """The filters [k, c, 3, 3, 3] and biases of the network."""
    torch.manual_seed(0)
    layers = [(torch.randn(k, c, 3, 3, 3) * (27 * c) ** -0.5, torch.zeros(k)) for c, k in pairwise(CHANNELS)]
    parameters = [p.requires_grad_() for layer in layers for p in layer]
    optimizer = torch.optim.AdamW(parameters, lr=5e-3)
    for _ in range(STEPS):
        clean = videos(images, 4, random)
        x = clean + NOISE * torch.randn_like(clean)
        for i, (weight, bias) in enumerate(layers):
            before = F.pad(x, (0, 0, 0, 0, 2, 0))
            activation = "silu" if i < len(layers) - 1 else None
            x = windrow.torch.conv3d(before, weight, bias, padding=(0, 1, 1), activation=activation)
        optimizer.zero_grad()
        F.mse_loss(x, clean).backward()
        optimizer.step()
    return [(weight.detach(), bias.detach()) for weight, bias in layers]


class Decoder:
    """The network, with the last two frames that each layer has read."""

    def __init__(self, layers: list[tuple[Tensor, Tensor]]) -> None:
        self.layers = layers
        self.states = [torch.zeros(1, weight.shape[1], 2, SIDE, SIDE) for weight, _ in layers]

    def __call__(self, chunk: Tensor) -> Tensor:
        for i, ((weight, bias), state) in enumerate(zip(self.layers, self.states, strict=True)):
            chunk = windrow.conv3d(
                chunk,
                weight,
                bias,
                padding=(0, 1, 1),
                time_padding="causal",
                initial_frames=state,
                final_frames=state,
                activation="silu" if i < len(self.layers) - 1 else None,
                algorithm="im2col_gemm",
            )
        return chunk


def write_png(path: Path, image: np.ndarray) -> None:
    """Writes a grey image [h, w] of values in 0..1."""
    rows = (image.clip(0, 1) * 255).round().astype(np.uint8)
    part = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    header = struct.pack(">2I5B", image.shape[1], image.shape[0], 8, 0, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", data) + part(b"IEND", b""))


def main() -> None:
    images, random = load_digits().images / 16, np.random.default_rng(0)
    layers = trained(images, random)
    clean = videos(images, 1, random)
    noisy = clean + NOISE * torch.randn_like(clean)
    whole = Decoder(layers)(noisy)
    decoder = Decoder(layers)
    decoded = torch.cat([decoder(chunk) for chunk in noisy.split(CHUNKS, dim=2)], dim=2)
    print(f"chunks of {CHUNKS} frames have the bits of the whole video: {torch.equal(decoded, whole)}")
    before, after = (F.mse_loss(video, clean).item() for video in (noisy, decoded))
    print(f"mean squared error {before:.3f} with noise, {after:.3f} decoded")
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "denoised.png")
    rows = [np.concatenate([*video[0, 0].numpy()], axis=1) for video in (clean, noisy, decoded)]
    write_png(path, np.kron(np.concatenate(rows), np.ones((4, 4))))
    print(f"wrote {path}")
    if not torch.equal(decoded, whole) or after > before / 4:
        raise SystemExit("the decoded video is not what it should be")


if __name__ == "__main__":
    main()
