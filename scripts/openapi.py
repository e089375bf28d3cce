"""What the server answers, held against its own OpenAPI document: `python scripts/openapi.py [--examples 100]`.

schemathesis makes requests of the document, right ones and wrong ones, for every route, and checks that no answer is
an error of the server's and that each has a status, content type, headers and body that the document names. It lives in
an environment of its own in a cache folder, made once and again when its version changes. Without --url a Marathon is
started on a tiny model with random weights and a short context, so that answers end soon. The exit code is
schemathesis's own: 0 when nothing was found.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import install  # noqa: E402

from loadtests import harness  # noqa: E402
from loadtests.zoo.models import obtain  # noqa: E402
from server.config.cache_folder import cache_folder  # noqa: E402

REQUIRES = "schemathesis>=4.32,<5"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
MODEL = "cheap"
CONTEXT = 128
# Two would let ast.parse run in two threads at once, which CPython before 3.11.8 and 3.12.2 may answer with SystemError
# ("AST constructor recursion depth mismatch"): https://github.com/python/cpython/pull/113035. schemathesis counts that
# as an error of its own, and fails. More may work here once pyproject.toml asks for a Python that has the change.
WORKERS = "1"


def program(folder: Path) -> Path:
    """The command of an environment that has schemathesis; it is made where it is missing. Raises SystemExit where
    that fails."""
    note = folder / "requires"
    if not (note.exists() and note.read_text("utf-8") == REQUIRES):
        if code := install.main([str(folder), "--", REQUIRES]):
            raise SystemExit(code)
        note.write_text(REQUIRES, "utf-8")
    return folder / "bin" / "schemathesis"


def command(program: Path, url: str, arguments: argparse.Namespace) -> list[str]:
    """How schemathesis is called for the server at `url`."""
    made = [str(program), "run", f"{url}/openapi.json", "--url", url, "--checks", ",".join(CHECKS)]
    made += ["--phases", "examples,coverage,fuzzing", "--max-examples", str(arguments.examples)]
    made += ["--continue-on-failure", "--workers", WORKERS, "--warnings", "off", "--suppress-health-check", "all"]
    for path in arguments.path:
        made += ["--include-path", path]
    if arguments.seed is not None:
        made += ["--seed", str(arguments.seed)]
    return made


def run(program: Path, url: str, arguments: argparse.Namespace) -> int:
    """Ask the server at `url`; return the exit code."""
    return subprocess.run(command(program, url, arguments), cwd=arguments.cache, check=False).returncode


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=50, help="random requests for each route [%(default)s]")
    parser.add_argument("--path", nargs="+", default=[], help="only these routes")
    parser.add_argument("--seed", type=int, help="of the random requests")
    parser.add_argument("--url", help="address of a running server, without /v1; default: one is started")
    parser.add_argument("--cache", type=Path, default=cache_folder() / "openapi", help="where the environment is kept")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parse(arguments)
    asked.cache.mkdir(parents=True, exist_ok=True)
    found = program(asked.cache / "environment")
    if asked.url:
        return run(found, asked.url.rstrip("/"), asked)
    log = asked.cache / "marathon.log"
    with tempfile.TemporaryDirectory() as data:  # stored answers belong to one server at a time
        options = {"context": CONTEXT, "default_max_tokens": 8, "journal": Path(data) / "journal.db"}
        with harness.marathon(obtain(MODEL, asked.cache), log, **options) as server:
            code = run(found, f"http://127.0.0.1:{server.port}", asked)
    print(f"the server's log: {log}")
    return code


if __name__ == "__main__":
    sys.exit(main())
