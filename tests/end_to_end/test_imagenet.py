"""examples/imagenet.py on a small folder of photographs, from beginning to end."""

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import skimage.data
import sklearn.datasets
from PIL import Image
from programs import ROOT

SMALL = (
    "--model resnet18 --width 4 --pixels 32 --batch-size 16 --epochs 2 --warmup 1 --log-every 1 "
    "--dtype float64"
)
STEPS = 12  # 96 images twice


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Make DIR/train and DIR/val with 6 classes, each cut from one photograph.

    One file of each part is damaged.
    """
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    images = {
        name: getattr(skimage.data, name)() for name in ("astronaut", "chelsea", "coffee", "rocket")
    }
    images |= dict(
        zip(("china", "flower"), sklearn.datasets.load_sample_images().images, strict=True)
    )
    for name, image in images.items():
        for part, count in (("train", 16), ("val", 5)):
            folder = root / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                side = rng.integers(80, 160)
                y, x = rng.integers(0, np.array(image.shape[:2]) - side)
                Image.fromarray(image[y : y + side, x : x + side]).save(folder / f"{i:03}.jpg")
    (root / "train" / "coffee" / "003.jpg").write_text("not an image")
    whole = root / "val" / "china" / "001.jpg"
    whole.write_bytes(whole.read_bytes()[:900])
    return root


@pytest.fixture(scope="module")
def start(photos):
    """Start the example on some ranks."""

    def start(ranks, out, *options, data=photos):
        program = ["examples/imagenet.py", str(data), "--out", str(out), *SMALL.split(), *options]
        launcher = ["-m", "jaxmpi", "run", "-n", str(ranks)] if ranks > 1 else []
        return subprocess.Popen(
            [sys.executable, *launcher, *program],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    return start


def ended(process, code=0):
    """The output of a run that must end with this code."""
    try:
        output, _ = process.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"it did not end:\n{process.communicate()[0]}")
    assert process.returncode == code, output
    assert "leaked" not in output
    return output


def rows(path):
    """The whole rows; NaN where a field is empty."""
    table = csv.DictReader(path.read_text().splitlines() if path.exists() else [])
    whole = [row for row in table if None not in row.values()]
    return [{name: float(x or "nan") for name, x in row.items()} for row in whole]


def wait_for_step(process, out, step):
    while not any(row["step"] >= step for row in rows(out / "train.csv")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def curves(out):
    """Return all losses and accuracies: [steps, 3], [epochs, 3]."""
    curves = []
    for file in ("train.csv", "eval.csv"):
        table = [[row["loss"], row["top1"], row["top5"]] for row in rows(out / file)]
        curves.append(np.array(table))
    return curves


@pytest.fixture(scope="module")
def undisturbed(start, tmp_path_factory):
    """The folder of a run on one rank."""
    out = tmp_path_factory.mktemp("undisturbed")
    ended(start(1, out, "--workers", "0"))
    return out


def assert_equal_curves(out, other):
    for mine, theirs, count in zip(curves(out), curves(other), (STEPS, 2), strict=True):
        assert len(mine) == count
        np.testing.assert_allclose(mine, theirs, rtol=1e-10)


def test_two_ranks_have_the_curves_of_one(start, undisturbed, tmp_path):
    """Batches, crops, statistics and means are the same; what cannot be read counts for neither."""
    output = ended(start(2, tmp_path, "--workers", "1"))
    assert_equal_curves(tmp_path, undisturbed)
    for damaged in ("train/coffee/003.jpg", "val/china/001.jpg"):
        assert len(re.findall(f"WARNING .*{damaged} cannot be read", output)) == 1
    assert [row["images"] for row in rows(tmp_path / "eval.csv")] == [29, 29]
    train = rows(tmp_path / "train.csv")
    assert all(row["per_second"] == 2 * row["per_second_per_rank"] for row in train)
    if os.environ.get("JAXMPI_TRANSPORT") == "mpi4jax":  # which does not record it
        assert all(np.isnan(row["communication"]) for row in train)
    else:
        assert all(0 < row["communication"] <= 1 for row in train)


def test_killed_and_told_to_end_it_goes_on_in_mid_epoch(start, undisturbed, tmp_path):
    killed = start(2, tmp_path, "--save-every", "2", "--workers", "1")
    wait_for_step(killed, tmp_path, 5)
    ranks = children(killed.pid, "imagenet.py")
    os.kill(ranks[-1], signal.SIGKILL)
    assert killed.wait(60) != 0
    killed.communicate()
    told = start(2, tmp_path, "--save-every", "100", "--workers", "0")
    wait_for_step(told, tmp_path, 8)
    told.send_signal(signal.SIGTERM)
    assert re.search(r"going on after \d+ steps, in epoch [12]\n", ended(told))
    step = rows(tmp_path / "train.csv")[-1]["step"]
    output = ended(start(1, tmp_path, "--workers", "0"))
    assert (
        f"going on after {step:.0f} steps, in epoch 2" in output
        and "WARNING imagenet: going on with" not in output
    )
    assert_equal_curves(tmp_path, undisturbed)
    others = ("--lr", "7", "--pretrained", str(undisturbed / "best.npz"))
    output = ended(start(1, tmp_path, *others, "--workers", "0"))  # there is nothing left to do
    assert "best top-1" in output and re.search(
        r"WARNING imagenet: going on with --lr 7.0 in the place of \S+\. Another", output
    )
    assert f"{undisturbed / 'best.npz'} is not read" in output
    assert_equal_curves(tmp_path, undisturbed)


def test_evaluation_is_exact_on_uneven_shards(start, undisturbed, photos, tmp_path):
    """Evaluate 29 images on 1 and 3 ranks, from the weights of the best epoch.

    Weights for other classes are refused.
    """
    best = max(rows(undisturbed / "eval.csv"), key=lambda row: row["top1"])
    for ranks in (1, 3):
        output = ended(
            start(ranks, undisturbed, "--evaluate", "--batch-size", "8", "--workers", "0")
        )
        top1, top5, loss, images = re.search(
            r"top-1 (\S+)%, top-5 (\S+)%, loss (\S+) over (\d+)", output
        ).groups()
        assert images == "29" and abs(float(loss) - best["loss"]) < 1e-6
        np.testing.assert_allclose(
            [float(top1), float(top5)], [100 * best["top1"], 100 * best["top5"]], atol=1e-4
        )
    fewer = tmp_path / "val"
    for name in ("astronaut", "china"):
        shutil.copytree(photos / "val" / name, fewer / name)
    output = ended(start(1, undisturbed, "--evaluate", "--workers", "0", data=tmp_path), code=1)
    assert "does not have params/head/bias, params/head/kernel: was it" in output, output


def test_pretrained_weights(start, undisturbed, photos, tmp_path):
    """Pretrained weights are used, and those of another model are refused by name."""
    best = undisturbed / "best.npz"
    ended(
        start(
            1,
            tmp_path / "a",
            "--pretrained",
            str(best),
            "--epochs",
            "1",
            "--lr",
            "0",
            "--warmup",
            "0",
            "--workers",
            "0",
        )
    )
    first = rows(tmp_path / "a" / "train.csv")[0]["loss"]
    assert first < rows(undisturbed / "train.csv")[0]["loss"] - 0.01
    refused = ended(
        start(1, tmp_path / "b", "--pretrained", str(best), "--width", "8", "--workers", "0"),
        code=1,
    )
    assert re.search(r"best.npz holds another model: \d+ of its arrays fit this one's \d+", refused)


def test_a_transformer_in_bfloat16(start, tmp_path):
    """A ViT trains with the other optimizer and schedule, and ranks that do not divide the images.

    It would average statistics if it had any.
    """
    vit = (
        "--model vit-ti --width 8 --dtype bfloat16 --optimizer adamw --lr 0.02 --schedule step "
        "--warmup 0 --batch-stats average"
    )
    output = ended(start(2, tmp_path, *vit.split(), "--epochs", "3", "--workers", "0"))
    losses = [row["loss"] for row in rows(tmp_path / "train.csv")]
    assert len(losses) == 18 and np.mean(losses[-6:]) < losses[0] - 0.05, output
    lr = [row["lr"] for row in rows(tmp_path / "train.csv")]
    np.testing.assert_allclose(
        lr, np.repeat([1, 0.1, 0.01, 0.001], [6, 6, 4, 2]) * 0.02 / 16, rtol=1e-5
    )


def test_hits_are_not_given_away(monkeypatch):
    """A tie is none, and no number is none, however few the classes."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from imagenet import counts_of

    nan = float("nan")
    logits = jnp.array([[3.0, 1, 2], [1, 1, 0], [nan, nan, nan], [nan, 5, 1], [0, 9, 3], [7, 7, 7]])
    batch = {
        "label": jnp.array([0, 1, 0, 1, 2, 0]),
        "good": jnp.array([True, True, True, True, True, False]),
    }
    _, top1, top5, images = counts_of(jnp.zeros(6), logits, batch)
    assert (top1, top5, images) == (1, 4, 5)


