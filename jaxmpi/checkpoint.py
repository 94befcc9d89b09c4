"""Save a training run, and go on with it on any number of ranks."""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path

import jax

from jaxmpi._checkpoint import leaf_values, parts
from jaxmpi._checkpoint.commit import commit
from jaxmpi._checkpoint.compatibility import difference, only_common
from jaxmpi._checkpoint.manifest import Leaf, LeafValue, Manifest
from jaxmpi._checkpoint.rank_checks import (
    check_call,
    check_equal,
    checked,
    checked_folder,
    checked_step,
    each_ranks_values,
    ranks_here,
    run_on_all_or_raise,
)
from jaxmpi._checkpoint.reading import newest, read
from jaxmpi._checkpoint.writing import Parts, Save, Saves, arrays_of, begin
from jaxmpi._collectives.objects import untraced
from jaxmpi._errors import CheckpointError
from jaxmpi._jit.api import local
from jaxmpi._leaves import PyTree
from jaxmpi._world import session

__all__ = ["latest", "restore", "save"]

TRIES = 3  # to read a checkpoint, where another job removes old ones


def save(
    directory: str | os.PathLike,
    step: int,
    tree: PyTree,
    *,
    keep: int | None = 3,
    background: bool = True,
    in_memory: bool = False,
) -> None:
    """Save everything that a run goes on from: parameters, optimizer state, model state, keys, where it is in the data.

    The arrays are copied, and written while the training goes on. The checkpoint is there as a whole or not at all, however
    the job ends; it is there for certain when the next call of `save`, `restore` or `latest` returns, when the script ends in
    order, or on return with `background=False`.

    What is equal on all ranks is written by rank 0, after the ranks have compared checksums (CRC-32) of it. What each rank has
    of its own must be in a `PerRankState`. Of that, of each `ShardedArray` and of the state of `sharded`, each rank writes its
    part, so that `directory` must be one that all ranks share.

    **Collective:** every rank calls it, with the same structure, shapes and dtypes.
    **Communication:** a comparison of them and of the values, 32 bytes, and of how the last save has ended.

    Args:
      directory: holds the checkpoints of one run; made if it is not there. The same on all ranks, in the same words; a
        relative one is a folder of rank 0's working directory.
      step: the number of the checkpoint, 0 or more. One of the same number is replaced. Those that this run has not come
        from are set aside, with a line on the screen: those of higher numbers, as after going back to an older step or in
        a folder of another run, and, at the first save after `restore`, those behind the step that was restored. They get
        names that begin with "abandoned-", and `latest` and `restore` do not look at them.
      tree: any pytree of arrays, PRNG keys, Python numbers and text.
      keep: how many checkpoints to keep, this one included; None for all.
      background: whether to return before it is written.
      in_memory: whether to write it into the memory of the host (/dev/shm) rather than to `directory`, for a restart of a job
        that fails while its host goes on. `latest` and `restore` of `directory` find it. Only the newest one is kept there, and
        none once a later one is in `directory`: end a run with one of these. All ranks must be on one host.

    Raises:
      CheckpointError: on every rank, if this save cannot begin, or if the one before could not be written; this one is then
        being written nevertheless.
      RankMismatchError: on every rank, if their trees, folders, steps or options differ, or the values of a leaf that is in no
        `PerRankState`, with its path.
      TypeError: a leaf that cannot be saved, with its path; a step that is no integer, a directory that is no path.
      ValueError: a negative step; `keep` below 1; two leaves with the same path.
      RuntimeError: called in traced code.
    """
    backend = untraced("save")
    where = checked(backend, "save", lambda: checked_folder("save", directory))
    step = checked(backend, "save", lambda: checked_step("save", step))
    found = checked(backend, "save", lambda: _leaves_to_save(tree, step, keep, backend.axes))
    leaves = [leaf for leaf, _ in found]
    options = f"step {step}, keep {keep}, background {background}" + (", in memory" if in_memory else "")
    check_call(backend, "save", leaves, where, options)
    check_equal(backend, found)
    leaves = each_ranks_values(backend, leaves)
    saves = session.state(Saves)
    earlier = saves.finished(backend)
    writers = range(1 if all(leaf.part == "all" for leaf in leaves) else backend.place.size)
    here = [rank for rank in ranks_here(backend) if rank in writers]
    arrays = run_on_all_or_raise(backend, lambda: {rank: arrays_of(found, rank) for rank in here})
    place = Path(directory).absolute()
    folder = begin(backend, place, len(writers) > 1, in_memory)
    base = saves.lineage.restored.pop(place, None)

    def finish(written: Parts) -> None:
        sizes, members = zip(*(written[rank] for rank in writers), strict=True)
        manifest = Manifest(step, len(writers), [*sizes], [*members], leaves)
        commit(saves.lineage, place, folder[0], manifest, 1 if in_memory else keep, base)

    saves.start(Save(backend, folder, step, arrays, writers, finish))
    if not background:
        earlier = earlier or saves.finished(backend)
    if earlier:
        raise CheckpointError(f"save: {earlier}")


