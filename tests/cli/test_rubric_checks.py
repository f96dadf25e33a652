"""`assay rubric checks` lists what a rubric can name, as the loader finds it."""

import inspect
import json

import pytest
from click.testing import CliRunner

from assay.cli.main import group
from assay.errors import RubricError
from assay.rubrics.loading import import_check


def test_every_listed_check_can_be_named_and_takes_the_listed_arguments() -> None:
    done = CliRunner().invoke(group, ["rubric", "checks", "--json"])
    checks = json.loads(done.stdout)["checks"]
    assert {"exact", "numeric", "tests_pass", "tool_executed", "query_cost"} <= {check["name"] for check in checks}
    for check in checks:
        parameters = inspect.signature(import_check(check["name"])).parameters
        assert [*parameters] == ["task", "prediction", "rollout", *(each["name"] for each in check["arguments"])]
        assert check["summary"]
    (case,) = [
        each for check in checks if check["name"] == "exact" for each in check["arguments"] if each["name"] == "case"
    ]
    assert (case["default"], case["required"]) == (False, False)
    printed = CliRunner().invoke(group, ["rubric", "checks"]).output
    assert all(check["name"] in printed for check in checks)
    assert "\nexact (final): " in printed
    assert "\ntool_executed (step): " in printed


def test_a_shipped_check_in_the_wrong_module_is_found_by_its_name() -> None:
    with pytest.raises(RubricError, match=r"Did you mean 'assay\.rubrics\.steps:tool_executed', or"):
        import_check("assay.rubrics.checks:tool_executed")
