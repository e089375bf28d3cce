"""Attention of single tokens under a mask: `python -m loadtests.attention [--rows 8 32] [--lengths 128 1024 8192]`.

On CUDA only. First compares the kernel of `server.compute.attention` with plain arithmetic over types, head sizes and
lengths; then times a chain of sixteen such attentions, as a model of sixteen layers has them, against MLX's own way: in
turn, host and device together, medians of pairs. Prints a table; its exit code is 0 when every result agrees and the
kernel is nowhere slower than `--bar` times MLX's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

import mlx.core as mx

from loadtests.bench.ledger import interval
from server.compute.attention import LONGEST, MANY, TOLERANCE, attend, difference, is_missing

LAYERS = 16
DIMS = {mx.float32: (32, 64, 128), mx.float16: (32, 64, 128, 256), mx.bfloat16: (32, 64, 128, 256)}
HEADS = {64: ((8, 8), (8, 2), (32, 8))}  # queries' and keys'; one kind elsewhere, since each is compiled
LENGTHS = (1, 2, 31, 257, MANY, MANY + 1, LONGEST)
Attend = Callable[[mx.array, mx.array, mx.array, mx.array, float], mx.array]


def agree() -> bool:
    good = True
    for dtype, dims in DIMS.items():
        for dim in dims:
            kinds = HEADS.get(dim, ((8, 2),))
            worst = max(difference(dtype, dim, *heads, dim**-0.5, length) for heads in kinds for length in LENGTHS)
            print(f"{dtype}, heads of {dim}: off by {worst:.2g}, {TOLERANCE[dtype]:.2g} allowed", flush=True)
            good &= worst <= TOLERANCE[dtype]
    return good


def mlx(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array, scale: float) -> mx.array:
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


def seconds(way: Attend, rows: int, heads: tuple[int, int], dim: int, length: int) -> float:
    """Of one chain of layers; each reads a slice of a longer buffer, as caches are."""
    room = length + 256 - length % 256
    queries = mx.random.normal((rows, heads[0], 1, dim)).astype(mx.bfloat16)
    keys = mx.random.normal((rows, heads[1], room, dim)).astype(mx.bfloat16)
    mask = mx.arange(length) >= mx.arange(rows).reshape(rows, 1, 1, 1)
    mx.eval(queries, keys, mask)
    started = perf_counter()
    for _ in range(LAYERS):
        queries = way(queries, keys[:, :, :length], keys[:, :, :length], mask, dim**-0.5)
    mx.eval(queries)
    return perf_counter() - started


def compare(rows: int, heads: tuple[int, int], dim: int, length: int, pairs: int) -> float:
    ratios, own = [], []
    for pair in range(pairs + 1):
        ours, theirs = (seconds(way, rows, heads, dim, length) for way in (attend, mlx))
        if pair:  # the first one compiles
            ratios.append(ours / theirs)
            own.append(ours)
    low, high = interval(ratios)
    print(
        f"| {rows} | {heads[0]} / {heads[1]} | {dim} | {length} | {median(own) * 1e3:.2f} "
        f"| {median(ratios):.2f} ({low:.2f} – {high:.2f}) |",
        flush=True,
    )
    return median(ratios)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[2, 8, 32], help="rows in the batch")
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 1024, 4096, LONGEST], help="keys")
    parser.add_argument("--pairs", type=int, default=15, help="of measurements")
    parser.add_argument("--bar", type=float, default=1.2, help="largest ratio")
    return parser.parse_args(arguments)


def main() -> int:
    arguments = parse()
    if not is_missing():
        print("MLX has such a kernel here, or none is worth it: nothing to measure")
        return 0
    good = agree()
    print("\n| rows | heads | dim | keys | ms, 16 layers | ÷ MLX's |\n| --- | --- | --- | --- | --- | --- |")
    ratios = [
        compare(rows, heads, dim, length, arguments.pairs)
        for heads, dim in (((32, 8), 64), ((16, 2), 256), ((32, 32), 128))
        for rows in arguments.rows
        for length in arguments.lengths
    ]
    return 0 if good and max(ratios) <= arguments.bar else 1


if __name__ == "__main__":
    sys.exit(main())
