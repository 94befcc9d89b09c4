"""Save a training run, and go on with it on any number of ranks."""

import os
from collections.abc import Sequence
from pathlib import Path

from jaxmpi import _jaxcompat
from jaxmpi._backends.interface import Ranks
from jaxmpi._checkpoint import restoring, saving, tree_leaves
from jaxmpi._checkpoint.agreement import (
    RaisedError,
    Side,
    agree,
    checked_folder,
    checked_step,
    lines_of,
)
from jaxmpi._checkpoint.saving import Saves
from jaxmpi._collectives.objects import untraced
from jaxmpi._consistency.compare import compare_values_again, raising_on_all
from jaxmpi._errors import CheckpointError
from jaxmpi._jit.api import local
from jaxmpi._leaves import PyTree
from jaxmpi._world import session

__all__ = ["latest", "restore", "save"]

REBUILD = "Build the model and the optimizer as they were, or restore what fits with partial=True."
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
    """Save all that a run goes on from: parameters, states, PRNG keys, the place in the data.

    The arrays are copied, and written while the training goes on. The checkpoint is there as a
    whole or not at all, however the job ends. It is there for certain when the next call of `save`,
    `restore` or `latest` returns, when the script ends in order, or on return with
    `background=False`.

    Rank 0 writes what is equal on all ranks, after the ranks have compared checksums (CRC-32) of
    it. What differs between ranks must be in a `PerRankState`. Each rank writes its own values of
    these, and its shards of each `ShardedArray` and of the state of `sharded`, so that `directory`
    must then be one that all ranks share.

    **Collective:** every rank calls it, with the same structure, shapes and dtypes.
    **Communication:** two exchanges before it is written. All ranks compare one fingerprint, 16
    bytes, of the call, of the leaves, of checksums of what is equal on all ranks, and of how the
    last save has ended; only where it differs do they send more. Then rank 0 sends the path of the
    folder that it has made, and every rank the Python numbers in its `PerRankState`s. The first
    save of a session into a directory in which several ranks write takes a third one: whether all
    see the folder. With `background=False` the ranks tell each other how it has ended, one round.
    Where MPI cannot be called from threads, they write before `save` returns, and tell rank 0 what,
    one round; elsewhere the monitor's thread does, beside the training.

    Args:
      directory: holds the checkpoints of one run; made if it is not there. The same on all ranks,
        in the same words; a relative one is a folder of rank 0's working directory.
      step: the number of the checkpoint, from 0 to 2^63 - 1. One of the same number is replaced.
        Those that this run has not come from are set aside, with a line on the screen: those of
        higher numbers, as after going back to an older step or in a folder of another run, and, at
        the first save after `restore` that is written, those after the step that was restored. They
        get names that begin with "abandoned-", and `latest` and `restore` do not look at them.
      tree: any pytree of arrays, PRNG keys, Python numbers and text.
      keep: how many checkpoints to keep, this one included; None for all.
      background: whether to return before it is written.
      in_memory: whether to write it into the memory of the host (/dev/shm) rather than to
        `directory`, for a restart of a job that fails while its host goes on. `latest` and
        `restore` of `directory` find it. Only the newest one is kept there, and none once a later
        one is in `directory`: end a run with one of these. All ranks must be on one host.

    Raises:
      CheckpointError: on every rank, if this save cannot begin, or if the one before could not be
        written; this one is then being written nevertheless.
      RankMismatchError: on every rank, if their trees, folders, steps or options differ, or the
        values of a leaf that is in no `PerRankState`, with its path; on the others, if one of the
        errors below is raised on some ranks only, with its text.
      TypeError: a leaf that cannot be saved, with its path; a step that is no integer, a directory
        that is no path.
      ValueError: a step below 0 or above 2^63 - 1; `keep` below 1; two leaves with the same path.
      RuntimeError: called in traced code.
    """
    backend = untraced("save")
    saves = session.state(Saves)
    with raising_on_all(backend, "save", sends=False):
        where = checked_folder("save", directory)
        step = checked_step("save", step)
        found = saving.leaves_to_save(tree, step, keep, backend.axes)
    leaves = [leaf for leaf, _ in found]
    writers = saving.writers_of(leaves, backend.place.size)
    # 1. One save is written at a time: when it is done, there is room for the copies of this one.
    last_save = saves.wait(backend)
    prepared = saving.prepare(backend, found, writers)
    # 2. The first round: the ranks agree on what they save, and that all can.
    options = f"step {step}, keep {keep}, background {background}"
    lines = lines_of(leaves, where, options + (", in memory" if in_memory else ""))
    side = Side(lines, prepared.digests[0], prepared.error, last_save)
    sides = agree(backend, "save", side)
    saving.check_sides(prepared, sides)
    # 3. The second round: rank 0 has made the folder.
    begun = saving.begin(backend, saves, Path(directory), leaves, in_memory)
    # 4. The ranks write, and rank 0 makes the folder a checkpoint.
    kept = 1 if in_memory else keep
    saves.start(backend, saving.Plan(begun, step, kept, writers, prepared.arrays))
    failed = [side.last_save for side in sides]
    if not background:
        failed += backend.allgather_object(saves.wait(backend))
        saves.forget()
    _raise_first(failed)


