"""Models of the hub: from the cache first, and a hub that is silent, away or unwilling costs seconds and one line."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from server.errors import StartupError
from server.model_files import hub_progress
from server.model_files.hub import hub_id_of, lacks, snapshot
from server.model_files.locate import at_hand, locate
from server.settings import load

ROOT = Path(__file__).parents[2]
SHA = "0123456789abcdef0123456789abcdef01234567"
SILENT_SECONDS = 0.6
SLOW_SECONDS = 2.5
ASK = f"""
import json, sys, time
from server.model_files import hub
from server.errors import StartupError
hub.ANSWER_SECONDS = {SILENT_SECONDS}
time.sleep = lambda seconds: None  # the hub's client waits between its attempts
for name in sys.argv[1:]:
    lines, began = [], time.monotonic()
    try:
        found, error = str(hub.hub_folder(name, lambda line, share=None: lines.append(line))), None
    except StartupError as refusal:
        found, error = None, str(refusal)
    print(json.dumps([found, error, lines, time.monotonic() - began]), flush=True)
"""


@dataclass
class Hub:
    """A hub on this machine. What it does depends on the model's name; `files` is what `org/whole` consists of."""

    files: dict[str, bytes]
    url: str = ""
    asked: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)


def handler(hub: Hub) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            hub.asked.append(self.path)
            name = next((word for word in ("silent", "later", "gone", "gated", "broken") if word in self.path), "")
            if name == "silent" or (name == "later" and "/tree/" in self.path):
                hub.over.wait(60)
                return self.close()
            if name in ("gone", "gated"):
                code = {"gone": "RepoNotFound", "gated": "GatedRepo"}[name]
                return self.answer(404 if name == "gone" else 403, {"error": "no"}, {"X-Error-Code": code})
            if name == "broken":
                return self.answer(500, {"error": "no"})
            if "/tree/" in self.path:
                return self.answer(200, [entry(path, data) for path, data in hub.files.items()])
            if self.path.startswith("/api/"):
                listed = [entry(path, data) for path, data in hub.files.items()]
                siblings = [{"rfilename": file["path"], "size": file["size"], "blobId": file["oid"]} for file in listed]
                return self.answer(200, {"id": "org/whole", "sha": SHA, "siblings": siblings, "private": False})
            is_slow = "slow" in self.path and self.path.endswith(".safetensors")
            pause = SLOW_SECONDS if is_slow else 0.0
            return self.send(200, hub.files[self.path.partition(f"/resolve/{SHA}/")[2]], {}, pause)

        def answer(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
            self.send(status, json.dumps(value).encode(), headers or {})

        def send(self, status: int, data: bytes, headers: dict[str, str], pause: float = 0.0) -> None:
            """`pause`: seconds in the middle of the file. Files are fetched side by side."""
            self.send_response(status)
            every = {"Content-Length": str(len(data)), "ETag": f'"{etag(data)}"', "X-Repo-Commit": SHA, **headers}
            for key, value in every.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                half = len(data) // 2
                self.wfile.write(data[:half])
                self.wfile.flush()
                time.sleep(pause)
                self.wfile.write(data[half:])

        def close(self) -> None:
            self.close_connection = True

    return Handler


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def entry(path: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(data), "oid": etag(data)}


@pytest.fixture(scope="module")
def hub(tiny: Callable[..., Path]) -> Iterator[Hub]:
    made = Hub({file.name: file.read_bytes() for file in tiny("llama").iterdir()})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler(made))
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield made
    made.over.set()
    server.shutdown()
    thread.join()
    server.server_close()


def cached(cache: Path, name: str, source: Path, *, without: str = "") -> Path:
    """A model in the hub's cache, as its client leaves it."""
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(SHA)
    (folder / "blobs").mkdir()
    (folder / "snapshots" / SHA).mkdir(parents=True)
    for file in source.iterdir():
        if file.name != without:
            shutil.copyfile(file, folder / "blobs" / file.name)
            (folder / "snapshots" / SHA / file.name).symlink_to(Path("../../blobs") / file.name)
    return folder / "snapshots" / SHA


