"""ONNX Runtime on the CPU, inputs and outputs bound to memory of ours."""

import cases
import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper

TYPES = {"f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16}


def versions() -> dict[str, str]:
    return {"onnxruntime": onnxruntime.__version__}


def _bind(dtype: str, x: np.ndarray, y_shape, constants: dict, nodes: list, threads: int):
    """A call of the graph `nodes`, from "x" to "y"."""
    kind = TYPES[dtype]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", kind, x.shape)],
        [helper.make_tensor_value_info("y", kind, y_shape)],
        [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    y = np.empty(y_shape, x.dtype)
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", onnxruntime.OrtValue.ortvalue_from_numpy(x))
    out = onnxruntime.OrtValue.ortvalue_from_numpy(y)
    binding.bind_ortvalue_output("y", out)

    def call():
        session.run_with_iobinding(binding)
        return out

    return call


def calls(case) -> dict:
    if getattr(case, "dtype", None) not in TYPES:
        return {}
    threads = torch.get_num_threads()
    node = helper.make_node
    match case:
        case cases.Conv2d(dtype="f32"):
            shape = (case.n, case.k, case.h - 2, case.w - 2)
            conv = [node("Conv", ["x", "w"], ["y"])]
            w = {"w": case.weight.numpy()}
            return {"onnxruntime": _bind(case.dtype, case.x.numpy(), shape, w, conv, threads)}
        case cases.Gelu():
            gelu = [node("Gelu", ["x"], ["y"], approximate=case.approximate)]
            x = case.x.numpy()
            return {"onnxruntime": _bind(case.dtype, x, x.shape, {}, gelu, threads)}
        case cases.Decode():
            return {}
        case cases.CausalConv1d(channel_last=False):
            nodes = [
                node("Conv", ["x", "w", "b"], ["c"], group=case.d, pads=[3, 0]),
                node("Sigmoid", ["c"], ["s"]),
                node("Mul", ["c", "s"], ["y"]),
            ]
            constants = {"w": case.weight[:, None].numpy(), "b": case.bias.numpy()}
            x = case.x.numpy()
            return {"onnxruntime": _bind(case.dtype, x, x.shape, constants, nodes, threads)}
    return {}
