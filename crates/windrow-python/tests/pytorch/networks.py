"""Small networks of random structure."""

import random

import torch
import torch.nn.functional as F
from common import leaf
from torch import nn


class Block(nn.Module):
    def __init__(self, draw, c, k):
        super().__init__()
        self.stride, groups = draw.choice([1, 1, 2]), draw.choice([1, 1, 2, c if k % c == 0 else 1])
        self.first = nn.Conv2d(c, k, draw.choice([1, 3, 5]), self.stride, groups=groups, bias=draw.random() < 0.5)
        self.first.padding = tuple(n // 2 for n in self.first.kernel_size)
        self.norm = nn.BatchNorm2d(k) if draw.random() < 0.7 else nn.Identity()
        self.act = draw.choice([nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), nn.SiLU(), nn.GELU(), nn.Hardswish()])
        self.second, self.after = nn.Conv2d(k, k, 3, padding=1), nn.BatchNorm2d(k)
        is_same = self.stride == 1 and c == k
        self.short = nn.Identity() if is_same else nn.Sequential(nn.Conv2d(c, k, 1, self.stride), nn.BatchNorm2d(k))

    def forward(self, x):
        y = self.after(self.second(self.act(self.norm(self.first(x)))))
        y += self.short(x)
        return F.relu(y)


def network(seed, dtype=torch.float32):
    """One of as many as there are seeds, of two to five blocks."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    widths = [draw.choice([8, 16, 24]) for _ in range(draw.randint(2, 5))]
    blocks = [Block(draw, c, k) for c, k in zip([8, *widths], widths, strict=False)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), *blocks)
    if draw.random() < 0.5:
        model.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10)])
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.5)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.5)
    return model.eval().to(dtype)


def image(dtype=torch.float32, batch=2):
    return leaf(batch, 3, 20, 20, dtype=dtype, grad=False)
