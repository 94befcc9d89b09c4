"""Damaged and hostile checkpoints are found, passed over, or harmless.

None gives another number, a wait, or a large allocation.

100 random corruptions here; `make test-all ONLY=soak` takes 900 others.
"""

import io
import itertools
import json
import os
import re
import shutil
import signal
import socket
import tracemalloc
import warnings
import zipfile
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmpi
from jaxmpi import PerRank, PerRankState
from jaxmpi._checkpoint import array_files, folders

RANKS = 2
NUMBERS = 60_000  # of float32 in the largest leaf: there are two, and the state of Adam for one
SLACK_BYTES = 4 << 20  # for what is no array, beside twice the checkpoint
JUNK = (
    None,
    True,
    -1,
    0.5,
    2**70,
    "x",
    "",
    [],
    [1],
    {},
    {"a": 1},
    [[]],
    "../rank-0.npz",
    "object",
    "V8",
    "float32,float32",
)


def tree_of(step, ranks=RANKS):
    """Make a tree to save: numbers depend on the step, and per-rank ones on the rank, too."""
    x = jnp.arange(NUMBERS, dtype=jnp.float32) * step
    of_rank = PerRank(np.arange(ranks * 8, dtype=np.int32).reshape(ranks, 8) * step)
    tx = jaxmpi.sharded(optax.adam(0.1))
    _, state = jaxmpi.jit(tx.update)({"w": x}, tx.init({"w": x}), {"w": x})
    return {
        "a": x,
        "b": x[::-1].copy(),
        "small": jnp.full((3, 5), step, jnp.bfloat16),
        "key": jax.random.key(step),
        "own": PerRankState({"x": of_rank, "n": step}),
        "state": state,
        "step": step,
        "name": f"step {step}",
    }


