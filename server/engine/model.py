"""The model: load it, probe whether and how it batches, and learn what a row costs.

Owns nothing after `load` returns. Runs in the engine process's main thread, before the loop.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from server import cache_guard
from server.cache_guard import cache_arrays, parts, pinned_bytes
from server.compute import merged_caches as together
from server.compute.merged_caches import merged, read_together, taken_apart
from server.errors import StartupError, one_line
from server.ipc.messages import LOADING, FileStates
from server.ipc.probe import GROWTH, LARGEST_CHUNK, LayerCost, Probe, ReadsTogether
from server.model_files import model_config
from server.model_files.generation_config import without_broken
from server.model_files.same_files import file_states, require_same
from server.model_files.stumbles import in_words
from server.model_files.trial_results import TrialResults
from server.model_files.weights import only_weights

log = logging.getLogger("marathon.engine")

_PROBE_LENGTH = GROWTH + 1  # one more than a growth step: separates arrays that grow from arrays that don't
_PEAK_LENGTHS = (32, 256)  # of the smaller chunk measured; the longer one is more exact where there is time for it
_PEAK_SECONDS = 2.0
_PEAK_READINGS = 4
TRIED_OUT_BY = [Path(__file__), Path(cache_guard.__file__), Path(together.__file__)]  # what a trial's result depends on
PARTS = 50  # in which a large model is read; evaluating one costs a wait of a fraction of a millisecond
LEAST_BYTES = 1 << 26  # of a part of the weights
NOISE_FACTOR = 16  # how much further two paths may be apart than reading at once and token by token are
SPREAD_SHARE = 2e-3  # or than this share of the logits' own spread, where those two hardly differ


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what the probe found."""

    model: nn.Module
    config: dict[str, Any]
    context: int
    weights_bytes: int
    probe: Probe
    files: FileStates = field(default_factory=dict)

    def row_bytes(self, length: int) -> int:
        """Bytes of one row's caches at `length` positions."""
        return sum(cost.bytes(length) for cost in self.probe.row_cost)

    def largest_bytes(self, length: int) -> int:
        """Bytes of its largest cache array: growing copies one at a time."""
        return max((cost.bytes(length) for cost in self.probe.row_cost), default=0)

    def longest_chunk(self, room: int, held: int) -> int:
        """Tokens of a chunk behind `held` others that `room` bytes suffice for: what it needs for a while, what it
        leaves behind, and the cache array that is copied as it grows."""
        pairs = self.probe.pair_bytes
        left = max(0, room - self.largest_bytes(held))
        each = self.probe.token_bytes + pairs * held + self.row_bytes(LARGEST_CHUNK) / LARGEST_CHUNK
        if not pairs:
            return int(left / max(1.0, each))
        return int((math.sqrt(each * each + 4 * pairs * left) - each) / (2 * pairs))

    @property
    def group_bytes(self) -> int:
        """What a step of one group costs before any KV: the weights and the overhead, as memory traffic."""
        return self.probe.group_bytes

    @property
    def batches(self) -> bool:
        return self.probe.batching == "batched"


def load(
    path: Path,
    *,
    trust_remote_code: bool,
    probe: Probe | None,
    on_stage: Callable[[str], None],
    trials: TrialResults[Probe] | None = None,
    on_read: Callable[[int, int], None] = lambda done, total: None,
    files: FileStates | None = None,
) -> LoadedModel:
    """Load the model in the folder `path`, and try it out unless an earlier engine's `probe`, or a trial that was kept,
    shows how it behaves.

    `on_stage` hears of each stage begun, `on_read` of the bytes that are read and their total. Raises StartupError with
    one sentence when the folder holds no model that mlx-lm can run, or another one than that of `files`, which an
    earlier engine loaded: answers that were begun with one model aren't gone on with by another.
    """
    on_stage(LOADING)
    if fault := model_config.fault(path, typed=True):
        raise StartupError(f"can't load the model in {path}: {fault}")
    try:
        with without_broken(path) as sound, only_weights(sound) as folder:
            found = file_states(path, files)
            require_same(files or found, found, "since the server loaded it", "; put them back, or start it anew")
            model, config = load_model(folder, lazy=True, trust_remote_code=trust_remote_code)
            weights = read_weights(model, on_read)
            require_same(found, file_states(path, found), "while it was loaded")
    except Exception as error:
        raise StartupError(f"can't load the model in {path}: {in_words(error, 'mlx-lm')}") from error
    if probe is None:
        try:
            probe = _known_or_tried(path, model, weights, on_stage, trials)
        except Exception as error:
            raise StartupError(f"the model in {path} loads but doesn't run: {one_line(error)}") from error
        mx.clear_cache()
    return LoadedModel(model, config, model_config.context_of(path), weights, probe, found)


