"""Statistics by the names of their leaves: which mean, spreads and count belong together.

The arrays alone do not tell a mean from a variance, so a leaf is recognized by its name: "mean" and
"var" of Flax, "mean_ema" and "var_ema" of Haiku, "running_mean" and "running_var" of torch,
"moving_mean" and "moving_variance" of Keras, and the pairs in an `equinox.nn.State`. A float that
nobody can recognize is an error, never a guess.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyEntry, KeyPath
from jax.typing import ArrayLike

from jaxmpi._backends.one_process import PerRank
from jaxmpi._jit.function import is_per_rank
from jaxmpi._leaves import PyTree, as_array, leaf_name

__all__ = ["FUNCTION", "StatGroup", "StatLeaf", "named_leaves", "pair_up"]

FUNCTION = "average_batch_stats"

Name: TypeAlias = tuple[str | int, ...]

# words for a spread in the names of leaves, and the field of `StatGroup` that they belong to
SPREADS = {
    "var": "variance",
    "vars": "variance",
    "variance": "variance",
    "variances": "variance",
    "std": "deviation",
    "stds": "deviation",
    "stddev": "deviation",
    "stdev": "deviation",
    "sigma": "deviation",
    "sigma2": "variance",
    "sigma_squared": "variance",
    "m2": "squares",
    "ssd": "squares",
    "summed_var": "squares",
    "summed_variance": "squares",
    "cov": "variance",
    "covariance": "variance",
}
MEANS = ("mean", "means", "mu", "average", "avg")


def _words(words: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern of a word in a name: "running_var", "var_ema", "var1", "runningVar"."""
    small = sorted(words, key=len, reverse=True)
    large = "|".join(word.capitalize() for word in small)
    either = "|".join([*small, large])
    return re.compile(rf"(?:(?<![a-zA-Z])(?:{either})|(?<=[a-z])(?:{large}))(?![a-z])")


SPREAD, MEAN = _words(SPREADS), _words(MEANS)
# functions of a spread, which cannot be averaged: "log_var", "logvar", "inv_std", "rstd"
FUNCTION_OF_SPREAD = re.compile(
    rf"(?<![a-z])(?:log|ln|inv|inverse|r|rsqrt|recip|reciprocal)_?(?:{'|'.join(SPREADS)})(?![a-z])",
    re.IGNORECASE,
)
COUNTS = ("count", "counts", "n", "num", "num_samples", "n_samples")
SUMS = ("total", "sum")
# names of floats beside a mean that may be averaged as they are: second moments, other averages
LINEAR = re.compile(r"mean|avg|average|ema|moment|square|sq(?![a-z])", re.IGNORECASE)


class StatLeaf(NamedTuple):
    """One leaf of the statistics, before its role is known."""

    text: str  # its path, for errors
    name: Name
    shape: tuple[int, ...]
    dtype: np.dtype
    mode: str = ""  # the mode of Equinox's BatchNorm, for its mean and variance; else ""

    @property
    def is_float(self) -> bool:
        return jnp.issubdtype(self.dtype, jnp.inexact)


@dataclass
class StatGroup:
    """One mean and the leaves that are computed with it, as positions in the list of leaves."""

    mean: int
    variance: list[int] = field(default_factory=list)
    deviation: list[int] = field(default_factory=list)
    squares: list[int] = field(default_factory=list)
    count: list[int] = field(default_factory=list)  # one, or the upper and the lower 32 bits of one
    # Haiku's "hidden": 1 - decay^t times the mean and the variance
    hidden: list[int] = field(default_factory=list)
    counter: list[int] = field(default_factory=list)  # t of Equinox's BatchNorm in the mode "batch"

    def arrays(self, leaves: Sequence[PyTree]) -> dict[str, PyTree]:
        """Return the arrays of the group by role.

        A group with other roles has another structure, and so another program.
        """
        found: dict[str, PyTree] = {"mean": leaves[self.mean]}
        for name in ("variance", "deviation", "squares", "count", "hidden", "counter"):
            found[name] = [leaves[i] for i in getattr(self, name)]
        return found

    def places(self, out: Mapping[str, PyTree]) -> Iterator[tuple[int, jax.Array]]:
        """Yield (position of a leaf, new value) for each leaf that changes."""
        for name, xs in out.items():
            yield from zip([self.mean] if name == "mean" else vars(self)[name], xs, strict=True)


