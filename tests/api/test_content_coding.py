"""Bodies that come coded: read within the cap, or refused by the coding's name."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
import pytest_asyncio
from serving import Site, run_server

from server.api.output.schema import ErrorBody

CAP = 50_000
BODY = json.dumps({"prompt": "x", "content": "né 🎉", "max_tokens": 1}, ensure_ascii=False).encode()
CHAT = json.dumps({"messages": [{"role": "user", "content": "né 🎉"}], "max_tokens": 1}, ensure_ascii=False).encode()


def zipped(data: bytes, level: int = 9) -> bytes:
    return gzip.compress(data, level, mtime=0)  # the same in each process of the tests: a case is named by its bytes


def bare(data: bytes) -> bytes:
    deflate = zlib.compressobj(wbits=-15)
    return deflate.compress(data) + deflate.flush()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def site() -> AsyncIterator[Site]:
    async with run_server(max_body_bytes=CAP) as site:
        yield site


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def post(site: Site, body: bytes, *codings: str, path: str = "/v1/completions", kind: str = "application/json"):
    headers = [("content-encoding", coding) for coding in codings] + [("content-type", kind)]
    return await site.client.post(path, content=body, headers=headers)


def refused(answer: httpx.Response, status: int, *words: str) -> None:
    assert answer.status_code == status, answer.text
    error = ErrorBody.model_validate_json(answer.content).error
    for word in words:
        assert word in error.message


@pytest.mark.parametrize(
    ("codings", "coded"),
    [
        (["gzip"], zipped(BODY)),
        (["GZip"], zipped(BODY)),
        (["x-gzip"], zipped(BODY)),
        (["gzip"], zipped(BODY[:9]) + zipped(b"") + zipped(BODY[9:])),
        (["deflate"], zlib.compress(BODY)),
        (["deflate"], bare(BODY)),
        (["identity"], BODY),
        ([""], BODY),
        (["identity, gzip"], zipped(BODY)),
        (["deflate, gzip"], zipped(zlib.compress(BODY))),
        (["deflate", "gzip"], zipped(zlib.compress(BODY))),
    ],
)
async def test_a_coded_body_means_what_it_meant_before(site: Site, codings: list[str], coded: bytes) -> None:
    for path in ("/v1/completions", "/tokenize"):
        plain, answer = await post(site, BODY, path=path), await post(site, coded, *codings, path=path)
        assert answer.status_code == plain.status_code == 200, answer.text
        if path == "/tokenize":
            assert answer.json() == plain.json()
    for path in ("/v1/chat/completions", "/apply-template", "/v1/chat/completions/input_tokens"):
        assert (await post(site, zipped(CHAT), "gzip", path=path)).status_code == 200


@pytest.mark.parametrize("coding", ["zstd", "br", "compress", "gzip, br", "snappy", "*", "gzip;q=1", "x" * 500])
async def test_a_coding_that_is_not_decoded_is_415_by_name(site: Site, coding: str) -> None:
    answer = await post(site, BODY, coding)
    refused(answer, 415, coding.rpartition(" ")[2][:100])
    assert answer.headers["accept-encoding"] == "gzip, deflate"
    refused(await post(site, BODY, *["gzip"] * 5), 415, "5 content codings")


@pytest.mark.parametrize(
    ("coding", "coded"),
    [
        ("gzip", BODY),
        ("gzip", zipped(BODY)[:-9]),
        ("gzip", zipped(BODY)[:-1]),
        ("gzip", zipped(BODY)[:5]),
        ("gzip", zipped(BODY) + b"more"),
        ("gzip", zipped(BODY)[:-8] + b"12345678"),
        ("gzip", zipped(b"") * 65),
        ("gzip", b""),
        ("gzip", zipped(b"")),
        ("gzip", zipped(BODY)[:-1] + b"\xff"),
        ("deflate", zlib.compress(BODY)[:-1]),
        ("deflate", zlib.compress(BODY) + b"x"),
        ("deflate", b"\xff\xff"),
        ("deflate, gzip", zipped(BODY)),
        ("gzip, gzip", zipped(BODY)),
    ],
)
async def test_broken_coded_bytes_are_400(site: Site, coding: str, coded: bytes) -> None:
    refused(await post(site, coded, coding), 400)


WRAPS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", zipped),
    "zlib": ("deflate", zlib.compress),
    "bare": ("deflate", bare),
    "twice": ("gzip, gzip", lambda data: zipped(zipped(data))),
}


@pytest.mark.parametrize("how", WRAPS)
async def test_what_is_small_only_while_it_is_coded_is_413(site: Site, how: str) -> None:
    coding, wrap = WRAPS[how]
    fits = wrap(BODY[:-1] + b" " * (CAP - len(BODY)) + b"}")
    assert (await post(site, fits, coding)).status_code == 200
    bombs = [wrap(b" " * (CAP + 1))]
    if coding == "gzip":
        bombs.append(zipped(b" " * (CAP // 2)) * 3)
    for bomb in bombs:
        assert len(bomb) < CAP
        refused(await post(site, bomb, coding), 413, str(CAP))


async def test_a_bomb_never_takes_more_room_than_the_cap() -> None:
    bomb = zipped(b" " * 2**28, 1)  # 256 MB
    tracemalloc.start()
    try:
        async with run_server(max_body_bytes=2**22) as site:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            refused(await post(site, bomb, "gzip"), 413)
            assert tracemalloc.get_traced_memory()[1] - before < 4 * 2**22
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------- charsets
@pytest.mark.parametrize(
    ("charset", "body"),
    [
        ("utf-8", BODY),
        ("", BODY),
        ('""', BODY),
        ('"UTF-8"', BODY),
        ("utf8", BODY),
        ("us-ascii", b'{"prompt": "x", "max_tokens": 1}'),
        ("utf-8", b"\xef\xbb\xbf" + BODY),
        ("utf-16", BODY.decode().encode("utf-16")),
        ("UTF-16LE", BODY.decode().encode("utf-16-le")),
        ("utf-16be", BODY.decode().encode("utf-16-be")),
        ("utf-32", BODY.decode().encode("utf-32")),
        ("iso-8859-1", b'{"prompt": "n\xe9", "content": "n\xc3\xa9", "max_tokens": 1}'),
    ],
)
async def test_a_named_charset_is_read(site: Site, charset: str, body: bytes) -> None:
    kind = f"application/json; charset={charset}"
    answer = await post(site, body, kind=kind)
    assert answer.status_code == 200, answer.text
    assert (await post(site, zipped(body), "gzip", kind=kind)).status_code == 200
    tokens = (await post(site, body, kind=kind, path="/tokenize")).json()["tokens"]
    python = {"us-ascii": "ascii", "iso-8859-1": "latin-1"}.get(charset, charset.strip('"') or "utf-8")
    same = json.loads(body.decode(python).lstrip("\ufeff"))
    assert tokens == (await site.client.post("/tokenize", json=same)).json()["tokens"]


async def test_a_charset_that_is_unknown_or_untrue_is_refused(site: Site) -> None:
    for charset in ("klingon", "utf-7", "punycode", "shift_jis"):
        refused(await post(site, BODY, kind=f"application/json; charset={charset}"), 415, charset)
    refused(await post(site, BODY[:-1] + b"\xe9", kind="text/plain; charset=utf-16"), 400, "utf-16")
    refused(await post(site, BODY.decode().encode("utf-16")), 400, "UTF-8")


async def test_decoding_holds_no_other_request_up(site: Site) -> None:
    bombs = [post(site, zipped(b" " * (CAP + 1)), "gzip") for _ in range(20)]
    answers = await asyncio.gather(*bombs)
    assert {answer.status_code for answer in answers} == {413}
    assert (await post(site, BODY)).status_code == 200
