"""Runs Dao-AILab causal-conv1d's own tests against Windrow's stand-in for it.

    python causal_conv1d.py [--device cuda] [--slice I/N] [--jobs J] [--source PATH] [--summary FILE] [pytest options]

Fetches the package's source with pip, or takes it from PATH, its archive or the folder where that is unpacked, for which no
network is needed. Changes nothing in its test file but the device, and takes the plain reference functions
that the tests compare with from that source too. All cases take more than an hour on two cores; `--slice I/N` takes each
N-th, from the I-th on, counted from 0. `--jobs` runs so many processes at a time, each with a part of the cases. The
summary is JSON: how many passed and were skipped, which failed, and the commit. Needs what requirements-torch.txt names.
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
import windrow.compat.causal_conv1d
from outcomes import Outcomes, names, write_summary
from windrow.compat.causal_conv1d import causal_conv1d_interface, causal_conv1d_varlen

PEER = "causal-conv1d==1.7.0"


def fetch(folder: Path) -> Path:
    """The archive of the package's source."""
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
    return archive


def unpacked(source: Path, folder: Path) -> Path:
    """The folder of an archive's content, or `source` if it is a folder."""
    if source.is_dir():
        return source
    with tarfile.open(source) as tar:
        tar.extractall(folder, filter="data")
    return folder / source.name.removesuffix(".tar.gz")


def take_references(source: Path) -> None:
    """Adds the peer's reference functions to the stand-in's modules, where its tests look."""
    triton = ModuleType("triton")
    triton.jit = lambda f: f
    triton.language = ModuleType("triton.language")
    triton.language.constexpr = int
    with patch.dict(sys.modules, {"triton": triton, "triton.language": triton.language}):
        for module in [causal_conv1d_interface, causal_conv1d_varlen]:
            name = module.__name__.rpartition(".")[2]
            path = source / "causal_conv1d" / f"{name}.py"
            spec = importlib.util.spec_from_file_location(f"peer_{name}", path)
            original = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(original)
            for attribute, value in vars(original).items():
                if attribute.endswith("_ref"):
                    setattr(module, attribute, value)


class Slice:
    """A pytest plugin that keeps each n-th case."""

    def __init__(self, first: int, n: int) -> None:
        self.cases = slice(first, None, n)

    def pytest_collection_modifyitems(self, items: list) -> None:
        items[:] = items[self.cases]


def run(source: Path, folder: Path, options: argparse.Namespace, rest: list[str]) -> int:
    """Runs a slice in this process."""
    windrow.compat.causal_conv1d.install()
    take_references(source)
    text = (source / "tests" / "test_causal_conv1d.py").read_text()
    text, lines = re.subn(r'device = "cuda"', f'device = "{options.device}"', text)
    print(f"{PEER}: {lines} device lines changed to {options.device}")
    test = folder / "test_peer.py"
    test.write_text(text)
    cases = ["-p", "no:cacheprovider", f"--rootdir={folder}", str(test), *rest]
    outcomes = Outcomes()
    status = pytest.main(cases, plugins=[Slice(*options.slice), outcomes])
    if options.outcomes:
        outcomes.write(options.outcomes)
    return status


def run_parts(
    source: Path, folder: Path, options: argparse.Namespace, rest: list[str]
) -> tuple[int, dict[str, str]]:
    """Runs the slice in so many processes; the highest of their statuses, and all outcomes."""
    first, n = options.slice
    processes, files = [], []
    for job in range(options.jobs):
        files.append(folder / f"outcomes-{job}.json")
        command = [sys.executable, __file__, "--device", options.device, "--source", str(source)]
        command += ["--slice", f"{first + n * job}/{n * options.jobs}", "--outcomes", str(files[-1])]
        processes.append(subprocess.Popen([*command, *rest]))
    status = max(abs(process.wait()) for process in processes)
    outcomes: dict[str, str] = {}
    for file in files:
        if file.exists():
            outcomes |= json.loads(file.read_text())["outcomes"]
    return status, outcomes


def fraction(text: str) -> tuple[int, int]:
    first, _, n = text.partition("/")
    return int(first), int(n)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--slice", type=fraction, default=(0, 1), metavar="I/N")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--summary", type=Path)
    # Of a part: where its outcomes go.
    parser.add_argument("--outcomes", type=Path, help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = unpacked(options.source or fetch(folder), folder)
        if options.outcomes:
            return run(source, folder, options, rest)
        status, outcomes = run_parts(source, folder, options, rest)
    count = {outcome: len(names(outcomes, outcome)) for outcome in ("passed", "failed", "skipped")}
    print(f"{PEER} on {options.device}: " + ", ".join(f"{n} {o}" for o, n in count.items()))
    if options.summary:
        first, n = options.slice
        what = {"peer": PEER, "device": options.device, "slice": f"{first}/{n}", "status": status}
        write_summary(options.summary, what | count | {"failures": names(outcomes, "failed")})
    return status


if __name__ == "__main__":
    sys.exit(main())
