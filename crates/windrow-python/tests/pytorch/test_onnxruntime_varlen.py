"""`VarlenCausalConvWithState` in the released ONNX Runtime, which has it for GPUs only."""

import itertools

import numpy as np
import pytest
import windrow.onnx

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper  # noqa: E402

OP = "VarlenCausalConvWithState"
ELEMENTS = {"f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
TOLERANCE = {"f32": 1e-5, "f16": 2e-3, "bf16": 1.6e-2}
INPUTS = ["x", "w", "cu", "b", "past", "count"]
INDICES = ("cu", "count")


def array(*shape, seed=0):
    return np.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def model_of(inputs, outputs, element, **attributes):
    """A model of a node of `com.microsoft`. Inputs and outputs that are no indices are f32 and cast on the way."""
    nodes, given, names = [], [], []
    for name in INPUTS:
        if inputs.get(name) is None:
            names.append("")
            continue
        is_index = name in INDICES
        type = TensorProto.INT32 if is_index else TensorProto.FLOAT
        shape = [f"{name}{i}" for i in range(inputs[name].ndim)]
        given.append(helper.make_tensor_value_info(name, type, shape))
        names.append(name if is_index else f"{name}_cast")
        if not is_index:
            nodes.append(helper.make_node("Cast", [name], [f"{name}_cast"], to=element))
    while names[-1] == "":
        names.pop()
    nodes.append(helper.make_node(OP, names, outputs, domain="com.microsoft", **attributes))
    nodes += [helper.make_node("Cast", [o], [f"{o}_cast"], to=TensorProto.FLOAT) for o in outputs if o]
    results = [helper.make_tensor_value_info(f"{o}_cast", TensorProto.FLOAT, None) for o in outputs if o]
    graph = helper.make_graph(nodes, "graph", given, results)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def run(inputs, outputs=("y", "last"), element=TensorProto.FLOAT, **attributes):
    model = windrow.onnx.convert(model_of(inputs, outputs, element, **attributes))
    assert [n.domain for n in model.graph.node if n.op_type == OP] == [windrow.onnx.DOMAIN]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(windrow.onnx.library())
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {name: value for name, value in inputs.items() if value is not None})


def rounded(values, element):
    torch = pytest.importorskip("torch")
    types = {TensorProto.FLOAT16: torch.float16, TensorProto.BFLOAT16: torch.bfloat16}
    return torch.from_numpy(values).to(types.get(element, torch.float32)).double().numpy()


def plain(inputs, dilation, silu):
    """One token after the other, in f64."""
    x, w, cu, past = inputs["x"], inputs["w"][:, 0], inputs["cu"], inputs["past"]
    bias = 0 if inputs.get("b") is None else inputs["b"]
    y, last = np.zeros(x.shape), np.zeros(past.shape)
    for i, (start, end) in enumerate(itertools.pairwise(cu)):
        joined = np.concatenate([past[i].T, x[start:end]])
        for t in range(end - start):
            y[start + t] = bias + sum(w[:, k] * joined[t + k * dilation] for k in range(w.shape[1]))
        last[i] = joined[len(joined) - past.shape[2] :].T
    return y / (1 + np.exp(-y)) if silu else y, last


def sample(tokens, channels, width, dilation, cu, bias=True):
    return {
        "x": array(tokens, channels),
        "w": array(channels, 1, width, seed=1),
        "cu": np.asarray(cu, np.int32),
        "b": array(channels, seed=2) if bias else None,
        "past": array(len(cu) - 1, channels, (width - 1) * dilation, seed=3),
    }


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("width", "dilation"), [(4, 1), (4, 3), (1, 2), (2, 40)])
def test_values_and_states(name, bias, width, dilation):
    element = ELEMENTS[name]
    for channels, cu in [(6, [0, 1, 2, 9]), (33, [0, 40]), (1, [0, 5, 5, 70])]:
        inputs = sample(cu[-1], channels, width, dilation, cu, bias)
        got, last = run(inputs, element=element, activation="silu", dilation=dilation)
        wide = {n: v if v is None or n in INDICES else rounded(v, element) for n, v in inputs.items()}
        want, want_last = plain(wide, dilation, silu=True)
        np.testing.assert_allclose(got, want, rtol=TOLERANCE[name], atol=4 * TOLERANCE[name])
        np.testing.assert_array_equal(last, want_last)


