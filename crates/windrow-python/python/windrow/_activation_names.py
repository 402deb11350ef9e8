"""The activations that operators fuse: their names, and what PyTorch and ONNX call them."""

from typing import Literal, NamedTuple, TypeAlias

# The names of Rust's `Activation`. A name of leaky ReLU may have any slope, as in `leaky_relu(0.2)`.
Activation: TypeAlias = (
    Literal["identity", "none", "relu", "relu6", "leaky_relu", "hardswish", "silu", "swish", "gelu", "gelu_tanh"] | str
)


class Names(NamedTuple):
    """The names of an activation in other libraries."""

    # The class in torch.nn.
    module: str
    # The function in torch.nn.functional. With an underscore at its end it is the function that works in place. Both
    # may also be functions of torch and methods of a tensor.
    function: str
    # The operator of ONNX; None if ONNX has no single operator for it.
    operator: str | None
    # The value of the argument `approximate`. None if the class, the function and the operator have no such argument.
    approximate: str | None = None


NAMES: dict[Activation, Names] = {
    "relu": Names("ReLU", "relu", "Relu"),
    "relu6": Names("ReLU6", "relu6", None),
    "leaky_relu": Names("LeakyReLU", "leaky_relu", "LeakyRelu"),
    "hardswish": Names("Hardswish", "hardswish", "HardSwish"),
    "silu": Names("SiLU", "silu", "Swish"),
    "gelu": Names("GELU", "gelu", "Gelu", "none"),
    "gelu_tanh": Names("GELU", "gelu", "Gelu", "tanh"),
}
SYNONYMS: dict[Activation, Activation] = {"none": "identity", "swish": "silu"}

# The slope of `leaky_relu`, as in PyTorch and ONNX.
DEFAULT_SLOPE = 0.01
# The largest number of f32.
_LARGEST = (2 - 2**-23) * 2.0**127


def leaky_relu(slope: float) -> Activation | None:
    """The name of leaky ReLU with this slope; None if the slope is not finite in f32."""
    if not abs(slope) <= _LARGEST:
        return None
    return "leaky_relu" if slope == DEFAULT_SLOPE else f"leaky_relu({slope})"


def slope_of(name: object) -> float | None:
    """The slope of leaky ReLU with this name; None for anything else, and for slopes that are not finite in f32."""
    if not isinstance(name, str):
        return None
    if name == "leaky_relu":
        return DEFAULT_SLOPE
    number = name[len("leaky_relu(") : -1]
    if name != f"leaky_relu({number})" or number.strip("+-.0123456789eE"):
        return None
    try:
        slope = float(number)
    except ValueError:
        return None
    return slope if abs(slope) <= _LARGEST else None


def steepest_slope(name: str | None) -> float:
    """The largest magnitude of the derivative of this activation, rounded up."""
    slope = None if name is None else slope_of(name)
    if slope is not None:
        return max(1.0, abs(slope))
    return {"hardswish": 1.5, "silu": 1.13, "swish": 1.13, "gelu": 1.13, "gelu_tanh": 1.13}.get(name or "none", 1.0)
