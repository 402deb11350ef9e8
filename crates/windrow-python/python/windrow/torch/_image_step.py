"""What stands between convolutions: the mean of an image, its product with a gate, sums, pooling, upsampling, and copies.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windrow import _native
from windrow.torch._calls import is_direct
from windrow.torch._fused import Way


class ImageStep(nn.Module):
    """One operation, computed by Windrow for plain f32 images in channels-last on the CPU, otherwise by PyTorch.

    operation: "mean" of the image, the product with "sigmoid" or "hardsigmoid" of a second value, "add" of a second image,
    "max_pool2d", "avg_pool2d", "upsample" to the nearest pixel, "copy", or "channels_last", the copy of a row-major image.
    window: height, width, strides and padding of a pooling; how often an upsampling repeats rows and columns.
    """

    def __init__(self, operation: str, window: Sequence[int] = (1, 1, 1, 1, 0, 0)) -> None:
        super().__init__()
        self.operation, self.window = operation, (*window,)
        self.eval()

    def forward(self, x: Tensor, second: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """`out`: where the result is written."""
        run = self.known(x, second, out) if is_direct(x, second, out) else None
        y = None if run is None else run(x, second, out)
        return self._pytorchs(x, second, out) if y is None else y

    def known(self, x: Tensor, second: Tensor | None, out: Tensor | None = None) -> Way | None:
        """The function for tensors like these. None if the dispatcher has something to do for these."""
        if not _native.is_plain(x, second, out):
            return None
        if not all(t.is_cpu and t.dtype is torch.float32 for t in (x, second) if t is not None):
            return self._pytorchs
        return _native.ImageStep.of(self.operation, self.window, x, second, out) or self._pytorchs

    def _pytorchs(self, x: Tensor, second: Tensor | None, out: Tensor | None = None) -> Tensor:
        y = self._computed(x, second)
        return y if out is None else out.copy_(y)

    def _computed(self, x: Tensor, second: Tensor | None) -> Tensor:
        h, w, *strides_and_padding = self.window
        strides, padding = strides_and_padding[:2], strides_and_padding[2:]
        if second is not None:
            if self.operation == "add":
                return x + second
            return x * (second.sigmoid() if self.operation == "sigmoid" else F.hardsigmoid(second))
        if self.operation == "mean":
            return x.mean((2, 3), keepdim=True)
        if self.operation == "channels_last":
            return x.clone(memory_format=torch.channels_last)
        if self.operation == "copy":
            return x
        if self.operation == "upsample":
            return F.interpolate(x, (h * x.shape[2], w * x.shape[3]))
        pool = F.max_pool2d if self.operation == "max_pool2d" else F.avg_pool2d
        return pool(x, (h, w), strides, padding)

    def extra_repr(self) -> str:
        has_window = "pool" in self.operation or self.operation == "upsample"
        return f"{self.operation}, {self.window}" if has_window else self.operation