def fingerprint(tree):
    """Return a fingerprint of all numbers of the tree."""
    is_key = lambda x: isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    tree = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)
    return {
        jax.tree_util.keystr(path): np.asarray(x).tobytes()
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


@pytest.fixture(autouse=True)
def initialized():
    jaxmpi.init()


class Made(NamedTuple):
    directory: Path  # with checkpoints of steps 1 and 2
    contents: dict  # the fingerprint of each
    like: object  # a tree of the same structure


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("made")
    with jaxmpi.simulate(RANKS):
        trees = {step: tree_of(step) for step in (1, 2, 3)}
        contents = {step: fingerprint(trees[step]) for step in (1, 2)}
        for step in contents:
            jaxmpi.save(directory, step, trees[step], background=False)
            assert fingerprint(jaxmpi.restore(directory, trees[3], step=step)) == contents[step]
    return Made(directory, contents, trees[3])


@pytest.fixture
def copied(made, tmp_path):
    shutil.copytree(made.directory, tmp_path / "run")
    return tmp_path / "run"


class Waits(BaseException):
    """Exception that nothing catches."""


@contextmanager
def limited(directory, seconds=20):
    """Fail if what stands under it waits, or takes more than twice the memory of the checkpoint."""

    def late(*_):
        raise Waits

    size = 0
    for path in Path(directory).rglob("*"):
        if path.is_file() and not path.is_symlink():
            size += path.stat().st_size
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 2 * size + SLACK_BYTES
    finally:
        tracemalloc.stop()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(directory, made, *, step=None):
    """ "found", "passed over" or "harmless"; fails where anything else comes back."""
    with warnings.catch_warnings(record=True) as caught, jaxmpi.simulate(RANKS), limited(directory):
        warnings.simplefilter("always")
        try:
            got = fingerprint(jaxmpi.restore(directory, made.like, step))
        except jaxmpi.CheckpointError as error:
            assert str(directory) in str(error)
            return "found"
    passed = any("a checkpoint is passed over" in str(warning.message) for warning in caught)
    if got == made.contents[2]:
        return "harmless"
    assert got == made.contents[1] and step is None and passed, "another number"
    return "passed over"


def folder_of(directory, step=2):
    return directory / f"step-{step:012}"


def rewrite_manifest(folder, change):
    """Change a manifest, and make its checksum that of the new text."""
    path = folder / "manifest.json"
    about = json.loads(path.read_text())
    del about["checksum"]
    change(about)
    text = json.dumps(about, indent=1)
    path.write_text(f'{{"checksum": {zlib.crc32(text.encode())},\n{text[1:]}')


def members(folder, rank=0):
    about = json.loads((folder / "manifest.json").read_text())
    return about["files"][f"rank-{rank}.npz"]["arrays"]


# one by one


def exchange(a, b):
    a.rename(a.with_name("between"))
    b.rename(a)
    a.with_name("between").rename(b)


def steps_exchanged(directory, rng):
    name = f"rank-{rng.integers(RANKS)}.npz"
    exchange(folder_of(directory, 1) / name, folder_of(directory, 2) / name)


def ranks_exchanged(directory, rng):
    exchange(folder_of(directory) / "rank-0.npz", folder_of(directory) / "rank-1.npz")


def one_ranks_file_for_both(directory, rng):
    shutil.copy(folder_of(directory) / f"rank-{rng.integers(2)}.npz", directory / "copy")
    for rank in range(RANKS):
        shutil.copy(directory / "copy", folder_of(directory) / f"rank-{rank}.npz")


def older_file(directory, rng):
    name = ("manifest.json", "rank-0.npz", "rank-1.npz")[rng.integers(3)]
    shutil.copy(folder_of(directory, 1) / name, folder_of(directory) / name)


def folders_exchanged(directory, rng):
    exchange(folder_of(directory, 1), folder_of(directory, 2))


def older_folder_renamed(directory, rng):
    shutil.rmtree(folder_of(directory))
    shutil.copytree(folder_of(directory, 1), folder_of(directory))


def arrays_swapped(directory, rng):
    """Swap two arrays in place: the headers and the archive stay right."""
    path = folder_of(directory) / "rank-0.npz"
    (a, length, _), (b, other, _) = (
        members(folder_of(directory))[name] for name in ("['a']", "['b']")
    )
    data = bytearray(path.read_bytes())
    assert length == other
    data[a : a + length], data[b : b + length] = data[b : b + length], data[a : a + length]
    path.write_bytes(data)


def archive_rewritten(directory, rng):
    """Rewrite the archive with another program: arrays swapped, stored or deflated, and padded.

    The padding restores the size that they had.
    """
    path = folder_of(directory) / f"rank-{rng.integers(RANKS)}.npz"
    size = path.stat().st_size
    with np.load(path) as opened:
        arrays = {name: opened[name] for name in opened.files}
    same = []
    for a, b in itertools.product(arrays, arrays):
        if a < b and arrays[a].nbytes == arrays[b].nbytes:
            same.append((a, b))
    a, b = same[rng.integers(len(same))]
    arrays[a], arrays[b] = arrays[b], arrays[a]
    packed = io.BytesIO()
    (np.savez, np.savez_compressed)[rng.integers(2)](packed, **arrays)
    path.write_bytes(packed.getvalue()[:size].ljust(size, b"\0"))


def zip_bomb(directory, rng):
    """A file of the same size, whose first array would take 20 times as much memory."""
    path = folder_of(directory) / "rank-0.npz"
    size = path.stat().st_size
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("['a'].npy", bytes(20 * size))
        rest = size - archive.fp.tell() - len("['a'].npy") - 46 - (30 + 46 + 2) - 22
        archive.writestr("b", bytes(rest), zipfile.ZIP_STORED)
    assert path.stat().st_size == size


def hostile_npy_header(directory, rng):
    start, *_ = members(folder_of(directory))["['a']"]
    header = b"{'descr': '|O', 'fortran_order': True, 'shape': (9999999999, 9999)}"
    patch(folder_of(directory) / "rank-0.npz", start + 12, header)


def hostile_zip_header(directory, rng):
    path = folder_of(directory) / "rank-0.npz"
    place = [m.start() for m in re.finditer(b"PK(\1\2|\3\4|\5\6)", path.read_bytes())]
    patch(
        path, place[rng.integers(len(place))] + 4 + rng.integers(20), rng.bytes(rng.integers(1, 12))
    )


def patch(path, start, data):
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data)


