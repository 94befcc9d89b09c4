"""`jaxmpi run --scaling 1,2,4`: a program's throughput against its number of ranks.

    speedup(n)    = rate(n) / rate(m)
    efficiency(n) = (rate(n) / n) / (rate(m) / m)

with m the smallest number of ranks, and rates in samples per second of all ranks together.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Point", "picture", "table"]


class Point(NamedTuple):
    """The measurement of one number of ranks."""

    ranks: int
    rates: tuple[float, ...]  # samples per second of all ranks, one for each `Throughput.read`
    crowded: bool  # more ranks than cores

    @property
    def per_second(self) -> float:
        """The median rate, without the first one, which includes compilation."""
        return statistics.median(self.rates[1:] or self.rates)


def efficiencies(points: Sequence[Point]) -> list[float]:
    """Return efficiency(n) of each point."""
    base = min(points)
    return [point.per_second / point.ranks / (base.per_second / base.ranks) for point in points]


def table(points: Sequence[Point]) -> str:
    """Return a table with a line for each number of ranks."""
    lines = [f"{'ranks':>5}  {'samples/s':>10}  {'spread':>19}  {'speedup':>7}  {'efficiency':>10}"]
    for point, efficiency in zip(points, efficiencies(points), strict=True):
        rates = point.rates[1:] or point.rates
        spread = f"{min(rates):.4g} to {max(rates):.4g}"
        speedup = efficiency * point.ranks / min(points).ranks
        note = "  more ranks than cores" if point.crowded else ""
        lines.append(
            f"{point.ranks:5}  {point.per_second:10.4g}  {spread:>19}  {speedup:7.2f}  "
            f"{efficiency:10.0%}{note}"
        )
    return "\n".join(lines) + "\n"


def picture(points: Sequence[Point], path: str) -> None:
    """Write a plot of the throughput and the efficiency.

    Raises:
      ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    ranks, base = [point.ranks for point in points], min(points)
    left.plot(ranks, [point.per_second for point in points], "o-", label="measured")
    left.plot(
        ranks, [base.per_second * n / base.ranks for n in ranks], "--", color="gray", label="linear"
    )
    left.set(xlabel="ranks", ylabel="samples per second", xticks=ranks, ylim=(0, None))
    left.legend()
    right.plot(ranks, efficiencies(points), "o-")
    right.axhline(1.0, linestyle="--", color="gray")
    right.set(
        xlabel="ranks", ylabel=f"efficiency against {base.ranks}", xticks=ranks, ylim=(0, 1.1)
    )
    for point, efficiency in zip(points, efficiencies(points), strict=True):
        if point.crowded:
            right.annotate(
                "more ranks\nthan cores",
                (point.ranks, efficiency),
                ha="right",
                va="top",
                fontsize=8,
            )
    figure.savefig(path)
