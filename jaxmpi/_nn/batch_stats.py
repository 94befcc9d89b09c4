"""Running statistics of all ranks as one: means, variances, and the counts that weigh them.

A leaf is recognized by its name, as the arrays alone do not tell a mean from a variance. The names
are found first; then one program with two rounds of messages computes all means, and all variances
around them.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyEntry, KeyPath
from jax.typing import ArrayLike

from jaxmpi._backends.simulate import PerRank
from jaxmpi._collectives.trees import Caller, refuse_stray
from jaxmpi._consistency.mismatch import in_words
from jaxmpi._jit.api import anywhere
from jaxmpi._jit.function import is_per_rank
from jaxmpi._leaves import PyTree, as_array, leaf_name, widest
from jaxmpi._optim.float_leaves import sum_of
from jaxmpi._optim.weights import Weight, as_weight, check_total
from jaxmpi._world import session

__all__ = ["average_batch_stats"]

FUNCTION = "average_batch_stats"
GOOD, NO_COUNT, NO_SAMPLES = range(3)  # what a program finds out about the counts of a group

Name: TypeAlias = tuple[str | int, ...]

# words for a spread, in the names of leaves
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
    """Any of these as a part of a name: "running_var", "var_ema", "var1", "runningVar"."""
    small = sorted(words, key=len, reverse=True)
    large = "|".join(word.capitalize() for word in small)
    either = "|".join([*small, large])
    return re.compile(rf"(?:(?<![a-zA-Z])(?:{either})|(?<=[a-z])(?:{large}))(?![a-z])")


SPREAD, MEAN = _words(SPREADS), _words(MEANS)
# functions of a spread: "log_var", "logvar", "inv_std", "rstd"
FUNCTION_OF_SPREAD = re.compile(
    rf"(?<![a-z])(?:log|ln|inv|inverse|r|rsqrt|recip|reciprocal)_?(?:{'|'.join(SPREADS)})(?![a-z])",
    re.IGNORECASE,
)
COUNTS = ("count", "counts", "n", "num", "num_samples", "n_samples")
SUMS = ("total", "sum")
# beside a mean, what is averaged as it is: second moments, other averages
LINEAR = re.compile(r"mean|avg|average|ema|moment|square|sq(?![a-z])", re.IGNORECASE)


def average_batch_stats(
    stats: PyTree,
    weight: Weight | None = None,
    *,
    momentum: float | None = None,
) -> PyTree:
    """Combine the running means and variances of all ranks, before evaluation or saving.

    With the shares a_r = w_r / Σ_q w_q of the ranks' samples,

        μ = Σ_r a_r · μ_r
        σ² = Σ_r a_r · (σ_r² + |μ_r - μ|²)

    These are the mean and variance of all ranks' samples together, where each rank's are those of
    its own. The weight w_r is `weight`; by default the count that stands beside the mean, as in the
    states of Welford's algorithm; 1 without one.

    Each rank's BatchNorm keeps statistics of its own batches, unless it has
    `axis_name=jaxmpi.AXIS`. A variance is paired with the mean beside it by name: "mean" and "var"
    of Flax, "mean_ema" and "var_ema" of Haiku, "running_mean" and "running_var" of torch,
    "moving_mean" and "moving_variance" of Keras, the pairs in an `equinox.nn.State`. A standard
    deviation ("std") becomes σ. A sum of squares around the mean ("m2", "ssd", "summed_variance")
    becomes n_r·σ², with n_r the count beside it. Any other float x, such as a second moment,
    becomes Σ_r a_r · x_r.

    Counts and other integers stay this rank's. So a state that was averaged can be updated and
    averaged again, at every step or once at the end, and no sample counts twice; the number of all
    samples is `jaxmpi.tree_allreduce(count, "sum")`. A rank with weight 0 does not count, and all
    stays as it is where all weights are 0.

    **Collective:** every rank calls it, with the same structure, shapes and dtypes; all pass a
    weight, or none does.
    **Communication:** the bytes of the statistics, in two rounds.

    Args:
      stats: Flax's "batch_stats", an `nnx.State` of `nnx.BatchStat`, Haiku's state, an
        `equinox.nn.State`, or any pytree whose leaves have names.
      weight: the number of samples that this rank's statistics stand for: one finite number of 0
        or more.
      momentum: that of Equinox's BatchNorm in the mode "batch", whose state does not hold it.

    Returns:
      The same structure. Its floats are JAX arrays, and equal on all ranks, except sums of squares
      where the counts differ.

    Raises:
      ValueError: a variance without a mean of its shape beside it; a float beside a mean that may
        or may not be its variance; a logarithm or an inverse of a variance; floats without any
        name; a sum of squares without a count, or
        with the count 0 on some ranks only; on all ranks, a weight or count of any rank that is
        no such number.
      TypeError: a leaf that is no array or number, with its path.

    >>> average_batch_stats({"mean": jnp.zeros(1), "var": jnp.ones(1)}, weight=32)["var"]
    Array([1.], dtype=float32)
    """
    backend = session.current(FUNCTION)
    refuse_stray(FUNCTION, stats, backend)
    leaves, treedef = jax.tree.flatten(stats, is_leaf=is_per_rank)
    named = list(_named(stats, leaves))
    groups = _pair_up(named, weighted=weight is not None, momentum=momentum)
    arrays = [group.arrays(leaves) for group in groups]
    w, problem = None, ""
    if weight is not None:
        means = [x["mean"] if is_per_rank(x["mean"]) else jnp.asarray(x["mean"]) for x in arrays]
        w, problem = as_weight(FUNCTION, weight, means)
    if not groups:
        return stats
    if backend.place.size == 1 and not backend.simulates:
        for i, leaf in enumerate(named):
            leaves[i] = jnp.asarray(leaves[i]) if leaf.is_float else leaves[i]
        return treedef.unflatten(leaves)
    outs, problems, total = _combine(w, momentum, arrays)
    if weight is not None:
        check_total(FUNCTION, total, problem)
    for group, found in zip(groups, problems, strict=True):
        _check_counts(group, named, leaves, found)
    for group, out in zip(groups, outs, strict=True):
        for i, x in group.places(out):
            leaves[i] = x
    return treedef.unflatten(leaves)


# which leaves belong together


class _Leaf(NamedTuple):
    """A leaf of the statistics, before anything is known of its kind."""

    text: str  # its path, for errors
    name: Name
    shape: tuple[int, ...]
    dtype: np.dtype
    state: str = ""  # of Equinox's BatchNorm: its mode, for the mean and the variance

    @property
    def is_float(self) -> bool:
        return jnp.issubdtype(self.dtype, jnp.inexact)


@dataclass
class _Group:
    """A mean and what is computed with it, as numbers of leaves."""

    mean: int
    variance: list[int] = field(default_factory=list)
    deviation: list[int] = field(default_factory=list)
    squares: list[int] = field(default_factory=list)
    count: list[int] = field(default_factory=list)  # one, or the upper and the lower 32 bits of one
    hidden: list[int] = field(default_factory=list)  # of Haiku: 1 - decay^t times mean and variance
    counter: list[int] = field(default_factory=list)  # of Equinox in the mode "batch": t

    def arrays(self, leaves: Sequence[PyTree]) -> dict[str, PyTree]:
        """The arrays by kind; the program is another one where other kinds are there."""
        found: dict[str, PyTree] = {"mean": leaves[self.mean]}
        for name in ("variance", "deviation", "squares", "count", "hidden", "counter"):
            found[name] = [leaves[i] for i in getattr(self, name)]
        return found

    def places(self, out: Mapping[str, PyTree]) -> Iterator[tuple[int, jax.Array]]:
        """The numbers of the leaves that change, and what becomes of them."""
        for name, xs in out.items():
            yield from zip([self.mean] if name == "mean" else vars(self)[name], xs, strict=True)


def _named(stats: PyTree, leaves: Sequence[PyTree]) -> Iterator[_Leaf]:
    """The leaves with their names, in the order of `leaves`."""
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
                # such as "BatchNorm.ema_state_index", then the position in the pair
                name = (
                    *_name(path),
                    *_parts(key if isinstance(key, str) else "state"),
                    *_name(inner),
                )
                name = (*name[:-1], ("mean", "var")[int(name[-1])]) if mode else name
                yield _leaf((*path, jax.tree_util.DictKey(key), *inner), name, next(left), mode)
            before = value


def _mode_of_equinox(key: object, value: PyTree, before: PyTree) -> str:
    """The mode of Equinox's BatchNorm, if a value of a State is its mean and variance; or "".

    A State of `make_with_state` has the names of the fields as keys. Otherwise the value before it
    tells: whether it is the first time in the mode "ema", the number of steps in the mode "batch".
    """
    if not (isinstance(value, tuple) and len(value) == 2):
        return ""
    if isinstance(key, str):
        return next((mode for mode in ("ema", "batch") if key.endswith(f"{mode}_state_index")), "")
    if isinstance(before, tuple) or before is None or _described(before)[0] != ():
        return ""
    return "ema" if _described(before)[1] == np.bool_ else "batch"


def _leaf(path: KeyPath, name: Name, leaf: PyTree, mode: str = "") -> _Leaf:
    if not is_per_rank(leaf):
        as_array(FUNCTION, path, leaf, None)  # for its error
    return _Leaf(leaf_name(path), name, *_described(leaf), mode)


def _described(leaf: ArrayLike | PerRank) -> tuple[tuple[int, ...], np.dtype]:
    """The shape and dtype of a leaf on each rank."""
    if is_per_rank(leaf):
        return np.shape(leaf.stack)[1:], jnp.result_type(leaf.stack)
    return np.shape(leaf), leaf.dtype if isinstance(leaf, jax.Array) else jnp.result_type(leaf)


def _name(path: KeyPath) -> Name:
    """The parts of a path that say what a leaf is, without those of variables and wrappers."""
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
    """The parts of one key, such as Haiku's "bn/~/mean_ema" or torch's "layer1.running_mean"."""
    return re.split(r"[/.]", text)


def _pair_up(named: Sequence[_Leaf], *, weighted: bool, momentum: float | None) -> list[_Group]:
    """The means, each with its spreads and its count; a group for each other float.

    Raises:
      ValueError: what a float is, or what it stands beside, cannot be known.
    """
    at = {leaf.name: i for i, leaf in enumerate(named)}
    groups: dict[int, _Group] = {}  # by the number of the mean
    done: set[int] = set()
    for i, leaf in enumerate(named):
        if not leaf.is_float:
            continue
        last = _last(leaf.name)
        if last >= 0 and FUNCTION_OF_SPREAD.search(str(leaf.name[last])):
            raise ValueError(
                f"{FUNCTION}: leaf {leaf.text} is the logarithm or the inverse of a spread by its "
                "name. Pass the "
                "variance itself, as 'var' beside the 'mean', and take the logarithm or the "
                "inverse of the result."
            )
        if (found := _spread(leaf.name)) is None:
            continue
        k, match = found
        name = leaf.name
        means = [(*name[:k], _replaced(match, word), *name[k + 1 :]) for word in MEANS]
        mean = next((j for other in means if _fits(named, j := at.get(other, -1), leaf)), None)
        if mean is None:
            # a layer may be called "var", and the "sigma" of Flax's SpectralNorm is no deviation
            if k == last and match.group().lower() != "sigma":
                beside = next((named[at[other]] for other in means if other in at), None)
                if beside is not None:
                    raise ValueError(
                        f"{FUNCTION}: leaf {leaf.text} is a spread of shape {list(leaf.shape)}, "
                        "and the mean beside it, "
                        f"{beside.text}, is {beside.dtype} of shape {list(beside.shape)}. Pass "
                        "floats of one shape."
                    )
                raise ValueError(
                    f"{FUNCTION}: leaf {leaf.text} is a spread by its name, and no mean of shape "
                    f"{list(leaf.shape)} stands beside it. Pass it with its mean, as "
                    f"{_replaced(match, 'mean')!r}, or average it alone by jaxmpi.tree_allreduce."
                )
            continue
        # Haiku: the hidden values are a multiple of the averages, which are what a model uses
        average = at.get((*named[mean].name[:-1], "average"), -1)
        if name[-1] == "hidden" and average >= 0:
            group = groups.setdefault(average, _Group(average))
            group.hidden = [mean, i]
            done |= {mean, i}
            continue
        group = groups.setdefault(mean, _Group(mean))
        vars(group)[SPREADS[match.group().lower()]].append(i)
        group.count = group.count or _count(at, name, k, match)
        if leaf.state == "batch":
            group.counter = [mean - 1]
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
    # means first: a count beside one of them is no float on its own
    alone = [i for i, leaf in enumerate(named) if leaf.is_float and i not in done]
    alone.sort(key=lambda i: not _is_mean(named[i].name))
    for i in alone:
        if i not in done:
            groups[i] = _alone(named, at, i, done)
    return list(groups.values())


def _spread(name: Name) -> tuple[int, re.Match[str]] | None:
    """The last part of a name that is a word for a spread, and the word in it."""
    for k in reversed(range(len(name))):
        if isinstance(name[k], str):
            if match := SPREAD.search(str(name[k])):
                return k, match
            if MEAN.search(str(name[k])) and name[k] != "average":
                return None  # the mean of a layer called "var"
    return None


def _last(name: Name) -> int:
    """The position of the part that says what a leaf is; -1 if there is none."""
    words = [k for k, part in enumerate(name) if isinstance(part, str)]
    if len(words) > 1 and name[words[-1]] in ("average", "hidden"):
        words.pop()
    return words[-1] if words else -1


def _is_mean(name: Name) -> bool:
    return _last(name) >= 0 and MEAN.search(str(name[_last(name)])) is not None


def _fits(named: Sequence[_Leaf], j: int, spread: _Leaf) -> bool:
    return j >= 0 and named[j].is_float and named[j].shape == spread.shape


def _replaced(match: re.Match[str], word: str) -> str:
    """The part of a name with another word in the place of the one that was found."""
    word = word.capitalize() if match.group()[0].isupper() else word
    return match.string[: match.start()] + word + match.string[match.end() :]


def _count(at: Mapping[Name, int], name: Name, k: int, match: re.Match[str]) -> list[int]:
    """The leaf that counts the samples of a mean or a spread, with its word found in part k."""
    for word in COUNTS:
        for count in (_replaced(match, word), word):
            for whole in ((*name[:k], count), (*name[:k], count, *name[k + 1 :])):
                if whole in at:
                    return [at[whole]]
                # Brax counts in 64 bits
                if (*whole, "hi") in at and (*whole, "lo") in at:
                    return [at[(*whole, "hi")], at[(*whole, "lo")]]
    return []


def _alone(named: Sequence[_Leaf], at: Mapping[Name, int], i: int, done: set[int]) -> _Group:
    """The group of a float without a spread, once it is sure that its average is what it needs."""
    leaf = named[i]
    k = _last(leaf.name)
    if k < 0:
        raise ValueError(
            f"{FUNCTION}: leaf {leaf.text} has no name, so that nobody can tell a mean from a "
            "variance. Pass a dict with names, such as 'mean' and 'var', or average by "
            "jaxmpi.tree_allreduce."
        )
    beside = {}  # the other leaves at its place, by name
    for j, other in enumerate(named):
        if j != i and other.name[:k] == leaf.name[:k] and other.name[k + 1 :] == leaf.name[k + 1 :]:
            beside[str(other.name[k])] = j
    word = str(leaf.name[k])
    if word.lower() in SUMS and any(name.lower() in COUNTS for name in beside):
        raise ValueError(
            f"{FUNCTION}: leaf {leaf.text} is a sum, with the count of its terms beside it. Merge "
            "metrics by jaxmpi.merge_metrics, and add sums by jaxmpi.tree_allreduce(sums, 'sum')."
        )
    match = MEAN.search(word)
    if match is None:
        return _Group(i)
    for name, j in beside.items():
        other = named[j]
        alike = other.is_float and other.shape == leaf.shape and j not in done
        if alike and name.lower() not in COUNTS and not LINEAR.search(name):
            raise ValueError(
                f"{FUNCTION}: leaf {other.text} stands beside the mean {leaf.text}, and nobody can "
                "tell whether it is a variance. Call it 'var', 'std' or 'm2' if it is, or average "
                "it alone by jaxmpi.tree_allreduce."
            )
    count = _count(at, leaf.name, k, match)
    done |= set(count)
    return _Group(i, count=count)


def _check_counts(
    group: _Group,
    named: Sequence[_Leaf],
    leaves: Sequence[PyTree],
    found: jax.Array,
) -> None:
    """Raise on all ranks what a program has found out about the counts of a group."""
    if isinstance(found, jax.core.Tracer) or found == GOOD or not group.count:
        return
    backend = session.current(FUNCTION)
    counts = [leaves[i] for i in group.count]
    if any(map(is_per_rank, counts)):
        by_rank = [np.max([np.asarray(x)[r] for x in counts], 0) for r in range(backend.place.size)]
    else:
        mine = [np.asarray(backend.unwrap(jnp.asarray(x))) for x in counts]
        by_rank = backend.allgather_object(np.max(mine, 0))
    text = named[group.count[0]].text
    if found == NO_COUNT:
        wrong = [r for r, n in enumerate(by_rank) if not np.all((n >= 0) & (n < np.inf))]
        raise ValueError(
            f"{FUNCTION}: count {text} is {by_rank[wrong[0]]} on {in_words(wrong[:1])}, and must "
            "be 0 or more. Count in 64 bits, or in floats, what is beyond 2^31."
        )
    squares = named[group.squares[0]].text
    ranks = [r for r, n in enumerate(by_rank) if not np.all(n)]
    raise ValueError(
        f"{FUNCTION}: count {text} is 0 on {in_words(ranks)} and not on others, so that {squares} "
        "cannot hold a share of the squares of all ranks there. Pass the variance, "
        "squares / max(count, 1), as 'var' in its place."
    )


# what becomes of them


class _Own(NamedTuple):
    """The values of one rank in a group, in 32 bits at least."""

    mean: jax.Array
    variances: list[jax.Array]  # in the order of "variance", "deviation", "squares"
    weight: jax.Array
    samples: jax.Array
    scale: jax.Array  # of Equinox in the mode "batch", 1 - momentum^t; of others 1


def _combined(
    weight: jax.Array | None, momentum: float | None, groups: list[dict[str, PyTree]]
) -> tuple[list[dict[str, PyTree]], list[jax.Array], jax.Array]:
    """Return what becomes of the groups, which of them cannot be, and the sum of the weights."""
    own = [_own(group, weight, momentum) for group in groups]

    # W = Σ w_r and μ = Σ w_r·μ_r / W; and k, the ratio of Haiku's hidden values to the averages
    sums = [_times(x.weight, [x.mean]) for x in own]
    hidden = [(_norm(x["hidden"]), _norm([x["mean"], *x["variance"]])) for x in groups]
    sent = (weight, [x.weight for x in own], sums, hidden)
    given, totals, sums, hidden = Caller(FUNCTION).allreduce(sent, op="sum")
    centers = [_over(W, x, [y.mean])[0] for W, x, y in zip(totals, sums, own, strict=True)]

    # σ² = Σ w_r·(σ_r² + |μ_r - μ|²) / W. The mean of squares less |μ|² would lose its digits
    around = []
    for x, center in zip(own, centers, strict=True):
        d = x.mean - center
        around.append(_times(x.weight, [v + jnp.real(d * jnp.conj(d)) for v in x.variances]))
    # a rank without samples cannot hold its share of the sum of squares
    empty = []
    for x, group in zip(own, groups, strict=True):
        empty.append((jnp.any(x.samples == 0) & bool(group["squares"])).astype(jnp.int32))
    around, empty = Caller(FUNCTION).allreduce((around, empty), op="sum")

    outs, problems = [], []
    for i, group in enumerate(groups):
        W, x = totals[i], own[i]
        variances = _over(W, around[i], x.variances)
        outs.append(_put_back(group, x, centers[i], variances, hidden[i]))
        some_empty = (empty[i] > 0) & jnp.any(W > 0)
        problem = jnp.where(some_empty, NO_SAMPLES, GOOD)
        problems.append(jnp.where(jnp.any(jnp.isnan(W)), NO_COUNT, problem))
    return outs, problems, given


_combine = anywhere(_combined, FUNCTION)


def _own(group: Mapping[str, PyTree], weight: jax.Array | None, momentum: float | None) -> _Own:
    mean = _wide(group["mean"])
    real = jnp.finfo(mean.dtype).dtype
    n = _count_of(group["count"], real)
    w = weight.astype(real) if weight is not None else jnp.ones((), real) if n is None else n
    n = w if n is None else n
    scale = jnp.ones((), real)
    if group["counter"]:
        t = jnp.asarray(group["counter"][0])  # before the first step the values are as they are
        scale = jnp.where(t > 0, 1 - jnp.asarray(momentum, real) ** t, 1)
    variances = [_wide(x) / scale for x in group["variance"]]
    variances += [jnp.square(_wide(x)) for x in group["deviation"]]
    variances += [_wide(x) / jnp.where(n == 0, 1, n) for x in group["squares"]]
    # what is no number of samples makes NaN, which tells all ranks
    return _Own(mean / scale, variances, jnp.where((w >= 0) & (w < jnp.inf), w, jnp.nan), n, scale)


def _put_back(
    group: Mapping[str, PyTree],
    own: _Own,
    mean: jax.Array,
    variances: list[jax.Array],
    hidden: tuple[jax.Array, jax.Array],
) -> dict[str, PyTree]:
    """The mean and variances of all ranks in the forms and dtypes of the group."""
    left = iter(variances)
    new = {
        "mean": [mean * own.scale],
        "variance": [next(left) * own.scale for _ in group["variance"]],
        "deviation": [jnp.sqrt(next(left)) for _ in group["deviation"]],
        "squares": [own.samples * next(left) for _ in group["squares"]],
    }
    new["hidden"] = []
    if group["hidden"]:
        dtype = widest(*hidden)
        k = hidden[0].astype(dtype) / jnp.where(hidden[1] == 0, 1, hidden[1]).astype(dtype)
        for x in (mean, *new["variance"]):
            dtype = widest(k, x)
            new["hidden"].append(k.astype(dtype) * x.astype(dtype))
    old = {name: [group["mean"]] if name == "mean" else group[name] for name in new}
    return jax.tree.map(lambda x, y: x.astype(jnp.result_type(y)), new, old)


def _wide(x: ArrayLike) -> jax.Array:
    x = jnp.asarray(x)
    return x.astype(widest(x.dtype))


def _norm(arrays: Sequence[ArrayLike]) -> jax.Array:
    return sum_of(jnp.sum(jnp.abs(_wide(x))) for x in arrays)


def _count_of(count: Sequence[ArrayLike], dtype: np.dtype) -> jax.Array | None:
    """A count as a float; None without one."""
    if len(count) == 2:
        return jnp.asarray(count[0], dtype) * 2.0**32 + jnp.asarray(count[1], dtype)
    return jnp.asarray(count[0]).astype(dtype) if count else None


def _times(w: jax.Array, xs: Sequence[jax.Array]) -> list[jax.Array]:
    """Products with a weight; zero for weight zero, whatever is in x."""
    return [jnp.where(w == 0, 0, w * x) for x in xs]


def _over(
    total: jax.Array,
    sums: Sequence[jax.Array],
    own: Sequence[jax.Array],
) -> list[jax.Array]:
    """Divide sums of products by the sum of weights; where that is 0, the rank's own values."""
    safe = jnp.where(total == 0, 1, total)
    return [jnp.where(total == 0, y, x / safe) for x, y in zip(sums, own, strict=True)]
