"""Train a ResNet or a ViT on a folder of images: DIR/train/<class>/<image> and DIR/val/<class>/<image>, as ILSVRC has them.

    python examples/imagenet.py DIR
    jaxmpi run -n 4 examples/imagenet.py DIR --model resnet50 --dtype bfloat16
    jaxmpi run -n 4 examples/imagenet.py DIR --model vit-s --optimizer adamw --lr 2.5e-4 --weight-decay 0.1
    jaxmpi run -n 2 examples/imagenet.py DIR --evaluate --pretrained runs/imagenet/best.npz

The folder of --out gets `train.csv` and `eval.csv` (examples/plot_logs.py draws them), `best.npz` with the weights of the best
epoch, and checkpoints. Started again with the same --out it goes on where the last checkpoint was made, in mid-epoch, too, and
on another number of ranks. SIGTERM makes one and ends the job.
"""

import argparse
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
from vision.folder import Folder, loader
from vision.models import MODELS

import jaxmpi

MEAN, DEVIATION = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])  # of ILSVRC, of 0 to 1
EVAL_COLUMNS = ("step", "epoch", "loss", "top1", "top5", "images")
TRAIN_COLUMNS = ("step", "epoch", "lr", "loss", "top1", "top5", *jaxmpi.Rate._fields)


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("data", type=Path, metavar="DIR", help="holds train/ and val/")
    parser.add_argument("--out", type=Path, default=Path("runs/imagenet"), help="of this run; on a file system of all ranks")
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--width", type=int, default=64, help="channels of the first convolution; for a ViT, of each head")
    parser.add_argument("--pixels", type=int, default=224, help="side of the images, a multiple of 16 for a ViT")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--batch-size", type=int, default=256, help="images per step, over all ranks together")
    parser.add_argument("--optimizer", choices=("sgd", "nesterov", "adam", "adamw"), default="nesterov")
    parser.add_argument("--lr", type=float, default=0.1, help="highest learning rate for 256 images per step; scaled by them")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument(
        "--weight-decay", type=float, default=1e-4, help="of matrices and kernels; in the gradient, for adamw in the step"
    )
    parser.add_argument(
        "--schedule", choices=("constant", "step", "cosine"), default="cosine", help="step: a tenth at 1/3, 2/3, 8/9"
    )
    parser.add_argument("--warmup", type=float, default=5, metavar="EPOCHS", help="in which the learning rate rises")
    parser.add_argument("--smoothing", type=float, default=0.1, help="of the labels, 0 to 1")
    parser.add_argument("--batch-stats", choices=("sync", "average"), default="sync",
                        help="of all ranks' images in each step, or of each rank's, averaged for evaluation")  # fmt: skip
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32", help="to compute in; with "
                        "bfloat16, too, parameters are float32")  # fmt: skip
    parser.add_argument("--workers", type=int, help="processes per rank that read images; 0: threads  (default: its cores)")
    parser.add_argument(
        "--save-every", type=int, default=1000, metavar="STEPS", help="between checkpoints, beside one per epoch"
    )
    parser.add_argument("--log-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--pretrained", type=Path, metavar="FILE", help="weights to begin with: a best.npz")
    parser.add_argument("--evaluate", action="store_true", help="only evaluate: --pretrained, or the best.npz of --out")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def optimizer_of(args, steps):
    """The chain, and its schedule; `steps` of an epoch."""
    highest, total, warmup = args.lr * args.batch_size / 256, args.epochs * steps, round(args.warmup * steps)
    after = {
        "constant": lambda: optax.constant_schedule(highest),
        "step": lambda: optax.piecewise_constant_schedule(
            highest, {round(total * part) - warmup: 0.1 for part in (1 / 3, 2 / 3, 8 / 9)}
        ),
        "cosine": lambda: optax.cosine_decay_schedule(highest, max(1, total - warmup)),
    }[args.schedule]()
    schedule = optax.join_schedules([optax.linear_schedule(highest / max(1, warmup), highest, max(1, warmup)), after], [warmup])
    matrices = partial(jax.tree.map, lambda x: x.ndim > 1)
    decay = optax.add_decayed_weights(args.weight_decay, mask=matrices)
    inner = {
        "sgd": lambda: optax.chain(decay, optax.sgd(schedule, args.momentum)),
        "nesterov": lambda: optax.chain(decay, optax.sgd(schedule, args.momentum, nesterov=True)),
        "adam": lambda: optax.chain(decay, optax.adam(schedule)),
        "adamw": lambda: optax.adamw(schedule, weight_decay=args.weight_decay, mask=matrices),
    }[args.optimizer]()
    return jaxmpi.distributed(inner), schedule


