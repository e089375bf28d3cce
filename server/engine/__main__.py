"""The engine process: owns the device, takes commands, sends steps.

`python -m server.engine --fd N` is started by the supervisor with its end of a socketpair; a spare engine is the same
process, which is asked to import everything and then waits for `Start`. Three threads: the main
thread is the only one that touches MLX (streams are thread-local); a reader thread takes commands and ends the
process at EOF, so that no engine outlives its server; a writer thread sends progress each second, also while the
main thread is stuck. It never sees text or HTTP.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import socket
import sys
from pathlib import Path

from server import faults as faults_module
from server.config import child_place, open_files
from server.engine.channel import Channel, Heartbeat
from server.errors import StartupError
from server.ipc import messages
from server.ipc.messages import Command, Preparation, Prepare, Start
from server.ipc.snapshot import Snapshot
from server.settings import Settings, from_json
from server.telemetry import logs

EXIT_WEDGED = 70  # an allocator or resource-limit error: nothing can run on this device queue any more

log = logging.getLogger("marathon.engine")


def main() -> None:
    parser = argparse.ArgumentParser(description="Marathon's engine process; started by the server, not by people")
    parser.add_argument("--fd", type=int, required=True, help="inherited end of the socketpair")
    channel = Channel(socket.socket(fileno=parser.parse_args().fd))
    channel.start_reader()
    _tie_to_parent()
    child_place.name_temporary_folder()
    first = _first_command(channel)
    if not isinstance(first, Start):
        sys.exit("engine: the first command must be Start")
    settings = from_json(first.settings)
    logs.configure(settings.log_level, settings.log_format, f"engine {first.epoch}")
    sys.exit(run(channel, first, settings))


def _first_command(channel: Channel) -> Command | None:
    """The command that ends a spare engine's waiting; of any other engine the first one."""
    command = channel.receive(None)
    while isinstance(command, Prepare):
        from server.engine import preparation

        preparation.prepare(Path(command.model_path))
        channel.send(Preparation())
        command = channel.receive(None)
    return command


def _tie_to_parent() -> None:
    """On Linux the kernel ends us with the server, even if the reader thread should be stuck."""
    if sys.platform == "linux":
        import ctypes
        import signal

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def run(channel: Channel, start: Start, settings: Settings) -> int:
    """The engine's life after its first command; returns the exit status."""
    snapshot = Snapshot()
    heartbeat = Heartbeat(channel, start.epoch, snapshot)
    heartbeat.start()
    fault = faults_module.Faults(
        faults_module.parse(settings.faults), epoch=start.epoch, write_garbage=channel.send_garbage
    )
    heartbeat.enter("importing MLX and the models' code")
    fault.at_start()
    with open_files.kept():
        from server.engine import loop  # MLX and the model code load here, with the heartbeat already sent

    try:
        engine = loop.open_loop(channel, heartbeat, snapshot, start, settings, fault)
    except StartupError as error:
        channel.send(messages.LoadFailure(start.epoch, str(error)))
        return 2
    gc.collect()
    gc.freeze()  # what is there now stays: a full collection looks through all of it, between two tokens
    try:
        engine.run()
    except loop.DeviceWedge as error:
        log.critical("%s", error)
        os._exit(EXIT_WEDGED)
    finally:
        heartbeat.stop()
    engine.close()
    if engine.pending_grammars.is_busy:
        os._exit(0)  # Python would wait for the thread at exit, and it may never end
    return 0


if __name__ == "__main__":
    main()
