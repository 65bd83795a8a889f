"""Timing shared by the benchmarks; prints nothing."""

import statistics
import time
from collections.abc import Callable


def median_s(run: Callable[[], object], repeats: int) -> float:
    """Median wall-clock of a call, after one call to warm up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
