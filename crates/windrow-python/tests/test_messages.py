"""What is said of arguments that cannot be taken: by the names that the caller has for them."""

import ast
import inspect
from pathlib import Path

import numpy as np
import pytest
import windrow
from windrow import _native

X, W = np.zeros((1, 4, 8, 8), np.float32), np.zeros((4, 4, 3, 3), np.float32)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"padding": -1}, ValueError, "`padding` is -1, expected no negative number"),
        ({"stride": (1, -2)}, ValueError, "`stride` is (1, -2), expected no negative number"),
        ({"padding": 2**70}, ValueError, f"`padding` is {2**70}, expected a smaller number"),
        ({"padding": 1.0}, TypeError, "`padding` is 1.0, expected an int, or one for each direction"),
        ({"dilation": None}, TypeError, "`dilation` is None, expected an int, or one for each"),
        ({"padding": "same"}, ValueError, "`padding` is 'same', expected an int"),
        ({"padding": (1, 2, 3)}, ValueError, "`padding` is (1, 2, 3), expected an int, or one for"),
        ({"groups": -1}, ValueError, "`groups` is -1, expected no negative number"),
        ({"groups": 1.5}, TypeError, "`groups` is 1.5, expected an int"),
        ({"groups": (2, 2)}, ValueError, "`groups` is "),
        ({"activation": "tanh"}, ValueError, "`activation` is tanh, expected "),
    ],
)
def test_options(options, kind, message):
    with pytest.raises(kind) as error:
        windrow.conv2d(X, W, **options)
    assert str(error.value).startswith(message)
    with pytest.raises(kind, match=str(error.value)[:8]):
        windrow.Conv2dPlan(X, W, **options)


@pytest.mark.parametrize("given", [True, False, 1])
def test_an_activation_is_a_word(given):
    """As causal-conv1d's functions take it, True is no word here."""
    row, state = np.zeros((1, 4), np.float32), np.zeros((1, 4, 3), np.float32)
    for call in (
        lambda: windrow.conv2d(X, W, activation=given),
        lambda: windrow.Conv2dPlan(X, W, activation=given),
        lambda: windrow.causal_conv1d(X[0], W[0, 0].repeat(2, 0)[:4], activation=given),
        lambda: windrow.causal_conv1d_update(row, state, W[:, 0, 0], activation=given),
    ):
        with pytest.raises(TypeError) as error:
            call()
        assert str(error.value).startswith(f"`activation` is {given}, expected None, ")


def test_arguments_have_the_callers_names():
    with pytest.raises(ValueError, match=r"`weight` has shape \[4, 3, 3, 3\]"):
        windrow.conv2d(X, W[:, :3])
    with pytest.raises(ValueError, match=r"`out` has shape"):
        windrow.conv2d(X, W, out=np.zeros((1, 4, 5, 5), np.float32))
    with pytest.raises(ValueError, match="`out` shares memory with `x`"):
        windrow.gelu(X[:, :, :4], out=X[:, :, 1:5])
    with pytest.raises(ValueError, match="`weight` has"):
        windrow.causal_conv1d(X[0], W[0])
    assert windrow.conv2d(X, W, padding=[1, 1], stride=np.int64(2)).shape == (1, 4, 4, 4)


def test_docstrings_are_those_of_the_stub():
    stub = ast.parse(Path(_native.__file__).with_name("_native.pyi").read_text())
    compared = 0
    for node in stub.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name not in windrow.__all__:
            continue
        # Overloads after the first have none.
        members = [(getattr(_native, node.name), node)]
        if isinstance(node, ast.ClassDef):
            functions = [n for n in node.body if isinstance(n, ast.FunctionDef)]
            public = [n for n in functions if not n.name.startswith("__")]
            members += [(getattr(_native, node.name).__dict__[n.name], n) for n in public]
        for item, described in members:
            if wanted := ast.get_docstring(described):
                assert inspect.getdoc(item) == wanted, described.name
                compared += 1
    assert compared >= 12
    public = [n for n in windrow.__all__ if n != "__version__"]
    assert all(getattr(windrow, name).__doc__ for name in public)


def test_signatures():
    signature = inspect.signature(windrow.conv2d)
    assert signature.parameters["stride"].default == 1 and "filters" not in signature.parameters
    assert inspect.signature(windrow.Conv2dPlan).parameters["padding"].default == 0
