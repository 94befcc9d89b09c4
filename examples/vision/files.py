"""What a run leaves behind, beside its checkpoints: tables of numbers, and weights."""

import csv
import os

import jax
import jax.numpy as jnp
import numpy as np

import jaxmpi


class Table:
    """A CSV file of rank 0: the rows of an earlier run in which `column` is at most `last`, and one for each `write`."""

    def __init__(self, path, columns, column, last):
        self.file = None
        if jaxmpi.rank() == 0:
            earlier = list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []
            self.file = path.open("w", newline="", buffering=1)
            self.rows = csv.DictWriter(self.file, columns)
            self.rows.writeheader()
            self.rows.writerows(row for row in earlier if int(row[column]) <= last)

    def write(self, **row):
        if self.file:
            self.rows.writerow(row)


def write_weights(path, tree):
    """Rank 0 writes a tree's arrays under the names of their paths, as a whole or not at all."""
    if jaxmpi.rank() == 0:
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.savez(file, **{name: np.asarray(x) for name, x in named(tree).items()})
        os.replace(part, path)


def read_weights(path, tree):
    """The arrays that rank 0 finds in the file, on every rank, and those that are not in it.

    What has another shape there, as the head for other classes has, stays as it is in `tree`.
    """
    saved, error = None, None
    if jaxmpi.rank() == 0:
        try:
            with np.load(path) as file:
                saved = dict(file)
        except (OSError, ValueError, EOFError) as why:
            error = f"{path} cannot be read: {why}"
    saved, error = jaxmpi.broadcast_object((saved, error))  # NumPy arrays, by value
    here = named(tree)
    if not error:
        fits = [name for name, x in here.items() if name in saved and saved[name].shape == x.shape]
        if 2 * len(fits) < len(here):
            error = f"{path} holds another model: {len(fits)} of its arrays fit this one's {len(here)}."
    if error:
        raise SystemExit(error)  # on every rank
    new = [jnp.asarray(saved[name], x.dtype) if name in fits else x for name, x in here.items()]
    return jax.tree.unflatten(jax.tree.structure(tree), new), [name for name in here if name not in fits]


def named(tree):
    """The arrays by their paths, such as `blocks/0/convs/1/kernel`."""
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
