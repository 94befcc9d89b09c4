"""Save a training run, and go on with it on any number of ranks."""

import operator
import os
from pathlib import Path
from typing import Any

import jax

from jaxmpi import _agreement
from jaxmpi._checkpoint import files, parts
from jaxmpi._checkpoint.parts import Leaf
from jaxmpi._checkpoint.reading import newest, read
from jaxmpi._checkpoint.together import meet, ranks_here
from jaxmpi._checkpoint.writing import Save, arrays_of, begin
from jaxmpi._errors import CheckpointError
from jaxmpi._jit import local
from jaxmpi._objects import untraced

__all__ = ["latest", "restore", "save"]

TRIES = 3  # to read a checkpoint, where another job removes old ones


def save(directory: str | os.PathLike, step: int, tree: Any, *, keep: int | None = 3, background: bool = True) -> None:
    """Save everything that a run goes on from: parameters, optimizer state, model state, keys, where it is in the data.

    The arrays are copied, and written while the training goes on. The checkpoint is there as a whole or not at all, however
    the job ends; it is there for certain when the next call of `save`, `restore` or `latest` returns, when the script ends in
    order, or on return with `background=False`.

    What is equal on all ranks is written by rank 0. Of the state of `sharded`, and of what else each rank has of its own, each
    rank writes its part, so that `directory` must be one that all ranks share.

    **Collective:** every rank calls it, with the same structure, shapes and dtypes.
    **Communication:** a comparison of them, and of how the last save has ended.

    Args:
      directory: holds the checkpoints of one run; made if it is not there.
      step: the number of the checkpoint, 0 or more. One of the same number is replaced; those of higher numbers stay, and are
        the latest: remove them to go on from an older one.
      tree: any pytree of arrays, PRNG keys, Python numbers and text.
      keep: how many checkpoints to keep, this one included; None for all.
      background: whether to return before it is written.

    Raises:
      CheckpointError: on every rank, if this save cannot begin, or if the one before could not be written; this one is then
        being written nevertheless.
      RankMismatchError: on every rank, if their trees, or Python numbers in them, differ.
      TypeError: a leaf that cannot be saved, with its path; a step that is no integer.
      ValueError: a negative step; `keep` below 1.
      RuntimeError: called in traced code.
    """
    backend = untraced("save")
    step = operator.index(step)
    if step < 0 or (keep is not None and keep < 1):
        raise ValueError(f"save: step is {step} and keep is {keep}. A step is 0 or more, and keep 1 or more, or None.")
    described = parts.leaves_of(local(tree), backend.place.size)
    leaves = [leaf for leaf, _ in described]
    for leaf, x in described:
        if isinstance(x, jax.ShapeDtypeStruct):
            raise TypeError(f"save: leaf {leaf.name} is a ShapeDtypeStruct, which holds no numbers. Make the array first.")
    meet(backend, "save", leaves, f"step {step}, keep {keep}", values=True)
    earlier = Save.finished(backend)
    writers = range(1 if all(leaf.part == "all" for leaf in leaves) else backend.place.size)
    arrays = {rank: arrays_of(described, rank) for rank in ranks_here(backend) if rank in writers}
    folder = begin(backend, Path(directory).absolute(), len(writers) > 1)
    Save.last = Save(backend, folder, step, arrays, writers, lambda files_: files.commit(folder, step, files_, leaves, keep))
    if not background:
        earlier = earlier or Save.finished(backend)
    if earlier:
        raise CheckpointError(f"save: {earlier}")


def latest(directory: str | os.PathLike) -> int | None:
    """The step of the newest checkpoint that is whole; None if there is none.

    Every file is read and its checksums compared; those that are damaged are warned of and passed over.

    **Collective:** every rank calls it.
    **Communication:** the number.

    Raises:
      CheckpointError: on every rank, if the save before could not be written.
      RuntimeError: called in traced code.

    >>> latest("a folder that is not there")
    """
    backend = untraced("latest")
    _agreement.meet(backend, _agreement.Statement.of("latest"))
    _raise(Save.finished(backend))
    folder, about = newest(backend, Path(directory), None)
    return None if folder is None else int(about["step"])


def restore(directory: str | os.PathLike, like: Any, step: int | None = None) -> Any:
    """What `save` has saved, on as many ranks as there are now, and on any backend.

    The states of `distributed` and `sharded` come back bit by bit on any number of ranks. What each rank has of its own
    otherwise (gradients that `accumulate` has not sent, steps of `local_sgd`, the errors of a codec) needs as many ranks as
    have saved it, unless it was equal on all of them.

    **Collective:** every rank calls it, with the same structure, shapes and dtypes.
    **Communication:** what is equal on all ranks, from rank 0, which alone reads it.

    Args:
      directory: that of `save`.
      like: a tree of the same structure, shapes and dtypes, such as the one that a new run begins with; its values don't
        matter, and `jax.ShapeDtypeStruct` will do. Arrays come back on its devices.
      step: which checkpoint; the newest that is whole by default.

    Raises:
      CheckpointError: on every rank: there is none; a file is missing, truncated, damaged or not one of ours, with its name; a
        leaf of `like` has another shape or dtype or is not there, with its path; the save before could not be written.
      RankMismatchError: on every rank, if their trees differ.
      ValueError: a state of `sharded` in `like` that was made for another number of ranks.
      RuntimeError: called in traced code.
    """
    backend = untraced("restore")
    like = local(like)
    described = parts.leaves_of(like, backend.place.size)
    leaves = [leaf for leaf, _ in described]
    meet(backend, "restore", leaves, f"step {step}", values=False)
    _raise(Save.finished(backend))
    for tries in range(TRIES, 0, -1):
        folder, about = newest(backend, Path(directory), step)
        if folder is None:
            which = "no whole checkpoint" if step is None else f"no whole checkpoint of step {step}"
            raise CheckpointError(f"restore: there is {which} in {directory}. " + (about or "Look where it was saved."))
        saved = {fields[0]: Leaf(*fields)._replace(shape=tuple(fields[3])) for fields in about["leaves"]}
        if wrong := parts.difference([*saved.values()], leaves):
            raise CheckpointError(f"restore: {folder}: {wrong}. Build the model and the optimizer as they were.")
        try:
            values = read(backend, folder, [(leaf, saved[leaf.name]) for leaf in leaves], about["ranks"])
            break
        except CheckpointError:  # was it removed meanwhile, by a run that saves?
            if tries == 1 or backend.broadcast_object(folder.exists(), 0):
                raise
    new = [
        saved[leaf.name].value if leaf.value is not None else parts.like(x, v)
        for (leaf, x), v in zip(described, values, strict=True)
    ]
    return parts.put_back(like, new)


def _raise(error: str | None) -> None:
    if error:
        raise CheckpointError(f"save: {error}")