@pytest.mark.parametrize("dilation", [1, 5])
def test_states_are_walked_on(dilation):
    """Two calls give what one does of both."""
    whole = sample(20, 4, 3, dilation, [0, 12, 20])
    y, last = run(whole, activation="swish", dilation=dilation)
    parts = [[0, 5, 12, 17], [5, 12, 17, 20]]
    first = whole | {"x": np.concatenate([whole["x"][0:5], whole["x"][12:17]]), "cu": np.int32([0, 5, 10])}
    y0, state = run(first, activation="swish", dilation=dilation)
    second = whole | {"x": np.concatenate([whole["x"][5:12], whole["x"][17:20]]), "cu": np.int32([0, 7, 10])}
    y1, end = run(second | {"past": state}, activation="swish", dilation=dilation)
    assert parts[0][0] == 0
    np.testing.assert_array_equal(np.concatenate([y0[:5], y1[:7], y0[5:], y1[7:]]), y)
    np.testing.assert_array_equal(end, last)


@pytest.mark.parametrize("name", ELEMENTS)
def test_updates(name):
    element = ELEMENTS[name]
    inputs = sample(12, 5, 4, 2, [0, 2, 3, 12]) | {"count": np.int32([9, -1, 3])}
    outputs = ("y", "last", "update")
    y, last, update = run(inputs, outputs, element, state_update_capacity=4, dilation=2)
    want = np.zeros((3, 4, 5))
    want[0, :2], want[2, :3] = inputs["x"][:2], inputs["x"][3:6]
    np.testing.assert_array_equal(update, rounded(want.astype(np.float32), element))
    plain_inputs = {n: v for n, v in inputs.items() if n != "count"}
    for got, same in zip((y, last), run(plain_inputs, element=element, dilation=2), strict=True):
        np.testing.assert_array_equal(got, same)
    # The output may be left out, and has no elements without a capacity.
    assert len(run(inputs, element=element, state_update_capacity=4, dilation=2)) == 2
    assert run(plain_inputs, outputs, element, dilation=2)[2].shape == (3, 0, 5)


GOOD = sample(9, 4, 3, 1, [0, 4, 9])
ERRORS = [
    ({"x": array(1, 9, 4)}, {}, "`input` has shape"),
    ({"w": array(4, 3)}, {}, "channels, 1, k"),
    ({"w": array(5, 1, 3)}, {}, "expected"),
    ({"b": array(3)}, {}, "bias"),
    ({"past": array(2, 4, 3)}, {}, "initial_states"),
    ({"past": array(2, 4, 2)}, {"dilation": 2}, "initial_states"),
    ({"cu": np.int32([0, 9, 4])}, {}, "cu_seqlens"),
    ({"cu": np.int32([0, 4, 8])}, {}, "cu_seqlens"),
    ({"cu": np.int32([[0, 4, 9]])}, {}, "cu_seqlens"),
    ({}, {"dilation": 0}, "`dilation` is 0"),
    ({}, {"dilation": -1}, "`dilation` is -1"),
    ({}, {"activation": "tanh"}, "`activation` is tanh"),
    ({}, {"state_update_capacity": 9}, "`state_update_capacity` is 9"),
    ({}, {"state_update_capacity": -1}, "`state_update_capacity` is -1"),
    ({}, {"state_update_capacity": 2}, "`capture_count` is expected"),
    ({"count": np.int32([1, 1])}, {}, "`capture_count` is expected"),
    ({"count": np.int32([1])}, {"state_update_capacity": 2}, r"`capture_count` has shape \[1\]"),
]


@pytest.mark.parametrize(("changed", "attributes", "message"), ERRORS)
def test_errors(changed, attributes, message):
    with pytest.raises(Exception, match=message) as raised:
        run(GOOD | changed, ("y", "last", "update"), **attributes)
    assert "onnxruntime" in type(raised.value).__module__ and "panicked" not in str(raised.value)


def test_what_is_not_converted():
    for element in (TensorProto.DOUBLE,):
        model = windrow.onnx.convert(model_of(GOOD, ("y", "last"), element))
        assert [n.domain for n in model.graph.node if n.op_type == OP] == ["com.microsoft"]
    model = model_of(GOOD, ("y", "last"), TensorProto.FLOAT)
    assert "ai.windrow" not in [e.domain for e in windrow.onnx.convert(model, ["Conv"]).opset_import]
