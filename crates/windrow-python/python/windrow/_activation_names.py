"""The activations that operators fuse: their names, and what PyTorch and ONNX call them."""

from typing import Literal, NamedTuple, TypeAlias

# The names of Rust's `Activation`.
Activation: TypeAlias = Literal["identity", "none", "relu", "relu6", "silu", "swish", "gelu", "gelu_tanh"]


class Names(NamedTuple):
    """The names of an activation in other libraries."""

    # Of the class in torch.nn.
    module: str
    # Of the function in torch.nn.functional, and with an underscore behind it of that which works in place. Both may also
    # be in torch and a method of a tensor.
    function: str
    # Of the operator of ONNX; None if it takes several.
    operator: str | None
    # The value of `approximate`, which all three have or none.
    approximate: str | None = None


NAMES: dict[Activation, Names] = {
    "relu": Names("ReLU", "relu", "Relu"),
    "relu6": Names("ReLU6", "relu6", None),
    "silu": Names("SiLU", "silu", "Swish"),
    "gelu": Names("GELU", "gelu", "Gelu", "none"),
    "gelu_tanh": Names("GELU", "gelu", "Gelu", "tanh"),
}
SYNONYMS: dict[Activation, Activation] = {"none": "identity", "swish": "silu"}
