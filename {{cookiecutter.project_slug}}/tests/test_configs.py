"""Each choice of each group of configs/ makes a run that may start. A file that you add there is tested, too."""

import pytest
from choices import GROUPS, accepted, targets
from hydra.utils import get_object


@pytest.mark.parametrize("choice", [f"{group}={choice}" for group, choices in GROUPS.items() for choice in choices])
def test_a_choice_is_accepted_and_all_that_it_names_can_be_imported(choice: str) -> None:
    for _, node in targets(accepted(choice).cfg):
        get_object(node["_target_"])
