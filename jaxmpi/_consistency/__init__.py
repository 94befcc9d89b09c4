"""Comparison of the ranks: do all of them make the same calls, with the same values?

compare      compare what the ranks are about to do, before they communicate
mismatch     the error for ranks that disagree: `RankMismatchError` with both sides
values       compare values that must be equal: JAXMPI_CHECK=1, and arrays before they are sharded
findings     assumptions that a program breaks, and the words of the warning
eager_calls  source lines of the eager calls of a function of jaxmpi
identity     compare tree structures, functions and other objects across processes
"""
