"""The command `python -m windrow.compat`: it says which causal_conv1d a program gets here."""

from importlib.util import find_spec
from pathlib import Path

import windrow


def main() -> None:
    spec = find_spec("causal_conv1d")
    folder = Path(windrow.__file__).parent
    if spec is None:
        print("causal_conv1d: not found; windrow-causal-conv1d makes it Windrow's")
    elif spec.origin is not None and folder in Path(spec.origin).parents:
        print(f"causal_conv1d: Windrow {windrow.__version__}, {folder}")
    else:
        print(f"causal_conv1d: another package, {spec.origin}")


if __name__ == "__main__":
    main()