def latest(directory: str | os.PathLike) -> int | None:
    """Return the step of the newest whole checkpoint, in the folder or in memory; None without one.

    Every file is read and its checksums compared; those that are damaged are warned of and passed
    over.

    **Collective:** every rank calls it.
    **Communication:** a comparison of the call and of how the last save has ended, 16 bytes; from
    rank 0 the name of the folder in memory; if there is one, from every rank whether it sees it;
    from rank 0 the manifest, or the error.

    Raises:
      CheckpointError: on every rank, if the save before could not be written.
      RankMismatchError: on every rank, if their folders differ.
      TypeError: a directory that is no path.
      RuntimeError: called in traced code.

    >>> latest("a folder that is not there")
    """
    backend = untraced("latest")
    with raising_on_all(backend, "latest", sends=False):
        where = checked_folder("latest", directory)
    _agree_after_save(backend, "latest", [where])
    whole, _ = restoring.newest(backend, Path(directory), None)
    return None if whole is None else whole[1].step


def restore(
    directory: str | os.PathLike,
    like: PyTree,
    step: int | None = None,
    *,
    partial: bool = False,
) -> PyTree:
    """Return what `save` has saved, on as many ranks as there are now, and on any backend.

    Parameters, and the states of their optimizers, come back bit by bit on any number of ranks,
    whether they are replicated, as with `distributed`, or sharded, as with `sharded` and
    `fully_shard`; and as one of these where another was saved. Other values that differ between
    ranks (a `PerRankState`: that of `accumulate`, `local_sgd` and codecs, too) need as many ranks
    as have saved them, unless they were equal on all of them. What is sharded over an axis of the
    ranks needs the same axes, unless the groups along it had equal values. `PerRankState(None)` in
    its place in `like` leaves it out: an environment, say, to be made anew for another number of
    ranks.

    **Collective:** every rank calls it, with the same structure, shapes and dtypes.
    **Communication:** a comparison of the call and of how the last save has ended, 16 bytes; from
    rank 0 the name of the folder in memory; if there is one, from every rank whether it sees it;
    from rank 0 the manifest, or the error; from every rank None or the error of what it reads;
    and from rank 0 the numbers of what is equal on all ranks, which it alone reads.

    Args:
      directory: that of `save`.
      like: a tree of the same structure, shapes and dtypes, such as the one that a new run begins
        with; its values don't matter, and `jax.ShapeDtypeStruct` will do. Arrays come back on its
        devices, in its shardings and with its weak types. A Python number fits an array without
        axes of its type (bool, integer or float), and the other way round: it comes back as what it
        is in `like`.
      step: which checkpoint; the newest that is whole by default.
      partial: whether `like` may have other leaves than the checkpoint: parameters without their
        optimizer for an evaluation, a model with a new head. Leaves of both, by name, are restored;
        those of `like` alone keep their values, and those of the checkpoint alone are left out.
        Rank 0 warns with the names of either. A leaf of both must have the same shape and dtype:
        take one with a new shape out of `like`, and put it in afterwards.

    Raises:
      CheckpointError: on every rank: there is none; a file is missing, truncated, damaged or not
        one of ours, with its name; a leaf of `like` has another shape or dtype or is not there,
        with its path; the save before could not be written.
      RankMismatchError: on every rank, if their trees, folders, steps or options differ; on the
        others, if one of the errors below is raised on some ranks only, with its text.
      TypeError: a step that is no integer, a directory that is no path.
      ValueError: a state of `sharded` in `like` that was made for another number of ranks; two
        leaves with the same path.
      RuntimeError: called in traced code.
    """
    backend = untraced("restore")
    saves = session.state(Saves)
    # 1. The ranks agree on the call, and the last save is written.
    with raising_on_all(backend, "restore", sends=False):
        where = checked_folder("restore", directory)
        if step is not None:
            step = checked_step("restore", step)
        like = local(like)
        found = tree_leaves.leaves_of(like, backend.axes)
        omitted = tree_leaves.omitted(like)
    wanted = [leaf for leaf, _ in found]
    options = f"step {step}, without {omitted}, partial {partial}"
    _agree_after_save(backend, "restore", lines_of(wanted, where, options))
    for tries in range(TRIES, 0, -1):
        # 2. Rank 0 looks for the checkpoint.
        whole, errors = restoring.newest(backend, Path(directory), step)
        if whole is None:
            which = "no whole checkpoint" + ("" if step is None else f" of step {step}")
            advice = "Look where it was saved."
            if errors and step is not None:
                advice = "Restore an older step, or look where it was saved."
            raise CheckpointError(
                " ".join([f"restore: there is {which} in {directory}.", *errors]),
                advice=advice,
                path=directory,
            )
        folder, manifest = whole
        # 3. Every rank has the manifest, and finds the same differences.
        saved, here, warning, advice = manifest.leaves, wanted, "", REBUILD
        if partial:
            saved, here, warning = restoring.only_common(saved, wanted)
            restoring.check_common(folder, here)
            advice = "Take it out of `like`."
        if different := restoring.difference(saved, here, omitted):
            raise CheckpointError(
                f"restore: {folder}: {different.what}.",
                advice=advice,
                path=folder,
                leaf=different.leaf,
            )
        # 4. Rank 0 reads what is replicated, and each rank its shards and its own values.
        by_name = {leaf.name: leaf for leaf in saved}
        pairs = [(by_name[leaf.name], leaf) for leaf in here]
        kept = [(leaf, x) for leaf, x in found if leaf.name not in by_name]
        try:
            values = restoring.read(backend, folder, manifest, pairs, kept)
            break
        except CheckpointError:  # a run that saves may have removed it: then look again
            if tries == 1 or backend.broadcast_object(os.path.exists(folder), 0):
                raise
    compare_values_again(backend)
    if warning and backend.place.rank == 0:
        _jaxcompat.warn(f"restore: {folder}: {warning}.")
    if not partial and backend.place.rank == 0:  # which makes the folders checkpoints
        saves.lineage.note_restore(Path(directory).absolute(), manifest.step)
    restored = dict(zip([leaf.name for leaf in here], values, strict=True))
    out = []
    for leaf, x in found:
        out.append(tree_leaves.like(x, restored[leaf.name]) if leaf.name in restored else x)
    return tree_leaves.put_back(like, out)


def _agree_after_save(backend: Ranks, function: str, lines: list[str]) -> None:
    """Compare a call, and wait for the last save; raise its error on all ranks, if there is one."""
    saves = session.state(Saves)
    sides = agree(backend, function, Side(lines, last_save=saves.wait(backend)))
    saves.forget()
    _raise_first([side.last_save for side in sides])


def _raise_first(failed: Sequence[RaisedError | None]) -> None:
    """Raise the error of the first rank whose part of a save has failed, if there is one."""
    for error in failed:
        if error is not None:
            raise error.to_raise()