def named_leaves(stats: PyTree, leaves: Sequence[PyTree]) -> Iterator[StatLeaf]:
    """Yield the leaves with their names, in the order of `leaves`."""
    equinox = sys.modules.get("equinox")
    state_of_equinox = equinox.nn.State if equinox else ()
    left = iter(leaves)

    def stop(node: PyTree) -> bool:
        return is_per_rank(node) or isinstance(node, state_of_equinox)

    for path, node in jax.tree_util.tree_flatten_with_path(stats, is_leaf=stop)[0]:
        if not isinstance(node, state_of_equinox):
            yield _leaf(path, _name(path), next(left))
            continue
        values, keys = jax.tree_util.default_registry.flatten_one_level(node)
        before = None
        for key, value in zip(keys, values, strict=True):
            mode = _mode_of_equinox(key, value, before)
            for inner, _ in jax.tree_util.tree_flatten_with_path(value, is_leaf=is_per_rank)[0]:
                # The key, such as "BatchNorm.ema_state_index", then the position in the pair.
                name = (
                    *_name(path),
                    *_parts(key if isinstance(key, str) else "state"),
                    *_name(inner),
                )
                name = (*name[:-1], ("mean", "var")[int(name[-1])]) if mode else name
                yield _leaf((*path, jax.tree_util.DictKey(key), *inner), name, next(left), mode)
            before = value


def _mode_of_equinox(key: object, value: PyTree, before: PyTree) -> str:
    """Return the mode of Equinox's BatchNorm if a value of a State is its pair of statistics.

    It is "" for other values. A State of `make_with_state` has the names of the fields as keys.
    Otherwise the value before it tells: a flag for the first step in the mode "ema", the number of
    steps in the mode "batch".
    """
    if not (isinstance(value, tuple) and len(value) == 2):
        return ""
    if isinstance(key, str):
        return next((mode for mode in ("ema", "batch") if key.endswith(f"{mode}_state_index")), "")
    if isinstance(before, tuple) or before is None or _described(before)[0] != ():
        return ""
    return "ema" if _described(before)[1] == np.bool_ else "batch"


def _leaf(path: KeyPath, name: Name, leaf: PyTree, mode: str = "") -> StatLeaf:
    if not is_per_rank(leaf):
        as_array(FUNCTION, path, leaf, None)  # raises for a leaf that is no array
    return StatLeaf(leaf_name(path), name, *_described(leaf), mode)


def _described(leaf: ArrayLike | PerRank) -> tuple[tuple[int, ...], np.dtype]:
    """Return the shape and dtype of a leaf on each rank."""
    if is_per_rank(leaf):
        return np.shape(leaf.stack)[1:], jnp.result_type(leaf.stack)
    return np.shape(leaf), leaf.dtype if isinstance(leaf, jax.Array) else jnp.result_type(leaf)


def _name(path: KeyPath) -> Name:
    """Return the parts of a path that name a leaf, without those of variables and wrappers."""
    parts: list[str | int] = []
    for key in path:
        part = _part(key)
        if isinstance(key, jax.tree_util.GetAttrKey) and part in ("value", "raw_value", "per_rank"):
            continue
        parts += _parts(part) if isinstance(part, str) else [part]
    return tuple(parts)


def _part(key: KeyEntry) -> str | int:
    for attribute in ("key", "name", "idx"):
        part = getattr(key, attribute, None)
        if isinstance(part, str | int):
            return part
    return str(key)


def _parts(text: str) -> list[str]:
    """Return the parts of one key: "bn/~/mean_ema" of Haiku, "layer1.running_mean" of torch."""
    return re.split(r"[/.]", text)