def ask(url: str, cache: Path, *names: str, **environment: str) -> list[tuple[Path | None, str, list[str], float]]:
    """What becomes of each model in a process of its own: folder, error, lines and seconds."""
    ended = subprocess.run(
        [sys.executable, "-c", ASK, *names],
        cwd=ROOT,
        env=os.environ | {"HF_ENDPOINT": url, "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_XET": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    answers = [json.loads(line) for line in ended.stdout.splitlines()]
    return [(Path(found) if found else None, error or "", lines, took) for found, error, lines, took in answers]


def test_what_the_cache_has_whole_is_served_without_asking_the_hub(hub: Hub, tiny: Any, tmp_path: Path) -> None:
    folder = cached(tmp_path, "org/silent-but-here", tiny("llama"))
    before = len(hub.asked)
    ((found, error, lines, took),) = ask(hub.url, tmp_path, "org/silent-but-here")
    assert (found, error) == (folder, "")
    assert len(hub.asked) == before
    assert took < 10
    assert "is in the hub's cache" in lines[0]


def test_a_hub_that_is_silent_costs_seconds_and_says_what_is_waited_for(hub: Hub, tiny: Any, tmp_path: Path) -> None:
    cached(tmp_path, "org/silent-part", tiny("llama"), without="model.safetensors")
    cached(tmp_path, "org/silent-words", tiny("llama"), without="tokenizer.json")
    names = ("org/silent", "org/silent-part", "org/later")
    nothing, part, later = ask(hub.url, tmp_path, *names)
    for name, (found, error, lines, took) in zip(names, (nothing, part, later), strict=True):
        assert found is None
        assert took < 20, name
        assert name in error
        assert "\n" not in error
        assert lines[0].startswith(f"asking the hub at {hub.url} for {name}")
    assert f"the hub at {hub.url} hasn't answered for {SILENT_SECONDS:g} s" in nothing[1]
    assert "its cache has nothing of it" in nothing[1]
    assert "no weights" in part[1]


def test_what_the_hub_says_is_said_in_one_line(hub: Hub, tmp_path: Path) -> None:
    gone, gated, broken = ask(hub.url, tmp_path, "org/gone", "org/gated", "org/broken")
    assert f"there is no {hub.url}/org/gone" in gone[1]
    assert "accepted its terms" in gated[1]
    assert "500" in broken[1]
    for _, error, _, _ in (gone, gated, broken):
        assert "\n" not in error
        assert not error.endswith(":")


@pytest.mark.parametrize("left", ["part", "nothing"])
def test_a_newer_download_that_was_cut_off_leaves_the_earlier_model_in_service(
    tiny: Any, tmp_path: Path, left: str
) -> None:
    """The hub's client writes `refs/main` before the first file."""
    folder = cached(tmp_path, "org/here", tiny("llama"))
    repository = folder.parent.parent
    (repository / "refs" / "main").write_text("f" * 40)
    if left == "part":
        (folder.parent / ("f" * 40)).mkdir()
        (folder.parent / ("f" * 40) / "config.json").symlink_to(folder / "config.json")
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
        ((found, error, lines, _),) = ask("http://127.0.0.1:9", tmp_path, "org/here", **environment)
        assert (found, error) == (folder, "")
        assert str(folder) in lines[-1]
        assert ("an earlier snapshot" in lines[-1]) == (left == "part")


def test_a_folder_of_the_cache_whose_main_is_gone_is_served_from_a_whole_snapshot(tiny: Any, tmp_path: Path) -> None:
    folder = cached(tmp_path, "org/here", tiny("llama"))
    (folder.parent.parent / "refs" / "main").write_text("f" * 40)
    (folder.parent / "another").mkdir()
    found = at_hand(str(folder.parent.parent))
    assert found is not None
    assert (found.path, found.name) == (folder.resolve(), "org/here")


def test_without_a_network_or_offline_the_cache_is_all_there_is(tiny: Any, tmp_path: Path) -> None:
    folder = cached(tmp_path, "org/here", tiny("llama"))
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
        here, away = ask("http://127.0.0.1:9", tmp_path, "org/here", "org/away", **environment)
        assert here[0] == folder
        assert "org/away" in away[1]
        assert ("HF_HUB_OFFLINE" in away[1]) == bool(environment)


def test_a_download_says_each_second_how_much_of_the_model_is_here(hub: Hub, tmp_path: Path) -> None:
    ((found, error, lines, _),) = ask(hub.url, tmp_path, "org/slow")
    assert (found is not None, error) == (True, "")
    assert sum(line.startswith("fetching org/slow: ") for line in lines) >= 2
    total = sum(map(len, hub.files.values()))
    assert f"of {total / 1e6:.0f} MB" in lines[-1]


def test_files_of_another_revision_or_unfinished_count_for_what_they_are(tmp_path: Path) -> None:
    files = {"a" * 40: 1000, "b" * 40: 500}
    for name, size in (("a" * 40 + ".incomplete", 300), ("a" * 40 + ".x1.incomplete", 200), ("c" * 40, 9000)):
        (tmp_path / name).write_bytes(bytes(size))
    said: list[tuple[str, float | None]] = []
    with hub_progress.watched("m", tmp_path, files, lambda line, share=None: said.append((line, share))):
        time.sleep(hub_progress.LOOK_SECONDS * 1.5)
        (tmp_path / ("b" * 40)).write_bytes(bytes(700))
        time.sleep(hub_progress.LOOK_SECONDS)
    assert [share for _, share in said[:2]] == [0.2, pytest.approx(800 / 1500)]


def test_a_start_that_is_given_up_leaves_the_download_alone(tmp_path: Path) -> None:
    def refuse(line: str, share: float | None = None) -> None:
        raise KeyError(line)

    with hub_progress.watched("m", tmp_path, {"a": 9}, refuse):
        time.sleep(hub_progress.LOOK_SECONDS * 1.2)


def test_what_the_cache_lacks_is_fetched_and_found_there_the_next_time(hub: Hub, tiny: Any, tmp_path: Path) -> None:
    cached(tmp_path, "org/whole-in-part", tiny("llama"), without="config.json")
    first, again, part = ask(hub.url, tmp_path, "org/whole", "org/whole", "org/whole-in-part")
    assert first[1] == again[1] == part[1] == ""
    assert first[0] == again[0]
    assert first[0] is not None
    assert {file.name for file in first[0].iterdir()} == hub.files.keys()
    assert first[2][-1] == f"fetching org/whole from the hub at {hub.url}"
    assert "is in the hub's cache" in again[2][0]


# ---------------------------------------------------------------- folders and names
def named(path: Path | str) -> str:
    return locate(load({"model": str(path)})).name


def test_a_model_has_the_name_that_it_was_given(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny("llama")
    link = tmp_path / "my-model"
    link.symlink_to(target)
    chain = tmp_path / "current"
    chain.symlink_to(link)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "from-home").symlink_to(link)
    monkeypatch.chdir(tmp_path)
    for given, name in (
        (target, target.name), (link, "my-model"), (f"{link}/", "my-model"), ("my-model", "my-model"),
        ("./my-model/.", "my-model"), (chain, "current"), ("~/from-home", "from-home"),
        (tmp_path / "home" / ".." / "my-model", "my-model"),
    ):  # fmt: skip
        located = locate(load({"model": str(given)}))
        assert (located.name, located.path) == (name, target.resolve()), given
    monkeypatch.chdir(target)
    assert named(".") == target.name
    assert named(f"../{target.name}") == target.name


def test_a_snapshot_of_the_hubs_cache_has_the_models_name(tiny: Any, tmp_path: Path, monkeypatch: Any) -> None:
    folder = cached(tmp_path / "hub", "org/some-name", tiny("llama"))
    bare = cached(tmp_path / "hub", "gpt2", tiny("llama"))
    elsewhere = tmp_path / "hub-by-link"
    elsewhere.symlink_to(tmp_path / "hub")
    assert (
        named(folder)
        == named(f"{folder}/")
        == named(elsewhere / folder.relative_to(tmp_path / "hub"))
        == "org/some-name"
    )
    assert named(bare) == "gpt2"
    assert named(folder.parent.parent) == "org/some-name"
    assert at_hand(str(folder.parent.parent)).path == folder.resolve()  # type: ignore[union-attr]
    monkeypatch.chdir(folder)
    assert named(".") == "org/some-name"
    (tmp_path / "mine").symlink_to(folder)
    assert named(tmp_path / "mine") == "mine"


def test_what_is_no_model_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "models--org--empty" / "snapshots").mkdir(parents=True)
    for given, words in (
        (tmp_path / "file", "is a file"), (tmp_path / "link", "a link to something that isn't there"),
        (tmp_path / "loop", "link"), (tmp_path, "no config.json"), (tmp_path / "no", "no such folder"),
        (tmp_path / "models--org--empty", "no config.json"), ("a/b/c", "no such folder"), ("x" * 5000, "looked at"),
    ):  # fmt: skip
        with pytest.raises(StartupError, match=words) as caught:
            at_hand(str(given))
        assert "\n" not in str(caught.value)
    assert at_hand("org/name") is None


@pytest.mark.parametrize("given", ["./no", "../no", "no/.", ".no/x", "-o/x", "o/x-", "o/é", "no/"])
def test_what_no_hub_could_have_is_never_asked_for(given: str) -> None:
    with pytest.raises(StartupError, match=r"there is no such folder, and it is no hub id either$"):
        at_hand(given)


@pytest.mark.parametrize(
    "given",
    ["https://huggingface.co/org/a.b-c", "http://hf.co/org/a.b-c/", "huggingface.co/org/a.b-c/tree/main",
     "org/a.b-c@v1", "hf://org/a.b-c", "org/a.b-c:Q4_K_M", " org/a.b-c ", "https://huggingface.co/org/a.b-c?library=mlx"],
)  # fmt: skip
def test_the_address_of_a_models_page_gets_its_id_for_a_suggestion(given: str) -> None:
    with pytest.raises(StartupError, match=r"no hub id either; did you mean org/a\.b-c\?$"):
        at_hand(given)


def test_what_another_program_makes_of_models_is_called_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.GGUF").write_bytes(b"GGUF")
    with pytest.raises(StartupError, match="GGUF isn't read"):
        at_hand(str(tmp_path / "a.GGUF"))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(StartupError, match=r"it is an adapter, of which `mlx_lm\.fuse` makes a model"):
        at_hand(str(tmp_path))


def test_the_pieces_of_the_cache_are_read_as_its_client_writes_them(tiny: Any, tmp_path: Path) -> None:
    folder = cached(tmp_path, "org/a", tiny("llama"))
    assert hub_id_of(folder) == hub_id_of(folder.parent.parent) == "org/a"
    assert hub_id_of(tmp_path) is None
    assert snapshot(folder.parent.parent) == folder
    (folder.parent.parent / "refs" / "main").unlink()
    assert snapshot(folder.parent.parent) == folder
    (folder.parent / "another").mkdir()
    assert snapshot(folder.parent.parent) is None
    assert lacks(folder) is None
    (folder.parent.parent / "blobs" / "model.safetensors").unlink()
    assert "model.safetensors is missing" in (lacks(folder) or "")
