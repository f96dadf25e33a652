"""A scripted model that needs demonstrations to be right, and compilations with it."""

import json
import re
from pathlib import Path
from typing import Any

import assay
from assay.evaluation import Session
from assay.models import Caps, Meter, ResponseCache
from assay.rubrics import load_rubric
from assay.testing import scripted_lm
from assay.traces import Recorder

DATA = "arithmetic:size=150&seed=3"


def student_of_examples(request: Any) -> str:
    """Calls the calculator if three demonstrations show it or if it must; otherwise guesses."""
    config = request.config.response_format
    if config is None or "schema" not in config:  # a teleprompter asks for instructions
        return json.dumps(
            {"proposed_instruction": "Use the calculator.", "reasoning": "r", "natural_language_rules": "rule"}
        )
    fields = config["schema"]["properties"]
    user = request.messages[-1].text or ""
    question = re.search(r"(?:is|Calculate|out|much is) ([-0-9 +*()]+)", user)
    result = re.search(r"= (-?\d+)\s*$", user.split("Respond with")[0].strip(), re.MULTILINE)
    taught = len(request.messages) >= 7
    reply = {
        "thought": "hm",
        "action": ("answer" if result else "calculator") if taught else "answer",
        "need": (0.0 if result else 1.0) if taught else 0.0,
        "expression": question[1].strip() if question else "0",
        "answer": result[1] if result else "0",
    }
    return json.dumps({name: reply.get(name, "x") for name in fields})


def session_for(lm: Any, meter: Meter, **options: Any) -> Session:
    return Session(lm, load_rubric("math_qa"), lm.recorder, meter, "math_qa", threads=2, **options)


def scripted_session(
    script: Any = student_of_examples, *, caps: Caps | None = None, cache: ResponseCache | None = None
) -> Session:
    recorder, meter = Recorder(), Meter(caps)
    lm = scripted_lm(script, meter=meter, observers=[recorder.observe], cache=cache)
    lm.recorder = recorder
    return session_for(lm, meter)


def compile_it(optimizer: str, tmp_path: Path, script: Any = student_of_examples, **options: Any) -> Any:
    options = {"sizes": {"train": 24, "val": 18, "gate": 12, "test": 12}, **options}
    return assay.compile(
        "math_qa",
        rubric="math_qa",
        data=DATA,
        lm=scripted_lm(script),
        optimizer=optimizer,
        store=tmp_path / ".assay" / "a.db",
        threads=2,
        **options,
    )
