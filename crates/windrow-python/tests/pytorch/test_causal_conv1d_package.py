"""The distribution windrow-causal-conv1d: `import causal_conv1d` without a call before."""

import subprocess
import sys
from pathlib import Path

import pytest
import windrow

PACKAGE = Path(__file__).parents[2] / "causal-conv1d"
# As the interpreter does it when it starts, for the folder that the distribution lies in.
START = f"import site; site.addsitedir({str(PACKAGE)!r})\n"


def run(code: str, folder: Path) -> str:
    command = [sys.executable, "-c", START + code]
    return subprocess.run(
        command, check=True, cwd=folder, capture_output=True, text=True
    ).stdout


def test_versions_agree():
    project = (PACKAGE / "pyproject.toml").read_text()
    version = windrow.__version__
    assert f'\nversion = "{version}"\n' in project and f'"windrow=={version}"' in project


def test_it_is_found_as_libraries_look_for_it(tmp_path):
    code = """
import importlib.metadata, importlib.util, sys
assert "torch" not in sys.modules and "windrow" not in sys.modules
assert importlib.util.find_spec("causal_conv1d") is not None
assert "torch" not in sys.modules
assert importlib.metadata.version("causal_conv1d") == "1.7.0"
assert importlib.metadata.version("causal-conv1d") == "1.7.0"
assert importlib.metadata.packages_distributions()["causal_conv1d"] == ["causal-conv1d"]
import causal_conv1d
from causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from causal_conv1d.causal_conv1d_interface import causal_conv1d_fn as fn
from causal_conv1d.causal_conv1d_varlen import causal_conv1d_varlen_states
from causal_conv1d.cpp_functions import causal_conv1d_fwd_function
import causal_conv1d_cuda
assert causal_conv1d_cuda.causal_conv1d_fwd
import windrow.torch, windrow.compat.causal_conv1d
assert fn is causal_conv1d_fn is windrow.torch.causal_conv1d_fn
windrow.compat.causal_conv1d.install()
assert sys.modules["causal_conv1d"] is causal_conv1d
"""
    run(code, tmp_path)


def test_the_original_wins(tmp_path):
    (tmp_path / "causal_conv1d").mkdir()
    (tmp_path / "causal_conv1d" / "__init__.py").write_text("here = True")
    info = tmp_path / "causal_conv1d-1.6.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: causal-conv1d\nVersion: 1.6.2\n")
    code = """
import importlib.metadata, importlib.util, sys
import causal_conv1d
assert importlib.util.find_spec("causal_conv1d_cuda") is None
assert causal_conv1d.here and importlib.metadata.version("causal_conv1d") == "1.6.2"
sys.argv = ["windrow.compat"]
import runpy; runpy.run_module("windrow.compat", run_name="__main__")
"""
    assert "another package" in run(code, tmp_path)


def test_it_says_what_a_program_gets(tmp_path):
    code = 'import runpy; runpy.run_module("windrow.compat", run_name="__main__")'
    assert run(code, tmp_path).startswith("causal_conv1d: Windrow ")
    without = [sys.executable, "-m", "windrow.compat"]
    said = subprocess.run(without, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert "not found" in said.stdout


def test_nothing_is_found_without_windrow(tmp_path):
    code = """
import importlib.metadata, importlib.util, sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name == "windrow" else find(name, *rest)
assert importlib.util.find_spec("causal_conv1d") is None
assert "causal_conv1d" not in importlib.metadata.packages_distributions()
"""
    run(code, tmp_path)


def test_transformers_finds_it(tmp_path):
    pytest.importorskip("transformers")
    code = """
from unittest.mock import patch
from transformers.utils import import_utils
# It asks for a GPU before it looks for the package.
with patch.object(import_utils, "is_torch_cuda_available", lambda: True):
    assert import_utils.is_causal_conv1d_available()
assert import_utils._is_package_available("causal_conv1d", return_version=True) == (True, "1.7.0")
"""
    run(code, tmp_path)


def test_transformers_before_5(tmp_path):
    """It binds the functions where a GPU is there, and calls them for tensors on it only: here on the CPU, with its calls."""
    transformers = pytest.importorskip("transformers")
    if transformers.__version__ >= "5":
        pytest.skip("transformers 5 and later asks in another way")
    code = """
from unittest.mock import patch
import torch
with patch.object(torch.cuda, "is_available", lambda: True):
    from transformers.models.lfm2 import modeling_lfm2
import windrow.torch
assert modeling_lfm2.causal_conv1d_fn is windrow.torch.causal_conv1d_fn
assert modeling_lfm2.is_fast_path_available
from transformers import Lfm2Config
torch.manual_seed(0)
config = Lfm2Config(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
    num_hidden_layers=2, layer_types=["conv", "full_attention"],
)
layer = modeling_lfm2.Lfm2ShortConv(config, 0)
caches = [modeling_lfm2.Lfm2HybridConvCache(config, max_batch_size=2, dtype=torch.float32) for _ in range(2)]
x = torch.randn(2, 9, 64)
with torch.no_grad():
    for tokens in [range(7), [7], [8]]:
        tokens = torch.tensor(tokens)
        calls = zip([layer.cuda_kernels_forward, layer.slow_forward], caches)
        ours, plain = (call(x[:, tokens], cache, tokens) for call, cache in calls)
        torch.testing.assert_close(ours, plain)
"""
    run(code, tmp_path)