def steps_of(model, optimizer, args):
    """The training and the evaluation step, and what they begin with."""
    model.train()
    graph, params, stats = nnx.split(model, nnx.Param, ...)
    model.eval()
    graph_eval = nnx.graphdef(model)
    types = {"float64": jnp.float64, "float32": jnp.float32, "bfloat16": jnp.bfloat16}
    equal = (0, 1, 2) if args.batch_stats == "sync" else (0, 1)

    def logits_of(graph, params, stats, images):
        model = nnx.merge(graph, params, stats, copy=True)  # BatchNorm writes to its own
        x = ((images / 255.0 - MEAN) / DEVIATION).astype(types[args.dtype])
        logits = model(x)
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), nnx.split(model, nnx.Param, ...)[2]

    def counts_of(losses, logits, batch):
        """Sums over this rank's good images: [loss, top-1, top-5, images]."""
        of_label = jnp.take_along_axis(logits, batch["label"][:, None], axis=1)
        better = jnp.sum(logits > of_label, axis=1)
        per_image = jnp.stack([losses, better < 1, better < 5, jnp.ones_like(losses)])
        return jnp.sum(per_image, axis=1, where=batch["good"])

    @partial(jaxmpi.jit, donate_argnums=(0, 1, 2), replicated_argnums=equal, replicated_outnums=equal)
    def train_step(params, state, stats, batch):
        def loss_of(params):
            logits, new_stats = logits_of(graph, params, stats, batch["image"])
            labels = optax.smooth_labels(jax.nn.one_hot(batch["label"], logits.shape[-1], dtype=logits.dtype), args.smoothing)
            counts = counts_of(optax.softmax_cross_entropy(logits, labels), logits, batch)
            # The mean of the ranks' losses is that over all good images. With `weight=` in the optimizer it would be, too, but
            # not its gradient through the batch statistics, which each rank's images have in common with the others'.
            images = jaxmpi.tree_allreduce(counts[-1])
            return counts[0] / jnp.maximum(images, 1), (new_stats, counts)

        grads, (stats, counts) = jax.grad(loss_of, has_aux=True)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, stats, counts

    @jaxmpi.jit
    def eval_step(params, stats, batch, total):
        logits, _ = logits_of(graph_eval, params, stats, batch["image"])
        return total + counts_of(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]), logits, batch)

    return train_step, eval_step, (params, optimizer.init(params), stats)


