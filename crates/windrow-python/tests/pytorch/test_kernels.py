"""The folder in the form of the Hugging Face Hub's kernels, by `kernels`, alone and in models of transformers."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import windrow

pytest.importorskip("kernels")

SOURCES = Path(__file__).parents[2] / "hub-kernels"
REVISION = "0123abc"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Made from the package that the tests run on."""
    out = tmp_path_factory.mktemp("kernels") / "windrow"
    command = [sys.executable, SOURCES / "folder.py", Path(windrow.__file__).parent, out, REVISION]
    # What an earlier version left is gone.
    (out / "build" / "torch-stable-abi24-cu118-x86_64-linux").mkdir(parents=True)
    subprocess.run(command, check=True)
    return out


def run(code, *arguments):
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    subprocess.run(command, check=True, env=environment)


def variants(folder):
    return sorted((folder / "build").iterdir())


def test_variants(folder):
    from kernels.variants import parse_variant

    names = [variant.name for variant in variants(folder)]
    parsed = [parse_variant(name) for name in names]
    assert [variant.variant_str for variant in parsed] == names
    assert [variant.arch.backend.name for variant in parsed] == ["cpu", "cuda", "cuda"]


def test_metadata(folder):
    from kernels._rust import Digest, DigestValidationError, Metadata

    for variant in variants(folder):
        metadata = Metadata.read_from_file(variant / "metadata.json")
        backend = str(metadata.backend.backend_type).lower()
        assert metadata.id == f"_windrow_{backend}_{REVISION}" and metadata.id.isidentifier()
        assert metadata.name.python_name == "windrow" and metadata.version == 1
        assert metadata.backend.archs == (None if backend == "cpu" else ["8.0+PTX"])
        actual = Digest.hash_variant(metadata.digest.algorithm, variant)
        metadata.digest.validate(actual)
        layers = variant / "layers.py"
        source = layers.read_text()
        layers.write_text(source + "\n")
        with pytest.raises(DigestValidationError, match=r"layers\.py"):
            metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, variant))
        layers.write_text(source)


