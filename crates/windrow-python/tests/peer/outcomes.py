"""What the scripts of this folder write down: outcomes of tests by name, and the commit."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks"))
import provenance


class Outcomes:
    """A pytest plugin: the outcome of each test."""

    def __init__(self) -> None:
        self.by_name: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # Setting up, the call, tearing down: the first that does not pass decides.
        if self.by_name.get(report.nodeid, "passed") == "passed":
            self.by_name[report.nodeid] = report.outcome

    def write(self, path: Path, **more: Any) -> None:
        path.write_text(json.dumps({"outcomes": self.by_name, **more}))


def names(outcomes: dict[str, str], outcome: str) -> list[str]:
    return sorted(name for name, o in outcomes.items() if o == outcome)


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    provenance.write(path, provenance.commit() | summary)
