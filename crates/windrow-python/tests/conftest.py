"""Makes the helpers beside the tests importable from the folders below."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

# A deadline would be a timing, which is never a test; a fixed seed makes a failure repeatable.
settings.register_profile("windrow", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("windrow")
