"""Check that the tests which `make long` takes from `make soak` are there: a stale name would go unnoticed."""

import pytest
from conftest import REPO
from tiers import LONG


@pytest.mark.parametrize("pattern", LONG)
def test_what_is_long_is_there(pattern):
    file, _, name = pattern.partition("::")
    assert f"\ndef {name.partition('[')[0].rstrip('*')}(" in (REPO / "tests" / file).read_text()
