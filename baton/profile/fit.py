"""Fits a model that is linear in its numbers to measured times.

    fit   numbers >= 0 that explain the times best, what else they could be, and how wrong they are about what was not fitted

Times of a step, a handoff or a process are sums of parts, and no part takes less than no time: hence least squares with non-negative
numbers (Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23). Long times would outvote short ones, so each row counts
by its relative error. The draws are a bootstrap over the rows (Efron, "Bootstrap Methods", 1979); `error` is the spread of what rows
that were left out took around what the rest says of them (five folds).
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from baton.profile.models import Fitted

Numbers = npt.NDArray[np.float64]
DRAWS, FOLDS = 16, 5
TOLERANCE = 1e-10


def fit(rows: Sequence[tuple[Mapping[str, float], float]], names: Sequence[str], source: str, seed: int = 0) -> Fitted:
    """`rows`: how often each named number enters, and the time in seconds. Raises ValueError for fewer rows than numbers, or a time that
    is not above 0."""
    if len(rows) < len(names):
        raise ValueError(f"{len(rows)} measurements cannot tell {len(names)} numbers ({', '.join(names)})")
    times = np.array([seconds for _, seconds in rows])
    if not (np.isfinite(times).all() and (times > 0).all()):
        raise ValueError("a measured time is not above 0")
    counts = np.array([[float(features.get(name, 0.0)) for name in names] for features, _ in rows])
    relative = counts / times[:, None]
    rng = np.random.default_rng(seed)

    values = _solved(relative)
    draws = [_solved(relative[rng.integers(0, len(rows), len(rows))]) for _ in range(DRAWS)]
    named = [dict(zip(names, map(float, each), strict=True)) for each in (values, *draws)]
    return Fitted(named[0], tuple(named[1:]), _left_out(relative, rng), len(rows), source)


def _solved(relative: Numbers) -> Numbers:
    return least_squares(relative, np.ones(len(relative)))


def _left_out(relative: Numbers, rng: np.random.Generator) -> float:
    """Standard deviation of the logarithm of told over measured, of rows that were not fitted."""
    count = len(relative)
    order = rng.permutation(count)
    logs: list[float] = []
    for fold in np.array_split(order, min(FOLDS, count)):
        rest = np.setdiff1d(order, fold)
        if len(rest) < relative.shape[1]:
            continue
        told = relative[fold] @ _solved(relative[rest])
        logs += [math.log(max(each, 1e-6)) for each in told]
    return float(np.sqrt(np.mean(np.square(logs)))) if logs else 0.0


def least_squares(matrix: Numbers, wanted: Numbers) -> Numbers:
    """x >= 0 with the least |matrix x - wanted|: the active-set method of Lawson and Hanson. Columns are scaled first: seconds of a step
    and of a byte differ by ten orders of magnitude."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    a = matrix / scale
    x = np.zeros(a.shape[1])
    free = np.zeros(a.shape[1], dtype=bool)
    for _ in range(10 * a.shape[1]):
        slope = a.T @ (wanted - a @ x)
        if free.all() or slope[~free].max() <= TOLERANCE:
            break
        free[np.argmax(np.where(free, -np.inf, slope))] = True
        while True:
            best = np.zeros_like(x)
            best[free] = np.linalg.lstsq(a[:, free], wanted, rcond=None)[0]
            if not (negative := free & (best <= 0)).any():
                x = best
                break
            step = np.min(x[negative] / np.maximum(x[negative] - best[negative], 1e-300))
            x = x + step * (best - x)
            free &= x > TOLERANCE
    found: Numbers = x / scale
    return found