def pair_up(
    named: Sequence[StatLeaf], *, weighted: bool, momentum: float | None
) -> list[StatGroup]:
    """Return one group for each mean, with its spreads and count, and one for each other float.

    Args:
      named: the leaves, with their names.
      weighted: whether the caller passes the number of samples.
      momentum: that of Equinox's BatchNorm in the mode "batch", if the caller passes it.

    Raises:
      ValueError: the role of a float, or of the leaf beside it, is not known.
    """
    at = {leaf.name: i for i, leaf in enumerate(named)}
    groups: dict[int, StatGroup] = {}  # by the position of the mean
    done: set[int] = set()
    # 1. Each spread, with the mean of its shape beside it.
    for i, leaf in enumerate(named):
        if not leaf.is_float:
            continue
        _refuse_function_of_spread(leaf)
        if (found := _spread(leaf.name)) is None:
            continue
        k, match = found
        name = leaf.name
        means = [(*name[:k], _replaced(match, word), *name[k + 1 :]) for word in MEANS]
        mean = next((j for other in means if _fits(named, j := at.get(other, -1), leaf)), None)
        if mean is None:
            # A layer may be called "var", and the "sigma" of Flax's SpectralNorm is no deviation.
            if k == _last(name) and match.group().lower() != "sigma":
                beside = next((named[at[other]] for other in means if other in at), None)
                _refuse_without_mean(leaf, beside, _replaced(match, "mean"))
            continue
        # Haiku's hidden values are a multiple of the averages, which are what a model uses.
        average = at.get((*named[mean].name[:-1], "average"), -1)
        if name[-1] == "hidden" and average >= 0:
            group = groups.setdefault(average, StatGroup(average))
            group.hidden = [mean, i]
            done |= {mean, i}
            continue
        group = groups.setdefault(mean, StatGroup(mean))
        vars(group)[SPREADS[match.group().lower()]].append(i)
        group.count = group.count or _count(at, name, k, match)
        if leaf.mode == "batch":
            group.counter = [mean - 1]  # the value before the pair
            if momentum is None:
                raise ValueError(
                    f"{FUNCTION}: leaf {leaf.text} is of Equinox's BatchNorm in the mode 'batch', "
                    "whose state does not hold its momentum. Pass momentum=, that of the layers."
                )
        if group.squares and not group.count and not weighted:
            raise ValueError(
                f"{FUNCTION}: leaf {leaf.text} is a sum over samples, and no count stands beside "
                "it. Pass the number of samples with it, as 'count', or as weight=."
            )
        done |= {mean, i, *group.count}
    # 2. The other floats. Means come first: a count beside one of them is no float on its own.
    alone = [i for i, leaf in enumerate(named) if leaf.is_float and i not in done]
    alone.sort(key=lambda i: not _is_mean(named[i].name))
    places = _Places(named, alone, done)
    for i in alone:
        if i not in done:
            groups[i] = _alone(named, at, i, done, places)
    return list(groups.values())


def _refuse_function_of_spread(leaf: StatLeaf) -> None:
    """Raise a ValueError for the logarithm or the inverse of a spread."""
    last = _last(leaf.name)
    if last >= 0 and FUNCTION_OF_SPREAD.search(str(leaf.name[last])):
        raise ValueError(
            f"{FUNCTION}: leaf {leaf.text} is the logarithm or the inverse of a spread by its "
            "name. Pass the variance itself, as 'var' beside the 'mean', and take the logarithm or "
            "the inverse of the result."
        )


def _refuse_without_mean(leaf: StatLeaf, beside: StatLeaf | None, mean: str) -> NoReturn:
    """Raise a ValueError for a spread without a mean of its shape; `beside` is one that differs."""
    if beside is not None:
        raise ValueError(
            f"{FUNCTION}: leaf {leaf.text} is a spread of shape {list(leaf.shape)}, and the mean "
            f"beside it, {beside.text}, is {beside.dtype} of shape {list(beside.shape)}. Pass "
            "floats of one shape."
        )
    raise ValueError(
        f"{FUNCTION}: leaf {leaf.text} is a spread by its name, and no mean of shape "
        f"{list(leaf.shape)} stands beside it. Pass it with its mean, as {mean!r}, or average it "
        "alone by jaxmpi.tree_allreduce."
    )


def _spread(name: Name) -> tuple[int, re.Match[str]] | None:
    """Return the last part of a name with a word for a spread, and the word in it."""
    for k in reversed(range(len(name))):
        if isinstance(name[k], str):
            if match := SPREAD.search(str(name[k])):
                return k, match
            if MEAN.search(str(name[k])) and name[k] != "average":
                return None  # the mean of a layer called "var"
    return None


def _last(name: Name) -> int:
    """Return the position of the part that names the role of a leaf; -1 if there is none."""
    words = [k for k, part in enumerate(name) if isinstance(part, str)]
    if len(words) > 1 and name[words[-1]] in ("average", "hidden"):
        words.pop()
    return words[-1] if words else -1


def _is_mean(name: Name) -> bool:
    return _last(name) >= 0 and MEAN.search(str(name[_last(name)])) is not None