def test_imports(folder):
    """What is not the kernel's own, by a relative import, is Python's or PyTorch's."""
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = [name.name for name in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            else:
                continue
            roots = {name.partition(".")[0] for name in names}
            assert roots <= {*sys.stdlib_module_names, "torch"}, (file, roots)


def test_an_import_that_stays_absolute_is_refused():
    spec = importlib.util.spec_from_file_location("folder", SOURCES / "folder.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    source = "from windrow import a\nif a:\n    from windrow.torch import b\nfrom windrow.torch._c import d\n"
    assert module.relative(source) == "from . import a\nif a:\n    from . import b\nfrom ._c import d\n"
    with pytest.raises(ValueError, match=r"import windrow\.torch"):
        module.relative("import windrow.torch\n")


def test_loads_beside_the_package(folder):
    code = """
import sys, torch
from pathlib import Path
from kernels import get_local_kernel
folder = Path(sys.argv[1])
x, weight = torch.randn(2, 6, 9, requires_grad=True), torch.randn(6, 4)
cpu = get_local_kernel(folder, backend="cpu")
own = get_local_kernel(folder)
assert not any(name.partition(".")[0] == "windrow" for name in sys.modules)
import windrow.torch
assert cpu.__name__ == "_windrow_cpu_0123abc"
for module in {cpu, own, windrow.torch}:
    y = module.causal_conv1d_fn(x, weight, activation="silu")
    grad, = torch.autograd.grad(y.sum(), x)
    want = torch.nn.functional.conv1d(x, weight[:, None], padding=3, groups=6)[..., :9]
    want = torch.nn.functional.silu(want)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(grad, *torch.autograd.grad(want.sum(), x))
    operators = getattr(torch.ops, module.__name__.partition(".")[0])
    torch.testing.assert_close(operators.gelu(x, None, None, "none"), torch.nn.functional.gelu(x))
assert set(cpu.__all__) - {"layers"} <= set(windrow.torch.__all__)
"""
    run(code, folder)


def test_loads_by_its_name(folder):
    """As versions of `kernels` before 0.11 did."""
    code = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("some_name", sys.argv[1] + "/windrow/__init__.py")
for _ in range(2):
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
kernel = sys.modules["_windrow_cpu_0123abc"]
assert all(getattr(module, name) is getattr(kernel, name) for name in kernel.__all__)
"""
    run(code, variants(folder)[0])


def test_layers(folder):
    """Forward, gradients and compilation, where a layer says that it has them."""
    code = """
import sys, torch
from pathlib import Path
from kernels import get_local_kernel
layers = get_local_kernel(Path(sys.argv[1])).layers
F, x = torch.nn.functional, torch.randn(2, 6, 9)
weight, bias, state = torch.randn(6, 4), torch.randn(6), torch.randn(2, 6, 3)
window = torch.cat([state, x[..., :1]], -1)
causal = lambda x, weight, bias, activation: F.silu(F.conv1d(F.pad(x, (3, 0)), weight[:, None], bias, groups=6))
step = lambda x, state, weight, bias, activation: F.silu(F.conv1d(window, weight[:, None], bias, groups=6))
cases = {
    "causal_conv1d_fn": (causal, [x, weight, bias, "silu"]),
    "causal_conv1d_update": (step, [x[..., :1], state, weight, bias, "silu"]),
    "GeLU": (F.gelu, [x]),
    "GeluTanh": (lambda x: F.gelu(x, approximate="tanh"), [x]),
}
assert cases.keys() == set(layers.__all__)
for name, (function, arguments) in cases.items():
    layer = getattr(layers, name)()
    assert layer.can_torch_compile
    has_backward = getattr(layer, "has_backward", True)
    for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        given = [a.clone().requires_grad_(has_backward) if isinstance(a, torch.Tensor) else a for a in arguments]
        y, want = call(*given), function(*given)
        torch.testing.assert_close(y, want)
        if has_backward:
            tensors = [a for a in given if isinstance(a, torch.Tensor)]
            for ours, plain in zip(*(torch.autograd.grad(r.sum(), tensors) for r in (y, want)), strict=True):
                torch.testing.assert_close(ours, plain)
        else:
            torch.testing.assert_close(given[1], window[..., 1:])
seq_idx = torch.tensor([[0] * 4 + [1] * 5] * 2, dtype=torch.int32)
y, states = layers.causal_conv1d_fn()(x, weight, seq_idx=seq_idx, return_final_states=True, max_length_q=9)
second = F.conv1d(F.pad(x[..., 4:], (3, 0)), weight[:, None], groups=6)
torch.testing.assert_close(y[..., 4:], second)
torch.testing.assert_close(states, x[..., -3:])
"""
    run(code, folder)


# Models of random weights before and after their functions are replaced; tells what was called.
MODELS = """
import sys, torch
from pathlib import Path
from unittest.mock import patch
from kernels import LocalLayerRepository, get_local_kernel, use_kernel_mapping
from transformers import AutoConfig, AutoModelForCausalLM, KernelConfig
from transformers.utils import kernel_config

folder = Path(sys.argv[1])
layers = ["causal_conv1d_fn", "causal_conv1d_update"]
sizes = {
    "mamba2": dict(state_size=16, num_heads=8, head_dim=16, n_groups=2, chunk_size=8, num_hidden_layers=2),
    "lfm2": dict(
        intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
    ),
}
functions = get_local_kernel(folder)._causal_conv1d
calls = []
for n in layers:
    function = getattr(functions, n)
    setattr(functions, n, lambda *a, n=n, f=function, **k: (calls.append(n), f(*a, **k))[1])

@torch.no_grad()
def results(model, tokens):
    decoded = model.generate(tokens, max_new_tokens=9, min_new_tokens=9, do_sample=False, pad_token_id=0)
    return model(tokens).logits, decoded

def by_mapping(model):
    with use_kernel_mapping({n: {"cpu": LocalLayerRepository(folder, layer_name=n)} for n in layers}):
        model.use_kernels = True

def by_config(model):
    config = KernelConfig({n: f"{folder}:{n}" for n in layers}, use_local_kernel=True)
    # transformers' own form has no CPU in its list.
    devices = [*kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES, "cpu"]
    with patch.object(kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES", devices):
        model.set_use_kernels(True, config)

for name, replace in [("mamba2", by_mapping), ("lfm2", by_config)]:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, vocab_size=128, hidden_size=64, **sizes[name])
    model = AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.randint(3, 128, (2, 17))
    plain = results(model, tokens)
    assert calls == []
    replace(model)
    ours = results(model, tokens)
    torch.testing.assert_close(ours[0], plain[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(ours[1], plain[1])
    # Two layers with a convolution: in prefill twice, then once for each of the tokens that follow the first.
    assert [calls.count(n) for n in layers] == [2 * 2, 2 * 8], calls
    calls.clear()
"""


def test_models_of_transformers(folder):
    utils = pytest.importorskip("transformers.utils")
    if not utils.is_kernels_available():
        pytest.skip("this transformers asks for another version of kernels")
    run(MODELS, folder)
