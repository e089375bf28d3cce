"""Shapes that a device would plan are few, and what is done instead says the same."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from driving import model, prompt
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from server.compute import cudnn_shapes

WITH_CONVOLUTIONS = ["qwen3_5", "mamba2", "nemotron_h", "jamba", "falcon_h1", "kimi_linear", "lfm2"]


@pytest.fixture
def replaced(monkeypatch):
    monkeypatch.setattr(cudnn_shapes, "is_planned", lambda: True)
    monkeypatch.setattr(nn.Conv1d, "__call__", nn.Conv1d.__call__)  # for the way back
    cudnn_shapes.avoid()


@pytest.fixture
def convolved(monkeypatch):
    """The shapes that went into MLX's convolution."""
    shapes, original = [], mx.conv1d
    monkeypatch.setattr(mx, "conv1d", lambda x, *rest: shapes.append(x.shape) or original(x, *rest))
    return shapes


def layer(channels=8, taps=4, dtype=mx.float32, **options):
    made = nn.Conv1d(channels, channels, taps, **{"groups": channels, **options})
    made.update({name: value.astype(dtype) for name, value in made.parameters().items()})
    return made


@given(count=st.integers(1, 64), rows=st.integers(1, 64))
def test_a_pass_reads_as_many_prompts_as_it_has_room_for(count, rows):
    with pytest.MonkeyPatch.context() as patch:
        for planned in (False, True):
            patch.setattr(cudnn_shapes, "is_planned", lambda planned=planned: planned)
            assert cudnn_shapes.rows_read(count) >= count
            assert cudnn_shapes.rows_read(cudnn_shapes.most_read(rows)) <= rows
            assert cudnn_shapes.rows_read(cudnn_shapes.most_read(rows) + 1) > rows


# Each combination compiles kernels of its own for a second or two, on a machine that has not run it yet.
@pytest.mark.parametrize(
    ("dtype", "bias", "taps_tried"),
    [
        (mx.float32, False, (1, 4)),
        (mx.float32, True, (2, 8)),
        (mx.float16, True, (4,)),
        (mx.bfloat16, False, (4,)),
    ],
)
def test_shifted_copies_add_up_to_the_convolution(convolved, replaced, dtype, bias, taps_tried):
    for taps in taps_tried:
        own = layer(taps=taps, dtype=dtype, bias=bias)
        for batch, length in [(1, taps), (3, taps), (2, 40), (5, 7 + taps)]:
            x = mx.random.normal((batch, length, 8)).astype(dtype)
            expected = mx.conv1d(x, own.weight, 1, 0, 1, 8) + (own.bias if bias else mx.array(0, dtype))
            convolved.clear()
            found = own(x)
            assert not convolved
            assert found.dtype == dtype
            assert found.shape == expected.shape
            assert float(mx.abs(found - expected).max()) <= 4 * float(mx.finfo(dtype).eps)


@pytest.mark.parametrize(
    "options", [{"groups": 1}, {"groups": 4}, {"padding": 3}, {"stride": 2}, {"dilation": 2}, {"taps": 9}]
)
def test_other_convolutions_stay_what_they_are(convolved, replaced, options):
    layer(**options)(mx.random.normal((2, 20, 8)))
    assert convolved == [(2, 20, 8)]


def test_where_nothing_is_planned_nothing_is_replaced(monkeypatch):
    monkeypatch.setattr(cudnn_shapes, "is_planned", lambda: False)
    before = nn.Conv1d.__call__
    cudnn_shapes.avoid()
    assert nn.Conv1d.__call__ is before


@pytest.mark.parametrize("family", WITH_CONVOLUTIONS)
def test_a_model_says_the_same_without_its_convolutions(family, convolved, request):
    inner, tokens = model(family), mx.array([prompt(30)])

    def logits():
        caches = make_prompt_cache(inner)
        read = inner(tokens[:, :20], cache=caches)
        return mx.concatenate([read, *(inner(tokens[:, i : i + 1], cache=caches) for i in range(20, 30))], axis=1)

    expected = logits()
    mx.eval(expected)
    assert convolved, "the family has none"
    convolved.clear()
    request.getfixturevalue("replaced")
    found = logits()
    assert not convolved
    assert float(mx.abs(found - expected).max()) <= 1e-4 * float(mx.std(expected))