def _fits(named: Sequence[StatLeaf], j: int, spread: StatLeaf) -> bool:
    return j >= 0 and named[j].is_float and named[j].shape == spread.shape


def _replaced(match: re.Match[str], word: str) -> str:
    """Return the part of a name with another word in the place of the matched one."""
    word = word.capitalize() if match.group()[0].isupper() else word
    return match.string[: match.start()] + word + match.string[match.end() :]


def _count(at: Mapping[Name, int], name: Name, k: int, match: re.Match[str]) -> list[int]:
    """Return the leaf that counts the samples of a mean or a spread, whose word is in part k."""
    for word in COUNTS:
        for count in (_replaced(match, word), word):
            for whole in ((*name[:k], count), (*name[:k], count, *name[k + 1 :])):
                if whole in at:
                    return [at[whole]]
                # Brax counts in 64 bits
                if (*whole, "hi") in at and (*whole, "lo") in at:
                    return [at[(*whole, "hi")], at[(*whole, "lo")]]
    return []


class _Places:
    """Leaves beside the floats without a spread, found once for all of these.

    The leaves at one place have names that differ in one part alone. A walk over all leaves for
    each float, or over all at its place, would cost the square of their number.
    """

    def __init__(self, named: Sequence[StatLeaf], alone: Iterable[int], done: set[int]) -> None:
        self._done = done
        self._counted: set[tuple[Name, Name]] = set()  # places with a leaf called "count"
        # floats that may be variances, by their place and shape
        self._unclear: dict[tuple[Name, Name, tuple[int, ...]], list[int]] = {}
        parts = {_last(named[i].name) for i in alone}
        for j, leaf in enumerate(named):
            for k in parts:
                if not 0 <= k < len(leaf.name):
                    continue
                place, word = _place(leaf.name, k), str(leaf.name[k])
                if word.lower() in COUNTS:
                    self._counted.add(place)
                elif leaf.is_float and j not in done and not LINEAR.search(word):
                    self._unclear.setdefault((*place, leaf.shape), []).append(j)

    def has_count(self, leaf: StatLeaf, k: int) -> bool:
        """Return whether a count stands beside a leaf, whose role part k of its name tells."""
        return _place(leaf.name, k) in self._counted

    def unclear(self, leaf: StatLeaf, k: int, i: int) -> int | None:
        """Return a float beside leaf i of which nobody can tell whether it is its variance."""
        key = (*_place(leaf.name, k), leaf.shape)
        # What has become the count of another mean is dropped here, once. Then leaf i alone stays,
        # or there is an error, so that the next mean at this place has one leaf to look at.
        self._unclear[key] = [j for j in self._unclear.get(key, []) if j not in self._done]
        return next((j for j in self._unclear[key] if j != i), None)


def _place(name: Name, k: int) -> tuple[Name, Name]:
    return name[:k], name[k + 1 :]


def _alone(
    named: Sequence[StatLeaf], at: Mapping[Name, int], i: int, done: set[int], places: _Places
) -> StatGroup:
    """Return the group of a float without a spread, once its plain average is known to be right."""
    leaf = named[i]
    k = _last(leaf.name)
    if k < 0:
        raise ValueError(
            f"{FUNCTION}: leaf {leaf.text} has no name, so that nobody can tell a mean from a "
            "variance. Pass a dict with names, such as 'mean' and 'var', or average by "
            "jaxmpi.tree_allreduce."
        )
    word = str(leaf.name[k])
    if word.lower() in SUMS and places.has_count(leaf, k):
        raise ValueError(
            f"{FUNCTION}: leaf {leaf.text} is a sum, with the count of its terms beside it. Merge "
            "metrics by jaxmpi.merge_metrics, and add sums by jaxmpi.tree_allreduce(sums, 'sum')."
        )
    match = MEAN.search(word)
    if match is None:
        return StatGroup(i)
    if (j := places.unclear(leaf, k, i)) is not None:
        raise ValueError(
            f"{FUNCTION}: leaf {named[j].text} stands beside the mean {leaf.text}, and nobody can "
            "tell whether it is a variance. Call it 'var', 'std' or 'm2' if it is, or average "
            "it alone by jaxmpi.tree_allreduce."
        )
    count = _count(at, leaf.name, k, match)
    done |= set(count)
    return StatGroup(i, count=count)
