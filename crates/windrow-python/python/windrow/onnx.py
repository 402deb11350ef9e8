"""Windrow's operators in ONNX Runtime, on the CPU.

    import onnxruntime, windrow.onnx

    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(windrow.onnx.library())
    model = windrow.onnx.convert(onnx.load("model.onnx"))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)

A model of more than 2 GiB cannot be one file: call `onnx.save(model, path, save_as_external_data=True)` and make the
session from `path`.

Nodes of the domain `ai.windrow` have the inputs, outputs and attributes of ONNX's operators with the same names:
`Conv` (images and rows), `Gelu` and `CausalConvWithState`, in f32, f16 and bf16. `VarlenCausalConvWithState` is the
operator of ONNX Runtime's domain `com.microsoft`, which has no kernel for the CPU there. The convolutions have an
attribute `activation`: "none", "relu", "relu6", "leaky_relu", also with another slope as in "leaky_relu(0.2)", "hardswish",
"silu", "gelu" or "gelu_tanh".
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from windrow import _native
from windrow._activation_names import DEFAULT_SLOPE, NAMES, leaky_relu

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from onnx import GraphProto, ModelProto, NodeProto, TypeProto

DOMAIN = "ai.windrow"
OPERATORS = ("CausalConvWithState", "Conv", "Gelu", "VarlenCausalConvWithState")
_VARLEN = "VarlenCausalConvWithState"
# Its inputs of i32: boundaries, and numbers of tokens.
_VARLEN_INDICES = (2, 5)


def library() -> str:
    """The path of the file for `SessionOptions.register_custom_ops_library`. It is this package's compiled
    extension."""
    file: str = _native.__file__
    return file


def convert(model: ModelProto, operators: Collection[str] = OPERATORS) -> ModelProto:
    """A copy of the model in which Windrow computes the nodes of these operators.

    A `Conv` is fused with the activation after it: `Relu`, `LeakyRelu`, `HardSwish`, `Gelu`, `Swish`, or `Sigmoid` and
    `Mul`. A node stays as it is if it has other types than f32, f16 and bf16, if its types cannot be inferred, or if it
    is a 3-D convolution.

    Raises ValueError for an operator that is not one of `OPERATORS`.
    """
    from onnx import helper, shape_inference

    for name in operators:
        if name not in OPERATORS:
            raise ValueError(f"`operators` has {name}, expected some of {', '.join(OPERATORS)}")
    # Type inference takes a message of less than 2 GiB. Types do not depend on the values of large tensors.
    light = type(model)()
    _copy_without_data(model, light)
    inferred = shape_inference.infer_shapes(light)
    result = type(model)()
    result.CopyFrom(model)
    count = 0
    for graph, known in zip(_graphs(result.graph), _graphs(inferred.graph), strict=True):
        del graph.output[:]
        graph.output.extend(known.output)
        count += _convert(graph, _types(known), operators)
    if count and DOMAIN not in [entry.domain for entry in result.opset_import]:
        result.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return result


# A tensor of more bytes than this holds no sizes, so type inference does not need its data.
_SMALL = 1 << 16
_DATA = ("raw_data", "float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")


def _copy_without_data(message: Message, into: Message) -> None:
    """Copies a message field by field, without the data of large tensors."""
    from google.protobuf.message import Message

    is_large = message.DESCRIPTOR.name == "TensorProto" and message.ByteSize() > _SMALL
    for field, value in message.ListFields():
        if is_large and field.name in _DATA:
            continue
        if field.message_type is not None:
            if isinstance(value, Message):
                part = getattr(into, field.name)
                part.SetInParent()
                _copy_without_data(value, part)
            else:
                for item in value:
                    _copy_without_data(item, getattr(into, field.name).add())
        elif isinstance(value, str | bytes | int | float):
            setattr(into, field.name, value)
        else:
            getattr(into, field.name).extend(value)


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """The graph, and the graphs inside its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
                yield from _graphs(inner)


def _convert(graph: GraphProto, types: dict[str, TypeProto], operators: Collection[str]) -> int:
    """Moves nodes to Windrow's domain and returns their number."""
    count = 0
    for node in graph.node:
        is_varlen = node.op_type == _VARLEN
        if node.domain not in (("com.microsoft",) if is_varlen else ("", "ai.onnx")) or node.op_type not in operators:
            continue
        floats = [name for i, name in enumerate(node.input) if name and not (is_varlen and i in _VARLEN_INDICES)]
        if not all(_is_computed(types.get(name)) for name in floats):
            continue
        if node.op_type == "Conv" and _rank(types[node.input[1]]) not in (3, 4):
            continue
        node.domain = DOMAIN
        count += 1
    for node in [*graph.node]:
        if node.domain == DOMAIN and node.op_type == "Conv":
            _take_over_activation(graph, node)
    return count


def _types(graph: GraphProto) -> dict[str, TypeProto]:
    """The types of the graph's values, as far as they are known."""
    from onnx import helper

    types = {value.name: value.type for value in [*graph.input, *graph.value_info, *graph.output]}
    for tensor in graph.initializer:
        types[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, [*tensor.dims])
    return types


def _is_computed(type: TypeProto | None) -> bool:
    from onnx import TensorProto

    computed = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
    return type is not None and type.tensor_type.elem_type in computed


def _rank(type: TypeProto) -> int | None:
    return len(type.tensor_type.shape.dim) if type.tensor_type.HasField("shape") else None


def _take_over_activation(graph: GraphProto, node: NodeProto) -> None:
    from onnx import helper

    found = _activation(graph, node.output[0])
    if found is None:
        return
    name, gone = found
    node.attribute.append(helper.make_attribute("activation", name))
    node.output[0] = gone[-1].output[0]
    for other in gone:
        graph.node.remove(other)


def _activation(graph: GraphProto, value: str) -> tuple[str, list[NodeProto]] | None:
    """The activation that is applied to a value, and its nodes in order; None if something else reads the value."""
    readers = _readers(graph, value)
    match [node.op_type for node in readers]:
        case ["LeakyRelu"]:
            slope = _attribute(readers[0], "alpha", DEFAULT_SLOPE)
            leaky = leaky_relu(slope) if isinstance(slope, float) else None
            return None if leaky is None else (leaky, readers)
        case [operator] if _attribute(readers[0], "alpha", 1.0) == 1.0:
            approximate = _attribute(readers[0], "approximate", b"none")
            for name, names in NAMES.items():
                if names.operator == operator and (names.approximate or "none").encode() == approximate:
                    return name, readers
        case ["Sigmoid", "Mul"]:
            sigmoid, product = readers
            gate = sigmoid.output[0]
            if {*product.input} == {value, gate} and _readers(graph, gate) == [product]:
                return "silu", readers
    return None


def _readers(graph: GraphProto, value: str) -> list[NodeProto]:
    """The nodes that read a value; empty if the graph returns it, or a graph inside a node reads it."""
    inner = [node for part in _graphs(graph) if part is not graph for node in part.node]
    given_back = [output.name for part in _graphs(graph) for output in part.output]
    if value in given_back or any(value in node.input for node in inner):
        return []
    return [node for node in graph.node if value in node.input]


def _attribute(node: NodeProto, name: str, default: object) -> object:
    from onnx import helper

    for attribute in node.attribute:
        if attribute.name == name:
            value: object = helper.get_attribute_value(attribute)
            return value
    return default
