"""The page of certified models says what the certificates say, for every family of the zoo."""

import copy
import re

from loadtests import zoo
from scripts import certified_models

CERTIFICATE = {
    "caches": "2 KVCache",
    "batching": "batched",
    "tokens": 400,
    "versions": {"marathon": "0.1.0", "mlx": "0.32.4"},
    "device": "CPU (x86_64)",
    "passed": True,
    "faults": [],
    "agreement": {"streams": 6, "parted": 0, "holds": True},
    "arms": {
        "guarded": {"buffers_a_token": 0.0, "at_fault": [], "failed": ""},
        "unguarded": {"buffers_a_token": 2.15, "at_fault": ["BatchKVCache.offset (layers 1, 3)"], "failed": ""},
        "mlx_lm": {"buffers_a_token": 2.25, "at_fault": ["BatchKVCache.offset (layers 1, 3)"], "failed": ""},
    },
}


def cells(found):
    return certified_models.row("one", found)


def test_a_row_has_the_figures_and_the_field_at_fault():
    assert cells(CERTIFICATE) == [
        *("one", "2 KVCache", "2.25", "0", "2.15", "BatchKVCache.offset", "together", "6 of 6", "passed"),
    ]


def test_what_is_flat_without_the_guard_is_said_to_be_so_by_construction():
    found = copy.deepcopy(CERTIFICATE)
    found["arms"]["unguarded"]["buffers_a_token"] = -0.0004
    found["arms"]["mlx_lm"] = {"buffers_a_token": None, "at_fault": [], "failed": "no merge"}
    found |= {"batching": "no merge", "agreement": None}
    assert cells(found)[2:8] == ["can't batch", "0", "flat by construction", "", "alone", "–"]


def test_a_failure_stands_out():
    found = copy.deepcopy(CERTIFICATE) | {"passed": False, "faults": ["not flat"]}
    found["agreement"] |= {"parted": 2, "holds": False}
    assert cells(found)[-2:] == ["**4 of 6**", "**failed**: not flat"]


def test_the_page_counts_who_leaks_and_who_passes():
    calm = copy.deepcopy(CERTIFICATE)
    calm["arms"]["mlx_lm"] |= {"buffers_a_token": 0.0}
    text = certified_models.page({"b": CERTIFICATE, "a": calm})
    assert "2 families: 1 leak in mlx-lm, 2 pass in Marathon." in text
    assert text.index("| a |") < text.index("| b |")
    assert "mlx 0.32.4; CPU (x86_64)" in text


def test_the_page_in_the_docs_has_every_family_and_none_failed():
    text = certified_models.TARGET.read_text(encoding="utf-8")
    assert re.findall(r"^\| (\w+) \|", text, re.MULTILINE)[1:] == sorted(zoo.FAMILIES)
    assert "failed" not in text
