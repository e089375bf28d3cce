"""Where the server's other processes run: in a folder that can't go away.

Owns that folder, and what has to be so that they find the server's code and a temporary folder there. The folder that
a server was started in may be deleted while it runs; libraries ask for the current one as they are imported, and no
engine could start then. Runs in the server process at its start, and in the processes that import MLX.
"""

from __future__ import annotations

import contextlib
import os
import tempfile

FOLDER = "/"
_IMPORT_PATH = "PYTHONPATH"
_TEMPORARY = "TMPDIR"


def make_import_path_whole() -> None:
    """Say in the environment from which folder the relative ones among those to import from count."""
    given = os.environ.get(_IMPORT_PATH)
    if given:
        folders = [os.path.abspath(folder) for folder in given.split(os.pathsep)]
        os.environ[_IMPORT_PATH] = os.pathsep.join(folders)


def name_temporary_folder() -> None:
    """Say in the environment which temporary folder can be written in, if any can.

    MLX's CPU backend compiles kernels in the folder that the environment names, and where that isn't one each forward
    pass fails; Python looks for another.
    """
    with contextlib.suppress(FileNotFoundError):
        os.environ[_TEMPORARY] = tempfile.gettempdir()
