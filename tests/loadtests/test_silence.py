"""The silence around a death is the longest one, however short it was and however late its tokens were read."""

import pytest

from loadtests.chaos.silence import longest_gap
from loadtests.chaos.sse_client import Account


@pytest.mark.parametrize(
    ("arrivals", "gap"),
    [
        ([0.5, 1.0, 2.04, 2.05], 1.04),
        ([1.9, 2.0, 2.1, 2.2, 5.2, 5.3], 3.0),  # read late
        ([0.1, 1.5, 1.99, 2.0, 2.09], 0.09),  # over soon; what was before the death doesn't count
        ([2.0], 0.0),
    ],
)
def test_the_longest_silence_since_a_death_is_found(arrivals, gap):
    account = Account({}, arrivals=[(at, number) for number, at in enumerate(arrivals)])
    assert longest_gap(account, 2.0) == pytest.approx(gap)
