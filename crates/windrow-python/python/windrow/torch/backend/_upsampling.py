"""Operators that enlarge images, kept whole where operators run one by one.

PyTorch's tracer replaces them by an index for each pixel, which suits a compiler. Computed one by one, that takes up to
thirty times as long as PyTorch's own kernel. For others, such as bilinear ones, it makes dozens of operators.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey
from torch._decomp import meta_table

_aten = torch.ops.aten

# What the tracer asks for in Python before it looks at the operator itself.
_KEYS = DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd
_NAMES = (
    *(f"upsample_{kind}" for kind in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "trilinear3d")),
    *("upsample_bicubic2d", "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "_upsample_lanczos2d_aa"),
    *(f"_upsample_nearest_exact{dims}d" for dims in (1, 2, 3)),
)


@contextmanager
def whole_upsampling() -> Iterator[None]:
    """A context in which graphs are traced with these operators. Dynamo compiles one graph at a time, and operators that
    other threads run are found without Python."""
    packets = [getattr(_aten, name) for name in _NAMES if hasattr(_aten, name)]
    operators = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    taken = [(op, {key: op.py_kernels[key] for key in _KEYS if key in op.py_kernels}) for op in operators]
    try:
        for op, kernels in taken:
            for key, own in kernels.items():
                del op.py_kernels[key]
                if op._overloadname == "vec":
                    op.py_kernels[key] = functools.partial(_whole, op, own)
            op._dispatch_cache.clear()
        yield
    finally:
        for op, kernels in taken:
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()


def _whole(operator: Any, own: Any, x: Any, size: Any, *rest: Any) -> Any:
    """The result of an operator that takes a size or factors. `own`: what the tracer calls instead. PyTorch's kernel takes
    no size that may change, and gradients of most modes take none either."""
    *corners, factors = rest
    packet = operator._overloadpacket
    changes = any(isinstance(n, torch.SymInt) for n in (*x.shape, *(size or ())))
    if changes and x.requires_grad and getattr(_aten, f"{packet._qualified_op_name[6:]}_backward").default not in meta_table:
        return own(x, size, *rest)
    if size is None or factors is not None:
        return operator._op_dk(DispatchKey.CompositeImplicitAutograd, x, size, *rest)
    return packet(x, size, *corners)
