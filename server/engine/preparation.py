"""What a spare engine does before it is needed: it imports everything that an engine runs, and opens no device.

Owns the order of the imports and the priority that they run at. Runs in the engine process before `Start`. Nothing
here loads a model or evaluates an array: a context on the device would take memory beside the engine that serves.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from server.config import open_files
from server.model_files import model_config

# What costs most to import, without MLX; transformers reads its parts when they are first asked for.
LIBRARIES = (
    ("llguidance.numpy", ()),
    ("transformers", ("AutoTokenizer", "PreTrainedTokenizer", "PreTrainedTokenizerFast")),
    ("huggingface_hub", ("snapshot_download",)),
)
ENGINE_MODULES = (
    "server.engine.loop",
    "server.engine.device",
    "server.engine.model",
    "server.compute.attention",
    "server.compute.cudnn_shapes",
)
OPENS_DEVICE = "deepseek_v41"  # its module makes arrays while it is imported
NICENESS = 10  # a tenth of a busy core
_DARWIN_THREAD, _DARWIN_BACKGROUND = 3, 0x1000  # setpriority(2) of macOS; Python names them from 3.12 on


def prepare(model: Path) -> None:
    """Import the engine and the code of the model in the folder `model`. Raises what an import raises.

    Most of it runs at low priority and so in a thread, since a priority that was lowered can't be raised again without
    privilege. MLX itself is imported by the thread that will run it: what another one compiled aborts the process when
    it exits.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # as mlx-lm has it, before transformers is there
    import numpy  # noqa: F401  not in that thread, whose priority numpy's own threads would keep

    with ThreadPoolExecutor(1, "imports", _step_back) as pool:
        pool.submit(_import_libraries).result()
    with open_files.kept(), device_closed():
        for name in ENGINE_MODULES:
            importlib.import_module(name)
        import_family(model)


def _step_back() -> None:
    """Let this thread give way to what serves."""
    with contextlib.suppress(OSError):
        if sys.platform == "darwin":
            os.setpriority(_DARWIN_THREAD, 0, _DARWIN_BACKGROUND)
        else:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _import_libraries() -> None:
    for name, parts in LIBRARIES:
        module = importlib.import_module(name)
        for part in parts:
            getattr(module, part)


def import_family(model: Path) -> None:
    """Import the module of mlx-lm that runs this model; one that would open the device, or isn't mlx-lm's, is left for
    the load."""
    from mlx_lm import utils

    config = model_config.read(model, "config.json")
    brings_code = "model_file" in config
    if brings_code or str(config.get("model_type", "")).startswith(OPENS_DEVICE):
        return
    with contextlib.suppress(KeyError, ValueError):  # the load says it in words
        utils._get_classes(config)


@contextlib.contextmanager
def device_closed() -> Iterator[None]:
    """Importing mlx-lm meanwhile doesn't make MLX open the device.

    mlx-lm compiles its samplers over the random state while it is imported, which makes that state: eight bytes, for
    which MLX opens the device (mlx_lm/sample_utils.py; docs/overrides.md has what is known of it). Here they are
    compiled when they are called, which Marathon never does. This may go once importing mlx-lm allocates nothing.
    """
    import mlx.core as mx

    compile_now = mx.compile
    state = object()
    mx.random.state = state
    mx.compile = functools.partial(_compile, compile_now, state)
    try:
        yield
    finally:
        mx.compile = compile_now
        del mx.random.state  # what the module has under that name is made when it is asked for


def _compile(
    compile_now: Callable[..., Callable[..., Any]],
    state: object,
    function: Callable[..., Any],
    inputs: Any = None,
    outputs: Any = None,
    shapeless: bool = False,
) -> Callable[..., Any]:
    """Compile a function, one over the random state when it is called."""
    if inputs is not state:
        return compile_now(function, inputs, outputs, shapeless)

    @functools.cache
    def compiled() -> Callable[..., Any]:
        import mlx.core as mx

        return compile_now(function, mx.random.state, mx.random.state, shapeless)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return compiled()(*arguments, **named)

    return call