def some_file(directory, rng):
    return folder_of(directory) / ("manifest.json", "rank-0.npz", "rank-1.npz")[rng.integers(3)]


def some_place(path, rng):
    return int(rng.integers(max(path.stat().st_size, 1)))


def bit_flipped(directory, rng):
    path = some_file(directory, rng)
    at = some_place(path, rng)
    with path.open("rb") as file:
        file.seek(at)
        old = file.read(1) or b"\0"
    patch(path, at, bytes([old[0] ^ 1 << rng.integers(8)]))


def bytes_overwritten(directory, rng):
    path = some_file(directory, rng)
    patch(path, some_place(path, rng), rng.bytes(int(10 ** rng.uniform(0, 4))))


def bytes_zeroed(directory, rng):
    path = some_file(directory, rng)
    patch(path, some_place(path, rng), bytes(int(10 ** rng.uniform(0, 4))))


def bytes_inserted_or_cut(directory, rng):
    path = some_file(directory, rng)
    data, at, count = path.read_bytes(), some_place(path, rng), int(rng.integers(1, 100))
    path.write_bytes(
        data[:at] + (data[at + count :] if rng.integers(2) else rng.bytes(count) + data[at:])
    )


def truncated(directory, rng):
    path = some_file(directory, rng)
    os.truncate(path, some_place(path, rng))


def grown(directory, rng):
    path = some_file(directory, rng)
    os.truncate(path, path.stat().st_size + int(10 ** rng.uniform(0, 9)))  # a hole, of up to 1 GB


def removed(directory, rng):
    path = some_file(directory, rng)
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def replaced(directory, rng):
    """Replace a file by something that is no regular file."""
    path = some_file(directory, rng)
    moved = directory / f"moved-{path.name}"
    path.rename(moved)
    kind = (
        "fifo",
        "directory",
        "socket",
        "device",
        moved,
        folder_of(directory, 1) / path.name,
        "nowhere",
        path,
    )[rng.integers(8)]
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        bind(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else kind)


def bind(path):
    with socket.socket(socket.AF_UNIX) as one:
        here = os.getcwd()
        os.chdir(path.parent)  # names of sockets are short
        try:
            one.bind(path.name)
        finally:
            os.chdir(here)


def junk_in_the_manifest(directory, rng):
    """Put anything in the place of anything in the manifest, with the right checksum.

    Values stay: who can write them has written a checkpoint.
    """

    def change(about):
        node, key = about, None
        while isinstance(node, dict | list) and len(node):
            keys = [*node] if isinstance(node, dict) else [*range(min(len(node), 4))]
            parent, key = node, keys[rng.integers(len(keys))]
            node = node[key]
            if rng.random() < 0.3:
                break
        parent[key] = JUNK[rng.integers(len(JUNK))]

    rewrite_manifest(folder_of(directory), change)


FOUND = [
    steps_exchanged,
    ranks_exchanged,
    one_ranks_file_for_both,
    older_file,
    folders_exchanged,
    older_folder_renamed,
]
FOUND += [
    arrays_swapped,
    archive_rewritten,
    zip_bomb,
    truncated,
    grown,
    removed,
    hostile_npy_header,
]
RANDOM = [
    bit_flipped,
    bytes_overwritten,
    bytes_zeroed,
    bytes_inserted_or_cut,
    hostile_zip_header,
    replaced,
    junk_in_the_manifest,
]


@pytest.mark.parametrize("corrupt", FOUND)
def test_a_checkpoint_that_is_another_is_not_restored(copied, made, corrupt):
    corrupt(copied, np.random.default_rng(0))
    assert outcome(copied, made, step=2) == "found"
    first_is_whole = corrupt not in (steps_exchanged, folders_exchanged)
    assert outcome(copied, made) == ("passed over" if first_is_whole else "found")


