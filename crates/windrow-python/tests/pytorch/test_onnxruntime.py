"""Windrow's operators in the released ONNX Runtime."""

import ctypes
import threading
from importlib import import_module

import numpy as np
import pytest
import windrow.onnx

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

OPSETS = [helper.make_opsetid("", 20), helper.make_opsetid(windrow.onnx.DOMAIN, 1)]
ELEMENTS = {"f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
TOLERANCE = {"f32": 1e-5, "f16": 2e-3, "bf16": 1.6e-2}


def session(model):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(windrow.onnx.library())
    data = model.SerializeToString()
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def model_of(node, inputs, outputs=1, element=TensorProto.FLOAT, constants=()):
    """A model of a node. Inputs and outputs are f32 and cast on the way; `constants` are part of the model."""
    casts, initializers, names = [], [], []
    for name, array in inputs.items():
        if name in constants:
            initializers.append(numpy_helper.from_array(array, name))
        else:
            shape = [f"{name}{i}" for i in range(array.ndim)]
            names.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        casts.append(helper.make_node("Cast", [name], [f"{name}_cast"], to=element))
    node.input[:] = [f"{name}_cast" if name else "" for name in node.input]
    back = [helper.make_node("Cast", [o], [f"{o}_cast"], to=TensorProto.FLOAT) for o in node.output]
    results = [helper.make_tensor_value_info(f"{o}_cast", TensorProto.FLOAT, None) for o in node.output]
    graph = helper.make_graph([*casts, node, *back], "graph", names, results, initializers)
    model = helper.make_model(graph, opset_imports=OPSETS, ir_version=10)
    return model


def run(node, inputs, **how):
    model = model_of(node, inputs, **how)
    given = {v.name: inputs[v.name] for v in model.graph.input}
    return session(model).run(None, given)


def ours(op, inputs, outputs, **attributes):
    return helper.make_node(op, inputs, outputs, domain=windrow.onnx.DOMAIN, **attributes)


def array(*shape, seed=0):
    return np.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def node_cases():
    node = import_module("onnx.backend.test.case.node")
    for name in ["conv", "gelu", "causal_conv_with_state"]:
        try:
            import_module(f"onnx.backend.test.case.node.{name}")
        except ModuleNotFoundError:
            pass  # An onnx before opset 20, or 27.
    return [case for case in node._NodeTestCases if case.model.graph.node[0].op_type in windrow.onnx.OPERATORS]


@pytest.mark.parametrize("case", node_cases(), ids=lambda case: case.name)
def test_node_cases_of_onnx(case):
    model = windrow.onnx.convert(case.model)
    assert [node.domain for node in model.graph.node] == [windrow.onnx.DOMAIN]
    # What is left of the standard operators, none, is that of a set which every ONNX Runtime knows.
    model.opset_import[0].version, model.ir_version = 20, 10
    runner = session(model)
    names = [value.name for value in runner.get_inputs()]
    for inputs, outputs in case.data_sets:
        results = runner.run(None, dict(zip(names, inputs, strict=True)))
        for got, want in zip(results, outputs, strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got, want, rtol=case.rtol, atol=1e-6)


def test_the_node_cases_are_there():
    operators = [case.model.graph.node[0].op_type for case in node_cases()]
    assert operators.count("Conv") >= 6 and operators.count("Gelu") >= 4
    if onnx.defs.onnx_opset_version() >= 27:
        assert operators.count("CausalConvWithState") >= 4


CONVOLUTIONS = [
    ((2, 8, 9, 7), (6, 8, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((2, 8, 9, 7), (6, 4, 3, 2), {"pads": [0, 2, 1, 1], "group": 2, "strides": [2, 1]}),
    ((1, 6, 11, 10), (6, 1, 3, 3), {"group": 6, "dilations": [2, 3], "pads": [2, 3, 2, 3]}),
    ((1, 3, 10, 11), (4, 3, 4, 3), {"auto_pad": "SAME_UPPER", "strides": [3, 2]}),
    ((1, 3, 10, 11), (4, 3, 4, 3), {"auto_pad": "SAME_LOWER", "strides": [3, 2], "kernel_shape": [4, 3]}),
    ((1, 3, 10, 11), (4, 3, 4, 3), {"auto_pad": "VALID"}),
    ((3, 5, 17), (4, 5, 3), {"pads": [2, 2], "dilations": [2]}),
    ((3, 6, 17), (6, 1, 4), {"pads": [3, 0], "group": 6, "strides": [2]}),
    ((2, 32, 14, 14), (32, 32, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((0, 8, 9, 7), (6, 8, 3, 3), {}),
]


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("constants", [(), ("w", "b")])
@pytest.mark.parametrize(("x", "w", "attributes"), CONVOLUTIONS)
def test_conv(x, w, attributes, constants, bias, name):
    element, tolerance = ELEMENTS[name], TOLERANCE[name]
    inputs = {"x": array(*x), "w": array(*w, seed=1)} | ({"b": array(w[0], seed=2)} if bias else {})
    how = {"element": element, "constants": constants}
    (got,) = run(ours("Conv", [*inputs], ["y"], activation="none", **attributes), inputs, **how)
    rounded = run_identity(inputs, element)
    (want,) = run(helper.make_node("Conv", [*inputs], ["y"], **attributes), rounded)
    (scale,) = run(helper.make_node("Conv", [*inputs], ["y"], **attributes), {n: abs(a) for n, a in rounded.items()})
    assert got.shape == want.shape
    assert (abs(got - want) <= tolerance * (scale + 1e-3)).all()


def test_conv_pads_a_dilated_filter_to_the_same_size():
    """Which ONNX Runtime's own operator does not."""
    inputs = {"x": array(1, 3, 9, 10), "w": array(4, 3, 4, 3, seed=1)}
    for auto_pad, pads in [("SAME_UPPER", [4, 2, 5, 2]), ("SAME_LOWER", [5, 2, 4, 2])]:
        how = {"dilations": [3, 2]}
        (got,) = run(ours("Conv", ["x", "w"], ["y"], auto_pad=auto_pad, **how), inputs)
        (want,) = run(ours("Conv", ["x", "w"], ["y"], pads=pads, **how), inputs)
        np.testing.assert_array_equal(got, want)
        assert got.shape == (1, 4, 9, 10)


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("stride", [1, 2])
def test_conv_makes_the_same_size_of_nothing(auto_pad, stride):
    """Of an axis without pixels; ONNX Runtime's own operator refuses it."""
    for x, size in [((1, 3, 0, 5), (0, 5)), ((1, 3, 5, 0), (5, 0)), ((2, 3, 0, 0), (0, 0)), ((0, 3, 0, 5), (0, 5))]:
        inputs = {"x": array(*x), "w": array(4, 3, 3, 3, seed=1), "b": array(4, seed=2)}
        (got,) = run(ours("Conv", [*inputs], ["y"], auto_pad=auto_pad, strides=[stride] * 2), inputs)
        assert got.shape == (x[0], 4, *(-(-n // stride) for n in size))
    inputs = {"x": array(2, 3, 0), "w": array(4, 3, 3, seed=1)}
    (got,) = run(ours("Conv", [*inputs], ["y"], auto_pad=auto_pad, strides=[stride]), inputs)
    assert got.shape == (2, 4, 0)


def run_identity(inputs, element):
    """As rounded to the element type."""
    return {
        name: run(helper.make_node("Identity", ["x"], ["y"]), {"x": a}, element=element)[0] for name, a in inputs.items()
    }


@pytest.mark.parametrize("activation", ["relu", "leaky_relu(-0.5)", "hardswish", "silu", "swish", "gelu", "gelu_tanh", "identity"])
def test_activations(activation):
    torch = pytest.importorskip("torch")
    functions = {
        "relu": torch.relu,
        "leaky_relu(-0.5)": lambda y: torch.nn.functional.leaky_relu(y, -0.5),
        "hardswish": torch.nn.functional.hardswish,
        "silu": torch.nn.functional.silu,
        "swish": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda y: torch.nn.functional.gelu(y, approximate="tanh"),
        "identity": lambda y: y,
    }
    inputs = {"x": array(2, 3, 8, 8), "w": array(4, 3, 3, 3, seed=1)}
    (got,) = run(ours("Conv", ["x", "w"], ["y"], activation=activation), inputs)
    x, w = (torch.from_numpy(a).double() for a in inputs.values())
    want = functions[activation](torch.conv2d(x, w))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    inputs = {"x": array(2, 3, 8), "w": array(3, 1, 4, seed=1)}
    got, _ = run(ours("CausalConvWithState", ["x", "w"], ["y", "s"], activation=activation), inputs)
    x, w = (torch.from_numpy(a).double() for a in inputs.values())
    want = functions[activation](torch.conv1d(x, w, padding=3, groups=3)[..., :8])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(2, 3, 5), (257,), (), (0, 4)])
def test_gelu(shape, approximate, name):
    torch = pytest.importorskip("torch")
    element, tolerance = ELEMENTS[name], TOLERANCE[name]
    inputs = {"x": np.asarray(3 * array(*shape))}
    (got,) = run(ours("Gelu", ["x"], ["y"], approximate=approximate), inputs, element=element)
    x = torch.from_numpy(np.asarray(run_identity(inputs, element)["x"])).double()
    want = torch.nn.functional.gelu(x, approximate=approximate)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize(("length", "width"), [(9, 4), (2, 4), (1, 4), (0, 4), (5, 1)])
def test_states_are_walked_on(length, width, name):
    """Two calls give what one does of both."""
    element, tolerance = ELEMENTS[name], TOLERANCE[name]
    x, w, b = array(2, 6, 7 + length), array(6, 1, width, seed=1), array(6, seed=2)
    names = ["x", "w", "b", "past"]

    def call(x, past):
        inputs = dict(zip(names, [x, w, b, past], strict=True))
        node = ours("CausalConvWithState", names, ["y", "present"], activation="silu")
        return run(node, inputs, element=element)

    nothing = np.zeros((2, 6, width - 1), np.float32)
    first, state = call(x[..., :7], nothing)
    second, state = call(x[..., 7:], state)
    whole, last = call(x, nothing)
    np.testing.assert_allclose(np.concatenate([first, second], -1), whole, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(state, last)


def test_nan():
    x = array(1, 3, 8, 8)
    x[0, 1, 4, 4] = np.nan
    (y,) = run(ours("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1]), {"x": x, "w": array(4, 3, 3, 3)})
    assert np.isnan(y[:, :, 3:6, 3:6]).all()
    (y,) = run(ours("Gelu", ["x"], ["y"]), {"x": x})
    assert np.isnan(y).sum() == 1


IMAGE = {"x": (1, 4, 8, 8), "w": (6, 4, 3, 3)}
SEQUENCE = {"x": (1, 4, 8), "w": (4, 1, 3)}
ERRORS = [
    ("Conv", IMAGE, {"strides": [1]}, "`strides` is"),
    ("Conv", IMAGE, {"strides": [1, -1]}, "`strides` is -1"),
    ("Conv", IMAGE, {"strides": [0, 1]}, "stride"),
    ("Conv", IMAGE, {"dilations": [1, 1, 1]}, "`dilations` is"),
    ("Conv", IMAGE, {"pads": [1, 1]}, "`pads` is"),
    ("Conv", IMAGE, {"pads": [-1, 0, 0, 0]}, "`pads` is -1"),
    ("Conv", IMAGE, {"pads": [2**62, 0, 2**62, 0]}, "overflows"),
    ("Conv", IMAGE, {"pads": [2**62, 0, 2**62 - 1, 0]}, "overflows"),
    ("Conv", IMAGE, {"pads": [2**63 - 1, 0, 2**63 - 2, 0]}, "`pads` is|overflows"),
    ("Conv", IMAGE, {"auto_pad": "SAME"}, "`auto_pad` is SAME"),
    ("Conv", IMAGE, {"kernel_shape": [3, 5]}, r"`kernel_shape` is \[3, 5\], and W has \[3, 3\]"),
    ("Conv", IMAGE, {"group": 3}, "groups"),
    ("Conv", IMAGE, {"group": -1}, "`group` is -1"),
    ("Conv", IMAGE, {"activation": "tanh"}, "`activation` is tanh"),
    ("Conv", IMAGE, {"group": 1.5}, "`group` is of another type"),
    ("Conv", IMAGE, {"group": [1]}, "`group` is of another type"),
    ("Conv", IMAGE, {"strides": 1}, "`strides` is"),
    ("Conv", IMAGE, {"activation": [1.5]}, "`activation` is of another type"),
    ("Conv", IMAGE, {"pads": "SAME"}, "`pads` is"),
    ("Conv", {"x": (1, 4, 8, 8), "w": (6, 4, 9, 3)}, {}, "expected"),
    ("Conv", {"x": (1, 4, 8, 8), "w": (6, 3, 3, 3)}, {}, "expected"),
    ("Conv", {"x": (1, 4, 8, 8), "w": (6, 4, 3, 3), "b": (5,)}, {}, "bias"),
    ("Conv", {"x": (1, 4, 8, 8, 8), "w": (6, 4, 3, 3, 3)}, {}, "images and rows only"),
    ("Conv", {"x": (4, 8), "w": (6, 4)}, {}, "images and rows only"),
    ("Gelu", {"x": (4, 8)}, {"approximate": "erf"}, "`approximate` is erf"),
    ("CausalConvWithState", {"x": (1, 4, 8), "w": (4, 2, 3)}, {}, "channels, 1, k"),
    ("CausalConvWithState", {"x": (1, 4, 8), "w": (4, 3)}, {}, "channels, 1, k"),
    ("CausalConvWithState", {"x": (4, 8), "w": (4, 1, 3)}, {}, "`x` has 2 dimensions"),
    ("CausalConvWithState", {"x": (1, 5, 8), "w": (4, 1, 3)}, {}, "expected"),
    ("CausalConvWithState", SEQUENCE | {"b": (3,)}, {}, "bias"),
    ("CausalConvWithState", SEQUENCE | {"b": (4,), "past": (1, 4, 3)}, {}, "initial_states"),
    ("CausalConvWithState", SEQUENCE, {"activation": "tanh"}, "`activation` is tanh"),
]


@pytest.mark.parametrize(("op", "shapes", "attributes", "message"), ERRORS)
def test_errors(op, shapes, attributes, message):
    inputs = {name: array(*shape) for name, shape in shapes.items()}
    outputs = ["y", "s"] if op == "CausalConvWithState" else ["y"]
    with pytest.raises(Exception, match=message) as raised:
        run(ours(op, [*inputs], outputs, **attributes), inputs)
    assert "onnxruntime" in type(raised.value).__module__ and "panicked" not in str(raised.value)


def test_threads():
    """A session is used by several threads at once, with more shapes than it keeps plans for."""
    inputs = {"x": array(1, 4, 6, 40), "w": array(8, 4, 3, 3, seed=1)}
    runner = session(model_of(ours("Conv", ["x", "w"], ["y"], activation="gelu"), inputs, constants=["w"]))
    crops = [inputs["x"][..., : 4 + i].copy() for i in range(36)]
    want = [runner.run(None, {"x": x})[0] for x in crops]
    wrong = []

    def work(order):
        for i in order:
            if not np.array_equal(runner.run(None, {"x": crops[i]})[0], want[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=[range(36)[::step]]) for step in (1, -1, 5, -3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def graph_model(nodes, values, outputs, constants, opset=24):
    inputs = [helper.make_tensor_value_info(n, t, s) for n, t, s in values]
    results = [helper.make_tensor_value_info(n, TensorProto.UNDEFINED, None) for n in outputs]
    for result in results:
        result.ClearField("type")
    initializers = [numpy_helper.from_array(a, n) for n, a in constants.items()]
    graph = helper.make_graph(nodes, "graph", inputs, results, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def operators(model):
    return [f"{node.domain}:{node.op_type}".lstrip(":") for node in model.graph.node]


BEHIND = {
    "relu": ([("Relu", ["a"], {})], "relu"),
    "gelu": ([("Gelu", ["a"], {})], "gelu"),
    "gelu_tanh": ([("Gelu", ["a"], {"approximate": "tanh"})], "gelu_tanh"),
    "swish": ([("Swish", ["a"], {})], "silu"),
    "hardswish": ([("HardSwish", ["a"], {})], "hardswish"),
    "leaky": ([("LeakyRelu", ["a"], {})], "leaky_relu"),
    "leaky 0.01": ([("LeakyRelu", ["a"], {"alpha": 0.01})], "leaky_relu(0.009999999776482582)"),
    "leaky 0.25": ([("LeakyRelu", ["a"], {"alpha": 0.25})], "leaky_relu(0.25)"),
    "leaky 1": ([("LeakyRelu", ["a"], {"alpha": 1.0})], "leaky_relu(1.0)"),
    "leaky inf": ([("LeakyRelu", ["a"], {"alpha": float("inf")})], None),
    "sigmoid": ([("Sigmoid", ["a"], {}), ("Mul", ["a", "y0"], {})], "silu"),
    "swish of 2": ([("Swish", ["a"], {"alpha": 2.0})], None),
    "sigmoid twice": ([("Sigmoid", ["a"], {}), ("Mul", ["y0", "y0"], {}), ("Add", ["y1", "a"], {})], None),
    "two readers": ([("Relu", ["a"], {}), ("Add", ["a", "y0"], {})], None),
}


@pytest.mark.parametrize("case", BEHIND)
def test_convert_takes_over_activations(case):
    behind, activation = BEHIND[case]
    nodes = [helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1])]
    nodes += [helper.make_node(op, i, [f"y{n}"], **more) for n, (op, i, more) in enumerate(behind)]
    values = [("x", TensorProto.FLOAT, ["n", 3, "h", "l"])]
    last = nodes[-1].output[0]
    model = graph_model(nodes, values, [last], {"w": array(4, 3, 3, 3)})
    before = model.SerializeToString()
    converted = windrow.onnx.convert(model)
    assert model.SerializeToString() == before
    assert operators(converted)[0] == "ai.windrow:Conv"
    if activation is None:
        assert len(converted.graph.node) == len(nodes)
        return
    (node,) = converted.graph.node
    assert helper.get_node_attr_value(node, "activation") == activation.encode()
    x = array(2, 3, 6, 5)
    (got,) = session(converted).run([last], {"x": x})
    if "Swish" not in operators(model):
        (want,) = session(model).run([last], {"x": x})
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_convert_leaves_what_it_cannot():
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),  # f64
        helper.make_node("Conv", ["volume", "v"], ["b"]),
        helper.make_node("Conv", ["image", "u"], ["c"]),  # given back as well as read
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("Gelu", ["c"], ["e"]),
        helper.make_node("NoSuchOperator", ["c"], ["f"], domain="another"),
        helper.make_node("Gelu", ["f"], ["g"]),  # of no known type
    ]
    double, single = TensorProto.DOUBLE, TensorProto.FLOAT
    values = [("x", double, [1, 3, 8, 8]), ("volume", single, [1, 3, 8, 8, 8]), ("image", single, [1, 3, 8, 8])]
    constants = {"w": array(4, 3, 3, 3).astype(np.float64), "v": array(4, 3, 3, 3, 3), "u": array(4, 3, 3, 3)}
    model = graph_model(nodes, values, ["a", "b", "c", "d", "e", "g"], constants)
    model.opset_import.append(helper.make_opsetid("another", 1))
    converted = windrow.onnx.convert(model)
    assert operators(converted) == [
        "Conv", "Conv", "ai.windrow:Conv", "Relu", "ai.windrow:Gelu", "another:NoSuchOperator", "Gelu",
    ]  # fmt: skip
    assert operators(windrow.onnx.convert(model, ["Gelu"]))[2] == "Conv"
    nothing = windrow.onnx.convert(model, [])
    assert operators(nothing) == operators(model)
    assert [entry.domain for entry in nothing.opset_import] == ["", "another"]
    with pytest.raises(ValueError, match="`operators` has Relu"):
        windrow.onnx.convert(model, ["Relu"])


def test_convert_looks_into_graphs_of_nodes():
    branch = [helper.make_node("Gelu", ["z"], ["r"])]
    inner = [helper.make_node("Identity", ["x"], ["z"]), *branch]
    result = helper.make_tensor_value_info("r", TensorProto.FLOAT, None)
    other = helper.make_node("Identity", ["x"], ["r"])
    node = helper.make_node(
        "If",
        ["flag"],
        ["y"],
        then_branch=helper.make_graph(inner, "then", [], [result]),
        else_branch=helper.make_graph([other], "else", [], [result]),
    )
    values = [("flag", TensorProto.BOOL, []), ("x", TensorProto.FLOAT, [4])]
    converted = windrow.onnx.convert(graph_model([node], values, ["y"], {}, opset=20))
    x = array(4)
    runner = session(converted)
    (then,) = (a.g for a in converted.graph.node[0].attribute if a.name == "then_branch")
    assert [n.domain for n in then.node] == ["", windrow.onnx.DOMAIN]
    (plain,) = runner.run(["y"], {"flag": np.array(False), "x": x})
    np.testing.assert_array_equal(plain, x)
    (y,) = runner.run(["y"], {"flag": np.array(True), "x": x})
    (want,) = run(ours("Gelu", ["x"], ["y"]), {"x": x})
    np.testing.assert_array_equal(y, want)


def test_convert_infers_types_without_large_tensors(monkeypatch):
    """A message of more than 2 GiB cannot be serialized, which is how types are inferred."""
    import onnx.shape_inference

    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("Reshape", ["a", "shape"], ["b"]),
        helper.make_node("Add", ["b", "large"], ["y"]),
        helper.make_node("Gelu", ["y"], ["z"]),
    ]
    constants = {"w": array(4, 3, 3, 3), "large": array(36, 4096), "shape": np.array([36, 1])}
    model = graph_model(nodes, [("x", TensorProto.FLOAT, [1, 3, 5, 5])], ["z"], constants)
    before = model.SerializeToString()
    infer, sizes = onnx.shape_inference.infer_shapes, []

    def infer_shapes(model, *args, **kwargs):
        sizes.append(model.ByteSize())
        return infer(model, *args, **kwargs)

    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", infer_shapes)
    converted = windrow.onnx.convert(model)
    assert sizes and max(sizes) < 1 << 16
    assert operators(converted) == ["ai.windrow:Conv", "Reshape", "Add", "ai.windrow:Gelu"]
    assert model.SerializeToString() == before
    assert [t.SerializeToString() for t in converted.graph.initializer] == [
        t.SerializeToString() for t in model.graph.initializer
    ]


def test_convert_of_external_data(tmp_path):
    """A model whose tensors stay in another file, where one may be larger than memory."""
    nodes = [helper.make_node("Conv", ["x", "w"], ["a"]), helper.make_node("Shape", ["large"], ["s"])]
    model = graph_model(nodes, [("x", TensorProto.FLOAT, [1, 3, 5, 5])], ["a", "s"], {"w": array(4, 3, 3, 3)})
    large = model.graph.initializer.add(name="large", data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    large.dims.extend([600_000, 1024])
    large.external_data.add(key="location", value="large.bin")
    with open(tmp_path / "large.bin", "wb") as file:
        file.truncate(600_000 * 1024 * 4)
    onnx.save(model, tmp_path / "model.onnx")
    converted = windrow.onnx.convert(onnx.load(tmp_path / "model.onnx", load_external_data=False))
    assert operators(converted) == ["ai.windrow:Conv", "Shape"]
    assert converted.graph.initializer[1].external_data[0].value == "large.bin"


def test_a_library_that_is_registered_twice():
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(windrow.onnx.library())
    options.register_custom_ops_library(windrow.onnx.library())
    inputs = {"x": array(2, 3)}
    data = model_of(ours("Gelu", ["x"], ["y"]), inputs).SerializeToString()
    for _ in range(2):
        runner = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        runner.run(None, inputs)
    session(model_of(ours("Gelu", ["x"], ["y"]), inputs)).run(None, inputs)


def test_an_old_version_is_told_what_is_missing():
    """An ONNX Runtime that does not know the version of the interface."""
    said = []
    status = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)(
        lambda code, message: said.append((code, message)) or 1
    )
    table = (ctypes.c_void_p * 1)(ctypes.cast(status, ctypes.c_void_p))
    get_api = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)(
        lambda version: ctypes.addressof(table) if version == 1 else None
    )
    base = (ctypes.c_void_p * 2)(ctypes.cast(get_api, ctypes.c_void_p), None)
    register = ctypes.CDLL(windrow.onnx.library()).RegisterCustomOps
    register.restype = ctypes.c_void_p
    assert register(None, base) == 1
    assert said == [(1, b"windrow needs ONNX Runtime 1.16 or later")]
