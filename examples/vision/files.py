"""Files of a run beside its checkpoints: tables of numbers, and weights."""

import csv
import os

import jax
import jax.numpy as jnp
import numpy as np

import jaxmpi


class Table:
    """CSV file of rank 0 that a resumed run continues.

    Keeps the rows of an earlier run in which `column` is at most `last`; each `write` adds a row.
    """

    def __init__(self, path, columns, column, last):
        self.file = None
        if jaxmpi.rank() == 0:
            earlier = list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []
            part = path.with_suffix(".part")
            self.file = part.open("w", newline="", buffering=1)
            self.rows = csv.DictWriter(self.file, columns)
            self.rows.writeheader()
            whole = (row for row in earlier if None not in row.values())  # the last one may be torn
            self.rows.writerows(row for row in whole if int(row[column]) <= last)
            os.replace(part, path)

    def write(self, **row):
        if self.file:
            self.rows.writerow(row)


def write_weights(path, tree):
    """Write a tree's arrays on rank 0, under the names of their paths, as a whole or not at all."""
    if jaxmpi.rank() == 0:
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.savez(file, **{name: np.asarray(x) for name, x in named(tree).items()})
        os.replace(part, path)


def read_weights(path, tree):
    """Read the arrays in rank 0's file; return them on every rank, with the names it lacks.

    What has another shape there, as the head for other classes has, stays as it is in `tree`.
    Raises a ValueError, on every rank, for a file that cannot be read, and for that of another
    model.
    """
    saved, error = None, None
    if jaxmpi.rank() == 0:
        try:
            with np.load(path) as file:
                saved = dict(file)
        except Exception as why:  # numpy and zipfile raise many kinds
            error = f"{path} cannot be read: {why}"
    saved, error = jaxmpi.broadcast_object((saved, error))
    if error:
        raise ValueError(error)
    here = named(tree)
    fits = [name for name, x in here.items() if name in saved and saved[name].shape == x.shape]
    if 2 * len(fits) < len(here):
        raise ValueError(
            f"{path} holds another model: {len(fits)} of its arrays fit this one's {len(here)}."
        )
    new = [jnp.asarray(saved[name], x.dtype) if name in fits else x for name, x in here.items()]
    missing = [name for name in here if name not in fits]
    return jax.tree.unflatten(jax.tree.structure(tree), new), missing


def named(tree):
    """Return the arrays by their paths, such as `params/head/kernel`."""
    arrays = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        arrays[name.removesuffix("/value")] = x  # nnx ends every path with it
    return arrays
