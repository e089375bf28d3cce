"""Attention of one new token a row under a mask, in one kernel.

Owns a CUDA kernel (attend.cu) and the place in `mx.fast` where it steps in. Rows that joined their batch at different
times see different parts of its cache, so that decoding has a mask, and MLX's fused kernels for CUDA take none beside a
single query: they leave it to five kernels a layer, where what each costs the host is what a step is made of. Metal has
such a kernel, and other devices have nothing to win. Runs in the engine's main thread.

The method is the online softmax of Milakov and Gimelshein (arXiv:1805.02867), over parts that are put together at the
end as in Flash-Decoding.
"""

from __future__ import annotations

import hashlib
import logging
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

SOURCE = Path(__file__).with_name("attend.cu")
LONGEST = 8192  # keys; one block a head reads them all, and beyond that several would be quicker
MANY = 1024  # keys that are worth the largest block
THREADS = {False: 256, True: 1024}
HEAD_BYTES = frozenset({16, 32, 64, 128, 256, 512})  # 16 for each of 1, 2, 4 … 32 threads
TOLERANCE = {mx.float32: 2e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}  # of values of a normal distribution

log = logging.getLogger("marathon.engine")


def is_missing() -> bool:
    """Whether MLX has no such kernel for this device, and this one runs on it."""
    return mx.cuda.is_available()


def install() -> None:
    """Let `mx.fast.scaled_dot_product_attention` use the kernel wherever it fits. Call it before the model loads."""
    if not is_missing():
        return
    original = mx.fast.scaled_dot_product_attention

    def attention(
        q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any = None, sinks: Any = None, **rest: Any
    ) -> mx.array:
        if sinks is None and isinstance(mask, mx.array) and fits(q, k, v, mask) and _is_proved(q, k, scale):
            return attend(q, k, v, mask, scale)
        found: mx.array = original(q, k, v, scale=scale, mask=mask, sinks=sinks, **rest)
        return found

    mx.fast.scaled_dot_product_attention = attention


def fits(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array) -> bool:
    """Whether the kernel knows such shapes and types."""
    rows, heads, count, dim = queries.shape
    length = keys.shape[2]
    if count != 1 or length > LONGEST or mask.dtype != mx.bool_ or mask.ndim != 4:
        return False
    if not queries.dtype == keys.dtype == values.dtype or queries.dtype not in TOLERANCE:
        return False
    if values.shape[3] != dim or heads % keys.shape[1] or dim * queries.dtype.size not in HEAD_BYTES:
        return False
    return mask.shape[0] in (1, rows) and mask.shape[1] in (1, heads) and mask.shape[2:] == (1, length)


def attend(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array, scale: float) -> mx.array:
    """Softmax of scaled products over the keys that the mask lets through, times the values.

    `queries` [B, H, 1, D]; `keys` and `values` [B, H / n, L, D], with any strides; `mask` [B or 1, H or 1, 1, L] bool.
    Gives [B, H, 1, D] in the queries' type, summed in float32; zeros where a row sees nothing.
    """
    rows, heads, _, dim = queries.shape
    threads = THREADS[keys.shape[2] > MANY]
    group = heads // keys.shape[1]
    out: mx.array = kernel(float(scale))(
        inputs=[queries, keys, values, mask],
        template=[("T", queries.dtype), ("D", dim), ("GROUP", group), ("THREADS", threads)],
        grid=(threads * heads, rows, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows, heads, 1, dim)],
        output_dtypes=[queries.dtype],
    )[0]
    return out


@cache
def kernel(scale: float) -> Any:
    """The scale is written into the source. MLX keeps compiled kernels by name, also on disk, so that the name says
    what the source is."""
    source = SOURCE.read_text(encoding="utf-8")
    header = f"#define SCALE {scale!r}f\n"
    digest = hashlib.sha256((header + source).encode()).hexdigest()[:16]
    return mx.fast.cuda_kernel(
        name=f"marathon_attend_{digest}",
        input_names=["queries", "keys", "values", "mask"],
        output_names=["out"],
        header=header,
        source=source,
        ensure_row_contiguous=False,
    )


def _is_proved(queries: mx.array, keys: mx.array, scale: float) -> bool:
    """Whether the kernel says what MLX says for heads of this kind; tried once for each."""
    _, heads, _, dim = queries.shape
    return agrees_with_mlx(queries.dtype, dim, heads, keys.shape[1], scale)


@cache
def agrees_with_mlx(dtype: mx.Dtype, dim: int, heads: int, shared: int, scale: float) -> bool:
    try:
        worst = max(difference(dtype, dim, heads, shared, scale, length) for length in (33, MANY + 1))
    except Exception as error:  # no compiler, no headers: MLX's own way remains
        log.warning("attention stays with MLX, heads of %d: %s: %s", dim, type(error).__name__, error)
        return False
    if not worst <= TOLERANCE[dtype]:
        log.warning("attention stays with MLX, heads of %d: the kernel is off by %g", dim, worst)
        return False
    return True


def difference(dtype: mx.Dtype, dim: int, heads: int, shared: int, scale: float, length: int) -> float:
    """The largest difference between the kernel and plain arithmetic, for three padded rows out of longer buffers."""
    key = mx.random.key(dim)
    queries, keys, values = (
        mx.random.normal(shape, key=one).astype(dtype)
        for one, shape in zip(
            mx.random.split(key, 3),
            [(3, heads, 1, dim), (3, shared, length + 7, dim), (3, shared, length + 7, dim)],
            strict=True,
        )
    )
    keys = keys[:, :, 3 : length + 3]
    values = values[:, :, 3 : length + 3]
    mask = mx.arange(length) >= mx.array([0, min(5, length - 1), length - 1]).reshape(3, 1, 1, 1)
    found = attend(queries, keys, values, mask, scale).astype(mx.float32)
    return float(mx.abs(found - plain(queries, keys, values, mask, scale)).max())


def plain(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array, scale: float) -> mx.array:
    """What `attend` computes, by definition and in float32."""
    group = queries.shape[1] // keys.shape[1]
    queries, keys, values = (array.astype(mx.float32) for array in (queries, keys, values))
    keys = mx.repeat(keys, group, axis=1)
    values = mx.repeat(values, group, axis=1)
    scores = mx.where(mask, scale * queries @ keys.swapaxes(-1, -2), -mx.inf)
    return mx.softmax(scores, axis=-1) @ values
