"""MLX's allocator object, reached through the one accessor that libmlx exports.

Owns the look-up of the library and of that address, for the two readers of the live-buffer count. Runs in the
engine's main thread. Never reads or writes the object.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import mlx.core as mx

ACCESSOR = "_ZN3mlx4core9allocator9allocatorEv"  # mlx::core::allocator::allocator()


class CountUnavailable(Exception):
    """The count can't be read in this process; the message is the reason for /health."""


def package() -> Path:
    """The folder with mlx's `lib` and `include`."""
    return Path(str(mx.__file__)).parent


def library() -> Path:
    """libmlx, as it was loaded by mlx.core."""
    path = package() / "lib" / ("libmlx.dylib" if sys.platform == "darwin" else "libmlx.so")
    if not path.exists():
        raise CountUnavailable(f"{path.name} isn't beside mlx.core")
    return path


def address() -> int:
    """Where the allocator lives. Raises Unavailable when libmlx doesn't export the accessor."""
    try:
        accessor = getattr(ctypes.CDLL(str(library())), ACCESSOR)
    except (OSError, AttributeError):
        raise CountUnavailable("libmlx doesn't export its allocator") from None
    accessor.restype = ctypes.c_void_p
    accessor.argtypes = []
    return int(accessor() or 0)
