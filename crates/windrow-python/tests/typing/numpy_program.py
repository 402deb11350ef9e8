"""What a program on NumPy arrays looks like: checked by mypy and pyright, and run."""

import numpy as np
import numpy.typing as npt
import windrow

Floats = npt.NDArray[np.float32]


def convolve(x: Floats, weight: Floats) -> Floats:
    y = windrow.conv2d(x, weight, stride=(1, 1), padding=[1, 1], activation="relu")
    windrow.conv2d(x, weight, padding=1, out=y)
    plan = windrow.Conv2dPlan(x, weight, padding=1)
    packed: windrow.PackedWeights = plan.pack(weight)
    return plan(x, packed, out=y)


def sequences(x: Floats, weight: Floats, *, with_states: bool) -> Floats:
    y: Floats = windrow.causal_conv1d(x, weight, activation="silu")
    y, states = windrow.causal_conv1d(x, weight, return_final_states=True)
    windrow.causal_conv1d_update(x[:, :, 0], states, weight)
    result = windrow.causal_conv1d(x, weight, return_final_states=with_states)
    return result[0] if isinstance(result, tuple) else y


def main() -> None:
    image, filters = np.ones((1, 2, 6, 6), np.float32), np.ones((3, 2, 3, 3), np.float32)
    assert convolve(image, filters).shape == (1, 3, 6, 6)
    tokens, taps = np.ones((1, 4, 8), np.float32), np.ones((4, 3), np.float32)
    assert sequences(tokens, taps, with_states=True).shape == (1, 4, 8)
    gelu: Floats = windrow.gelu(tokens, approximate="tanh", gate=tokens)
    assert gelu.shape == tokens.shape and windrow.__version__


if __name__ == "__main__":
    main()
