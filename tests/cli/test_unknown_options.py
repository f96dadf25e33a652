"""An option that does not exist: the error names the one that was meant."""

import click
import pytest

from assay.cli.main import command_of, group
from assay.cli.unknown import MEANT, explained


def refused(words: str) -> str:
    """The message of a command line with an unknown option."""
    with pytest.raises(click.NoSuchOption) as caught:
        group.main(words.split(), prog_name="assay", standalone_mode=False)
    return explained(caught.value, group).format_message()


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("evaluate p --limit 5", "--size"),
        ("evaluate p --rubrik r", "--rubric"),
        ("evaluate p --output r.html", "--report"),
        ("traces list -n 5", "--limit"),
        ("compile p --output x", "--out"),
        ("compile p --max-examples 5", "--train-size, --val-size, --gate-size, --test-size"),
        ("tune p --n-trials 5", "--trials"),
        ("judge compile j --data d", "--labels"),
        ("serve --api-base http://127.0.0.1/v1", "--upstream"),
        ("serve --base-url http://127.0.0.1/v1", "--upstream"),
        ("traces score --api-base http://127.0.0.1/v1", "--judge-api-base"),
        ("evaluate p --upstream http://127.0.0.1/v1", "--api-base"),
        ("train grpo p --lr 1", "--learning-rate"),
        ("train grpo p --max-new-tokens 9", "--max-completion"),
    ],
)
def test_the_option_that_was_meant_is_named(words: str, meant: str) -> None:
    assert refused(words).endswith(f". Did you mean {meant}?")


def test_an_option_of_another_command_names_that_command() -> None:
    assert refused("evaluate p --trials 5") == "No such option '--trials'. It belongs to assay tune."


def test_an_option_that_is_only_spelled_alike_is_not_offered() -> None:
    assert "--max-tokens" not in refused("compile p --max-new-tokens 9")
    assert "--" not in refused("runs list --foo").replace("--foo", "")


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
    known = {name for words in commands for option in command_of(words.split()).params for name in option.opts}
    assert {meant for names in MEANT.values() for meant in names} - known == set()
