"""The activations that operators fuse: their names, and what PyTorch and ONNX call them."""

from typing import Literal, NamedTuple, TypeAlias

# The names of Rust's `Activation`.
Activation: TypeAlias = Literal["identity", "none", "relu", "relu6", "silu", "swish", "gelu", "gelu_tanh"]


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
    "silu": Names("SiLU", "silu", "Swish"),
    "gelu": Names("GELU", "gelu", "Gelu", "none"),
    "gelu_tanh": Names("GELU", "gelu", "Gelu", "tanh"),
}
SYNONYMS: dict[Activation, Activation] = {"none": "identity", "swish": "silu"}
