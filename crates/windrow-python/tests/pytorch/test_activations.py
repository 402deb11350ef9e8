"""The activations: one table for all of Python, whose names are Rust's."""

import re
from typing import get_args

import numpy as np
import pytest
import torch
import windrow
from common import ACTIVATIONS as FUNCTIONS
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from windrow import onnx
from windrow._activation_names import NAMES, SYNONYMS, Activation
from windrow.torch import (
    Conv1d,
    Conv2d,
    ConvTranspose1d,
    ConvTranspose2d,
    causal_conv1d_fn,
    causal_conv1d_update,
    conv2d,
)
from windrow.torch._activations import ACTIVATIONS, PYTORCHS, activation_of
from windrow.torch._fused import FusedConv2d
from windrow.torch.backend._activated import activated

LAYERS = {Conv1d: (2, 4, 9), Conv2d: (2, 4, 9, 8), ConvTranspose1d: (2, 4, 9), ConvTranspose2d: (2, 4, 9, 8)}


def test_the_names_are_those_of_rust():
    x, weight = np.ones((1, 2, 3), np.float32), np.ones((2, 2), np.float32)
    with pytest.raises(ValueError) as raised:
        windrow.causal_conv1d(x, weight, activation="mish")
    known = re.search("expected (.*);", str(raised.value))[1].split(", ")
    assert {*ACTIVATIONS} - {None} - {*SYNONYMS} <= {*known}
    for name in known:
        activation_of(name)
    x = np.linspace(-7, 7, 29, dtype=np.float32).reshape(1, 1, 29)
    for name, function in ACTIVATIONS.items():
        y = windrow.causal_conv1d(x, np.ones((1, 1), np.float32), activation=name)
        torch.testing.assert_close(torch.from_numpy(y), function(torch.from_numpy(x)), atol=1e-5, rtol=1e-5)


def test_type_checkers_know_the_names():
    names, slopes = get_args(Activation)
    assert {*get_args(names)} == {*ACTIVATIONS} - {None} and slopes is str


@pytest.mark.parametrize("name", NAMES)
def test_graphs_of_pytorch_and_onnx_know_an_activation(name):
    """The table is all that the backend of torch.compile and `windrow.onnx` look at."""
    names = NAMES[name]
    kwargs = {} if names.approximate is None else {"approximate": names.approximate}
    by_module = getattr(nn, names.module)(**kwargs)
    by_function = lambda x: getattr(nn.functional, names.function)(x, **kwargs)
    behind_neg = lambda function: make_fx(lambda x: function(x.neg()))(torch.zeros(2)).graph
    for graph in map(behind_neg, (PYTORCHS[name], by_module, by_function)):
        (behind,) = (node for node in graph.nodes if node.target is torch.ops.aten.neg.default)
        assert activated(behind, torch.float32, None)[0] == name
    if names.operator is not None:
        helper = pytest.importorskip("onnx").helper
        node = helper.make_node(names.operator, ["x"], ["y"], **kwargs)
        float = helper.make_tensor_value_info
        graph = helper.make_graph([node], "graph", [float("x", 1, [2])], [float("y", 1, [2])])
        assert onnx._activation(graph, "x")[0] == name


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_functions(name):
    x = torch.linspace(-7, 7, 29)
    want = FUNCTIONS.get(name, FUNCTIONS[None])(x)
    torch.testing.assert_close(activation_of(name)(x), want)
    torch.testing.assert_close(activation_of(name, in_place=True)(x.clone()), want)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_scripted_modules(kind, name):
    module, x = kind(4, 6, 3), torch.randn(LAYERS[kind])
    plain = getattr(nn, kind.__name__)(4, 6, 3)
    plain.load_state_dict(module.state_dict())
    module.activation = name
    want = activation_of(name)(plain(x))
    torch.testing.assert_close(torch.jit.script(module)(x), want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(module(x), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["mish", "", True, 1])
def test_another_name_is_refused_by_all(name):
    x, weight = torch.randn(2, 4, 9, 8), torch.randn(6, 4, 3, 3)
    refused = pytest.raises((ValueError, TypeError), match="activation")
    with refused:
        conv2d(x, weight, activation=name)
    for kind, shape in LAYERS.items():
        module = kind(4, 6, 3)
        module.activation = name
        with refused:
            module(torch.randn(shape))
        if isinstance(name, str):
            with pytest.raises(torch.jit.Error, match="`activation` is"):
                torch.jit.script(module)(torch.randn(shape))
    refused = pytest.raises((ValueError, TypeError), match=f"`activation` is '?{name}")
    line, taps = torch.randn(2, 4, 9), torch.randn(4, 3)
    with refused:
        causal_conv1d_fn(line, taps, activation=name)
    with refused:
        causal_conv1d_update(line[..., 0], torch.zeros(2, 4, 2), taps, None, name)
    with torch.no_grad(), refused:
        options = ((1, 1), (0, 0), (1, 1), 1)
        FusedConv2d(weight, None, options, name, None)(x, torch.randn(2, 6, 7, 6))
