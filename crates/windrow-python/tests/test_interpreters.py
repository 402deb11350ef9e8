"""Which interpreters the package is for."""

import re
import subprocess
import sys
from importlib import metadata

FREE_THREADED = """
import sysconfig
answer = sysconfig.get_config_var
sysconfig.get_config_var = lambda name: 1 if name == "Py_GIL_DISABLED" else answer(name)
try:
    import windrow
except ImportError as error:
    assert "free-threaded" in str(error), error
else:
    raise SystemExit("imported")
"""


def test_the_wheel_is_not_offered_to_free_threaded_python():
    # Those look for the tags cp313-cp313t, py313-none, ...: none of them is of the stable ABI.
    wheel = metadata.distribution("windrow").read_text("WHEEL")
    tags = re.findall(r"^Tag: (\S+)$", wheel, re.MULTILINE)
    assert tags and all(tag.startswith("cp310-abi3-") for tag in tags), tags


def test_free_threaded_python_is_told_why():
    subprocess.run([sys.executable, "-c", FREE_THREADED], check=True)
