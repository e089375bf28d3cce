"""What was published of each finding, and of which engine, model and machine. Data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Publication:
    """The source of one finding, as far as it is known."""

    words: str
    engine: str
    short: str  # the figure, for the table at the top

    @property
    def text(self) -> str:
        return f"{self.words} Source: {self.engine}."


QWEN = (
    "Candle on Metal or Transformers on MPS (the source names both engines for findings 2 to 5 without saying which "
    "figure is whose), Qwen2.5-0.5B in BF16, a Mac with 24 GB, medians of 3 runs of 128 tokens"
)

LEAK = Publication(
    "A model with N leaking layers loses N − 1 or N buffers a token. 47 a token exhaust Metal's 499,000 at token "
    "10,570 by calculation (10,560 measured in three runs), 23 a token at 21,696 (21,641 measured). A model with "
    "attention alone was flat past 20,000 tokens. Evaluating the metadata with each step kept the count flat over "
    "6,000 tokens, took 22 % less time, and a request of 14,000 tokens came to its end. `x = x - 1`, never evaluated, "
    "lost 4 bytes a step.",
    "mlx-lm 0.31.3 itself, on Metal; which models on which Mac isn't in our source",
    "23 or 47 buffers a token; 499,000 are gone at token 21,641 or 10,560",
)
KINDS = Publication(
    "A strided concatenating cache copied itself with strided kernels at each step: decode 33 % slower than with a "
    "contiguous one at 513 tokens, 59 % at 2,049, and by its table 69 % at 4,097. Its peak was 1.18, 2.75 and 4.54 "
    "times that of a preallocated cache.",
    QWEN,
    "strided decode 33 to 69 % slower; peak 1.18 to 4.54 × a preallocated cache's",
)
PINS = Publication(
    "A pool that hands out the smallest free buffer without an upper bound let a key tensor of 1 MiB hold a buffer of "
    "512 MiB in each layer: a peak of 14.5 GiB where 3.4 were needed. A bound of four times the request mended it.",
    "Candle on Metal or Transformers on MPS (the source doesn't say which); model and machine aren't in our source",
    "1 MiB held 512 MiB",
)
PATHS = Publication(
    "Fused ÷ in steps (matrix product, mask, softmax, matrix product) at 513, 2,049 and 4,097 tokens: peak 0.99, "
    "0.77, 0.43; prefill 1.42, 2.86, 4.56 times as fast; first token after 0.70, 0.35, 0.22 of the time; decode 1.14, "
    "1.40, 1.77 times as fast. The top token may differ only at a near tie.",
    QWEN,
    "prefill 1.42 to 4.56 × as fast, peak 0.99 to 0.43",
)
PASSES = Publication(
    "Concatenating cache: an empty step of 8.01 ms, 77 GB/s, 2.7 passes, R² 0.997. Static cache: 8.74 ms, 33 GB/s, "
    "6.4 passes, R² 0.998. Both about 1.3 passes once extra copies were removed. Copies ran at 212 GB/s.",
    "Transformers on MPS, SmolLM2-135M with 23,040 bytes of cache a token; the Mac isn't in our source",
    "2.7 passes (concatenating), 6.4 (static), 1.3 once mended",
)
LONG = Publication(
    "No speed by thousand tokens was published of any MLX server. Of length only: 14,000 tokens in one request of "
    "mlx-lm, with the metadata evaluated.",
    "mlx-lm 0.31.3 on Metal, as in finding 1",
    "nothing",
)
MIXED = Publication("Nothing was published of any MLX server.", "none", "nothing")

# by tokens of the prompt: peak in MiB and decode tok/s of each kind of cache
KINDS_FIGURES = {
    "513": {"concatenate": (1376, 86), "contiguous": (1338, 131), "step": (1166, 137)},
    "2049": {"concatenate": (4628, 41), "contiguous": (4488, 104), "step": (1683, 109)},
    "4097": {"concatenate": (14872, 23), "contiguous": (14367, 75), "step": (3273, 83)},
}
# by tokens of the prompt: peak, prefill, first token and decode, fused ÷ in steps
PATHS_FIGURES = {
    "513": (0.99, 1.42, 0.70, 1.14),
    "2049": (0.77, 2.86, 0.35, 1.40),
    "4097": (0.43, 4.56, 0.22, 1.77),
}
