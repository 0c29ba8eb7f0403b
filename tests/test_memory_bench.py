"""Test the rows of benchmarks/memory.py for given planned and counted bytes."""

import sys

import pytest
from conftest import REPO

sys.path.insert(0, str(REPO / "benchmarks"))

from memory import describe_sizes, make_rows

GB = 10**9
SIZES = {
    ("GPT 1B", "32-true", False, 1): (30 * GB, 29 * GB),
    ("GPT 1B", "32-true", False, 8): (89 * GB, 100 * GB),
    ("GPT 1B", "32-true", True, 8): (70 * GB, float("inf")),  # planned to fit
    ("GPT 7B", "32-true", False, 8): (277 * GB, None),  # planned not to fit, and not tried
}


def test_errors_are_of_what_was_counted():
    values = {one["name"].partition(":")[2]: one["value"] for one in make_rows(SIZES, gpu=True)}
    assert values[" error of memory, against CUDA's allocator"] == pytest.approx(100 * (1 / 29 + 0.11) / 2)
    assert values[" largest error of memory, against CUDA's allocator"] == pytest.approx(11)
    assert values[" runs whose memory was compared with CUDA's allocator"] == 2
    assert values[" runs that should fit and ran out of memory"] == 1


def test_a_run_that_does_not_fit_is_told_so():
    assert describe_sizes(277 * GB, None) == " 277.00 GB, does not fit"
    assert describe_sizes(89 * GB, 100 * GB) == "  89.00 GB for  100.00 GB -11.0%"