@pytest.mark.parametrize(
    "ranks, options, words",
    [
        (2, "--batch-size 15", r"--batch-size is 15\. There are 96 images, and 2 ranks"),
        (1, "--batch-size 97", r"--batch-size is 97\. There are 96 images"),
        (1, "--model vit-s --pixels 40", r"--pixels is 40 .* A ViT takes multiples of 16"),
        (1, "--warmup 2", r"--warmup 2.0 leaves none of 2 epochs"),
        (1, "--evaluate --pretrained nothing.npz", r"nothing.npz cannot be read: .*No such file"),
    ],
)
def test_what_cannot_be_trained_is_refused(start, tmp_path, ranks, options, words):
    output = ended(start(ranks, tmp_path, *options.split(), "--workers", "0"), code=1)
    assert len(re.findall(f"imagenet: .*{words}", output)) == 1 and "Traceback" not in output, (
        output
    )


def test_the_tables_can_be_drawn(undisturbed, tmp_path):
    picture = tmp_path / "curves.png"
    draw = lambda folder: subprocess.run(
        [sys.executable, "examples/plot_logs.py", str(folder), "--out", str(picture)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert draw(undisturbed).returncode == 0
    with Image.open(picture) as image:
        # lines and letters, and no empty page
        assert len(np.unique(np.asarray(image.convert("L")))) > 50
    assert "There is no" in draw(tmp_path).stderr


def children(pid, name):
    """The processes below `pid` whose command is this script, but for those that read for them."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            command = (path / "cmdline").read_bytes().split(b"\0")
        except (OSError, IndexError):
            continue
        if parent == pid:
            is_rank = len(command) > 1 and command[1].endswith(name.encode())
            found += [int(path.name)] if is_rank else children(int(path.name), name)
    return found
