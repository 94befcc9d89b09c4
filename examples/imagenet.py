r"""Train a ResNet or a ViT on a folder of images.

The images are DIR/train/<class>/<image> and DIR/val/<class>/<image>, one folder a class.

    python examples/imagenet.py DIR
    jaxmpi run -n 4 examples/imagenet.py DIR --model resnet50 --dtype bfloat16
    jaxmpi run -n 4 examples/imagenet.py DIR --model vit-s --optimizer adamw \
        --lr 2.5e-4 --weight-decay 0.1
    jaxmpi run -n 2 examples/imagenet.py DIR --evaluate --pretrained runs/imagenet/best.npz

The folder of --out gets `train.csv` and `eval.csv` (examples/plot_logs.py draws them), `best.npz`
with the weights of the best epoch, and checkpoints. Started again with the same --out it goes on
where the last checkpoint was made, in mid-epoch, too, and on another number of ranks. SIGTERM makes
one and ends the job. An image that cannot be read is named, and counts neither in the loss nor in
the accuracy. (The val/ of ILSVRC is one folder of all images: move them into one for each class
first.)
"""

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from vision.files import Table, read_weights, write_weights
from vision.folder import MEAN, Folder, loader
from vision.models import MODELS

import jaxmpi

DEVIATION = np.array([0.229, 0.224, 0.225])  # of ILSVRC, of 0 to 1
TRAIN_COLUMNS = ("step", "epoch", "lr", "loss", "top1", "top5", *jaxmpi.Rate._fields)
EVAL_COLUMNS = ("step", "epoch", "loss", "top1", "top5", "images")
log = jaxmpi.get_logger("imagenet")


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("data", type=Path, metavar="DIR", help="holds train/ and val/")
    add(
        "--out",
        type=Path,
        default=Path("runs/imagenet"),
        help="of this run; on a file system of all ranks",
    )
    add("--model", choices=MODELS, default="resnet50")
    add(
        "--width",
        type=int,
        default=64,
        help="channels of the first convolution; for a ViT, of each head",
    )
    add("--pixels", type=int, default=224, help="side of the images, a multiple of 16 for a ViT")
    add("--epochs", type=int, default=90)
    add("--batch-size", type=int, default=256, help="images per step, over all ranks together")
    add("--optimizer", choices=("sgd", "nesterov", "adam", "adamw"), default="nesterov")
    add(
        "--lr",
        type=float,
        default=0.1,
        help="highest learning rate for 256 images per step; scaled by their number",
    )
    add("--momentum", type=float, default=0.9)
    add(
        "--weight-decay",
        type=float,
        default=1e-4,
        help="of kernels; in the gradient, or for adamw in the step",
    )
    add(
        "--schedule",
        choices=("constant", "step", "cosine"),
        default="cosine",
        help="step: a tenth at 1/3, 2/3, 8/9",
    )
    add(
        "--warmup", type=float, default=5, metavar="EPOCHS", help="in which the learning rate rises"
    )
    add("--smoothing", type=float, default=0.1, help="of the labels, 0 to 1")
    add(
        "--batch-stats",
        choices=("sync", "average"),
        default="sync",
        help="of all ranks' images, or averaged to evaluate",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float64"),
        default="float32",
        help="bfloat16: parameters stay float32",
    )
    add(
        "--workers",
        type=int,
        default=argparse.SUPPRESS,
        help="processes per rank that read images (default: one per core but one); 0: threads",
    )
    add(
        "--save-every",
        type=int,
        default=1000,
        metavar="STEPS",
        help="between checkpoints, beside one per epoch",
    )
    add("--log-every", type=int, default=50, metavar="STEPS")
    add("--pretrained", type=Path, metavar="FILE", help="weights to begin with: a best.npz")
    add(
        "--evaluate",
        action="store_true",
        help="only evaluate: --pretrained, or the best.npz of --out",
    )
    add("--seed", type=int, default=0)
    return parser.parse_args()


def refuse(text):
    """End the job in order, with one line of rank 0."""
    raise SystemExit(f"imagenet: {text}" if jaxmpi.rank() == 0 else 1)


