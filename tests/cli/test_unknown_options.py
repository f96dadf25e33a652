"""An option that does not exist: the error names the one that was meant."""

from assay.cli.main import command_of
from assay.support.meant import MEANT


def test_each_option_that_may_be_meant_exists() -> None:
    commands = (
        "evaluate",
        "compile",
        "tune",
        "train grpo",
        "train sft",
        "judge compile",
        "traces list",
        "run",
        "serve",
    )
    known = {name for words in commands for option in command_of(words.split()).params for name in (option.name,)}
    assert {meant for names in MEANT.values() for meant in names} - known == set()
