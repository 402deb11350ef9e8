"""Networks that are in no package that the benchmarks need, built as their papers and their best known programs build them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Conv(nn.Sequential):
    """A convolution with batch normalisation and SiLU."""

    def __init__(self, c: int, k: int, size: int = 3, stride: int = 1) -> None:
        super().__init__(nn.Conv2d(c, k, size, stride, size // 2, bias=False), nn.BatchNorm2d(k), nn.SiLU())


class _Split(nn.Module):
    """The block C2f of YOLOv8: half of the channels through residual pairs, all that comes by concatenated."""

    def __init__(self, c: int, k: int, depth: int, is_residual: bool = True) -> None:
        super().__init__()
        self.enter, self.leave = _Conv(c, k, 1), _Conv((2 + depth) * k // 2, k, 1)
        self.pairs = nn.ModuleList(nn.Sequential(_Conv(k // 2, k // 2), _Conv(k // 2, k // 2)) for _ in range(depth))
        self.is_residual = is_residual

    def forward(self, x: Tensor) -> Tensor:
        parts = [*self.enter(x).chunk(2, 1)]
        for pair in self.pairs:
            y = pair(parts[-1])
            parts.append(parts[-1] + y if self.is_residual else y)
        return self.leave(torch.cat(parts, 1))


class Detector(nn.Module):
    """The backbone, neck and convolutions of the heads of YOLOv8n. Gives three maps of 144 channels at strides of 8, 16, 32."""

    def __init__(self) -> None:
        super().__init__()
        self.p3 = nn.Sequential(
            _Conv(3, 16, stride=2), _Conv(16, 32, stride=2), _Split(32, 32, 1), _Conv(32, 64, stride=2), _Split(64, 64, 2)
        )
        self.p4 = nn.Sequential(_Conv(64, 128, stride=2), _Split(128, 128, 2))
        self.p5 = nn.Sequential(_Conv(128, 256, stride=2), _Split(256, 256, 1))
        self.enter, self.leave = _Conv(256, 128, 1), _Conv(512, 256, 1)
        self.up4, self.up3 = _Split(384, 128, 1, False), _Split(192, 64, 1, False)
        self.down4, self.down5 = _Conv(64, 64, stride=2), _Conv(128, 128, stride=2)
        self.out4, self.out5 = _Split(192, 128, 1, False), _Split(384, 256, 1, False)
        head = lambda c, k, out: nn.Sequential(_Conv(c, k), _Conv(k, k), nn.Conv2d(k, out, 1))
        self.boxes = nn.ModuleList(head(c, 64, 64) for c in (64, 128, 256))
        self.classes = nn.ModuleList(head(c, 80, 80) for c in (64, 128, 256))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        p3 = self.p3(x)
        p4 = self.p4(p3)
        pooled = [self.enter(self.p5(p4))]
        for _ in range(3):
            pooled.append(F.max_pool2d(pooled[-1], 5, 1, 2))
        p5 = self.leave(torch.cat(pooled, 1))
        up4 = self.up4(torch.cat([F.interpolate(p5, scale_factor=2.0), p4], 1))
        up3 = self.up3(torch.cat([F.interpolate(up4, scale_factor=2.0), p3], 1))
        out4 = self.out4(torch.cat([self.down4(up3), up4], 1))
        out5 = self.out5(torch.cat([self.down5(out4), p5], 1))
        maps = zip((up3, out4, out5), self.boxes, self.classes, strict=True)
        return tuple(torch.cat([boxes(y), classes(y)], 1) for y, boxes, classes in maps)


class Segmentation(nn.Module):
    """The U-Net of Ronneberger et al. with padding and batch normalisation: 64 to 1024 channels, two classes."""

    def __init__(self) -> None:
        super().__init__()
        norm = lambda c, k: (nn.Conv2d(c, k, 3, padding=1, bias=False), nn.BatchNorm2d(k), nn.ReLU(inplace=True))
        pair = lambda c, k: nn.Sequential(*norm(c, k), *norm(k, k))
        widths = [64, 128, 256, 512, 1024]
        self.down = nn.ModuleList(pair(c, k) for c, k in zip([3, *widths], widths, strict=False))
        wider = [*zip(widths[:0:-1], widths[-2::-1], strict=True)]
        self.scale = nn.ModuleList(nn.ConvTranspose2d(c, k, 2, 2) for c, k in wider)
        self.up = nn.ModuleList(pair(c, k) for c, k in wider)
        self.last = nn.Conv2d(64, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = [self.down[0](x)]
        for block in self.down[1:]:
            levels.append(block(F.max_pool2d(levels[-1], 2)))
        y = levels.pop()
        for scale, block in zip(self.scale, self.up, strict=True):
            y = block(torch.cat([levels.pop(), scale(y)], 1))
        return self.last(y)  # type: ignore[no-any-return]


class _Residual(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * self.second(F.relu(self.first(x)))  # type: ignore[no-any-return]


class Edsr(nn.Module):
    """EDSR of 256 channels with eight blocks, twice the height and width."""

    def __init__(self) -> None:
        super().__init__()
        c = 256
        self.first, self.last = nn.Conv2d(3, c, 3, padding=1), nn.Conv2d(c, 3, 3, padding=1)
        self.blocks = nn.Sequential(*(_Residual(c) for _ in range(8)), nn.Conv2d(c, c, 3, padding=1))
        self.up = nn.Sequential(nn.Conv2d(c, 4 * c, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(self.up(y + self.blocks(y)))  # type: ignore[no-any-return]


class _Dense(nn.Module):
    """Five convolutions, each of all before it concatenated."""

    def __init__(self, c: int, growth: int) -> None:
        super().__init__()
        widths = [(c + i * growth, growth) for i in range(4)] + [(c + 4 * growth, c)]
        self.convs = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in widths)

    def forward(self, x: Tensor) -> Tensor:
        parts = [x]
        for conv in self.convs[:-1]:
            parts.append(F.leaky_relu(conv(torch.cat(parts, 1)), 0.2))
        return x + 0.2 * self.convs[-1](torch.cat(parts, 1))  # type: ignore[no-any-return]


class _Nested(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.2 * super().forward(x)


class Esrgan(nn.Module):
    """ESRGAN with eight blocks of three dense ones, 64 channels and 32 more a layer, four times the height and width."""

    def __init__(self) -> None:
        super().__init__()
        c = 64
        conv = lambda i, o: nn.Conv2d(i, o, 3, padding=1)
        self.first, self.last, self.after = conv(3, c), conv(c, 3), conv(c, c)
        self.blocks = nn.Sequential(*(_Nested(*(_Dense(c, 32) for _ in range(3))) for _ in range(8)), conv(c, c))
        self.up = nn.ModuleList([conv(c, c), conv(c, c)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = y + self.blocks(y)
        for scale in self.up:
            y = F.leaky_relu(scale(F.interpolate(y, scale_factor=2.0)), 0.2)
        return self.last(F.leaky_relu(self.after(y), 0.2))  # type: ignore[no-any-return]
