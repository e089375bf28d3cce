"""A process that stores the ids 0, 1, 2 … of one record and prints each once the journal says that it may be shown.

python killed_writer.py JOURNAL FAULTS: goes on until the fault ends it.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from journaling import append, opened, record  # noqa: E402


async def write(path: str, faults: str) -> None:
    async with opened(path, faults=faults) as journal:
        await journal.add(record())
        print("added", flush=True)
        log = journal.tokens("resp_1")
        for n in range(10_000):
            await append(log, [n])
            print(n, flush=True)


if __name__ == "__main__":
    asyncio.run(write(*sys.argv[1:]))
