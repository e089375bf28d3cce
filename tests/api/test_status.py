"""The live page's files: whole, ours, and harmless."""

from __future__ import annotations

import re

import pytest
from serving import run_server

from server.api.status import STATIC, files

VENDORED = ("marked", "purify", "uPlot")


async def test_the_page_is_served_with_a_policy_that_lets_nothing_else_in() -> None:
    async with run_server() as site:
        answer = await site.client.get("/")
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy


async def test_every_file_that_the_page_names_is_served_from_here() -> None:
    html = (STATIC / "index.html").read_text(encoding="utf-8")
    named = re.findall(r'(?:src|href)="(page/[^"]+)"', html)
    scripts = [path for path in files().values() if path.suffix == ".js" and path.parent == STATIC]
    named += [f"page/{name}" for path in scripts for name in re.findall(r'from "\./([\w.]+)"', path.read_text("utf-8"))]
    assert len(named) > 8
    async with run_server() as site:
        for path in named:
            answer = await site.client.get("/" + path)
            assert answer.status_code == 200
            assert "html" not in answer.headers["content-type"]


@pytest.mark.parametrize("path", ["/page/none.js", "/page/../status.py", "/page/%2e%2e/status.py", "/page/vendor"])
async def test_nothing_but_the_pages_files_is_served(path: str) -> None:
    async with run_server() as site:
        assert (await site.client.get(path)).status_code == 404


def test_the_page_asks_no_other_host() -> None:
    own = [path for path in files().values() if path.suffix in (".html", ".css", ".js") and path.parent == STATIC]
    for path in own:
        assert not re.search(r"(?:https?:)?//[a-z0-9]", path.read_text(encoding="utf-8").replace("https?:", "")), path


def test_each_vendored_library_brings_its_license() -> None:
    assert {path.name.partition(".")[0] for path in (STATIC / "vendor").iterdir()} == set(VENDORED)
    for name in VENDORED:
        text = (STATIC / "vendor" / f"{name}.LICENSE").read_text(encoding="utf-8")
        assert "licen" in text.lower()


async def test_with_a_key_the_page_is_open_and_what_it_shows_is_not() -> None:
    async with run_server(api_key="secret-1") as site:
        assert (await site.client.get("/")).status_code == 200
        assert (await site.client.get("/page/page.js")).status_code == 200
        for path in ("/status", "/status/events"):
            assert (await site.client.get(path)).status_code == 401
        key = {"Authorization": "Bearer secret-1"}
        assert (await site.client.get("/status", headers=key)).status_code == 200
