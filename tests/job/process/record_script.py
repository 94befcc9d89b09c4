"""One rank that compares 5003 fingerprints, and reads its own live record."""

import importlib
import mmap
import os

import numpy as np

from jaxmpi._job.process import live_record

native = importlib.import_module("jaxmpi._native")
writer = live_record.Writer()
size = native.layout_bytes(1, 4096, 4)
file = os.memfd_create("slots")
os.ftruncate(file, size)
memory = mmap.mmap(file, size)
native.open(
    rank=0,
    order=[0],
    ranks=[1],
    node=0,
    local_rank=0,
    slot_bytes=4096,
    slots=4,
    crowded=True,
    memory=np.frombuffer(memory, np.uint8).ctypes.data,
    file=file,
)
for number in range(5003):
    assert native.compare(number) == (number, number, 0)
reader = live_record.Reader(os.getpid())
events = reader.events(4096)
assert events == native.events()[-len(events) :] and len(events) == 2048
assert events[-1][:3] == (5002, 5002, 0)
assert events[-1][3] <= events[-1][4] <= events[-1][5]
assert reader.exposed() == native.exposed_ns() > 0
assert native.last_fingerprint() == 5002
print(len(native.events()) - 1, len(native.waits()), native.messages()[1])