def check(args, folders):
    """Refuse settings and folders that cannot be trained."""
    for name in ("width", "pixels", "batch_size", "save_every", "log_every"):
        if getattr(args, name) < 1:
            refuse(f"--{name.replace('_', '-')} is {getattr(args, name)}. It is 1 or more.")
    if args.model.startswith("vit") and (args.pixels % 16 or args.width % 4):
        refuse(
            f"--pixels is {args.pixels} and --width {args.width}. "
            "A ViT takes multiples of 16 and of 4."
        )
    for part, folder in folders.items():
        if not len(folder):
            refuse(
                f"there are no images in {args.data / part}. "
                "It holds a folder of images for each class."
            )
    if args.evaluate:
        return
    train, val = folders["train"], folders["val"]
    if train.classes != val.classes:
        refuse(
            f"the class folders of {args.data}/train and {args.data}/val differ: "
            f"{sorted({*train.classes} ^ {*val.classes})}."
        )
    if len(train) < args.batch_size or args.batch_size % jaxmpi.size():
        refuse(
            f"--batch-size is {args.batch_size}. There are {len(train)} images, and "
            f"{jaxmpi.size()} ranks to share it equally."
        )
    if args.warmup >= args.epochs / (3 if args.schedule == "step" else 1) > 0:
        refuse(
            f"--warmup {args.warmup} leaves none of {args.epochs} epochs "
            "for the highest learning rate."
        )


def schedule_of(args, steps):
    """Make the learning rate by step: a linear warm-up, then the chosen schedule.

    `steps` is the number of steps of an epoch.
    """
    highest = args.lr * args.batch_size / 256
    total = args.epochs * steps
    warmup = round(args.warmup * steps)
    tenths = {}
    for part in (1 / 3, 2 / 3, 8 / 9):
        step = round(total * part) - warmup
        tenths[step] = tenths.get(step, 1.0) / 10
    after = {
        "constant": lambda: optax.constant_schedule(highest),
        "step": lambda: optax.piecewise_constant_schedule(highest, tenths),
        "cosine": lambda: optax.cosine_decay_schedule(highest, max(1, total - warmup)),
    }[args.schedule]()
    rises = optax.linear_schedule(highest / max(1, warmup), highest, max(1, warmup))
    return optax.join_schedules([rises, after], [warmup])


def optimizer_of(args, schedule):
    def kernels(params):
        is_kernel = lambda path, x: "kernel" in jax.tree_util.keystr(path)
        return jax.tree_util.tree_map_with_path(is_kernel, params)

    decay = optax.add_decayed_weights(args.weight_decay, mask=kernels)
    inner = {
        "sgd": lambda: optax.chain(decay, optax.sgd(schedule, args.momentum)),
        "nesterov": lambda: optax.chain(decay, optax.sgd(schedule, args.momentum, nesterov=True)),
        "adam": lambda: optax.chain(decay, optax.adam(schedule)),
        "adamw": lambda: optax.adamw(schedule, weight_decay=args.weight_decay, mask=kernels),
    }[args.optimizer]()
    return jaxmpi.distributed(inner)


def counts_of(losses, logits, batch):
    """Sum over this rank's good images: [loss, top-1, top-5, images].

    A tie, or a NaN, counts as a miss.
    """
    of_label = jnp.take_along_axis(logits, batch["label"][:, None], axis=1)
    before = jnp.sum(~(logits < of_label), axis=1) - 1  # classes that are not worse
    hits = [jnp.isfinite(of_label[:, 0]) & (before < k) for k in (1, 5)]
    return jnp.sum(jnp.stack([losses, *hits, jnp.ones_like(losses)]), axis=1, where=batch["good"])


def steps_of(model, optimizer, args):
    """Make the training and evaluation steps, the parameters and the batch statistics."""
    model.train()
    graph, params, stats = nnx.split(model, nnx.Param, ...)
    # nnx has them in float32
    stats = jax.tree.map(lambda x: x.astype(jax.tree.leaves(params)[0].dtype), stats)
    model.eval()
    graph_eval = nnx.graphdef(model)
    equal = (0, 1, 2) if args.batch_stats == "sync" else (0, 1)

    def logits_of(graph, params, stats, images):
        model = nnx.merge(graph, params, stats, copy=True)  # BatchNorm writes to its own
        logits = model(((images / 255.0 - MEAN) / DEVIATION).astype(args.dtype))
        return logits, nnx.split(model, nnx.Param, ...)[2]

    @partial(
        jaxmpi.jit, donate_argnums=(0, 1, 2), replicated_argnums=equal, replicated_outnums=equal
    )
    def train_step(params, state, stats, batch):
        def loss_of(params):
            logits, new_stats = logits_of(graph, params, stats, batch["image"])
            labels = optax.smooth_labels(
                jax.nn.one_hot(batch["label"], logits.shape[-1], dtype=logits.dtype), args.smoothing
            )
            counts = counts_of(optax.softmax_cross_entropy(logits, labels), logits, batch)
            # The mean of the ranks' losses is that over all good images. With `weight=` in the
            # optimizer it would be, too, but not its gradient through the batch statistics, which
            # each rank's images have in common with the others'.
            images = jaxmpi.tree_allreduce(counts[-1])
            return counts[0] / jnp.where(images > 0, images, 1), (new_stats, counts)

        grads, (stats, counts) = jax.grad(loss_of, has_aux=True)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, stats, counts

    @jaxmpi.jit
    def eval_step(params, stats, batch, total):
        logits, _ = logits_of(graph_eval, params, stats, batch["image"])
        return total + counts_of(
            optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]), logits, batch
        )

    return train_step, eval_step, params, stats


