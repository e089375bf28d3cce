"""A live-buffer count of our own, for machines where MLX keeps none.

Owns the little library of live_count.cpp: built once with the machine's C++ compiler into a cache folder, loaded after
mlx, installed before the model so that weights count too, and believed only once it has counted known numbers of
buffers right. Runs in the engine's main thread. Whatever is missing is refused with a reason.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from server.memory import allocator
from server.memory.allocator import CountUnavailable

SOURCE = Path(__file__).with_name("live_count.cpp")
LIMIT = 499_000  # Metal's, so that a soak elsewhere has the same room
ROUNDS = (37, 11)
BUILD_SECONDS = 120


class NativeCount:
    """Live buffers since the installation. Nothing pooled is counted."""

    name = "native"
    reason = ""
    pooled = False

    def __init__(self, library: ctypes.CDLL, limit: int) -> None:
        self.limit: int | None = limit
        self._library = library
        library.live_count.restype = ctypes.c_int64
        library.live_install.argtypes = [ctypes.c_void_p]

    def raw(self) -> int:
        # A buffer made before the installation and freed after it takes one off.
        return max(0, self.difference())

    def settled(self) -> int:
        return self.raw()

    def difference(self) -> int:
        """Buffers made since the installation, less those freed."""
        return int(self._library.live_count())

    def install(self) -> None:
        """Begin to count, and prove it. Raises Unavailable."""
        if code := self._library.live_install(allocator.address()):
            raise CountUnavailable("already counting" if code == 1 else "MLX's allocator has an unknown interface")
        try:
            self._prove()
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        self._library.live_uninstall()

    def _prove(self) -> None:
        """Known numbers of buffers, from the host and from the device, must be counted exactly, coming and going."""
        operand = mx.ones(64)
        mx.eval(operand)
        for count in ROUNDS:
            before = self._quiet()
            made = [mx.array([0.0] * 64) for _ in range(count)]
            computed = [operand + operand for _ in range(count)]
            mx.eval(computed)
            during = self._quiet()
            del made, computed
            after = self._quiet()
            if (during - before, during - after) != (2 * count, 2 * count):
                raise CountUnavailable(
                    f"{2 * count} buffers were counted as +{during - before} and {after - during}: "
                    "this build of MLX doesn't allocate through its interface"
                )

    def _quiet(self) -> int:
        mx.synchronize()
        return self.difference()


def open_count(folder: Path, limit: int | None) -> NativeCount:
    """Build if need be, load, install, prove. Raises Unavailable with one line."""
    path = build(folder)
    try:
        count = NativeCount(ctypes.CDLL(str(path)), limit or LIMIT)
    except OSError as error:
        raise CountUnavailable(f"the counter can't be loaded: {error}") from None
    gc.collect()  # what is garbage already must not be freed while we count
    count.install()
    return count


def build(folder: Path) -> Path:
    """The built library; made anew when mlx, the source or the machine is another. Raises Unavailable."""
    target = folder / f"live_count-{_key()}.so"
    if target.exists():
        return target
    compiler = find_compiler()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / target.name
            compile_library(compiler, built)
            os.replace(built, target)  # whole or not at all, also with two engines at it
    except OSError as error:
        raise CountUnavailable(f"the counter can't be built in {folder}: {error.strerror}") from None
    return target


def find_compiler() -> str:
    """The user's choice in CXX, else what the machine has. Raises Unavailable."""
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise CountUnavailable("no C++ compiler found (CXX, c++, g++, clang++)")


def compile_library(compiler: str, target: Path) -> None:
    include = allocator.package() / "include"
    command = [compiler, "-O2", "-std=c++20", "-shared", "-fPIC", f"-I{include}", str(SOURCE), "-o", str(target)]
    if platform.system() == "Darwin":
        command += ["-undefined", "dynamic_lookup"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_SECONDS)
    except subprocess.TimeoutExpired:
        raise CountUnavailable(f"{compiler} took longer than {BUILD_SECONDS} seconds") from None
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or ["no message"]
        raise CountUnavailable(f"{compiler} failed: {lines[0].strip()}") from None


def _key() -> str:
    digest = hashlib.sha256(SOURCE.read_bytes())
    digest.update(" ".join((version("mlx"), platform.system(), platform.machine())).encode())
    return digest.hexdigest()[:16]