def latest(directory: str | os.PathLike) -> int | None:
    """The step of the newest checkpoint that is whole, in the folder or in memory; None if there is none.

    Every file is read and its checksums compared; those that are damaged are warned of and passed over.

    **Collective:** every rank calls it.
    **Communication:** the number, and whether all ranks see the folder in memory.

    Raises:
      CheckpointError: on every rank, if the save before could not be written.
      RankMismatchError: on every rank, if their folders differ.
      TypeError: a directory that is no path.
      RuntimeError: called in traced code.

    >>> latest("a folder that is not there")
    """
    backend = untraced("latest")
    check_call(backend, "latest", [], checked(backend, "latest", lambda: checked_folder("latest", directory)))
    _raise(session.state(Saves).finished(backend))
    whole, _ = newest(backend, Path(directory), None)
    return None if whole is None else whole[1].step


def restore(directory: str | os.PathLike, like: PyTree, step: int | None = None, *, partial: bool = False) -> PyTree:
    """What `save` has saved, on as many ranks as there are now, and on any backend.

    Parameters, and the states of their optimizers, come back bit by bit on any number of ranks, whether they are whole, as with
    `distributed`, or cut over the ranks, as with `sharded` and `fully_shard`; and as one of these where another was saved. What
    each rank has of its own otherwise (a `PerRankState`: that of `accumulate`, `local_sgd` and codecs, too) needs as many ranks
    as have saved it, unless it was equal on all of them. What is cut over an axis of the ranks needs the same axes, unless the
    groups along it had equal values. `PerRankState(None)` in its place in `like` leaves it out: an environment, say, to be made
    anew for another number of ranks.

    **Collective:** every rank calls it, with the same structure, shapes and dtypes.
    **Communication:** what is equal on all ranks, from rank 0, which alone reads it; whether all see the folder in memory.

    Args:
      directory: that of `save`.
      like: a tree of the same structure, shapes and dtypes, such as the one that a new run begins with; its values don't
        matter, and `jax.ShapeDtypeStruct` will do. Arrays come back on its devices. A Python number fits an array without axes
        of its kind (bool, integer or float), and the other way round: it comes back as what it is in `like`.
      step: which checkpoint; the newest that is whole by default.
      partial: whether `like` may have other leaves than the checkpoint: parameters without their optimizer for an
        evaluation, a model with a new head. Leaves of both, by name, are restored; those of `like` alone keep their values,
        and those of the checkpoint alone are left out. Rank 0 warns with the names of either. A leaf of both must have the
        same shape and dtype: take one with a new shape out of `like`, and put it in afterwards.

    Raises:
      CheckpointError: on every rank: there is none; a file is missing, truncated, damaged or not one of ours, with its name; a
        leaf of `like` has another shape or dtype or is not there, with its path; the save before could not be written.
      RankMismatchError: on every rank, if their trees, folders, steps or options differ.
      TypeError: a step that is no integer, a directory that is no path.
      ValueError: a state of `sharded` in `like` that was made for another number of ranks; two leaves with the same path.
      RuntimeError: called in traced code.
    """
    backend = untraced("restore")
    where = checked(backend, "restore", lambda: checked_folder("restore", directory))
    if step is not None:
        step = checked(backend, "restore", lambda: checked_step("restore", step))
    like = local(like)
    found = checked(backend, "restore", lambda: parts.leaves_of(like, backend.axes))
    leaves = [leaf for leaf, _ in found]
    out = parts.left_out(like)
    check_call(backend, "restore", leaves, where, f"step {step}, without {out}, partial {partial}")
    _raise(session.state(Saves).finished(backend))
    for tries in range(TRIES, 0, -1):
        whole, wrong = newest(backend, Path(directory), step)
        if whole is None:
            which = "no whole checkpoint" if step is None else f"no whole checkpoint of step {step}"
            raise CheckpointError(f"restore: there is {which} in {directory}. {wrong or 'Look where it was saved.'}")
        folder, manifest = whole
        saved = {leaf.name: leaf for leaf in manifest.leaves}
        there, here, missing = manifest.leaves, leaves, ""
        if partial:
            there, here, missing = only_common(there, here)
            _check_kept(folder, found, {leaf.name for leaf in here})
        if different := difference(there, here, out):
            way_out = "Take it out of `like`." if partial else (
                "Build the model and the optimizer as they were, or restore what fits with partial=True."
            )  # fmt: skip
            raise CheckpointError(f"restore: {folder}: {different}. {way_out}")
        try:
            values = read(backend, folder, manifest, [(leaf, saved[leaf.name]) for leaf in here])
            break
        except CheckpointError:  # was it removed meanwhile, by a run that saves?
            if tries == 1 or backend.broadcast_object(folder.exists(), 0):
                raise
    if missing and backend.place.rank == 0:
        warnings.warn(f"restore: {folder}: {missing}.", stacklevel=2)
    if not partial:  # what is restored in part is another run's beginning, or its end
        session.state(Saves).lineage.note_restore(Path(directory).absolute(), manifest.step)
    restored = dict(zip([leaf.name for leaf in here], values, strict=True))
    return parts.put_back(like, [leaf_values.like(x, restored[leaf.name]) if leaf.name in restored else x for leaf, x in found])


