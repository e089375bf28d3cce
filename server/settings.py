"""Settings: one definition for file, environment and command line.

Owns every setting of Marathon and its bounds. Runs in both processes: the server reads them from their sources, and
the engine gets its copy as JSON with its first command. Never touches MLX.

Precedence: command line, environment (`MARATHON_<NAME>`), TOML file (`--config`), default. Unknown keys are refused
in all three places.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from server.config.sources import ENV_PREFIX, Sources, option
from server.config.user_path import user_path
from server.errors import StartupError

__all__ = [
    "ENV_PREFIX",
    "Settings",
    "as_address",
    "from_json",
    "in_words",
    "is_loopback",
    "load",
    "load_from",
    "option",
    "read_sources",
]

WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # hosts that mean every address, and the one that clients here use
SIZE_UNITS = "a number of bytes, or one with a unit: 500MB and 8GB are powers of 1000, 512MiB and 8GiB of 1024"
LEAST_SIZE = 1024  # fewer bytes aren't meant where a text has no unit
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SHOWN_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (10**9, "GB"), (10**6, "MB"), (2**10, "KiB"))
_BYTES = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*$", re.IGNORECASE)

# Extensions of browsers and frames without an origin have one, too.
_ORIGIN = re.compile(r"\*|null|file://|[a-z][a-z0-9+.-]*://(?:\[[0-9a-f:.]+\]|[^\s/:@?#*\[\]]+)(?::(?:\d{1,5}|\*))?")
_HOST_NAME = re.compile(r"\*|[^\s/:@?#*\[\]]+")

_OFF = frozenset({"off", "false", "no", "0", "none", "disabled"})
_ON = frozenset({"on", "true", "yes", "1", "enabled"})
_MOST = 2**63 - 1

SECRETS = {"api_key", "api_key_file"}
Names = list[str]


def parse_bytes(value: object) -> object:
    """`"8GiB"`, `"500MB"`, `4096` → bytes. Anything else is returned for pydantic to refuse."""
    if isinstance(value, str) and (match := _BYTES.match(value)):
        return int(float(match[1]) * _UNITS[(match[2] or "").lower()])
    return value


class ServerSettings(BaseModel):
    """Which model, where, and who may call."""

    model: str | None = Field(None, description="MLX model folder or hub id; absent: the starter model")
    model_alias: Names = Field([], description="further names under which the model answers, comma-separated")
    host: str = Field("127.0.0.1", description="address to listen on; others than loopback need an API key")
    port: int = Field(8080, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    api_key: Names = Field([], description="accepted API keys, comma-separated; none: no key is asked for")
    api_key_file: Path | None = Field(None, description="file with one accepted API key a line")
    cors_origins: Names = Field([], description="browser origins let in, comma-separated; * for all, :* for any port")
    allowed_hosts: Names = Field([], description="names accepted in Host besides loopback, comma-separated")
    trust_remote_code: bool = Field(False, description="let a model folder bring its own Python code")
    cache_dir: Path | None = Field(None, description="folder for what Marathon keeps; default: the user's cache")


class Limits(BaseModel):
    """What a request may ask for, and how long it may take."""

    context: int | None = Field(None, ge=16, description="positions a sequence; default and maximum: the model's")
    default_max_tokens: int | None = Field(None, ge=1, description="chat answers' limit if the request has none")
    max_rows: int = Field(32, ge=1, le=1024, description="sequences decoded together")
    queue_limit: int = Field(256, ge=0, description="sequences that may wait; one more is answered 429")
    max_body_bytes: int = Field(32 * 2**20, ge=1024, description="largest request body")
    max_choices: int = Field(16, ge=1, le=128, description="largest n, and most prompts in one request")
    max_schema_bytes: int = Field(256 * 2**10, ge=64, description="largest JSON schema")
    request_timeout_seconds: float | None = Field(None, gt=0, description="deadline of a request, queue included")
    keepalive_seconds: float = Field(10, gt=0, description="silence on a stream before a keep-alive comment")
    send_timeout_seconds: float = Field(60, gt=0, description="a reader that takes nothing for so long is dropped")
    drain_seconds: float = Field(8, ge=0, description="how long running generations may go on after SIGTERM")


class EngineSettings(BaseModel):
    """The process that owns MLX."""

    guard: bool = Field(True, description="keep every cache array evaluated (the cache guard)")
    census_steps: int = Field(256, ge=1, description="decode steps between two censuses of pending arrays")
    live_buffers: Literal["auto", "native", "off"] = Field("auto", description="how the live-buffer count is read")
    buffer_limit: int | None = Field(None, ge=1, description="live-buffer limit; default: the device's")
    memory_limit: int | None = Field(None, ge=1, description="bytes that MLX may use; default: the device's")
    pool_limit: int | None = Field(None, ge=0, description="bytes that MLX's buffer pool may keep; default: MLX's")
    wired_limit: bool = Field(True, description="raise the wired limit as mlx-lm does (Metal)")
    prefill_stall_ms: int = Field(250, ge=1, description="longest that prefill holds running rows up")
    prefix_cache: int = Field(
        2 * 2**30,
        ge=0,
        description="bytes of earlier prompts' KV kept (64 prompts and half of what weights leave at most); 0: off",
    )
    kv_disk: int = Field(
        0,
        ge=0,
        description="bytes of rows' KV kept on disk, for resumes, restarts and later prompts; 0: none is written",
    )
    kv_disk_folder: Path | None = Field(
        None, description="folder for that KV; default: `kv` where Marathon keeps things"
    )
    kv_disk_hourly: int = Field(
        32 * 2**30, ge=0, description="most bytes of KV written in an hour, which spares the disk"
    )
    long_group_interval: int = Field(4, ge=1, le=4, description="long groups step at least each k-th iteration")
    stall_seconds: float = Field(60, gt=0, description="no progress for so long: the engine is replaced")
    start_seconds: float = Field(300, gt=0, description="longest that an engine may take to start")
    outage_seconds: float = Field(
        600, ge=0, description="answers under way are kept for so long while no engine can be started"
    )
    spare_engine: bool = Field(
        True, description="keep a second process that has imported everything, to be the next engine"
    )
    rotate_min_seconds: float = Field(60, ge=0, description="rotations needed sooner than this name a leak")
    keep_awake: bool = Field(False, description="macOS: no idle sleep while generations run")
    faults: str = Field("", description="DANGEROUS, for tests: what to break, e.g. kill@decode:100")


class JournalSettings(BaseModel):
    """Answers that are kept on disk."""

    journal: Path | Literal["off"] | None = Field(
        None, description="file that keeps stored answers, or off; default: journal.db in the user's data folder"
    )
    journal_days: float = Field(30, gt=0, le=36500, description="finished answers are kept for so many days")
    journal_bytes: int = Field(2**30, ge=2**20, description="bytes of them that are kept; the oldest go first")
    store_responses: bool = Field(True, description="keep responses whose request doesn't say `store`")


class Logs(BaseModel):
    """What is written where."""

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe line to log")
    log_format: Literal["text", "json"] = Field("text", description="lines for people or for machines")
    access_log: bool = Field(True, description="one line a request")


SIZES = (
    "max_body_bytes",
    "max_schema_bytes",
    "memory_limit",
    "pool_limit",
    "prefix_cache",
    "journal_bytes",
    "kv_disk",
    "kv_disk_hourly",
)


GROUPS: dict[str, type[BaseModel]] = {
    "model and network": ServerSettings,
    "limits": Limits,
    "engine": EngineSettings,
    "journal": JournalSettings,
    "logs": Logs,
}


class Settings(ServerSettings, Limits, EngineSettings, JournalSettings, Logs):
    """All settings. Construct with `load`."""

    # No number may be infinite: JSON, in which another process gets the settings, has no word for that.
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    @field_validator(*SIZES, mode="before")
    @classmethod
    def _sizes(cls, value: object, info: ValidationInfo) -> object:
        size = parse_bytes(value)
        if isinstance(size, str):
            raise ValueError(f"a size is {SIZE_UNITS}")
        few = isinstance(value, str) and isinstance(size, int) and value.strip().isdecimal() and 0 < size < LEAST_SIZE
        if few and info.field_name != "max_schema_bytes":
            raise ValueError(f"that is {size} bytes, and {size}GB is gigabytes; a size is {SIZE_UNITS}")
        return size

    @field_validator("host")
    @classmethod
    def _address_or_name(cls, value: str) -> str:
        host = value
        if value.startswith("[") and value.endswith("]"):
            host = value[1:-1]
        if "/" in host:
            raise ValueError("a host is an address or a name, without a scheme or a path")
        if host.count(":") == 1:
            raise ValueError("a host has no port in it; that is --port")
        return host

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """pydantic takes `true` for 1."""
        field = cls.model_fields[str(info.field_name)]
        if isinstance(value, bool) and {int, float} & {field.annotation, *get_args(field.annotation)}:
            raise ValueError("input should be a number")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _home_in_paths(cls, value: object, info: ValidationInfo) -> object:
        """Here for every source: a shell has done it for some words of the command line alone."""
        kinds = get_args(cls.model_fields[str(info.field_name)].annotation)
        if Path in kinds and isinstance(value, str | Path) and str(value).startswith("~"):
            return user_path(value)
        return value

    @field_validator("*")
    @classmethod
    def _whole_paths(cls, value: object) -> object:
        """Its other processes don't run in the folder that the server was started in."""
        if isinstance(value, Path):
            return value.absolute()
        return value

    @field_validator("*")
    @classmethod
    def _in_64_bits(cls, value: object) -> object:
        """MLX and SQLite take no larger number."""
        if isinstance(value, int) and abs(value) > _MOST:
            raise ValueError(f"it is beyond {_MOST}")
        return value

    @field_validator("guard", "spare_engine", mode="before")
    @classmethod
    def _on_off(cls, value: object) -> object:
        if isinstance(value, str):
            return {"on": True, "off": False}.get(value.strip().lower(), value)
        return value

    @field_validator("journal", mode="before")
    @classmethod
    def _off_or_file(cls, value: object) -> object:
        """A switch's word must not become a file with what people wrote in it."""
        if not isinstance(value, str):
            return value
        word = value.strip().lower()
        if word in _OFF:
            return "off"
        if word in _ON:
            raise ValueError(f"{value!r} is neither a file, such as ./{word}, nor off; without the option it is on")
        return value

    @field_validator("model_alias", "api_key", "cors_origins", "allowed_hosts", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return [part.strip() for part in value.split(",") if part.strip()]
        return value

    @field_validator("api_key", mode="before")
    @classmethod
    def _some_key(cls, value: object) -> object:
        """What was meant to protect the server must not leave it open. Runs before the text is split."""
        if isinstance(value, str) and not value.replace(",", "").strip():
            raise ValueError("it holds no key")
        return value

    @field_validator("cors_origins")
    @classmethod
    def _as_browsers_send_them(cls, origins: list[str]) -> list[str]:
        sent = [re.sub(r"(?<=[^/:])/+$", "", origin).lower() for origin in origins]
        for origin in sent:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is no origin, which has a scheme and no path: https://app.example:8443")
        return sent

    @field_validator("allowed_hosts")
    @classmethod
    def _as_names(cls, hosts: list[str]) -> list[str]:
        for host in hosts:
            if not (_HOST_NAME.fullmatch(host) or as_address(host)):
                raise ValueError(f"{host!r} is no name of a host, which has no scheme, port and path: box.local")
        return hosts

    @property
    def base_url(self) -> str:
        """The address at which a client on this machine reaches the server."""
        return http_address(WILDCARDS.get(self.host, self.host), self.port)

    def for_a_process(self) -> str:
        """As JSON for another process of the server (`from_json`), without the API keys, which none of them needs."""
        return self.model_dump_json(exclude=SECRETS)

    def allowed_context(self, model: int) -> int:
        """Positions a sequence may have when the model was made for so many."""
        return min(model, self.context or model)

    @model_validator(mode="after")
    def _public_needs_a_key(self) -> Settings:
        if not is_loopback(self.host) and not (self.api_key or self.api_key_file):
            raise ValueError(f"listening on {self.host} needs --api-key or --api-key-file; use 127.0.0.1 for local use")
        return self


def http_address(host: str, port: int) -> str:
    """Build the base address of a server that listens there, without a final slash."""
    if ":" in host:
        host = f"[{host}]"
    return f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """True for addresses that no other machine can reach. `127.evil.example` is a name, whatever it begins with."""
    address = as_address(host)
    if address is None:
        return host.lower() == "localhost"
    return address.is_loopback


def as_address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None for a name. `127.evil.example` is one."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def in_words(name: str, value: Any) -> str:
    """A setting's value as one would write it: `on`, `32MiB`, `a,b`."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ",".join(map(str, value))
    if name in SIZES and value:
        whole = (f"{value // size}{unit}" for size, unit in _SHOWN_UNITS if value % size == 0)
        return next(whole, str(value))
    return str(value)


_OWN_WORDS = {"path_type": "Input should be a path in quotes"}


def load(values: Mapping[str, Any], config: str | Path | None = None) -> Settings:
    """Settings from command-line `values`, the environment and the TOML file `config`.

    Raises StartupError with one line that names the option, the value and what is allowed.
    """
    return load_from(read_sources(values, config))


def read_sources(values: Mapping[str, Any], config: str | Path | None = None) -> Sources:
    """What the user wrote, and where. Raises StartupError for a setting that doesn't exist or is left empty."""
    sources = Sources.read(values, config, Settings.model_fields)
    for name, value in sources.merged().items():
        if value == "" and Settings.model_fields[name].default != "":
            raise StartupError(f"{sources.blame(name, value)} is empty; leave it out for the default")
    return sources


def load_from(sources: Sources) -> Settings:
    """Settings of what the user wrote. Raises StartupError with one line for values that aren't allowed."""
    try:
        return Settings(**sources.merged())
    except ValidationError as error:
        raise StartupError("; ".join(_sentences(error, sources))) from None


def _sentences(error: ValidationError, sources: Sources) -> Iterator[str]:
    """One for each setting that is wrong; what is wrong with several together has one of its own."""
    faults: dict[str, list[Any]] = {}
    for fault in error.errors():
        faults.setdefault(str(fault["loc"][0]) if fault["loc"] else "", []).append(fault)
    for name, found in faults.items():
        words = _words(found)
        if name:
            words = f"{sources.blame(name, found[0]['input'])}: {words[0].lower()}{words[1:]}"
        yield words


def _words(faults: list[Any]) -> str:
    """What is allowed of one setting, in pydantic's words but for those that name a class of Python."""
    said = [_OWN_WORDS.get(fault["type"], fault["msg"]).removeprefix("Value error, ") for fault in faults]
    first, *others = dict.fromkeys(said)
    return " or ".join([first, *(other.removeprefix("Input should be ") for other in others)])


def from_json(text: str) -> Settings:
    """The settings that another process of the server dumped with `model_dump_json`; no other source is read."""
    return Settings.model_construct(**PlainSettings.model_validate_json(text).model_dump())


class PlainSettings(ServerSettings, Limits, EngineSettings, JournalSettings, Logs):
    """The same fields without sources, for the engine's copy."""