def evaluate(eval_step, params, stats, batches, between_steps):
    """Return mean loss, top-1 and top-5 accuracy over all images, and their number.

    Each image is counted once.
    """
    total = np.zeros(4, jax.tree.leaves(params)[0].dtype)
    for batch in jaxmpi.progress(batches, desc="evaluation", leave=False):
        total = eval_step(params, stats, batch, total)
        between_steps()
    *sums, images = np.asarray(jaxmpi.tree_allreduce(total, op="sum"))
    means = [float(x / max(images, 1)) for x in sums]
    return dict(zip(("loss", "top1", "top5"), means, strict=True)) | {"images": int(images)}


def report_unreadable(folders):
    """Name the images that some rank could not read, each once."""
    for folder in folders.values():
        rows = set().union(*jaxmpi.allgather_object(folder.unreadable))
        for row in sorted(rows - folder.reported):
            log.warning(f"{folder.files[row][0]} cannot be read: it does not count")
        folder.reported |= rows


def compare_settings(args, resumed):
    """Name the settings that differ from the run that --out resumes."""
    free = ("data", "out", "workers", "pretrained", "evaluate", "log_every", "save_every")
    now = {name: str(value) for name, value in vars(args).items() if name not in free}
    path = args.out / "settings.json"
    if jaxmpi.rank() == 0:
        begun = now | (json.loads(path.read_text()) if resumed and path.exists() else {})
        changed = []
        for name, value in now.items():
            if value != begun[name]:
                option = "--" + name.replace("_", "-")
                changed.append(f"{option} {value} in the place of {begun[name]}")
        if changed:
            log.warning(f"going on with {', '.join(changed)}. Another --out begins anew")
        path.write_text(json.dumps(begun, indent=1))
    if resumed and args.pretrained:
        log.warning(f"{args.pretrained} is not read: the training goes on from {args.out}")


