"""The library's probes as a process of its own, for peers.py: says what machine it is on, then answers each JSON line,
{"threads": N, "size": BYTES, "seconds": S}, with GFLOP/s of multiply-adds in f32 and GB/s of reading so many bytes."""

import json
import sys

import manyhead
from manyhead._measure import arithmetic_rate, read_rate

isa = manyhead.isa()
print(json.dumps({"cpu": manyhead.machine()["cpu"], "isa": isa}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    threads, seconds = asked["threads"], asked["seconds"]
    fma = arithmetic_rate(isa, "f32", threads, seconds)
    read = read_rate(asked["size"], threads, seconds)
    print(json.dumps({"fma": fma / 1e9, "read": read / 1e9}), flush=True)
