"""`python -m windrow`, and the README's programs."""

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

import pytest
import windrow
from windrow import __main__ as command

PACKAGE = Path(__file__).parent.parent


def windrow_command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "windrow", *arguments], capture_output=True, text=True, check=False
    )


def test_version_and_devices():
    done = windrow_command("--version")
    assert done.returncode == 0 and done.stdout == f"windrow {windrow.__version__}\n"
    done = windrow_command("devices")
    assert done.returncode == 0 and re.match(r"cpu +\w+ kernels, \d+ threads\n", done.stdout)
    assert windrow_command().returncode == 2
    done = windrow_command("verify", "--device", "cuda:4000")
    assert done.returncode == 2 and "no device cuda:4000" in done.stderr


class Case:
    def __init__(self, layout, result):
        self.kind = ("gelu", "cpu", "f32", layout)
        self.result = result

    def __call__(self):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.mark.parametrize(
    ("results", "status", "said"),
    [
        ([[("y", 10, 0, 1e-7)]] * 3, 0, "30       0        1.0e-07"),
        ([[("y", 10, 0, 0.0)], [("y", 10, 2, 0.5)]], 1, "1 failed"),
        ([ValueError("no")], 1, "1 failed"),
    ],
)
def test_verify(results, status, said, monkeypatch, capsys):
    monkeypatch.setattr(command, "verification_cases", lambda device: [Case("a", r) for r in results])
    assert command.main(["verify"]) == status
    assert said in capsys.readouterr().out
    if len(results) == 3:
        assert command.main(["verify", "--quick"]) == 0
        assert " 20 " in capsys.readouterr().out


def test_a_case_of_each_operator():
    seen = set()
    for case in windrow._native.verification_cases("cpu"):
        op = case.kind[0]
        if op not in seen and (op != "conv2d" or case.kind[1] == "direct"):
            seen.add(op)
            checks = case()
            assert sum(elements for _, elements, _, _ in checks) > 0, case
            assert all(errors == 0 for _, _, errors, _ in checks), case
    assert {"gelu", "causal_conv1d", "conv2d"} <= seen


def test_console_script():
    try:
        version("windrow")
    except PackageNotFoundError:
        pytest.skip("the package is on the path, not installed")
    (script,) = entry_points(group="console_scripts", name="windrow")
    assert script.load() is command.run


def test_readme():
    programs = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), re.DOTALL)
    assert len(programs) == 2
    for program in programs:
        if "torch" not in program:
            exec(program, {})