def read_weights(model: nn.Module, on_read: Callable[[int, int], None]) -> int:
    """Evaluate the weights of a model that was loaded lazily, and return their bytes. `on_read` hears after each part
    how many bytes are there, and of how many."""
    arrays = [array for _, array in tree_flatten(model.parameters())]
    total: int = sum(array.nbytes for array in arrays)
    done = 0
    parts = list(_parts(arrays, max(LEAST_BYTES, total // PARTS)))
    for part, following in zip(parts, [*parts[1:], []], strict=True):
        mx.async_eval(part, following)  # so that the disk has work while this one is reported
        mx.eval(part)
        done += sum(array.nbytes for array in part)
        on_read(done, total)
    return total


def _parts(arrays: Iterable[mx.array], size: int) -> Iterator[list[mx.array]]:
    """Divide arrays into lists of at least `size` bytes; the last one may be smaller."""
    part: list[mx.array] = []
    held = 0
    for array in arrays:
        part.append(array)
        held += array.nbytes
        if held >= size:
            yield part
            part = []
            held = 0
    if part:
        yield part


def _known_or_tried(
    path: Path, model: nn.Module, weights: int, on_stage: Callable[[str], None], trials: TrialResults[Probe] | None
) -> Probe:
    known = None
    if trials:
        known = trials.recall(path)
    doubts: list[Exception] = []
    probe = known or try_out(model, weights, on_stage, doubts)
    if probe.batching != "batched":
        log.warning("the model runs in groups of one: %s", probe.batching)
    log.info("rows are decoded %s; short prompts are read %s", probe.batching, probe.reads)
    if trials and known is None and not doubts:
        trials.keep(path, probe)
    return probe


def try_out(model: nn.Module, weights_bytes: int, on_stage: Callable[[str], None], doubts: list[Exception]) -> Probe:
    """How the model batches, and what its rows and steps cost. To `doubts` is added what may go otherwise next time."""
    on_stage("trying out whether rows can be decoded together")
    vocab, batching = try_batching(model, doubts)
    on_stage("trying out whether prompts can be read together")
    reads = reads_together(model, batching, doubts)
    on_stage("measuring what a step, a row and a chunk cost")
    traffic = max(weights_bytes, int(step_seconds(model) * _bandwidth()))
    largest, pair = chunk_peak(model)
    return Probe(vocab, batching, row_cost(model), largest, traffic, reads, pair)


def _note(error: Exception, doubts: list[Exception] | None) -> None:
    """MLX's own errors may be of the moment, such as memory that was short; others are the model's."""
    of_mlx = isinstance(error, MemoryError | RuntimeError) and not isinstance(error, NotImplementedError)
    if doubts is not None and of_mlx:
        doubts.append(error)


def quantization(config: dict[str, Any]) -> str:
    """`"4-bit"`, or the weights' type where they aren't quantised."""
    found = config.get("quantization") or config.get("quantization_config") or {}
    if bits := found.get("bits"):
        return f"{bits}-bit"
    return str(config.get("torch_dtype") or config.get("dtype") or "none")


# ---------------------------------------------------------------- batching
def rounding(noise: float, spread: float) -> float:
    """How far logits may be apart that come from the same tokens by two paths: they differ by `noise` where the tokens
    are read at once or one by one, and have a standard deviation of `spread`."""
    return max(NOISE_FACTOR * noise, SPREAD_SHARE * spread)


def try_batching(model: nn.Module, doubts: list[Exception] | None = None) -> tuple[int, str]:
    """Width of the logits, and whether rows of different lengths give the same logits together and alone.

    The shortest has read a single token: windows of the newest tokens aren't full yet.
    """
    longest = _selects_from(model) + 19
    prompts = [[(step * i + 3) % 50 + 1 for i in range(length)]
               for step, length in ((5, longest), (7, longest - 14), (11, 2))]  # fmt: skip
    read = [_prefilled(model, prompt[:-1]) for prompt in prompts]
    singles = copy.deepcopy(read)  # the arrays are shared until written to
    alone = [_next(model, prompt[-1:], caches)[0] for prompt, caches in zip(prompts, read, strict=True)]
    vocab = int(alone[0].shape[-1])
    try:
        together = merged_step(model, [prompt[-1] for prompt in prompts], singles)
    except Exception as error:  # a model's own code may raise anything
        _note(error, doubts)
        return vocab, one_line(error)
    noise = max(_distance(_whole(model, prompt), logits) for prompt, logits in zip(prompts, alone, strict=True))
    spread = max(float(mx.std(logits)) for logits in alone)
    allowed = rounding(noise, spread)
    apart = max(_distance(a, together[i]) for i, a in enumerate(alone))
    if not apart <= allowed:  # a NaN is not
        return (
            vocab,
            f"batched logits differ from those of a row alone by {apart:.3g}, of which {allowed:.3g} is rounding",
        )
    return vocab, "batched"


def reads_together(model: nn.Module, batching: str, doubts: list[Exception] | None = None) -> ReadsTogether:
    """How prompts of different lengths give the same logits read together and alone: at first from nothing, then on
    caches of different lengths. A model whose rows are decoded alone reads alone."""
    if batching != "batched":
        return "alone"
    prompts = [[(step * i + 5) % 50 + 1 for i in range(length)] for step, length in ((3, 11), (7, 8))]
    alone = [_next(model, prompt[-1:], _prefilled(model, prompt[:-1]))[0] for prompt in prompts]
    noise = _distance(_whole(model, prompts[0]), alone[0])
    allowed = rounding(noise, max(float(mx.std(logits)) for logits in alone))
    ways: list[tuple[ReadsTogether, Callable[[int], list[int]]]] = [
        ("padded", lambda left: [left // 2, left - left // 2]),
        ("even", lambda left: [4, left - 6, 2]),
    ]
    for way, cut in ways:
        try:
            found = _read_by_parts(model, prompts, cut, way)
        except Exception as error:  # a model's own code may raise anything
            _note(error, doubts)
            log.debug("prompts can't be read %s: %s", way, one_line(error))
            continue
        if all(_distance(a, b) <= allowed for logits in found for a, b in zip(alone, logits, strict=True)):
            return way
    return "alone"


def _read_by_parts(
    model: nn.Module, prompts: list[list[int]], cut: Callable[[int], list[int]], way: ReadsTogether
) -> list[list[mx.array]]:
    """Logits [V] of each prompt's last token after its other tokens were read in pieces of the sizes that `cut` gives,
    with the last pass taken apart, and left as it is. In the even way pieces of different sizes are read alone."""
    singles = [make_prompt_cache(model) for _ in prompts]
    texts = [iter(prompt) for prompt in prompts]
    everyone = list(range(len(prompts)))
    shared = []
    for sizes in zip(*(cut(len(prompt) - 1) for prompt in prompts), strict=True):
        pieces = [list(islice(text, size)) for text, size in zip(texts, sizes, strict=True)]
        if way == "padded" or len(set(sizes)) == 1:
            shared = read_together(model, singles, pieces)
            singles = taken_apart(shared, everyone)
            continue
        for piece, own in zip(pieces, singles, strict=True):
            model(mx.array([piece]), cache=own)
    last = [list(text) for text in texts]
    apart = [_next(model, tokens, own)[0] for tokens, own in zip(last, singles, strict=True)]
    together = model(mx.array(last), cache=shared)[:, -1]
    return [apart, [together[i] for i in everyone]]


def _selects_from(model: nn.Module) -> int:
    """How many positions it takes before attention that selects blocks of keys leaves any out; 0 without such.

    mlx-lm cuts the blocks over padded positions (MiniMax M3), which shows only beyond.
    """
    return max(
        (getattr(part, "index_block_size", 0) * getattr(part, "index_topk_blocks", 0) for part in model.modules()),
        default=0,
    )


def _whole(model: nn.Module, prompt: list[int]) -> mx.array:
    logits: mx.array = model(mx.array([prompt]), cache=make_prompt_cache(model))[0, -1].astype(mx.float32)
    mx.eval(logits)
    return logits


def _next(model: nn.Module, tokens: list[int], caches: list[Any]) -> mx.array:
    logits: mx.array = model(mx.array(tokens)[:, None], cache=caches)[:, -1].astype(mx.float32)
    mx.eval(logits, cache_arrays(caches))
    return logits


def merged_step(model: nn.Module, tokens: list[int], singles: list[list[Any]]) -> mx.array:
    caches = merged(singles)
    logits = _next(model, tokens, caches)
    for layer in caches:  # the ways out of a batch must exist as well
        layer.extend(layer.extract(0).merge([layer.extract(0)]))
        layer.filter(mx.array([0]))
    mx.eval(cache_arrays(caches))
    return logits


def _distance(a: mx.array, b: mx.array) -> float:
    return float(mx.max(mx.abs(a - b)))


# ---------------------------------------------------------------- cost
def row_cost(model: nn.Module) -> list[LayerCost]:
    """What each cache array of one row takes, from rows of 1 and 257 tokens after a decode step: an array whose shape
    grew holds positions; one that a `max_size` caps stops there; the rest is constant."""
    short = _stepped(model, 1)
    long = _stepped(model, _PROBE_LENGTH)
    mx.clear_cache()  # a buffer that is used again may be larger than asked for
    mx.eval(cache_arrays(short))  # of the longer row only the shapes matter, and a graph has them before it runs
    costs = []
    for (before, _), (after, cap) in zip(_arrays(short), _arrays(long), strict=False):
        axis = next((i for i, (a, b) in enumerate(zip(before.shape, after.shape, strict=False)) if a != b), None)
        if axis is None:
            costs.append(LayerCost(pinned_bytes([before]), 0))  # some models keep a view of something larger
        else:
            costs.append(LayerCost(0, after.nbytes // after.shape[axis], GROWTH, cap))
    return costs


def _stepped(model: nn.Module, length: int) -> list[Any]:
    """Caches, not evaluated, after a prompt of `length` tokens and a decode step."""
    caches: list[Any] = make_prompt_cache(model)
    model(mx.array([_filler(length)]), cache=caches)
    model(mx.array([[1]]), cache=caches)
    return caches


def _filler(length: int) -> list[int]:
    return [i % 50 + 1 for i in range(length)]


def _prefilled(model: nn.Module, tokens: list[int]) -> list[Any]:
    caches: list[Any] = make_prompt_cache(model)
    model(mx.array([tokens]), cache=caches)
    mx.eval(cache_arrays(caches))
    return caches


def _arrays(caches: list[Any]) -> list[tuple[mx.array, int]]:
    """Each array with the cap on its positions, that of the innermost cache that has one."""
    found: list[tuple[mx.array, int]] = []
    for part in parts(caches):
        cap = getattr(part, "max_size", 0) or 0
        if chunk := getattr(part, "chunk_size", 0):  # cut to that size before a step grows it again
            cap = chunk + GROWTH
        found += [(array, cap) for array in cache_arrays([part])]
    return found


def chunk_peak(model: nn.Module, patience: float = _PEAK_SECONDS) -> tuple[int, float]:
    """Bytes that the largest prefill chunk needs beyond what it leaves behind, and those for each pair of its tokens.

    `patience`: seconds that the longer measurement, which is more exact, may take.

    Estimated from two smaller ones: the part for each token grows with the chunk, and where attention isn't fused the
    part for each pair of tokens with its square. The difference of the two magnifies what one reading is off by, so
    where there is time the highest of several counts.
    """
    size, readings = _PEAK_LENGTHS[0], 1
    measure_peak(model, size)  # the first of its kind may have to compile something, which says nothing of the next
    started = perf_counter()
    small = measure_peak(model, size)
    of_the_longer = (perf_counter() - started) / size * 3 * _PEAK_LENGTHS[1]
    if of_the_longer < patience:
        size = _PEAK_LENGTHS[1]
        readings = int(min(_PEAK_READINGS, patience / max(of_the_longer, 1e-6)))
        small = _highest_peak(model, size, readings)
    twice = _highest_peak(model, 2 * size, readings)
    pairs = max(0.0, (twice - 2 * small) / (2 * size**2))
    each = (twice - pairs * (2 * size) ** 2) / (2 * size)
    return int(each * LARGEST_CHUNK + pairs * LARGEST_CHUNK**2), pairs


def _highest_peak(model: nn.Module, length: int, readings: int) -> int:
    """Of several readings: a reading is too low when the device frees one array before it needs the next."""
    return max(measure_peak(model, length) for _ in range(readings))


def measure_peak(model: nn.Module, length: int) -> int:
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    caches = _prefilled(model, _filler(length))
    kept = mx.get_active_memory() - before
    peak = mx.get_peak_memory() - before
    del caches
    return max(0, peak - kept)


# ---------------------------------------------------------------- speed
def step_seconds(model: nn.Module) -> float:
    """Best time of a lone decode step on a short context."""
    caches = _prefilled(model, _filler(8))
    times = []
    for _ in range(4):
        started = perf_counter()
        _next(model, [1], caches)
        times.append(perf_counter() - started)
    return min(times)


def _bandwidth(size: int = 1 << 25) -> float:
    """Bytes a second that a copy moves, reads and writes counted."""
    source = mx.zeros((size,), dtype=mx.uint8)
    mx.eval(source)
    times = []
    for _ in range(3):
        started = perf_counter()
        mx.eval(source + 1)
        times.append(perf_counter() - started)
    return 2 * size / min(times)
