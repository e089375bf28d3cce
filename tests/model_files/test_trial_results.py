"""What models showed, kept for the next start and for nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from server.engine import model
from server.ipc.probe import LayerCost, Probe
from server.model_files import trial_results
from server.model_files.trial_results import TrialResults

PROBE = Probe(2048, "batched", [LayerCost(1, 2, 256, 512)], 7, 10**9, "padded")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text('{"model_type": "llama"}')
    (made / "model.safetensors").write_bytes(bytes(100))
    return made


def opened(tmp_path: Path, device: str = "GPU 8", code: str = "one") -> TrialResults[Probe]:
    file = tmp_path / "code.py"
    file.write_text(code)
    return TrialResults(Probe, tmp_path / "kept", device, [file])


def test_it_is_known_to_the_next_start(tmp_path, folder):
    assert opened(tmp_path).recall(folder) is None
    opened(tmp_path).keep(folder, PROBE)
    assert opened(tmp_path).recall(folder) == PROBE


@pytest.mark.parametrize("change", ["device", "code", "mlx", "weights", "config", "name", "new file"])
def test_with_anything_changed_the_model_is_tried_out_again(tmp_path, folder, change, monkeypatch):
    opened(tmp_path).keep(folder, PROBE)
    device, code = "GPU 8", "one"
    match change:
        case "device":
            device = "GPU 9"
        case "code":
            code = "two"
        case "mlx":
            monkeypatch.setattr(trial_results, "version", lambda package: f"{package} 99")
        case "weights":
            os.utime(folder / "model.safetensors", (1, 1))
        case "config":
            stat = (folder / "config.json").stat()
            (folder / "config.json").write_text('{"model_type": "lfm22"}')
            os.utime(folder / "config.json", ns=(stat.st_atime_ns, stat.st_mtime_ns))
        case "name":
            folder = folder.rename(tmp_path / "other")
        case "new file":
            (folder / "model.py").write_text("")
    assert opened(tmp_path, device, code).recall(folder) is None


@pytest.mark.parametrize("content", [b"", b"{}", b'{"vocab_size": "x"}', b"\xff"])
def test_a_broken_file_is_no_fault(tmp_path, folder, content):
    opened(tmp_path).keep(folder, PROBE)
    (file,) = (tmp_path / "kept").iterdir()
    file.write_bytes(content)
    assert opened(tmp_path).recall(folder) is None


def test_a_folder_that_cannot_be_written_is_no_fault(tmp_path, folder):
    (tmp_path / "kept").write_text("a file")
    opened(tmp_path).keep(folder, PROBE)
    assert opened(tmp_path).recall(folder) is None


def test_only_the_newest_are_kept(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(trial_results, "KEPT", 3)
    for i in range(5):
        opened(tmp_path, device=str(i)).keep(folder, PROBE)
        for file in (tmp_path / "kept").iterdir():
            os.utime(file, (file.stat().st_mtime - 10,) * 2)
    assert [opened(tmp_path, device=str(i)).recall(folder) is not None for i in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("error", "kept"),
    [(ValueError("no batching"), 1), (NotImplementedError("none"), 1), (RuntimeError("no memory"), 0)],
)
def test_what_may_have_been_of_the_moment_is_not_kept(tmp_path, tiny, monkeypatch, error, kept):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(model, "merged_step", fail)
    here = opened(tmp_path)
    loaded = model.load(tiny("llama"), trust_remote_code=False, probe=None, on_stage=lambda stage: None, trials=here)
    assert loaded.probe.batching == str(error)
    assert (here.recall(tiny("llama")) is not None) == bool(kept)


@pytest.mark.parametrize("place", ["a file", "below a file"])
def test_a_folder_that_cannot_be_written_is_said(tmp_path, folder, place, caplog):
    (tmp_path / "file").write_text("")
    kept = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "trials"}[place]
    results = TrialResults(Probe, kept, "GPU 8", [])
    results.keep(folder, PROBE)
    assert results.recall(folder) is None
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert str(kept) in line