def train(args, folders, load, model, begin):
    """Train to the end, from the last checkpoint of --out if there is one."""
    steps = len(folders["train"]) // args.batch_size
    schedule = schedule_of(args, steps)
    optimizer = optimizer_of(args, schedule)
    train_step, eval_step, params, stats = steps_of(model, optimizer, args)
    directory, best_path = args.out / "checkpoints", args.out / "best.npz"
    # position: images of this epoch that were trained on
    at = {"epoch": 0, "position": 0, "step": 0, "best": -1.0}
    resumed = jaxmpi.latest(directory) is not None
    if not resumed:
        params, stats = begin(params, stats)
    state = optimizer.init(params)
    if resumed:
        like = {"params": params, "state": state, "stats": stats, "at": at}
        params, state, stats, at = (jaxmpi.restore(directory, like)[name] for name in like)
        log.info(f"going on after {at['step']} steps, in epoch {at['epoch'] + 1}")
    compare_settings(args, resumed)
    train_rows = Table(args.out / "train.csv", TRAIN_COLUMNS, "step", at["step"])
    eval_rows = Table(args.out / "eval.csv", EVAL_COLUMNS, "epoch", at["epoch"])
    counts, meter = [], jaxmpi.Throughput()

    def stats_of_all():
        return stats if args.batch_stats == "sync" else jaxmpi.nn.average_batch_stats(stats)

    def save():
        report_unreadable(folders)
        tree = {"params": params, "state": state, "stats": stats_of_all(), "at": at}
        jaxmpi.save(directory, at["step"], tree, keep=2)

    def save_if_told_to_end():
        if jaxmpi.preempted():
            write_row()
            save()
            sys.exit(0)

    def write_row():
        """Write the means since the last row to the table and the screen."""
        if not counts:
            return
        of_rank = np.sum(jax.device_get(counts), axis=0)  # waits for the last step
        counts.clear()
        meter.add(int(of_rank[-1]))
        rate = meter.read()
        *sums, images = np.asarray(jaxmpi.tree_allreduce(of_rank, op="sum"))
        loss, top1, top5 = (float(x / max(images, 1)) for x in sums)
        row = {
            "step": at["step"],
            "epoch": at["epoch"] + 1,
            "lr": float(schedule(at["step"] - 1)),
            "loss": loss,
        }
        train_rows.write(**row, top1=top1, top5=top5, **rate._asdict())
        log.info(
            "epoch {epoch}  step {step}  lr {lr:.3g}  loss {loss:.4f}  images: {rate}".format(
                **row, rate=rate
            )
        )

    for epoch in range(at["epoch"], args.epochs):
        batches = load(folders["train"], training=True, epoch=epoch, start=at["position"])
        left = steps - at["position"] // args.batch_size
        for batch in jaxmpi.progress(batches, total=left, desc=f"epoch {epoch + 1}", leave=False):
            params, state, stats, count = train_step(params, state, stats, batch)
            counts.append(count)
            at |= {"step": at["step"] + 1, "position": at["position"] + args.batch_size}
            if at["step"] % args.log_every == 0:
                write_row()
            if at["step"] % args.save_every == 0:
                write_row()
                save()
            save_if_told_to_end()
        write_row()
        save()
        of_all = stats_of_all()
        result = evaluate(
            eval_step, params, of_all, load(folders["val"], training=False), save_if_told_to_end
        )
        eval_rows.write(step=at["step"], epoch=epoch + 1, **result)
        line = "epoch {}  top-1 {top1:.2%}, top-5 {top5:.2%}, loss {loss:.4f} over {images} images"
        log.info(line.format(epoch + 1, **result))
        if result["top1"] > at["best"] and np.isfinite(result["loss"]):
            at |= {"best": result["top1"]}
            write_weights(best_path, {"params": params, "stats": of_all})
        at |= {"epoch": epoch + 1, "position": 0}
        meter = jaxmpi.Throughput()  # of training alone
    save()
    if jaxmpi.rank() == 0 and at["best"] >= 0:
        print(f"best top-1 {at['best']:.2%}, its weights in {best_path}")
    elif jaxmpi.rank() == 0:
        print("no epoch with a finite loss")


def main():
    args = arguments()
    jax.config.update("jax_enable_x64", args.dtype == "float64")
    world = jaxmpi.init(verbose=True)
    jaxmpi.preempted()  # from now on SIGTERM is heard
    cores = len(os.sched_getaffinity(0))
    of_rank = cores if cores < os.cpu_count() else cores // world.local_size
    workers = getattr(args, "workers", max(1, of_rank - 1))
    parts = ["val"] if args.evaluate else ["train", "val"]
    folders = {part: Folder(args.data / part, args.pixels) for part in parts}
    check(args, folders)
    args.out.mkdir(parents=True, exist_ok=True)
    load = partial(loader, batch_size=args.batch_size, seed=args.seed, workers=workers)

    types = {
        "dtype": jnp.dtype(args.dtype),
        "param_dtype": jnp.float64 if args.dtype == "float64" else jnp.float32,
    }
    axis = jaxmpi.AXIS if args.batch_stats == "sync" else None
    classes = len(folders["val"].classes)
    model = MODELS[args.model](
        classes, width=args.width, axis_name=axis, rngs=nnx.Rngs(args.seed), **types
    )
    weights = args.pretrained or (args.out / "best.npz" if args.evaluate else None)

    def begin(params, stats):
        """Return the file's parameters and statistics, or rank 0's, on every rank."""
        if weights:
            try:
                tree, missing = read_weights(weights, {"params": params, "stats": stats})
            except ValueError as error:
                refuse(error)
            if missing and args.evaluate:
                refuse(
                    f"{weights} does not have {', '.join(missing)}: "
                    "was it trained on other classes?"
                )
            if missing:
                log.info(f"not from {weights}: {', '.join(missing)}")
            params, stats = tree["params"], tree["stats"]
        return jaxmpi.synchronize((params, stats))

    if not args.evaluate:
        train(args, folders, load, model, begin)
        return
    _, eval_step, params, stats = steps_of(model, None, args)
    leave_if_told_to_end = lambda: sys.exit(0) if jaxmpi.preempted() else None
    result = evaluate(
        eval_step, *begin(params, stats), load(folders["val"], training=False), leave_if_told_to_end
    )
    report_unreadable(folders)
    if world.rank == 0:
        print(
            "top-1 {top1:.4%}, top-5 {top5:.4%}, loss {loss:.6f} over {images} images".format(
                **result
            )
        )


if __name__ == "__main__":  # Grain's workers import this file
    main()
