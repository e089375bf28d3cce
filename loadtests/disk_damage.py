"""Ways to damage a folder of kept caches, as disks, people and other programs do.

Owns the acts, each a function of the folder and a random generator. Runs in the process of a test or a load test; it
touches nothing but that folder. None of the acts forges a checksum: who can do that may as well write other caches.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from server.kv_store.files import folder as kept

LARGE = 1 << 40  # bytes of a file that takes none on the disk


def _files(home: Path) -> list[Path]:
    return sorted(found.path for found in kept.files(home) if found.size < LARGE)


def _any(home: Path, rng: random.Random) -> Path:
    return rng.choice(_files(home))


def _overwrite(path: Path, content: bytes) -> None:
    """In place, as a failing disk does; times stay as they are."""
    times = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def damage_the_log(home: Path, rng: random.Random) -> None:
    """Of the newest positions, which a live engine appends to."""
    for path in sorted(home.glob(f"*/{kept.TAIL}")):
        content = bytearray(path.read_bytes())
        if content:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            _overwrite(path, bytes(content[: rng.randint(1, len(content))]))


def flip_a_bit(home: Path, rng: random.Random) -> None:
    path = _any(home, rng)
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    _overwrite(path, bytes(content))


def flip_a_bit_in_every_file(home: Path, rng: random.Random) -> None:
    for path in _files(home):
        content = bytearray(path.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        _overwrite(path, bytes(content))


def overwrite_a_part(home: Path, rng: random.Random) -> None:
    path = _any(home, rng)
    content = bytearray(path.read_bytes())
    first = rng.randrange(len(content))
    content[first : first + 512] = rng.randbytes(len(content[first : first + 512]))
    _overwrite(path, bytes(content))


def cut(home: Path, rng: random.Random) -> None:
    path = _any(home, rng)
    _overwrite(path, path.read_bytes()[: rng.randrange(path.stat().st_size)])


def empty(home: Path, rng: random.Random) -> None:
    _overwrite(_any(home, rng), b"")


def append(home: Path, rng: random.Random) -> None:
    path = _any(home, rng)
    _overwrite(path, path.read_bytes() + rng.randbytes(rng.randint(1, 5000)))


def remove(home: Path, rng: random.Random) -> None:
    _any(home, rng).unlink()


def remove_a_model(home: Path, rng: random.Random) -> None:
    shutil.rmtree(_any(home, rng).parent)


def clear(home: Path, rng: random.Random) -> None:
    kept.clear(home)


def swap_two(home: Path, rng: random.Random) -> None:
    """Of one model or of two."""
    one, other = rng.sample(_files(home), 2)
    contents = one.read_bytes(), other.read_bytes()
    _overwrite(one, contents[1])
    _overwrite(other, contents[0])


def copy_under_another_name(home: Path, rng: random.Random) -> None:
    one, other = rng.sample(_files(home), 2)
    if one.parent != other.parent:
        shutil.copyfile(one, other.with_name(one.name))
    shutil.copyfile(one, other)


def put_a_folder_there(home: Path, rng: random.Random) -> None:
    path = _any(home, rng)
    path.unlink()
    path.mkdir()


def put_a_pipe_there(home: Path, rng: random.Random) -> None:
    """Opening it would wait for a writer for ever."""
    path = _any(home, rng)
    path.unlink()
    os.mkfifo(path)


def put_a_link_there(home: Path, rng: random.Random) -> None:
    """What it points to never ends."""
    path = _any(home, rng)
    path.unlink()
    path.symlink_to("/dev/zero")


def make_huge(home: Path, rng: random.Random) -> None:
    os.truncate(_any(home, rng), LARGE)


def leave_rubbish(home: Path, rng: random.Random) -> None:
    model = _any(home, rng).parent
    (model / "piece.part").write_bytes(rng.randbytes(100))
    (model / "model.json").write_bytes(rng.randbytes(100))
    (model / _any(home, rng).name.replace("piece", "state")).write_bytes(rng.randbytes(100))
    with contextlib.suppress(FileExistsError):
        (home / "not a model").mkdir()


ACTS: dict[str, Callable[[Path, random.Random], None]] = {
    act.__name__: act
    for act in (
        damage_the_log,
        flip_a_bit,
        flip_a_bit_in_every_file,
        overwrite_a_part,
        cut,
        empty,
        append,
        remove,
        remove_a_model,
        clear,
        swap_two,
        copy_under_another_name,
        put_a_folder_there,
        put_a_pipe_there,
        put_a_link_there,
        make_huge,
        leave_rubbish,
    )
}