def main():
    args = arguments()
    jax.config.update("jax_enable_x64", args.dtype == "float64")
    world = jaxmpi.init(verbose=True)
    log = jaxmpi.get_logger("imagenet")
    workers = max(1, len(os.sched_getaffinity(0)) - 1) if args.workers is None else args.workers
    folders = {part: Folder(args.data / part, args.pixels) for part in ("val",) + ("train",) * (not args.evaluate)}
    if not args.evaluate and folders["train"].classes != folders["val"].classes:
        raise SystemExit(f"The class folders of {args.data}/train and {args.data}/val differ. Both need one for each class.")
    classes = len(folders["val"].classes)
    load = partial(loader, batch_size=args.batch_size, seed=args.seed, workers=workers)
    args.out.mkdir(parents=True, exist_ok=True)

    types = {"dtype": jnp.dtype(args.dtype), "param_dtype": jnp.float64 if args.dtype == "float64" else jnp.float32}
    axis = jaxmpi.AXIS if args.batch_stats == "sync" else None
    model = MODELS[args.model](classes, width=args.width, axis_name=axis, rngs=nnx.Rngs(args.seed), **types)
    steps = 0 if args.evaluate else len(folders["train"]) // args.batch_size
    optimizer, schedule = optimizer_of(args, max(1, steps))
    train_step, eval_step, (params, state, stats) = steps_of(model, optimizer, args)
    stats = jax.tree.map(lambda x: x.astype(types["param_dtype"]), stats)  # nnx has them in float32

    best_path = args.out / "best.npz"
    weights = args.pretrained or (best_path if args.evaluate else None)
    if weights:
        (params, stats), missing = read_weights(weights, (params, stats))
        if missing:
            log.info(f"not from {weights}: {', '.join(missing)}")
    params, stats = jaxmpi.synchronize((params, stats))  # rank 0's, on every rank

    def stats_of_all():
        return stats if args.batch_stats == "sync" else jaxmpi.nn.average_batch_stats(stats)

    def evaluate():
        """Mean loss, top-1 and top-5 accuracy of all images, each counted once, and how many they are."""
        total, of_all = np.zeros(4, types["param_dtype"]), stats_of_all()
        batches = load(folders["val"], training=False)
        for batch in jaxmpi.progress(batches, desc="evaluation", leave=False):
            total = eval_step(params, of_all, batch, total)
            leave_if_told()
        *sums, images = np.asarray(jaxmpi.tree_allreduce(total, op="sum"))
        return {name: float(x / images) for name, x in zip(("loss", "top1", "top5"), sums, strict=True)} | {
            "images": int(images)
        }

    def report_unreadable():
        for folder in folders.values():
            rows = set().union(*jaxmpi.allgather_object(folder.unreadable))
            for row in sorted(rows - folder.reported):
                log.warning(f"{folder.files[row][0]} cannot be read: it does not count")
            folder.reported |= rows

    def save():
        tree = {"params": params, "state": state, "stats": stats_of_all(), "at": at}
        jaxmpi.save(args.out / "checkpoints", at["step"], tree, keep=2)

    def leave_if_told():
        if jaxmpi.preempted():
            if not args.evaluate:
                write_row()
                save()
            sys.exit(0)

    if args.evaluate:
        result = evaluate()
        report_unreadable()
        if world.rank == 0:
            print("top-1 {top1:.4%}, top-5 {top5:.4%}, loss {loss:.6f} over {images} images".format(**result))
        return

    at = {"epoch": 0, "position": 0, "step": 0, "best": 0.0}  # position: images of this epoch that were trained on
    if jaxmpi.latest(args.out / "checkpoints") is not None:
        like = {"params": params, "state": state, "stats": stats, "at": at}
        params, state, stats, at = (jaxmpi.restore(args.out / "checkpoints", like)[name] for name in like)
        log.info(f"going on after {at['step']} steps, in epoch {at['epoch'] + 1}")
    train_rows = Table(args.out / "train.csv", TRAIN_COLUMNS, "step", at["step"])
    eval_rows = Table(args.out / "eval.csv", EVAL_COLUMNS, "epoch", at["epoch"])
    counts, meter = [], jaxmpi.Throughput()

    def write_row():
        """The means since the last row."""
        nonlocal meter
        if not counts:
            return
        own = np.sum(jax.device_get(counts), axis=0)  # waits for the last step
        counts.clear()
        meter.add(int(own[-1]))
        rate, (loss, top1, top5, images) = meter.read(), np.asarray(jaxmpi.tree_allreduce(own, op="sum"))
        means = {"loss": loss / images, "top1": top1 / images, "top5": top5 / images}
        lr = float(schedule(at["step"] - 1))
        train_rows.write(step=at["step"], epoch=at["epoch"] + 1, lr=lr, **means, **rate._asdict())
        log.info(f"epoch {at['epoch'] + 1}  step {at['step']}  lr {lr:.3g}  loss {means['loss']:.4f}  images: {rate}")

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
            leave_if_told()
        write_row()
        save()
        result = evaluate()
        report_unreadable()
        eval_rows.write(step=at["step"], epoch=epoch + 1, **result)
        log.info(
            "epoch {}  top-1 {top1:.2%}, top-5 {top5:.2%}, loss {loss:.4f} over {images} images".format(epoch + 1, **result)
        )
        if result["top1"] > at["best"]:
            at["best"] = result["top1"]
            write_weights(best_path, (params, stats_of_all()))
        at |= {"epoch": epoch + 1, "position": 0}
        meter = jaxmpi.Throughput()  # of training alone
    save()
    if world.rank == 0:
        print(f"best top-1 {at['best']:.2%}, its weights in {best_path}")


if __name__ == "__main__":  # Grain's workers import this file
    main()
