"""Makes of the Python package a folder in the form of the Hugging Face Hub's kernels.

    python folder.py PACKAGE OUT REVISION

PACKAGE is the folder `windrow` of an installed wheel. OUT gets a folder `build` with a variant for the CPU and for each
generation of CUDA. REVISION, the short hash of a commit, goes into the names of the module and of the operators, so
that two versions can be loaded side by side.

A variant has the extension, the modules of `windrow.torch` and below that need no others, with relative imports,
and the files beside this one. No variant links PyTorch or CUDA, so that the same code serves all of them.
"""

import base64
import hashlib
import json
import platform
import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
NAME = "windrow"
# Raised with every change that needs a rebuild of what calls the kernel.
VERSION = 1
# The first version of PyTorch that the Python package works with.
TORCH = "torch-stable-abi24"
# The oldest architecture that kernels are compiled for; the compiler and the driver do the rest on newer ones.
ARCHITECTURES = ["8.0+PTX"]
# What a variant is called, and for which backend it is.
BACKENDS = {"cpu": {"type": "cpu"}} | {
    cuda: {"type": "cuda", "archs": ARCHITECTURES} for cuda in ("cu126", "cu130")
}
# The modules that `__init__.py` imports from the package; the rest follows from their own imports.
FIRST = ["torch/_causal_conv1d.py", "torch/_conv2d.py", "torch/_flops.py", "torch/_gelu.py", "_threads.py"]
# Indent, `.torch`, module and names of an import from the package; modules of both `windrow` and `windrow.torch` lie in the
# folder that is made.
IMPORT = re.compile(r"^([ \t]*)from windrow(\.torch)?((?:\.\w+)*) import (.*)", re.MULTILINE)


def modules(package: Path) -> list[str]:
    """Modules of the folder: the first ones, and those that they import."""
    found = [*FIRST]
    for module in found:
        for _, torch, path, names in IMPORT.findall((package / module).read_text()):
            at = package / torch[1:] / path[1:].replace(".", "/")
            within = [at / f"{name.strip()}.py" for name in (*["__init__"] * bool(path), *names.split(","))]
            files = [*[at.with_name(f"{at.name}.py")] * bool(path), *within]
            names = [file.relative_to(package).as_posix() for file in files if file.exists()]
            found += [name for name in names if name not in found]
    return found


def relative(source: str, depth: int = 0) -> str:
    """With imports from the package's own modules; `depth`: folders above the module's own in the one that is made."""
    dots = "." * (depth + 1)
    source = IMPORT.sub(lambda found: f"{found[1]}from {dots}{found[3][1:]} import {found[4]}", source)
    if left := re.search(r"^\s*(?:import|from) windrow.*", source, re.MULTILINE):
        raise ValueError(f"not made relative: {left[0].strip()}")
    return source


def write_variant(package: Path, folder: Path, backend: dict, revision: str) -> None:
    by_name = folder / NAME
    by_name.mkdir(parents=True)
    shutil.copy(HERE / "by_name.py", by_name / "__init__.py")
    for file in ["__init__.py", "layers.py"]:
        shutil.copy(HERE / file, folder)
    for module in modules(package):
        to = folder / module.removeprefix("torch/")
        if to.exists():
            raise ValueError(f"{module}: another module of the folder has this name")
        to.parent.mkdir(exist_ok=True)
        to.write_text(relative((package / module).read_text(), depth=len(to.relative_to(folder).parts) - 1))
    shutil.copy(package / "_native.abi3.so", folder)
    metadata = {
        "name": NAME,
        "id": f"_{NAME}_{backend['type']}_{revision}",
        "version": VERSION,
        "license": "apache-2.0",
        "python-depends": [],
        "kernel-depends": [],
        "backend": backend,
        "digest": {"algorithm": "sha256", "files": digests(folder)},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def digests(folder: Path) -> dict:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    hashes = {file: hashlib.sha256(file.read_bytes()).digest() for file in files}
    return {file.relative_to(folder).as_posix(): base64.b64encode(h).decode() for file, h in hashes.items()}


def main(package: Path, out: Path, revision: str) -> None:
    build = out / "build"
    if build.exists():
        shutil.rmtree(build)
    # macOS has another name for what the Hub calls as Linux does.
    cpu = platform.machine().replace("arm64", "aarch64")
    machine = f"{cpu}-{platform.system().lower()}"
    for name, backend in BACKENDS.items():
        write_variant(package, build / f"{TORCH}-{name}-{machine}", backend, revision)


if __name__ == "__main__":
    package, out, revision = sys.argv[1:]
    main(Path(package), Path(out), revision)