@pytest.mark.parametrize(
    "first",
    [*range(0, 100, 50), *(pytest.param(i, marks=pytest.mark.soak) for i in range(100, 1000, 50))],
)
def test_random_corruptions(made, tmp_path, first):
    seen = []
    for seed in range(first, first + 50):
        rng = np.random.default_rng(seed)
        directory = tmp_path / str(seed)
        shutil.copytree(made.directory, directory)
        names = []
        some = []
        for table in (FOUND, RANDOM, RANDOM):
            if rng.integers(2):
                some.append(table[rng.integers(len(table))])
        some = some or [bit_flipped]
        # the others would wait for a FIFO
        for corrupt in sorted(some, key=lambda corrupt: corrupt is replaced):
            try:
                corrupt(directory, rng)
                names.append(corrupt.__name__)
            except (
                OSError,
                ValueError,
                KeyError,
                TypeError,
                zipfile.BadZipFile,
                EOFError,
                AssertionError,
                IndexError,
            ):
                continue  # one of the others has left nothing to corrupt
        try:
            seen.append(outcome(directory, made, step=(None, 2)[rng.integers(2)]))
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {', '.join(names)}") from error
        shutil.rmtree(directory)
    assert {"found", "passed over"} <= set(seen)


@pytest.mark.parametrize("name", ["manifest.json", "rank-0.npz"])
@pytest.mark.parametrize(
    "kind", ["fifo", "directory", "socket", "link", "link to a device", "link to nothing"]
)
def test_only_regular_files_are_read(copied, made, name, kind):
    path = folder_of(copied) / name
    good = path.rename(copied / "good")
    makes = {"fifo": os.mkfifo, "directory": os.mkdir, "socket": bind}
    links = {"link": good, "link to a device": "/dev/zero", "link to nothing": "nothing"}
    makes[kind](path) if kind in makes else path.symlink_to(links[kind])
    words = rf"{name} (is no regular file|cannot be opened: .* must be a regular file)"
    with limited(copied), pytest.warns(UserWarning, match=words):
        assert jaxmpi.latest(copied) == 1
    assert outcome(copied, made) == "passed over"


@pytest.mark.parametrize("kind", ["fifo", "file", "link to nothing", "empty"])
def test_what_has_the_name_of_a_checkpoint_and_is_none(copied, made, kind):
    path = folder_of(copied, 3)
    {
        "fifo": os.mkfifo,
        "file": Path.touch,
        "link to nothing": lambda p: p.symlink_to("nothing"),
        "empty": os.mkdir,
    }[kind](path)
    assert outcome(copied, made) in ("harmless", "passed over")
    with jaxmpi.simulate(RANKS), warnings.catch_warnings():
        jaxmpi.save(copied, 3, made.like, background=False)  # beside it, or in its place
        assert jaxmpi.latest(copied) == 3


def the_file(about):
    return about["files"]["rank-0.npz"]


def the_array(about):
    """Return (start, length, checksum) of an array in the file."""
    return the_file(about)["arrays"]["['a']"]


