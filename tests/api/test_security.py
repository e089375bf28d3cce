"""Who may call, and what is written down about it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from serving import MODEL, Site, engine, run_server, settings

from server.api.middleware.security import hostname, read_keys
from server.api.output.schema import ErrorBody
from server.errors import StartupError
from server.settings import is_loopback, load
from server.telemetry import logs

KEY = {"Authorization": "Bearer secret-1"}


async def status(site: Site, path: str = "/v1/models", method: str = "GET", **headers: str) -> int:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return (await site.client.request(method, path, headers=names)).status_code


# ---------------------------------------------------------------- keys
async def test_without_a_key_configured_none_is_asked_for() -> None:
    async with run_server() as site:
        assert await status(site) == 200
        assert await status(site, Authorization="Bearer whatever") == 200


async def test_any_of_several_keys_opens_and_nothing_else_does(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\ufefffirst\n from-file \n\nünïcode\n")  # as some editors begin a file
    async with run_server(api_key="secret-1,secret-2", api_key_file=file) as site:
        for key in ("secret-1", "secret-2", "first", "from-file"):
            assert await status(site, Authorization=f"Bearer {key}") == 200
            assert await status(site, Authorization=f"bearer  {key}") == 200
            assert await status(site, X_Api_Key=key) == 200
        for encoding in ("utf-8", "latin-1"):
            for header in (b"Authorization", b"X-Api-Key"):
                sent = b"Bearer " * (header == b"Authorization") + "ünïcode".encode(encoding)
                answer = await site.client.get("/v1/models", headers=[(header, sent)])
                assert answer.status_code == 200, (header, encoding)
        assert await status(site, X_Api_Key="secret") == 401
        for header in ("Bearer secret", "Bearer secret-1x", "Bearer", "secret-1", "Basic secret-1", ""):
            assert await status(site, Authorization=header) == 401
        assert await status(site) == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer another", "X_Api_Key": "secret-1"},
        {"Authorization": "Bearer secret-1", "X_Api_Key": "another"},
        {"Authorization": "Basic another", "X_Api_Key": "secret-1"},
    ],
)
async def test_either_of_two_headers_may_have_the_key(headers: dict[str, str]) -> None:
    async with run_server(api_key="secret-1") as site:
        assert await status(site, **headers) == 200
        assert await status(site, **{name: value.replace("secret-1", "x") for name, value in headers.items()}) == 401


async def test_a_missing_key_is_an_error_that_sdks_understand() -> None:
    async with run_server(api_key="secret-1") as site:
        answer = await site.chat()
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "secret" not in answer.text
        assert (await site.post("/v1/chat/completions", {}, **KEY)).status_code == 400


async def test_health_stays_open_and_so_do_metrics_on_loopback() -> None:
    async with run_server(api_key="secret-1") as site:
        for path in ("/live", "/ready", "/health", "/metrics"):
            assert await status(site, path) == 200
        for path in ("/status", "/debug/guard", "/openapi.json", "/no-such-thing"):
            assert await status(site, path) == 401
    async with run_server(api_key="secret-1", host="0.0.0.0") as site:
        assert await status(site, "/metrics") == 401
        assert await status(site, "/metrics", **KEY) == 200
        assert await status(site, "/ready") == 200


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "127.1.2.3", "::1"])
def test_loopback_is_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["127.evil.example", "localhost.evil.example", "0.0.0.0", "::", "10.0.0.1", ""])
def test_what_only_looks_like_loopback_needs_a_key(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(StartupError, match=r"needs --api-key|is empty"):
        load({"host": host})


def test_a_key_file_without_keys_is_refused_at_start(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for file in (empty, tmp_path / "missing"):
        with pytest.raises(StartupError, match=str(file)):
            read_keys(settings(api_key_file=file))


# ---------------------------------------------------------------- Host and Origin
@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8080", "127.0.0.1:99", "127.1.2.3", "[::1]:8080", "LOCALHOST"]
)
async def test_loopback_names_are_hosts(host: str) -> None:
    async with run_server() as site:
        assert await status(site, Host=host) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.evil.example", "192.168.1.5:8080", "localhost.evil.example", "x"]
)
async def test_a_foreign_host_is_refused(host: str) -> None:
    async with run_server() as site:
        answer = await site.client.get("/v1/models", headers={"Host": host})
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "forbidden"
        assert await status(site, "/health", Host=host) == 403


async def test_hosts_can_be_allowed_and_addresses_are_where_all_are_listened_on() -> None:
    async with run_server(allowed_hosts="box.local,other.") as site:
        for host in ("Box.local:8080", "box.local.", "other", "other.:80"):
            assert await status(site, Host=host) == 200
        assert await status(site, Host="192.168.1.5") == 403
    async with run_server(host="0.0.0.0", api_key="secret-1") as site:
        assert await status(site, Host="192.168.1.5:80", **KEY) == 200
        assert await status(site, Host="evil.example", **KEY) == 403


async def test_a_foreign_origin_is_refused_everywhere() -> None:
    async with run_server() as site:
        for path in ("/", "/v1/models", "/debug/guard", "/metrics"):
            for origin in ("http://evil.example", "null", "http://localhost:3000"):
                assert await status(site, path, Origin=origin) == 403
        assert await status(site, Origin=site.url) == 200, "the server's own pages"
        preflight = await preflighted(site, "http://localhost:3000")
        assert preflight.status_code == 403
        assert "access-control-allow-origin" not in preflight.headers


async def preflighted(site: Site, origin: str) -> Any:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    return await site.client.options("/v1/chat/completions", headers={"Origin": origin, **asked})


@pytest.mark.parametrize(
    "origins", ["*", "http://localhost:3000,https://app.example", "https://app.example,http://localhost:*"]
)
async def test_a_named_origin_is_let_in(origins: str) -> None:
    async with run_server(cors_origins=origins, api_key="secret-1") as site:
        answer = await preflighted(site, "http://localhost:3000")
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] in ("*", "http://localhost:3000")
        assert "authorization" in answer.headers["access-control-allow-headers"]
        assert answer.headers["access-control-allow-methods"] == "GET, HEAD, POST, DELETE"
        assert ("access-control-allow-credentials" in answer.headers) == (origins != "*"), "only for named pages"
        refused = await site.client.get("/v1/models", headers={"Origin": "http://localhost:3000"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"], "a browser may read why"
        assert await status(site, Origin="http://evil.example", **KEY) == (200 if origins == "*" else 403)


async def test_a_preflight_for_a_method_that_nothing_takes_has_the_error_body() -> None:
    async with run_server(cors_origins="http://localhost:3000") as site:
        for method, wanted in (("GET", 200), ("HEAD", 200), ("POST", 200), ("DELETE", 200), ("BREW", 400)):
            asked = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": method}
            answer = await site.client.options("/v1/models", headers=asked)
            assert answer.status_code == wanted
            assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"
            if wanted == 400:
                assert ErrorBody.model_validate_json(answer.content).error.code == "invalid_value"


async def test_an_origin_may_leave_its_port_open_and_nothing_else() -> None:
    async with run_server(cors_origins="HTTP://Localhost:*/,https://a.example/,http://[::1]:*") as site:
        for origin in (
            "http://localhost", "http://localhost:1", "http://localhost:65535", "https://a.example", "http://[::1]:3000"
        ):  # fmt: skip
            assert (await preflighted(site, origin)).headers["access-control-allow-origin"] == origin
            answer = await site.client.get("/v1/models", headers={"Origin": origin})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
        for origin in (
            "https://localhost:1", "http://localhost:1.evil.example", "http://localhost.evil.example",
            "http://localhost:", "https://a.example:8", "https://axexample", "http://evil.example#http://localhost:1",
        ):  # fmt: skip
            assert (await preflighted(site, origin)).status_code == 403, origin


def test_host_names_are_read_without_their_port() -> None:
    assert [hostname(h) for h in ("a:1", "a", "[::1]:8", "[::1]", "::1")] == ["a", "a", "::1", "::1", "::1"]


# ---------------------------------------------------------------- request ids and the access log
async def test_a_request_id_is_taken_over_or_made() -> None:
    async with run_server() as site:
        assert (await site.client.get("/live", headers={"x-request-id": "abc-1"})).headers["x-request-id"] == "abc-1"
        for bad in ("", "a b", "x" * 129):
            made = (await site.client.get("/live", headers={"x-request-id": bad})).headers["x-request-id"]
            assert made.startswith("req_")
        assert (await site.client.get("/nope")).headers["x-request-id"] != made


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "marathon.access"]


async def test_the_access_log_says_what_a_request_was(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with run_server(engine()) as site:
        await site.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "seed": 5})
        await site.stream_chat(temperature=0.5)
        await site.chat(temperature=9)
        await site.client.get("/health")
    plain, streamed, refused = lines(caplog)
    assert plain.getMessage() == "POST /v1/chat/completions 200"
    assert plain.facts["seed"] == 5  # type: ignore[attr-defined]
    assert plain.facts["temperature"] == 1.0  # type: ignore[attr-defined]
    assert (plain.facts["finish"], plain.facts["completion_tokens"]) == ("stop", 12)  # type: ignore[attr-defined]
    assert streamed.facts["stream"]  # type: ignore[attr-defined]
    assert streamed.facts["temperature"] == 0.5  # type: ignore[attr-defined]
    assert refused.facts["param"] == "temperature"  # type: ignore[attr-defined]
    assert "hi" not in str(plain.facts), "what people write is not logged"  # type: ignore[attr-defined]


async def test_the_access_log_can_be_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with run_server(access_log=False) as site:
        await site.chat()
    assert not lines(caplog)


def record(message: str, **facts: Any) -> logging.LogRecord:
    made = logging.LogRecord("marathon", logging.INFO, "f", 1, message, (), None)
    made.facts = facts
    return made


def test_lines_for_people_cannot_be_broken_by_clients() -> None:
    line = logs.Lines().format(record("GET /", id="a\nb", seconds=0.12345, none=None, model=MODEL))
    assert "\n" not in line
    assert line.endswith(r'GET / id="a\nb" seconds=0.12345 model=tiny')


async def test_no_path_forges_a_line_or_fills_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with run_server() as site:
        for path in ("a%0a2026-01-01 00:00:00 info", "%0d%1b[2J", "%e2%80%a8x%c2%85", "a b", "%22", "%00", "x" * 9000):
            assert (await site.client.get(f"/v1/{path}")).status_code == 404
    for made in lines(caplog):
        for line in (logs.Lines().format(made), logs.JsonLines().format(made)):
            assert len(line.splitlines()) == 1
            assert all(character.isprintable() for character in line)
            assert len(line) < 500
        assert len(logs.Lines().format(made).partition(" 404 ")[0].split("GET ")) == 2


@pytest.mark.parametrize("sign", [chr(code) for code in (0, 7, 8, 10, 13, 27, 127, 133, 155, 0x2028, 0x2029)])
def test_a_message_that_quotes_a_client_stays_one_line(sign: str) -> None:
    line = logs.Lines().format(record(f"left out: a{sign}b"))
    assert line.isprintable()
    assert len(line.splitlines()) == 1


def test_lines_for_machines_are_json() -> None:
    line = json.loads(logs.JsonLines().format(record("GET /", id="a\nb", finish="stop")))
    assert (line["message"], line["id"], line["finish"], line["level"]) == ("GET /", "a\nb", "stop", "info")
