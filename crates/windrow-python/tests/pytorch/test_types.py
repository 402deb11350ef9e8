"""The package's types as mypy and pyright see them, in programs on NumPy and on PyTorch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import windrow

TESTS = Path(__file__).parent.parent
PROGRAMS = sorted((TESTS / "typing").glob("*_program.py"))
PACKAGE = Path(windrow.__file__).parent
# A mistake that both have to see, else the checks see nothing.
WRONG = 'import windrow\nwindrow.gelu(3, approximate="erf")\n'


def check(tool, program, folder):
    paths = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("MYPYPATH")])])
    if tool == "mypy":
        cache = f"--cache-dir={folder / 'cache'}"
        command = ["mypy", "--strict", cache, "--python-executable", sys.executable, str(program)]
    else:
        settings = folder / "pyrightconfig.json"
        settings.write_text(f'{{"extraPaths": ["{PACKAGE.parent}"], "typeCheckingMode": "strict"}}')
        (folder / program.name).write_text(program.read_text())
        command = ["pyright", "--project", str(settings), "--pythonpath", sys.executable]
    environment = {**os.environ, "MYPYPATH": paths, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    return subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, env=environment, check=False
    )


@pytest.mark.parametrize("tool", ["mypy", "pyright"])
@pytest.mark.parametrize("program", [*PROGRAMS, None], ids=[*[p.stem for p in PROGRAMS], "wrong"])
def test_types(tool, program, tmp_path):
    pytest.importorskip(tool)
    if program is None:
        (wrong := tmp_path / "wrong_program.py").write_text(WRONG)
        done = check(tool, wrong, tmp_path)
        assert done.returncode == 1 and done.stdout.count("error") >= 2, done.stdout + done.stderr
        return
    done = check(tool, program, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.stem)
def test_programs_run(program):
    subprocess.run([sys.executable, str(program)], check=True)