WRONG = {  # with the right checksum
    "no object": lambda about: about.clear(),
    "another program's": lambda about: about.update(format="another"),
    "an earlier version": lambda about: about.update(version=1),
    "a later version": lambda about: about.update(version=3),
    "no leaves": lambda about: about.update(leaves=None),
    "leaves are numbers": lambda about: about.update(leaves=[1, 2]),
    "one leaf twice": lambda about: about["leaves"].append(about["leaves"][0]),
    "a part of no kind": lambda about: about["leaves"][0].__setitem__(1, "most"),
    "a list for a dtype": lambda about: about["leaves"][0].__setitem__(2, ["float32"]),
    "a dtype of objects": lambda about: about["leaves"][0].__setitem__(2, "object"),
    "a dtype of bytes": lambda about: about["leaves"][0].__setitem__(2, "V4"),
    "a negative shape": lambda about: about["leaves"][0].__setitem__(3, [-1]),
    "a shape of text": lambda about: about["leaves"][0].__setitem__(3, "33"),
    "a huge shape": lambda about: about["leaves"][0].__setitem__(3, [2**40, 2**40]),
    "a value beside numbers": lambda about: about["leaves"][0].__setitem__(4, 5),
    "no files": lambda about: about.update(files={}),
    "a file elsewhere": lambda about: about.update(files={"../rank-0.npz": the_file(about)}),
    "too many ranks": lambda about: about.update(ranks=2**40),
    "ranks are true": lambda about: about.update(ranks=True),
    "a step of text": lambda about: about.update(step="2"),
    "another step": lambda about: about.update(step=1),
    "another rank": lambda about: the_file(about).update(rank=1),
    "no arrays": lambda about: the_file(about).update(arrays={}),
    "bytes are missing": lambda about: the_file(about).pop("bytes"),
    "before the file": lambda about: the_array(about).__setitem__(0, -1),
    "behind the file": lambda about: the_array(about).__setitem__(0, 10**9),
    "no length": lambda about: the_array(about).__setitem__(1, 0),
    "a length of 3 TB": lambda about: the_array(about).__setitem__(1, 3 * 10**12),
    "a checksum of text": lambda about: the_array(about).__setitem__(2, "1"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_manifest_with_the_right_checksum(copied, made, wrong):
    rewrite_manifest(folder_of(copied), lambda about: None)
    assert outcome(copied, made) == "harmless"
    rewrite_manifest(folder_of(copied), WRONG[wrong])
    with pytest.raises(jaxmpi.CheckpointError, match=r"step-0+2/manifest\.json is"):
        folders.read_manifest(folder_of(copied))
    assert outcome(copied, made, step=2) == "found"
    assert outcome(copied, made) == "passed over"


def test_a_manifest_whose_rows_end_early_is_restored(copied, made):
    """Manifests from before the first release are restored.

    Their rows ended before the usual values: no stack, no axis.
    """

    def shorten(about):
        for row in about["leaves"]:
            assert len(row) == 8
            del row[5 if row[5:] == [0, [], []] else 6 if row[6:] == [[], []] else 8 :]
        assert {len(row) for row in about["leaves"]} == {5}

    rewrite_manifest(folder_of(copied), shorten)
    assert outcome(copied, made, step=2) == "harmless"


def test_a_large_manifest_is_not_read(copied, made):
    path = folder_of(copied) / "manifest.json"
    text = path.read_bytes()
    os.truncate(path, 3 << 30)  # a hole
    with (
        limited(copied / "nowhere"),
        pytest.raises(jaxmpi.CheckpointError, match=r"manifest\.json is no manifest"),
    ):
        folders.read_manifest(folder_of(copied))
    path.write_text('{"checksum": 1,\n' + "[" * 100_000)
    assert outcome(copied, made, step=2) == "found"
    path.write_bytes(text)
    assert outcome(copied, made) == "harmless"


class Runs:
    """Ends the process where it is unpickled."""

    def __reduce__(self):
        return os._exit, (1,)


def test_nothing_is_unpickled(tmp_path):
    """Objects in place of numbers, with right checksums everywhere, are never unpickled."""
    jaxmpi.save(tmp_path, 1, {"x": jnp.zeros(20)}, background=False)
    file = io.BytesIO()
    np.savez(file, x=np.array([Runs()] * 100, dtype=object))
    packed = file.getvalue()
    start = packed.index(b"\x93NUMPY")
    folder = folder_of(tmp_path, 1)
    (folder / "rank-0.npz").write_bytes(packed)
    at = {"['x']": [start, 200, zlib.crc32(packed[start : start + 200])]}
    rewrite_manifest(folder, lambda about: the_file(about).update(bytes=len(packed), arrays=at))
    got = jaxmpi.restore(tmp_path, {"x": jnp.zeros(20)})["x"]
    if hasattr(got, "tobytes"):
        assert got.tobytes() == packed[start + 120 : start + 200]
    else:
        assert got.shape == (20,)


def test_large_arrays_are_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(array_files, "PIECE_BYTES", 1000)
    x = np.random.default_rng(0).normal(size=(37, 41))
    jaxmpi.save(tmp_path, 1, {"x": x, "one": np.int8(3)}, background=False)
    got = jaxmpi.restore(tmp_path, {"x": x * 0, "one": np.int8(0)})
    np.testing.assert_array_equal(got["x"], x)
    assert got["one"] == 3
