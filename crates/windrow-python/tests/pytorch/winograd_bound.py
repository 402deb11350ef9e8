"""How far roundings move a result of Winograd's algorithm, from its matrices.

A worst case over all roundings is no use: it exceeds what happens several hundred times. For
independent numbers the variances of independent roundings add, and the matrices say how much each
contributes.
"""

import numpy as np

# Points besides 0 and infinity, and outputs in a dimension: docs/conv2d.md.
TILES = {2: [1, -1], 4: [2 / 3, -2 / 3, 3 / 2, -3 / 2], 6: [1, -1, 1 / 2, -1 / 2, 2, -2]}
FILTER = 3


def _evaluation(points: list[float], powers: int) -> np.ndarray:
    """Polynomials of so many coefficients at the points and at infinity."""
    rows = [[p**i for i in range(powers)] for p in points]
    return np.array([*rows, [0.0] * (powers - 1) + [1.0]])


def _growth(outputs: int, points: list[float]) -> float:
    """Variance of an output in units of that of a product of U and V, beside a direct sum's.

    In one dimension; Y = A^T [(G g) (B^T d)] by Cook and Toom, the transposed product of polynomials.
    """
    points = [0.0, *points]
    a, g = _evaluation(points, outputs), _evaluation(points, FILTER)
    b = np.linalg.inv(_evaluation(points, outputs + FILTER - 1)).T
    products = (g**2).sum(1) * (b**2).sum(1)
    return ((a**2).T @ products).max() / FILTER


# Both dimensions grow the variance by as much, so the deviation by the one factor.
GROWTH = max(_growth(m, p) for m, p in TILES.items())
# Additions in a row of both transforms of an operand and of the output, of the largest tile.
TRANSFORM_ROUNDINGS = 48
# No normal number is so many deviations from zero in as many tries as there are tests.
DEVIATIONS = 8


def error(terms: int, unit: float, operand: float) -> float:
    """Relative to the root of the sum of the squared products of one output: sums of `terms`
    products round by `unit`, each operand by `operand` besides."""
    return DEVIATIONS * GROWTH * (unit * (terms + TRANSFORM_ROUNDINGS) ** 0.5 + 2 * operand)
