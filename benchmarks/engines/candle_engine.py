"""candle, by a program of its own: its times are not interleaved with the others'.

Its causal_conv1d is without bias and activation, and its input is padded before the clock starts.
"""

import json
import subprocess
from pathlib import Path

import cases


def _arguments(case) -> list:
    match case:
        case cases.Conv2d():
            return ["conv2d", case.dtype, case.n, case.c, case.h, case.w, case.k]
        case cases.Gelu():
            return ["gelu", case.dtype, case.approximate, case.size]
        case cases.Decode():
            return ["causal_conv1d_update", case.dtype, case.b, case.d]
        case cases.CausalConv1d(channel_last=False):
            return ["causal_conv1d", case.dtype, case.b, case.d, case.l]
    return []


class Engine:
    """The program beside_candle of windrow-candle."""

    def __init__(self, program: Path) -> None:
        self.program = program

    def times(self, case) -> dict[str, dict[str, float]]:
        """Its median in seconds, if it can do this case in f32: elsewhere it is far behind."""
        arguments = _arguments(case)
        if not arguments or case.dtype != "f32":
            return {}
        command = [str(self.program), "peer", *map(str, arguments)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        return {"candle": {"median": json.loads(output)["ms_median"] * 1e-3}}
