"""Each choice in configs/ passes the checks before a run. A file that you add there is tested, too."""

import pytest
from choices import GROUPS, compose_choice, list_targets
from hydra.utils import get_object


@pytest.mark.parametrize("choice", [f"{group}={choice}" for group, choices in GROUPS.items() for choice in choices])
def test_a_choice_is_accepted_and_all_that_it_names_can_be_imported(choice: str) -> None:
    for _, node in list_targets(compose_choice(choice).cfg):
        get_object(node["_target_"])
