"""Arguments of `save`, `restore` and `latest`: one folder on all ranks, and their order."""

import os
import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmpi
from jaxmpi.testing import run_ranks

RUN = {"w": jnp.arange(3.0), "step": 3}


class Refuses(os.PathLike):
    """A path, or a node of a tree, that cannot be read."""

    def __init__(self, error):
        self.error = error

    def __fspath__(self):
        raise self.error


def flatten(node):
    raise node.error


jax.tree_util.register_pytree_node(Refuses, flatten, lambda _, children: Refuses(*children))
CALLS = {
    "save": lambda folder: jaxmpi.save(folder, 4, RUN),
    "restore": lambda folder: jaxmpi.restore(folder, RUN),
    "latest": jaxmpi.latest,
}


def check_folders():
    """Each rank has a folder of its own, as with `tempfile.mkdtemp()` on each."""
    mine = tempfile.mkdtemp()
    first, second, *_ = jaxmpi.allgather_object(mine)
    for name, call in CALLS.items():
        with pytest.raises(jaxmpi.RankMismatchError) as caught:
            call(mine)
        text = str(caught.value)
        assert (
            text.startswith(f"{name}: ")
            and f"directory {first}" in text
            and f"directory {second}" in text
        ), text
        assert not os.listdir(mine)
    assert jaxmpi.latest(first) is None  # the ranks go on together


@run_ranks(2, 3)
def test_other_folders_on_other_ranks_are_an_error_with_both():
    check_folders()


@run_ranks(2, backend="xla")
def test_other_folders_on_other_ranks_are_an_error_with_both_on_xla():
    check_folders()


@run_ranks(1, 2)
def test_one_folder_has_several_names():
    """Equal paths on all ranks are one folder, with or without a final slash.

    The working directories of the ranks do not matter.
    """
    rank, folder = jaxmpi.rank(), Path(jaxmpi.broadcast_object(tempfile.mkdtemp()))
    names = [str(folder), f"{folder}/", folder, f"{folder.parent}/./{folder.name}"]
    jaxmpi.save(names[rank], 4, RUN, background=False)
    for i in range(len(names)):
        assert jaxmpi.latest(names[(rank + i) % len(names)]) == 4
        got = jaxmpi.restore(names[(rank + i) % len(names)], {"w": jnp.zeros(3), "step": 0})
        np.testing.assert_array_equal(got["w"], RUN["w"])
    here = os.getcwd()
    os.chdir(folder if rank == 0 else tempfile.mkdtemp())
    try:
        jaxmpi.save("run", 5, RUN, background=False)  # rank 0 knows where that is
        assert jaxmpi.latest("run") == 5
    finally:
        os.chdir(here)
    assert jaxmpi.latest(folder / "run") == 5


@run_ranks(1, 2)
def test_arguments_in_another_order_say_the_signature():
    folder = jaxmpi.broadcast_object(tempfile.mkdtemp())
    wrong = {
        "restore: step is of type dict, and must be an integer or None. "
        "Call restore(directory, like, step).": [
            lambda: jaxmpi.restore(folder, 20, RUN),
            lambda: jaxmpi.restore(folder, RUN, {"step": 3}),
        ],
        "save: step is of type dict, and must be an integer. Call save(directory, step, tree).": [
            lambda: jaxmpi.save(folder, RUN, 20),
            lambda: jaxmpi.save(folder, RUN, RUN),
        ],
        "save: directory is of type dict, and must be a path. Call save(directory, step, tree).": [
            lambda: jaxmpi.save(RUN, 4, folder)
        ],
        "restore: directory is of type dict, and must be a path. "
        "Call restore(directory, like, step).": [lambda: jaxmpi.restore(RUN, folder)],
        "latest: directory is of type int, and must be a path. Call latest(directory).": [
            lambda: jaxmpi.latest(4)
        ],
        "restore: step is of type float, and must be an integer or None. "
        "Call restore(directory, like, step).": [lambda: jaxmpi.restore(folder, RUN, 4.0)],
    }
    for text, calls in wrong.items():
        for call in calls:
            with pytest.raises(TypeError, match=re.escape(text)):
                call()
    assert jaxmpi.latest(folder) is None
    jaxmpi.save(folder, jnp.int32(4), RUN, background=False)
    assert jaxmpi.latest(folder) == 4
    np.testing.assert_array_equal(jaxmpi.restore(folder, RUN, np.int64(4))["w"], RUN["w"])


@run_ranks(2)
def test_arguments_in_another_order_on_one_rank_are_an_error_on_all():
    folder = jaxmpi.broadcast_object(tempfile.mkdtemp())
    for right, wrong in (
        (lambda: jaxmpi.restore(folder, RUN, 20), lambda: jaxmpi.restore(folder, 20, RUN)),
        (lambda: jaxmpi.save(folder, 20, RUN), lambda: jaxmpi.save(folder, RUN, 20)),
        (lambda: jaxmpi.latest(folder), lambda: jaxmpi.latest(20)),
    ):
        if jaxmpi.rank() == 0:
            with pytest.raises(
                jaxmpi.RankMismatchError,
                match=r"TypeError: .* Call (save|restore|latest)\(directory",
            ):
                right()
        else:
            with pytest.raises(
                (TypeError, jaxmpi.RankMismatchError),
                match=r"Call (save|restore|latest)\(directory",
            ):
                wrong()
    assert jaxmpi.latest(folder) is None


@run_ranks(2, 3)
@pytest.mark.parametrize("error", [AttributeError("no attribute a"), RuntimeError("no"), OSError()])
def test_an_error_of_any_type_in_the_arguments_of_one_rank_is_raised_on_all(error):
    folder, wrong = jaxmpi.broadcast_object(tempfile.mkdtemp()), Refuses(error)
    last = jaxmpi.rank() == jaxmpi.size() - 1
    for call in (
        lambda: jaxmpi.save(folder, 4, wrong if last else RUN),
        lambda: jaxmpi.save(wrong if last else folder, 4, RUN),
        lambda: jaxmpi.restore(folder, wrong if last else RUN),
        lambda: jaxmpi.latest(wrong if last else folder),
    ):
        with pytest.raises(
            type(error) if last else jaxmpi.RankMismatchError, match=str(error)
        ) as caught:
            call()
        assert last or type(error).__name__ in str(caught.value)
    assert jaxmpi.latest(folder) is None  # the ranks go on together
