"""A scripted engine and recorded counts for the tests of supervision."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngine
from supervising import Recorded


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def counts() -> Recorded:
    return Recorded()
