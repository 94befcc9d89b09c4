"""Time that codecs take to encode and decode 5 million float32 in 16 arrays, beside their messages.

    jaxmpi run -n 2 benchmarks/codec_times.py

A call's time without the time in which it waits for messages. Exits with 1 where int8 takes over
8 ms on 2 ranks with a core each, or a codec of 16 bits over 5 ms.
"""

import time

import jax
import numpy as np
import peers
from common import Report, parser

import jaxmpi
from jaxmpi import codecs

CODECS = {  # and the bound in milliseconds
    "bf16": (codecs.bf16(), 5.0),
    "f16": (codecs.f16(), 5.0),
    "int8": (codecs.int8(), 8.0),
}
SHAPES = [(5_000_000 // 16,)] * 16
CALLS = 10  # of a turn

args = parser(__doc__).parse_args()
report = Report("codec_times", args)
backend = jaxmpi._world.session.current("benchmark")
rounds = 2 if args.quick else args.rounds
means = {name: peers.codec_mean(codec, SHAPES) for name, (codec, _) in CODECS.items()}
milliseconds = {name: np.empty((rounds, CALLS)) for name in CODECS}
for k in range(-1, rounds):  # the first round, which compiles, does not count
    for name, mean in means.items():
        jaxmpi.barrier()
        for i in range(CALLS):
            start_ns, waited_ns = time.perf_counter_ns(), backend.exposed_ns()
            jax.block_until_ready(mean())
            took_ns = time.perf_counter_ns() - start_ns - (backend.exposed_ns() - waited_ns)
            milliseconds[name][k, i] = took_ns / 1e6
everyone = jaxmpi.allgather_object(milliseconds)
for name, (_, bound) in CODECS.items():
    values = np.concatenate([one[name] for one in everyone], axis=1)
    report.rows.append(
        {"case": "20 MB", "contender": name, "median_us": 1e3 * float(np.median(values))}
    )
    report.ratio("20 MB", f"codec {name}, ms", values, np.ones((rounds, 1)), at_most=bound)
report.finish()
