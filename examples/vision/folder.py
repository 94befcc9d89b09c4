"""Images in a folder of class folders, as ILSVRC has it, read by Grain's workers with Pillow."""

import gc
import signal
import struct
import zlib
from functools import partial
from pathlib import Path

import grain.python as grain
import numpy as np
from absl import flags
from PIL import Image

import jaxmpi

flags.FLAGS.mark_as_parsed()  # Grain's processes, which import this, too, look at absl's flags
MEAN = np.array([0.485, 0.456, 0.406])  # of ILSVRC, of 0 to 1
SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".webp"}
DAMAGED = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


class Folder:
    """Labeled images in `root/<class>/<image>`.

    Sample i is `files[i]`, a (path, label) pair, in the order of the names, as rank 0 sees them.
    """

    def __init__(self, root, pixels):
        self.pixels = pixels
        self.unreadable = set()  # rows that `loader` has found on this rank
        self.reported = set()  # rows that all ranks know of
        self.classes, self.files = jaxmpi.broadcast_object(
            listing(Path(root)) if jaxmpi.rank() == 0 else None
        )

    def __len__(self):
        return len(self.files)

    def sample(self, row, seed=None):
        """Return sample `row`, randomly cropped if there is a seed.

        Row -1, and a file that is no image, give an image of the mean color that is not `good`.
        """
        blank = np.broadcast_to(np.uint8(np.round(255 * MEAN)), (self.pixels, self.pixels, 3))
        if row < 0:
            return {"image": blank, "label": np.int32(0), "row": row, "good": False}
        path, label = self.files[row]
        try:
            with Image.open(path) as image:
                # JPEG decodes some sizes quickly: take the next larger one
                image.draft("RGB", (2 * self.pixels, 2 * self.pixels))
                image = image.convert("RGB")
        except DAMAGED as error:
            # an error of the file system, not a damaged file
            if isinstance(error, OSError) and error.errno is not None:
                raise
            return {"image": blank, "label": np.int32(0), "row": row, "good": False}
        if seed is None:
            crop = center_crop(image, self.pixels)
        else:
            crop = random_crop(image, self.pixels, [*seed, row])
        return {"image": np.asarray(crop), "label": np.int32(label), "row": row, "good": True}


def listing(root):
    """List the class names, and (path, label) of every image; empty without such a folder."""
    classes = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    files = []
    for label, name in enumerate(classes):
        for path in sorted((root / name).iterdir()):
            if path.suffix.lower() in SUFFIXES:
                files.append((str(path), label))
    return classes, files


def center_crop(image, pixels):
    """Crop the middle of the image, 7/8 of its shorter side."""
    side = min(image.size) * 7 / 8
    left, top = (image.width - side) / 2, (image.height - side) / 2
    return image.resize(
        (pixels, pixels), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side)
    )


def random_crop(image, pixels, seed):
    """Crop 8 % to 100 % of the area, and flip every other time (Szegedy et al. 2015)."""
    rng = np.random.default_rng(seed)
    for _ in range(10):
        area = rng.uniform(0.08, 1) * image.width * image.height
        ratio = np.exp(rng.uniform(*np.log([3 / 4, 4 / 3])))
        width, height = (area * ratio) ** 0.5, (area / ratio) ** 0.5
        if width <= image.width and height <= image.height:
            break
    else:
        width = height = min(image.size)
    left, top = rng.uniform(0, image.width - width), rng.uniform(0, image.height - height)
    crop = image.resize(
        (pixels, pixels), Image.Resampling.BICUBIC, box=(left, top, left + width, top + height)
    )
    return crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else crop


def loader(folder, batch_size, *, training, seed=0, epoch=0, start=0, workers=0):
    """Load this rank's part of every global batch onto the device.

    Batches are dicts of "image", "label" and "good".

    In training, shuffled and cropped by (seed, epoch, row), whatever the ranks and workers; the
    incomplete last batch is left out. Else in order, each image once, and with rows that only fill
    up, which are not good.

    Args:
      start: how many samples of the epoch have been seen, over all ranks.
      workers: processes that read; 0 reads with threads of this one.
    """
    rows = np.arange(len(folder))  # jaxmpi says which rows, and Grain reads them
    if training:
        plan = list(jaxmpi.batches(rows, batch_size, seed=seed, epoch=epoch, start=start))
    else:
        masked = jaxmpi.batches(rows, batch_size, remainder="mask")
        plan = [np.where(mask, part, -1) for part, mask in masked]
    if not plan:
        return []
    read = partial(folder.sample, seed=(seed, epoch) if training else None)
    samples = grain.MapDataset.source(np.concatenate(plan)).map(read)
    batches = samples.batch(len(plan[0])).to_iter_dataset(
        grain.ReadOptions(num_threads=4, prefetch_buffer_size=4)
    )
    if workers:
        options = grain.MultiprocessingOptions(num_workers=min(workers, len(plan)))
        batches = batches.mp_prefetch(options, worker_init_fn=outlive_sigterm)
    return jaxmpi.prefetch(noting(folder, batches))


def outlive_sigterm(*_):
    """Ignore SIGTERM, so that the ranks have their workers until they have saved.

    A scheduler sends the signal to every process of the job.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def noting(folder, batches):
    """Yield the batches without row numbers, noting the rows that cannot be read."""
    reader = iter(batches)
    try:
        for batch in reader:
            rows = batch.pop("row")
            folder.unreadable.update(rows[~batch["good"] & (rows >= 0)].tolist())
            copied = {name: np.array(x) for name, x in batch.items()}
            del batch, rows  # shared memory, which the worker gets back
            yield copied
    finally:
        reader.close()  # and its processes with it
        del reader
        gc.collect()  # the last batch hangs in a cycle of Grain's
