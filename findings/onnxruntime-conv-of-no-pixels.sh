#!/usr/bin/env bash
# ONNX Runtime refuses a convolution of an image without rows where the result has no rows either.
#
# The formula of ONNX's Conv gives 0 rows of 0 rows with SAME padding, and with a padding of one for a filter of three. An
# empty tensor is a valid result of other operators. With a padding of two the same image gives two rows of bias, and that
# is computed.
#
# Seen: onnxruntime 1.32.0, onnx 1.23.2, numpy 2.3.5. The three modes fail with "Invalid input shape: {0,4}".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnxruntime
from onnx import TensorProto, helper

def outcome(**padding):
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "w", "y")]
    node = helper.make_node("Conv", ["x", "w"], ["y"], **padding)
    graph = helper.make_graph([node], "g", values[:2], values[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    given = {"x": np.zeros((1, 3, 0, 4), np.float32), "w": np.ones((5, 3, 3, 3), np.float32)}
    try:
        return str(session.run(None, given)[0].shape)
    except Exception as error:
        return "refused" if "Invalid input shape" in str(error) else repr(error)

found = {name: outcome(**padding) for name, padding in {
    "SAME_UPPER": {"auto_pad": "SAME_UPPER"},
    "SAME_LOWER": {"auto_pad": "SAME_LOWER"},
    "padding of one": {"pads": [1, 1, 1, 1]},
    "padding of two": {"pads": [2, 2, 2, 2]},
}.items()}
print(found)
assert found.pop("padding of two") == "(1, 5, 2, 6)", "changed"
assert set(found.values()) == {"refused"}, "changed"
PYTHON
