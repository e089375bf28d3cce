"""Buffers that a decode loop of mlx-lm never gives back. Needs mlx and mlx-lm, nothing else:

    python live_buffers.py            # two caches by themselves, then a tiny model in BatchGenerator
    python live_buffers.py --mend     # BatchGenerator with the caches' state evaluated along with each step
    python live_buffers.py --time     # what that costs, in pairs of blocks

Counts the leaves of the graph behind a cache's arrays: each is a buffer that stays allocated. On Metal the process ends
with "[metal::malloc] Resource limit (499000) exceeded" once there are as many, whatever their size.
"""

import sys
from statistics import median
from time import perf_counter

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, GenerationBatch
from mlx_lm.models.cache import ArraysCache, BatchKVCache
from mlx_lm.models.smollm3 import Model, ModelArgs


class Leaves:
    """A sink for `export_to_dot` that counts and keeps nothing."""

    count = 0

    def write(self, text: str) -> int:
        self.count += text.count("rank=source")
        return len(text)

    def flush(self) -> None: ...


def held(*arrays: mx.array) -> int:
    sink = Leaves()
    mx.export_to_dot(sink, *arrays)
    return sink.count


def bare_caches(steps: int) -> tuple[int, int]:
    """What a step touches is evaluated, as logits evaluate it: keys, values, a layer's state. The rest is not."""
    attention = BatchKVCache([0])
    recurrent = ArraysCache(1, left_padding=[0])
    token = mx.zeros((1, 1, 1, 32))
    for _ in range(steps):
        mx.eval(attention.update_and_fetch(token, token))
        recurrent[0] = mx.zeros((1, 32))
        recurrent.advance(1)
        mx.eval(recurrent[0])
    return held(attention.offset), held(recurrent.left_padding)


def model() -> Model:
    """Four layers, the fourth of which has no rotary embedding and so never reads its cache's offset."""
    arguments = ModelArgs(
        model_type="smollm3", hidden_size=64, num_hidden_layers=4, intermediate_size=128, num_attention_heads=4,
        rms_norm_eps=1e-5, vocab_size=256, num_key_value_heads=2, rope_theta=1e4, tie_word_embeddings=False,
    )  # fmt: skip
    made = Model(arguments)
    mx.eval(made.parameters())
    return made


def mend() -> None:
    """Hand the caches' state over with each step. It is what `generate_step` does after each chunk of a prompt."""
    step = GenerationBatch._step

    def evaluating(self):
        found = step(self)
        mx.async_eval([cache.state for cache in self.prompt_cache])
        return found

    GenerationBatch._step = evaluating


def block(steps: int) -> float:
    """Seconds a step of a fresh generation."""
    generator = BatchGenerator(model(), stream=mx.default_stream(mx.default_device()))
    generator.insert([[1, 2, 3]], [steps + 1])
    generator.next()
    began = perf_counter()
    for _ in range(steps - 1):
        generator.next()
    return (perf_counter() - began) / (steps - 1)


def time(pairs: int = 15, steps: int = 300) -> None:
    """The median ratio of blocks with the mend to blocks without, in turn."""
    plain = GenerationBatch._step
    mend()
    mended = GenerationBatch._step
    ratios = []
    for pair in range(pairs + 1):
        seconds = {}
        for step in (plain, mended)[:: -1 if pair % 2 else 1]:
            GenerationBatch._step = step
            seconds[step] = block(steps)
        if pair:
            ratios.append(seconds[mended] / seconds[plain])
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    print(f"a step takes {median(ratios):.3f} times as long with the mend ({spread}, {pairs} pairs)")


def main() -> None:
    if "--time" in sys.argv:
        time()
        return
    if "--mend" in sys.argv:
        mend()
    else:
        for steps in (100, 200, 400):
            offset, padding = bare_caches(steps)
            print(f"after {steps} steps: BatchKVCache.offset holds {offset}, ArraysCache.left_padding {padding}")
    generator = BatchGenerator(model(), stream=mx.default_stream(mx.default_device()))
    generator.insert([[1, 2, 3]], [1000])
    for step in range(1, 401):
        generator.next()
        if step in (100, 200, 400):
            offset = generator._generation_batch.prompt_cache[3].offset
            print(f"BatchGenerator after {step} tokens: layer 3's offset holds {held(offset)}")


if __name__ == "__main__":
    main()
