"""Demonstrations of an agent that follows the labels of train tasks (`Agent.guided`)."""

import json
from typing import Any

import dspy

from assay.datasets import load_tasks
from assay.programs import Converse
from assay.programs.agent import GUIDE
from assay.testing import scripted_lm


def helpless(request: Any) -> str:
    return json.dumps(dict.fromkeys(request.config.response_format["schema"]["properties"], "none"))


def test_labels_guide_no_run_outside_of_the_search() -> None:
    task = load_tasks("conversations:?size=1&facts=4-4&changes=0")[0]
    with dspy.context(lm=scripted_lm(helpless)):
        assert dspy.settings.get(GUIDE) is None
        try:
            ended = Converse().execute(task).ended
        except Exception:  # the model writes no valid choice
            ended = "failed"
    assert ended != "done"
