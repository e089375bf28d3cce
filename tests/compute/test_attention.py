"""Attention of single tokens under a mask: what the kernel computes, when it steps in, and when MLX keeps its way.

The kernel itself runs on CUDA only. Elsewhere its source runs on host threads (attend_host.cpp), and plain arithmetic
stands in for it where it is called.
"""

import logging
import subprocess
from pathlib import Path

import mlx.core as mx
import pytest
from driving import CLOSE, Rig, prompt, row
from hypothesis import given
from hypothesis import strategies as st

from server.compute import attention
from server.memory.allocator import CountUnavailable
from server.memory.native_count import find_compiler

HERE = Path(__file__).parent
SCALE = 0.125
WITH_ATTENTION = ["llama", "gemma3_text", "qwen3_5", "cohere2", "smollm3", "nemotron_h"]


@pytest.fixture
def calls(monkeypatch):
    """The shapes that went into the kernel, which plain arithmetic stands in for."""
    seen = []

    def attend(queries, keys, values, mask, scale):
        seen.append((queries.shape, keys.shape))
        return attention.plain(queries, keys, values, mask, scale).astype(queries.dtype)

    monkeypatch.setattr(attention, "attend", attend)
    return seen


@pytest.fixture
def install(monkeypatch):
    """Installs as on a device that lacks such a kernel, until the test ends."""
    monkeypatch.setattr(attention, "is_missing", lambda: True)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", mx.fast.scaled_dot_product_attention)
    attention.agrees_with_mlx.cache_clear()
    yield attention.install
    attention.agrees_with_mlx.cache_clear()


def heads(rows=2, queries=4, shared=2, length=9, dim=16, count=1, dtype=mx.float32):
    made = [(rows, queries, count, dim), (rows, shared, length, dim), (rows, shared, length, dim)]
    return [mx.random.normal(shape).astype(dtype) for shape in made]


def padded(rows, length):
    return mx.arange(length) >= mx.array([i % length for i in range(rows)]).reshape(rows, 1, 1, 1)


# ---------------------------------------------------------------- what it computes
@pytest.mark.parametrize(
    ("threads", "dim", "length", "shift"),
    [(64, 64, 33, 0), (64, 64, 150, 1), (128, 128, 70, 0), (32, 16, 1, 0), (64, 4, 40, 0)],
)
def test_the_source_of_the_kernel_computes_attention(tmp_path, threads, dim, length, shift):
    try:
        compiler = find_compiler()
    except CountUnavailable as reason:
        pytest.skip(str(reason))
    sizes = {"THREADS": threads, "D": dim, "LENGTH": length, "SHIFT": shift}
    options = ["-std=c++20", "-O1", "-pthread", f"-I{attention.SOURCE.parent}"]
    command = [compiler, *options, *(f"-D{name}={value}" for name, value in sizes.items())]
    subprocess.run([*command, str(HERE / "attend_host.cpp"), "-o", str(tmp_path / "attend")], check=True, timeout=120)
    found = subprocess.run([tmp_path / "attend"], check=True, capture_output=True, text=True, timeout=120).stdout
    assert float(found) < 2e-6


@given(rows=st.integers(1, 4), group=st.integers(1, 3), shared=st.integers(1, 3), length=st.integers(1, 20))
def test_plain_arithmetic_says_what_mlx_says(rows, group, shared, length):
    queries, keys, values = heads(rows, group * shared, shared, length)
    mask = padded(rows, length)
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE, mask=mask)
    assert mx.allclose(attention.plain(queries, keys, values, mask, SCALE), expected, atol=1e-5)


@pytest.mark.skipif(not mx.cuda.is_available(), reason="the kernel runs on CUDA, and MLX finds none")
def test_the_kernel_computes_attention():
    for dtype, allowed in attention.TOLERANCE.items():
        for dim in (32, 64, 128):
            for length in (1, 2, 31, 257, attention.MANY + 1):
                assert attention.difference(dtype, dim, 8, 2, dim**-0.5, length) <= allowed


@pytest.fixture
def built(monkeypatch):
    """What kernels were built of, and what they were called with."""
    kernels, runs = [], []

    def build(**description):
        kernels.append(description)
        return lambda **run: runs.append(run) or [mx.zeros(run["output_shapes"][0], run["output_dtypes"][0])]

    monkeypatch.setattr(mx.fast, "cuda_kernel", build)
    attention.kernel.cache_clear()
    yield kernels, runs
    attention.kernel.cache_clear()


def test_every_head_of_every_row_has_a_block(built):
    _, runs = built
    for length in (9, attention.MANY, attention.MANY + 1):
        queries, keys, values = heads(rows=3, queries=8, shared=2, length=length, dim=64, dtype=mx.bfloat16)
        assert attention.attend(queries, keys, values, padded(3, length), SCALE).shape == queries.shape
    small, small_too, large = runs
    assert small["grid"] == small_too["grid"] == (256 * 8, 3, 1)
    assert large["grid"] == (1024 * 8, 3, 1)
    assert [dict(run["template"])["THREADS"] for run in runs] == [run["threadgroup"][0] for run in runs]
    assert dict(small["template"]) == {"T": mx.bfloat16, "D": 64, "GROUP": 4, "THREADS": 256}


