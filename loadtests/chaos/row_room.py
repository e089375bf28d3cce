"""How many bytes a memory limit must have for so many rows: `python -m loadtests.chaos.row_room MODEL ROWS LENGTH`.

A process of its own, because it loads the model; prints one number. Uses the server's own arithmetic.
"""

from __future__ import annotations

import sys
from pathlib import Path

from server.engine import model
from server.ipc import messages
from server.supervision.admission import Capacity

LONGEST_PROMPT = 40  # tokens


def main(arguments: list[str]) -> None:
    folder, rows, length = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    loaded = model.load(folder, trust_remote_code=False, probe=None, on_stage=lambda stage: None)
    ready = messages.Ready(
        epoch=1,
        pid=0,
        load_seconds=0,
        probe=loaded.probe,
        context=loaded.context,
        weights_bytes=loaded.weights_bytes,
        model_type="",
        quantization="",
        device="",
        mlx="",
        mlx_lm="",
    )
    capacity = Capacity(ready, None, rows)
    print(capacity.weights + capacity.peak(LONGEST_PROMPT) + rows * (capacity.cost(length) + capacity.largest(length)))


if __name__ == "__main__":
    main(sys.argv[1:])
