"""Programs, checks and judges in the user's files: helper modules, names, copies, asynchronous calls and streams."""

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import dspy
import pytest
from own_programs import RUBRIC, answer, compiled, write_program

import assay
from assay.datasets import make_task
from assay.programs import load_program
from assay.programs.loading import SHIPPED, full_name, program_class
from assay.support.package import CONTENT
from assay.testing import scripted_lm
from rigs.serving import served
from rigs.upstream import ScriptedUpstream


def test_helper_modules_are_imported_and_isolated_between_programs(tmp_path: Path) -> None:
    before = list(sys.path)
    first, second = (load_program(write_program(tmp_path / name, name)) for name in ("one", "two"))
    with dspy.context(lm=scripted_lm(answer)):
        answers = [program(question="?").answer for program in (first, second, first)]
    assert answers == [f"{name}late{name}-deep-1 4" for name in ("one", "two", "one")]
    assert sys.path == before
    assert "helper" not in sys.modules


def test_checks_and_judges_import_from_their_folder_the_working_directory_and_the_programs(
    tmp_path: Path, monkeypatch: Any
) -> None:
    load_program(write_program(tmp_path / "programs"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "work" / "shared.py").write_text("HERE = 1.0\n")
    (tmp_path / "rubrics").mkdir()
    (tmp_path / "rubrics" / "beside.py").write_text("RIGHT = '4'\n")
    (tmp_path / "rubrics" / "check.py").write_text(
        "import beside, shared\nfrom helper import PREFIX\ndef right(task, prediction, rollout):\n"
        "    return shared.HERE * (prediction['answer'] == PREFIX + beside.RIGHT)\n"
    )
    (tmp_path / "rubrics" / "r.yaml").write_text(
        RUBRIC.replace("contains", "check.py:right").replace("right\n    check", "one\n    check")
    )
    rubric = assay.load_rubric(tmp_path / "rubrics" / "r.yaml")
    task = make_task({"question": "?", "answer": "4"})
    assert rubric.score(task, dspy.Prediction(answer="A4")).value == 1.0
    (tmp_path / "rubrics" / "judging.py").write_text(
        "from shared import HERE\nfrom assay.judges import PointwiseJudge\nmood = PointwiseJudge('Is it kind?')\n"
    )
    assert assay.load_judge(f"{tmp_path}/rubrics/judging.py:mood").labels == ("no", "yes")


def test_a_file_named_like_an_installed_module_does_not_shadow_it(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text(
        "import json, dspy\nassert json.loads('1') == 1\nqa = dspy.ChainOfThought('question -> answer')\n"
    )
    assert load_program(f"{tmp_path}/json.py:qa").predictors()
    assert json.__name__ == sys.modules["json"].__name__ == "json"


@pytest.mark.parametrize("name", SHIPPED)
def test_a_copy_of_a_shipped_program_is_a_program_of_its_own(name: str, tmp_path: Path) -> None:
    shutil.copytree(CONTENT / "programs" / name, tmp_path / name)
    copied = program_class(str(tmp_path / name / "program.py"))
    assert copied.__name__ == program_class(name).__name__
    assert copied is not program_class(name)
    assert full_name(str(tmp_path / name / "program.py")).endswith(f":{copied.__name__}")


def test_a_loaded_program_runs_async_streams_and_brings_its_model(tmp_path: Path) -> None:
    upstream = ScriptedUpstream()
    with served(upstream.app()) as address:
        server = f"{address}/v1"
        program = write_program(tmp_path / "p")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OPENAI_API_KEY", "none")
            artifact = compiled(
                program, tmp_path / "job", lm=None, model="openai/echo", api_base=server, prompt_format="json"
            )
            calls, loaded = upstream.calls, assay.load(artifact)
            assert dspy.settings.lm is None
            assert "-deep-1" in loaded(question="one more?").answer
            assert upstream.calls > calls
            assert "-deep-1" in asyncio.run(loaded.acall(question="and async?")).answer

            async def streamed() -> list[Any]:
                stream = dspy.streamify(loaded, stream_listeners=[dspy.streaming.StreamListener("answer")])
                return [part async for part in stream(question="and streamed?")]

            parts = asyncio.run(streamed())
        assert isinstance(parts[-1], dspy.Prediction)
        assert [type(part).__name__ for part in parts[:-1]].count("StreamResponse") >= 1
        own_lm = scripted_lm(answer)
        with dspy.context(lm=own_lm):  # what is set in DSPy comes first
            assert loaded(question="?").answer.endswith(" 4")
        assert own_lm.scripted.calls == 1


async def streamed(program: Any, question: str, **options: Any) -> tuple[str, Any]:
    """The chunks of `answer` that the listener received, and the prediction."""
    stream = dspy.streamify(program, stream_listeners=[dspy.streaming.StreamListener("answer")], **options)
    parts = [part async for part in stream(question=question)]
    chunks = "".join(part.chunk for part in parts if isinstance(part, dspy.streaming.StreamResponse))
    return chunks.strip(' "'), parts[-1]  # DSPy gives a JSON value with its quotes
