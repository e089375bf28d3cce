"""What bias and penalties are by definition, one token at a time."""

import numpy as np

VOCAB = 40


def reference(sequence):
    """The definitions, one token at a time: `adjust(logits [V], tokens so far)` in float64."""
    wish = sequence.sampling

    def adjust(logits, tokens):
        logits, output = np.float64(logits), tokens[len(sequence.prompt) :]
        for token, bias in wish.logit_bias.items():
            logits[token] += bias
        if wish.allowed:
            logits[[token for token in range(VOCAB) if token not in wish.allowed]] = -1e30
        for token in set(tokens):
            factor = wish.repetition_penalty or 1.0
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token in set(output):
            logits[token] -= wish.frequency_penalty * output.count(token) + wish.presence_penalty
        if len(output) < sequence.min_tokens:
            logits[list(sequence.stop_ids)] = -1e30
        return np.float32(logits)

    return adjust