def _check_kept(folder: Path, found: list[tuple[Leaf, LeafValue]], restored: set[str]) -> None:
    """Raise unless something is restored, and the other leaves of `like` have values to keep."""
    if not restored:
        raise CheckpointError(f"restore: {folder} has no leaf of `like`. Name the leaves as they were saved.")
    for leaf, x in found:
        if leaf.name not in restored and isinstance(x, jax.ShapeDtypeStruct):
            raise CheckpointError(
                f"restore: {folder}: leaf {leaf.name} is not in it, and `like` has only its shape. Pass an array that it keeps."
            )


def _leaves_to_save(tree: PyTree, step: int, keep: int | None, axes: Mapping[str, int]) -> list[tuple[Leaf, LeafValue]]:
    if step < 0 or (keep is not None and keep < 1):
        raise ValueError(f"save: step is {step} and keep is {keep}. A step is 0 or more, and keep 1 or more, or None.")
    found = parts.leaves_of(local(tree), axes)
    for leaf, x in found:
        if isinstance(x, jax.ShapeDtypeStruct):
            raise TypeError(f"save: leaf {leaf.name} is a ShapeDtypeStruct, which holds no numbers. Make the array first.")
    return found


def _raise(error: str | None) -> None:
    if error:
        raise CheckpointError(f"save: {error}")
