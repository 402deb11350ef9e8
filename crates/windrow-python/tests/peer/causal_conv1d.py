"""Runs Dao-AILab causal-conv1d's own tests against Windrow's stand-in for it.

    python causal_conv1d.py [--device cuda] [--every N [--first K]] [--source FOLDER] [pytest options]

Fetches the package's source with pip into a temporary folder, or takes it from FOLDER where it is unpacked,
changes nothing in its test file but the device, and takes the plain reference functions that the tests
compare with from that source too. All cases take more than an hour on two cores; `--every N` takes
each N-th, from the K-th on. Needs what requirements-torch.txt names.
"""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from types import ModuleType

import pytest
import windrow.compat.causal_conv1d
from windrow.compat.causal_conv1d import causal_conv1d_interface, causal_conv1d_varlen

PEER = "causal-conv1d==1.7.0"


def fetch(folder: Path) -> Path:
    """The unpacked source of the package."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    tools = folder / "tools"
    # Its setup.py asks for torch, hence no isolated build, and for wheel.
    subprocess.run([*pip, "install", "--target", str(tools), "wheel"], check=True)
    environment = os.environ | {
        "CAUSAL_CONV1D_SKIP_CUDA_BUILD": "TRUE",
        "PYTHONPATH": os.pathsep.join([str(tools), *sys.path]),
    }
    only_source = ["--no-binary", ":all:", "--no-deps", "--no-build-isolation"]
    download = [*pip, "download", *only_source, "--dest", str(folder), PEER]
    subprocess.run(download, check=True, env=environment)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return archive.with_suffix("").with_suffix("")


def take_references(source: Path) -> None:
    """Adds the peer's reference functions to the stand-in's modules, where its tests look."""
    triton = ModuleType("triton")
    triton.jit = lambda f: f
    triton.language = ModuleType("triton.language")
    triton.language.constexpr = int
    sys.modules["triton"], sys.modules["triton.language"] = triton, triton.language
    for module in [causal_conv1d_interface, causal_conv1d_varlen]:
        name = module.__name__.rpartition(".")[2]
        path = source / "causal_conv1d" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"peer_{name}", path)
        original = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(original)
        for attribute, value in vars(original).items():
            if attribute.endswith("_ref"):
                setattr(module, attribute, value)
    del sys.modules["triton"], sys.modules["triton.language"]


class Every:
    """A pytest plugin that keeps each n-th case."""

    def __init__(self, first: int, n: int) -> None:
        self.cases = slice(first, None, n)

    def pytest_collection_modifyitems(self, items: list) -> None:
        items[:] = items[self.cases]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--source", type=Path)
    options, rest = parser.parse_known_args()
    windrow.compat.causal_conv1d.install()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = options.source or fetch(folder)
        take_references(source)
        text = (source / "tests" / "test_causal_conv1d.py").read_text()
        text, lines = re.subn(r'device = "cuda"', f'device = "{options.device}"', text)
        print(f"{PEER}: {lines} device lines changed to {options.device}")
        test = folder / "test_peer.py"
        test.write_text(text)
        cases = ["-p", "no:cacheprovider", f"--rootdir={folder}", str(test), *rest]
        return pytest.main(cases, plugins=[Every(options.first, options.every)])


if __name__ == "__main__":
    sys.exit(main())