def test_kernels_of_different_sources_have_different_names(built, tmp_path, monkeypatch):
    kernels, _ = built
    attention.kernel(0.125)
    attention.kernel(0.25)
    attention.kernel(0.25)
    changed = tmp_path / "attend.cu"
    changed.write_text(attention.SOURCE.read_text() + "\n")
    monkeypatch.setattr(attention, "SOURCE", changed)
    attention.kernel.cache_clear()
    attention.kernel(0.25)
    assert len({kernel["name"] for kernel in kernels}) == len(kernels) == 3


# ---------------------------------------------------------------- when it steps in
@pytest.mark.parametrize("family", WITH_ATTENTION)
def test_rows_of_different_lengths_decode_through_the_kernel_and_say_the_same(family, install, calls):
    texts = [prompt(5), prompt(19), prompt(12)]
    expected = logits_of(family, texts)
    assert not calls
    install()
    found = logits_of(family, texts)
    assert calls
    assert all(queries[2] == 1 for queries, _ in calls)
    assert float(mx.abs(found - expected).max()) <= CLOSE * float(expected.std())


def logits_of(family, texts):
    """Of three steps of rows that are decoded together, [3, B, V]."""
    rig = Rig(family)
    batch = rig.batch()
    rig.join(batch, *rig.read(*(row(seq, text) for seq, text in enumerate(texts))))
    rig.step(batch, 3)
    return mx.stack([mx.stack(rig.model.logits[seq]) for seq in range(len(texts))], axis=1)


@given(
    rows=st.integers(1, 3),
    group=st.integers(1, 4),
    shared=st.integers(1, 3),
    length=st.integers(1, 12),
    dim=st.sampled_from([16, 64, 128]),
    per_head=st.booleans(),
    dtype=st.sampled_from(list(attention.TOLERANCE)),
)
def test_it_fits_whatever_a_batch_may_ask(rows, group, shared, length, dim, per_head, dtype):
    queries, keys, values = heads(rows, group * shared, shared, length, dim, dtype=dtype)
    mask = padded(rows, length)
    if per_head:
        mask = mx.broadcast_to(mask, (rows, group * shared, 1, length))
    assert attention.fits(queries, keys, values, mask)
    assert attention.fits(queries, keys, values, mask[:1])


def test_it_fits_nothing_else():
    queries, keys, values = heads()
    mask = padded(2, 9)
    others = {
        "several tokens": (heads(count=2)[0], keys, values, mask),
        "a mask that adds": (queries, keys, values, mask.astype(mx.float32)),
        "a flat mask": (queries, keys, values, mask[0, 0]),
        "a mask of other keys": (queries, keys, values, padded(2, 8)),
        "a mask of other rows": (queries, keys, values, padded(3, 9)),
        "mixed types": (queries, keys.astype(mx.float16), values, mask),
        "odd heads": (*heads(dim=24), mask),
        "tiny heads": (*heads(dim=2), mask),
        "large heads": (*heads(dim=256), mask),
        "values of another size": (queries, keys, heads(dim=32)[2], mask),
        "heads that aren't shared evenly": (heads(queries=5)[0], keys, values, mask),
        "more keys than one block should read": (
            *heads(rows=1, length=attention.LONGEST + 1),
            padded(1, attention.LONGEST + 1),
        ),
    }
    assert attention.fits(queries, keys, values, mask)
    assert [name for name, shapes in others.items() if attention.fits(*shapes)] == []


def test_sinks_prompts_and_whole_rows_stay_with_mlx(install, calls):
    queries, keys, values = heads()
    longer = heads(count=3, length=3)[0]
    sinks = mx.zeros(4)

    def answers():
        return [
            mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE, mask=padded(2, 9), sinks=sinks),
            mx.fast.scaled_dot_product_attention(longer, keys, values, scale=SCALE, mask="causal"),
            mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE),
        ]

    expected = answers()
    install()
    found = answers()
    assert not calls
    assert all(mx.array_equal(a, b) for a, b in zip(found, expected, strict=True))


# ---------------------------------------------------------------- when it doesn't
@pytest.mark.parametrize("fault", ["raises", "is wrong", "is no number"])
def test_a_kernel_that_fails_its_proof_is_never_used_and_that_is_said_once(install, monkeypatch, caplog, fault):
    def attend(queries, keys, values, mask, scale):
        if fault == "raises":
            raise RuntimeError("no such header")
        wrong = 0.5 if fault == "is wrong" else float("nan")
        return attention.plain(queries, keys, values, mask, scale) + wrong

    monkeypatch.setattr(attention, "attend", attend)
    queries, keys, values = heads()
    mask = padded(2, 9)
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE, mask=mask)
    install()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            found = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE, mask=mask)
    assert mx.array_equal(found, expected)
    assert len(caplog.records) == 1
    assert "heads of 16" in caplog.text


def test_where_mlx_has_such_a_kernel_nothing_is_replaced(monkeypatch):
    monkeypatch.setattr(attention, "is_missing", lambda: False)
    before = mx.fast.scaled_dot_product_attention
    attention.install()
    assert mx.fast.scaled_dot_product_attention is before
