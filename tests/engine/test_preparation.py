"""What a spare engine imports before it is needed, in a process of its own."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
from pathlib import Path
import server.engine.__main__
from server.engine import preparation
preparation.NICENESS = 0
good, *bad = map(Path, sys.argv[1:])
preparation.prepare(good)
for folder in bad:
    preparation.import_family(folder)

import mlx.core as mx
found = {"allocated": [mx.get_active_memory(), mx.get_peak_memory()]}

before = set(sys.modules)
from server.engine import loop, model
from server.compute import attention, cudnn_shapes
cudnn_shapes.avoid()
attention.install()
model.load(good, trust_remote_code=False, probe=None, on_stage=lambda stage: None)
found["imported by the load"] = sorted(set(sys.modules) - before)

from mlx_lm.sample_utils import categorical_sampling
def drawn():
    mx.random.seed(3)
    return [int(categorical_sampling(mx.zeros((1, 1000)), 1.0)) for _ in range(3)]
found["drawn"] = [drawn(), drawn()]
print(json.dumps(found))
"""
CONFIGS = ["", "no JSON", "{}", '{"model_type": "never heard of"}', '{"model_file": "mine.py", "model_type": "llama"}']


@pytest.fixture(scope="module")
def found(tiny, tmp_path_factory):
    """What the script says. It must end well: MLX aborts processes where another thread has compiled something."""
    folders = [tmp_path_factory.mktemp("bad") for _ in CONFIGS]
    for folder, config in zip(folders, CONFIGS, strict=True):
        (folder / "config.json").write_text(config)
    command = [sys.executable, "-P", "-c", SCRIPT, *map(str, [tiny("qwen3_5"), *folders])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_nothing_is_left_for_a_load_to_import(found):
    assert found["imported by the load"] == []


def test_nothing_is_allocated_so_that_no_device_is_opened(found):
    """Folders that hold no model are among those looked at: the load complains of them."""
    assert found["allocated"] == [0, 0]


def test_samplers_of_mlx_lm_draw_as_ever(found):
    first, again = found["drawn"]
    assert first == again
    assert len(set(first)) > 1
