"""Times manyhead.attention beside PyTorch's own on problems drawn at random, or the layer, and prints the worst ratios.

Layouts, masks, groups and sizes that no table names, as a program that swaps one call for the other would have them:
tensors in, a tensor out. Both run in this process on PyTorch's threads, in turns of 20 ms, the fastest of three counts.
What differs from PyTorch by more than rounding is an error.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import manyhead
import options
import torch

TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
TOLERANCE = {"f32": 1e-4, "bf16": 5e-2, "f16": 1e-2}
LENGTHS = (
    1,
    1,
    1,
    2,
    3,
    4,
    7,
    8,
    12,
    16,
    17,
    24,
    33,
    48,
    64,
    77,
    100,
    128,
    197,
    200,
    256,
    300,
    384,
    512,
    577,
    777,
    1024,
)
KV_LENGTHS = (8, 16, 50, 77, 128, 256, 300, 512, 1000, 1500, 2048, 4096)
DIMS = (16, 32, 40, 48, 64, 64, 64, 72, 80, 96, 112, 128, 128, 128, 160, 192, 256)
WIDTHS = (64, 128, 192, 256, 384, 512, 768, 1024, 1280)
MOST_FLOPS, MOST_BYTES = 2e9, 2e8  # of a call; for each thread


class Drawn(NamedTuple):
    batch: int
    heads: int
    group: int
    q_len: int
    kv_len: int
    dim: int
    causal: bool
    mask: str  # "", "bool", "bias"
    bshd: bool

    @property
    def line(self) -> str:
        heads = f"h{self.heads}" + (f"/{self.heads // self.group}" if self.group > 1 else "")
        flags = ["causal" if self.causal else "", self.mask, "bshd" if self.bshd else ""]
        return " ".join([f"b{self.batch} {heads} q{self.q_len} kv{self.kv_len} d{self.dim}", *filter(None, flags)])


def draw_lengths(rng: random.Random) -> tuple[int, int]:
    """Of queries and of keys, in two of three cases the same."""
    q_len = rng.choice(LENGTHS)
    return q_len, rng.choice((q_len, q_len, rng.choice(KV_LENGTHS)))


def draw(rng: random.Random, masks: tuple[str, ...], threads: int) -> Drawn:
    while True:
        q_len, kv_len = draw_lengths(rng)
        causal = q_len == kv_len and rng.random() < 0.3 and "" in masks
        p = Drawn(
            batch=rng.choice((1, 1, 1, 2, 4, 8, 16)),
            heads=rng.choice((1, 2, 4, 6, 8, 12, 16, 20, 32)),
            group=rng.choice((1, 1, 1, 2, 4, 8)),
            q_len=q_len,
            kv_len=kv_len,
            dim=rng.choice(DIMS),
            causal=causal,
            mask="" if causal else rng.choice(masks),
            bshd=rng.random() < 0.4,
        )
        rows = p.batch * p.heads
        if p.heads % p.group or 4 * rows * q_len * kv_len * p.dim > MOST_FLOPS * threads:
            continue
        if 4 * rows * max(q_len, kv_len) * p.dim <= MOST_BYTES:
            return p


def contestants(p: Drawn, dtype: torch.dtype) -> tuple[Callable[[], Any], Callable[[], Any]]:
    def tensor(heads: int, length: int) -> torch.Tensor:
        if p.bshd:
            return torch.randn(p.batch, length, heads, p.dim).to(dtype).transpose(1, 2)
        return torch.randn(p.batch, heads, length, p.dim).to(dtype)

    q = tensor(p.heads, p.q_len)
    k, v = (tensor(p.heads // p.group, p.kv_len) for _ in range(2))
    out, mask, ours = torch.empty_like(q), None, {}
    if p.mask == "bool":
        mask = torch.rand(p.batch, 1, p.q_len, p.kv_len) > 0.3
        mask[..., 0] = True
        ours["attn_mask"] = mask
    if p.mask == "bias":
        ours["attn_bias"] = mask = torch.randn(p.batch, p.heads, p.q_len, p.kv_len).to(dtype)
    theirs = torch.nn.functional.scaled_dot_product_attention
    return (
        lambda: manyhead.attention(q, k, v, causal=p.causal, out=out, **ours),
        lambda: theirs(q, k, v, attn_mask=mask, is_causal=p.causal, enable_gqa=p.group > 1),
    )


class DrawnLayer(NamedTuple):
    batch: int
    q_len: int
    kv_len: int
    width: int
    heads: int
    causal: bool
    weights: bool

    @property
    def line(self) -> str:
        flags = ["causal" if self.causal else "", "weights" if self.weights else ""]
        sizes = f"b{self.batch} q{self.q_len} kv{self.kv_len} width {self.width} h{self.heads}"
        return " ".join([sizes, *filter(None, flags)])


def draw_layer(rng: random.Random, threads: int) -> DrawnLayer:
    while True:
        q_len, kv_len = draw_lengths(rng)
        p = DrawnLayer(
            batch=rng.choice((1, 1, 2, 4, 8)),
            q_len=q_len,
            kv_len=kv_len,
            width=rng.choice(WIDTHS),
            heads=rng.choice((1, 2, 4, 6, 8, 12, 16)),
            causal=1 < q_len == kv_len and rng.random() < 0.3,
            weights=rng.random() < 0.25,
        )
        projections = 4 * p.batch * (q_len + kv_len) * p.width**2
        products = 4 * p.batch * q_len * kv_len * p.width
        if p.width % p.heads == 0 and p.width >= 16 * p.heads and projections + products <= 2 * MOST_FLOPS * threads:
            return p


def contesting_layers(p: DrawnLayer, dtype: torch.dtype) -> tuple[Callable[[], Any], Callable[[], Any]]:
    theirs = torch.nn.MultiheadAttention(p.width, p.heads, batch_first=True, dtype=dtype).eval()
    ours = manyhead.MultiHeadAttention.from_state_dict(theirs.state_dict(), num_heads=p.heads)
    x = torch.randn(p.batch, p.q_len, p.width).to(dtype)
    y = x if p.q_len == p.kv_len else torch.randn(p.batch, p.kv_len, p.width).to(dtype)
    mask = torch.ones(p.q_len, p.kv_len, dtype=torch.bool).triu(1) if p.causal else None
    options = {"need_weights": p.weights, "attn_mask": mask}
    return (
        lambda: ours.forward_torch(x, y, y, batch_first=True, **options)[0],
        lambda: theirs(x, y, y, **options)[0],
    )


def turn(call: Callable[[], Any], seconds: float = 0.02) -> float:
    """Seconds of a call, of as many as fill the turn."""
    start = time.perf_counter()
    call()
    calls = max(1, int(seconds / max(time.perf_counter() - start, 1e-6)))
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def main() -> int:
    parser = options.torch_sweep()
    args = parser.parse_args()
    if args.layers and args.masks is not None:
        parser.error("--layers draws masks of its own: leave out --masks")
    words = (args.masks or "none,none,none,bool,bias").split(",")
    masks = tuple("" if word == "none" else word for word in words)
    if not set(masks) <= {"", "bool", "bias"} or args.number < 1 or args.threads < 1:
        parser.error("--masks: none, bool or bias; --number and --threads: at least 1")
    torch.set_num_threads(args.threads)
    manyhead.set_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    rows = []
    with torch.inference_mode():
        for _ in range(args.number):
            if args.layers:
                problem = draw_layer(rng, args.threads)
                ours, theirs = contesting_layers(problem, TYPES[args.dtype])
            else:
                problem = draw(rng, masks, args.threads)
                ours, theirs = contestants(problem, TYPES[args.dtype])
            apart = (ours().float() - theirs().float()).abs().max().item()
            if not apart <= TOLERANCE[args.dtype]:
                print(f"{args.dtype} {problem.line}: differs from PyTorch by {apart}", file=sys.stderr)
                return 1
            their = our = math.inf
            for _ in range(3):
                their = min(their, turn(theirs))
                our = min(our, turn(ours))
            rows.append((their / our, problem.line, our * 1e6, their * 1e6))
    rows.sort()
    print(f"{args.dtype}, isa {manyhead.isa()}, {args.threads} threads, PyTorch {torch.__version__}; us of a call")
    for ratio, line, our, their in rows[: args.list]:
        print(f"{line:44} manyhead {our:9.1f}  torch {their:9.1f}  ratio {ratio:.2f}")
    ratios = [row[0] for row in rows]
    mean = statistics.geometric_mean(ratios)
    print(f"geometric mean {mean:.2f}, slower than PyTorch: {sum(r < 1 for r in ratios)} of {len(rows)}", end="")
    large = [ratio for ratio, _, our, _ in rows if our >= 20]
    print(f"; of {len(large)} calls of 20 us and more {sum(r < 1 for r in large)}" if large else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
