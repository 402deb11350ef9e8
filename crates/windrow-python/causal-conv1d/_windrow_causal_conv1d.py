"""Makes `import causal_conv1d` find Windrow's where the original is not installed.

Python imports this file when it starts (windrow_causal_conv1d.pth), so that it imports little itself. Its finder
stands last in `sys.meta_path`: an installed causal_conv1d is found before.
"""

import sys

# As importlib.metadata asks for it, and the version whose interface it is.
_NAME = "causal_conv1d"
# Its extension, which mamba_ssm up to 2.2.4 imports.
_EXTENSION = "causal_conv1d_cuda"
_METADATA = """\
Metadata-Version: 2.1
Name: causal-conv1d
Version: 1.7.0
Summary: Stand-in by windrow-causal-conv1d
"""


class Finder:
    """Finds the package in Windrow's folder, and metadata for who asks for its version."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in (_NAME, _EXTENSION):
            return None
        from importlib.machinery import PathFinder
        from importlib.util import spec_from_file_location

        windrow = PathFinder.find_spec("windrow")
        if windrow is None or not windrow.submodule_search_locations:
            return None
        folder = windrow.submodule_search_locations[0] + "/compat/causal_conv1d"
        if name == _EXTENSION:
            # Not beside an original package.
            is_ours = PathFinder.find_spec(_NAME) is None
            return spec_from_file_location(name, folder + "_cuda.py") if is_ours else None
        return spec_from_file_location(
            name, folder + "/__init__.py", submodule_search_locations=[folder]
        )

    @staticmethod
    def find_distributions(context=None):
        name = getattr(context, "name", None)
        if name is not None and name.lower().replace("-", "_") != _NAME:
            return
        from importlib.machinery import PathFinder

        # One that is installed has its own.
        if PathFinder.find_spec(_NAME) is None and Finder.find_spec(_NAME) is not None:
            yield _distribution()


def _distribution():
    from importlib.metadata import Distribution

    class StandIn(Distribution):
        def read_text(self, filename):
            return {"METADATA": _METADATA, "top_level.txt": f"{_NAME}\n{_EXTENSION}"}.get(filename)

        def locate_file(self, path):
            return path

    return StandIn()


if not any(finder is Finder for finder in sys.meta_path):
    sys.meta_path.append(Finder)
