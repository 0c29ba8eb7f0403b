"""The two tiers of tests: `make test` holds what decides whether the product works, `make soak` the rest."""

from collections.abc import Iterable
from typing import Any

import pytest


def soak_all_but(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Return parameters of which `make test` takes only those kept, and `make soak` the others.

    Raises:
        ValueError: a case to keep is none of the cases.
    """
    cases = list(cases)
    if missing := [case for case in kept if case not in cases]:
        raise ValueError(f"no such cases: {missing}")
    return [pytest.param(case, marks=() if case in kept else pytest.mark.soak) for case in cases]
