"""What this machine's device is and can hold.

Owns the facts about the device that `Ready` carries and that `marathon check` prints
(`python -m server.engine.device`). Runs in the engine process's main thread, or as a short-lived process of its own:
the server process never creates a device.
"""

from __future__ import annotations

import json
import logging
import os
import platform
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

import mlx.core as mx

from server.engine.model import LoadedModel, quantization
from server.errors import StartupError
from server.ipc.messages import Ready
from server.ipc.snapshot import Snapshot
from server.memory.residency import Residency, device_memory
from server.settings import Settings, from_json

CUDA_PACKAGES = ("mlx-cuda-13", "mlx-cuda-12")


def name() -> str:
    """The device that MLX computes on, in words."""
    device = mx.default_device()
    if device.type == mx.DeviceType.cpu:
        return f"CPU ({platform.machine()})"
    return str(mx.device_info(device).get("device_name", "GPU"))


def hidden_gpu() -> str:
    """Why MLX runs on the CPU although its package for CUDA is installed, and what mends that; else nothing.

    MLX's packages for CPU and CUDA write one and the same file, and whichever came last stays.
    """
    for package in CUDA_PACKAGES:
        try:
            found = distribution(package)
        except PackageNotFoundError:
            continue
        for file in found.files or []:
            if file.name == "libmlx.so" and Path(str(file.locate())).stat().st_size != file.size:
                mend = f"pip install --force-reinstall --no-deps {package}=={found.version}"
                return f"another package's library lies in the place of {package}'s; `{mend}` mends that"
    return ""


def announce(epoch: int, loaded: LoadedModel, residency: Residency, seconds: float) -> Ready:
    """The engine's first word once it can serve; `seconds` it took to load."""
    source = residency.source
    return Ready(
        epoch=epoch,
        pid=os.getpid(),
        probe=loaded.probe,
        context=loaded.context,
        weights_bytes=loaded.weights_bytes,
        model_type=str(loaded.config.get("model_type", "unknown")),
        quantization=quantization(loaded.config),
        device=name(),
        mlx=version("mlx"),
        mlx_lm=version("mlx-lm"),
        load_seconds=seconds,
        live_source=source.name,
        live_reason=source.reason,
        buffer_limit=source.limit,
        memory_limit=residency.memory_limit,
        device_memory=device_memory(),
        files=loaded.files,
    )


def facts(settings: Settings) -> dict[str, Any]:
    """Device, versions and limits as they would be with these settings. Raises StartupError."""
    residency = Residency.open(settings, Snapshot())
    source = residency.source
    return {
        "device": name(),
        **({"cuda": hidden} if (hidden := hidden_gpu()) else {}),
        "device_memory_bytes": device_memory(),
        "memory_limit_bytes": residency.memory_limit,
        "buffer_limit": source.limit,
        "live_buffers": source.name if source.name != "off" else f"off: {source.reason}",
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
    }


def main() -> None:
    """Settings as JSON on standard input, facts as JSON on standard output."""
    logging.disable(logging.WARNING)
    settings = from_json(input())
    try:
        print(json.dumps(facts(settings)))
    except StartupError as error:
        print(json.dumps({"error": str(error)}))


if __name__ == "__main__":
    main()
