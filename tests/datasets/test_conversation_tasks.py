"""Generated conversations: facts, changes, two meetings with a person, and options that are refused."""

import pytest

from assay.datasets import load_splits, load_tasks
from assay.errors import DataError


def test_splits_are_those_of_the_content() -> None:
    one, two = (load_splits(f"conversations:?size={size}&seed=2", salt="s") for size in (60, 120))
    assert {task.id for task in one.train} <= {task.id for task in two.train}
    assert min(len(one.train), len(one.val), len(one.gate)) > 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("facts=0-4", "facts='0-4'"),
        ("facts=9-40", "facts='9-40'"),
        ("changes=2", "changes is .2.: it must be a number from 0 to 1"),
        ("changes=much", "changes is .much."),
        ("meeting=third", "meeting='third' must be one of only, first, second"),
        ("meeting=first&facts=3-4", "must be above 6"),
        ("turns=4", "unknown option"),
    ],
)
def test_options_out_of_range_are_refused(options: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_tasks(f"conversations:?{options}")
