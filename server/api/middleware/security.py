"""Who may call: the Host and Origin checks and the API keys.

Owns the rules against DNS rebinding, cross-site requests and callers without a key. Runs on the event loop as ASGI
middleware; never reads a body and never logs a key.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.middleware.access import refusal
from server.errors import Forbidden, InvalidApiKey, InvalidValue, RequestError, StartupError
from server.settings import WILDCARDS, Settings, as_address

OPEN_PATHS = frozenset({"/live", "/ready", "/health", "/"})
OPEN_FOLDER = "/page/"  # the live page's files, which say nothing of the server
_HOST = re.compile(
    r"([a-z0-9._~!$&'()*+,;=%-]*|\[[0-9a-f:.]+\])(:[0-9]*)?|[0-9a-f:.]*"
)  # the last one without brackets
OWNER = "marathon.owner"  # in a request's scope: of whom the stored answers are that it may see


class Names:
    """Refuses requests whose Host or Origin names a foreign place."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._hosts = {host.lower().removesuffix(".") for host in [*settings.allowed_hosts, settings.host]}
        self._origins = frozenset(settings.cors_origins)
        self._any_port = re.compile(any_port(settings.cors_origins))
        # A rebound name is a name: where the server listens on every address, addresses themselves are fine.
        self._addresses = settings.host in WILDCARDS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self.fault(scope)):
            await refusal(scope, error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def fault(self, scope: Scope) -> RequestError | None:
        """Why a request isn't let in."""
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        origin = headers.get("origin")
        if len(hosts) > 1 or (not hosts and scope["http_version"] != "1.0"):
            return InvalidValue(f"A request has one Host header; this one has {len(hosts) or 'none'}")
        host = "".join(hosts).lower()
        if not _HOST.fullmatch(host):
            return InvalidValue(f"Host {host[:100]!r} is no name or address with a port")
        if host and not self._knows_host(hostname(host)):
            return Forbidden(f"Host {host[:100]!r} isn't allowed; --allowed-hosts adds names")
        if origin is not None and not self._knows_origin(origin.lower(), host):
            return Forbidden(f"Origin {origin[:100]!r} isn't allowed; --cors-origins adds origins")
        return None

    def _knows_host(self, name: str) -> bool:
        address = as_address(name)
        local = name == "localhost" or (address is not None and (address.is_loopback or self._addresses))
        return local or name in self._hosts or "*" in self._hosts

    def _knows_origin(self, origin: str, host: str) -> bool:
        named = "*" in self._origins or origin in self._origins or self._any_port.fullmatch(origin) is not None
        return named or origin.partition("://")[2] == host != ""


class Keys:
    """Refuses requests without an accepted API key, where keys are configured."""

    def __init__(self, app: ASGIApp, keys: Iterable[str], metrics_open: bool) -> None:
        self._app = app
        self._digests = [digest(key) for key in keys]
        if metrics_open:
            self._open = OPEN_PATHS | {"/metrics"}
        else:
            self._open = OPEN_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not (self._is_open(scope["path"]) or self._accepts(scope)):
            error = InvalidApiKey("A valid API key is needed: send it as `Authorization: Bearer <key>` or `X-Api-Key`")
            await refusal(scope, error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in self._open or path.startswith(OPEN_FOLDER)

    def _accepts(self, scope: Scope) -> bool:
        """Whether the request has a key that is accepted; its owner is noted in the scope."""
        if not self._digests:
            return True
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digests(headers.get("x-api-key", ""))
        if scheme.lower() == "bearer":
            given = _digests(key) + given  # an agent may send its own token here, and ours in the other
        # Every key is compared, each in constant time: the answer's timing says nothing about any of them.
        accepted = [one for one in given if sum(hmac.compare_digest(one, known) for known in self._digests)]
        if accepted:
            scope[OWNER] = accepted[0].hex()
        return bool(accepted)


class Cors(CORSMiddleware):
    """Starlette's, but a preflight that is refused has the body that every error has."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        error = InvalidValue(bytes(response.body).decode())
        headers = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        return JSONResponse(error.body(), error.status, headers)


def owner_of(scope: Scope) -> str:
    """Who a stored answer belongs to: a digest of the key, or nothing where no keys are configured."""
    return str(scope.get(OWNER, ""))


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _digests(header: str) -> list[bytes]:
    """What a key may be that came in a header. Its bytes were taken for Latin-1; some clients send UTF-8."""
    sent = header.strip(" \t")
    return [hashlib.sha256(sent.encode("latin-1")).digest(), digest(sent)]


def read_keys(settings: Settings) -> list[str]:
    """The keys of the settings and of the key file. Raises StartupError for a file that gives none."""
    keys = list(settings.api_key)
    if settings.api_key_file is not None:
        try:
            lines = settings.api_key_file.read_text(encoding="utf-8-sig").splitlines()
        except OSError as error:
            raise StartupError(f"--api-key-file {settings.api_key_file} can't be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise StartupError(f"--api-key-file {settings.api_key_file} isn't UTF-8 text") from None
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise StartupError(f"--api-key-file {settings.api_key_file} holds no key")
        keys += found
    return keys


def any_port(origins: Iterable[str]) -> str:
    """A pattern for the origins that leave the port open, `http://localhost:*`; matches none if there are none."""
    open_ones = [re.escape(origin.removesuffix(":*")) for origin in origins if origin.endswith(":*")]
    if open_ones:
        return rf"({'|'.join(open_ones)})(:[0-9]{{1,5}})?"
    return r"(?!)"


def hostname(host: str) -> str:
    """`[::1]:8080` → `::1`, `localhost.:8080` → `localhost`: a dot at the end says that the name is a whole one."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    if host.count(":") == 1:
        host = host.rpartition(":")[0]
    return host.removesuffix(".")
