"""Loaded programs of the user's files: asynchronous calls, streams, models of their own."""

import asyncio
import json
from pathlib import Path
from typing import Any

import dspy
import pytest
from own_programs import answer, compiled, write_program

import assay
from assay.testing import scripted_lm
from rigs.serving import served
from rigs.upstream import ScriptedUpstream

PLAIN = """
import dspy

class QA(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        return self.answer(question=question)
"""


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


FRUITS = ("apple", "pear", "plum", "fig")


def demonstrated(request: Any) -> str:
    """Repeats the answer of the last demonstration; wrong without one."""
    texts = [message.text for message in request.messages if message.role == "assistant"]
    return json.dumps({"answer": json.loads(texts[-1])["answer"] if texts else "?"})


def nearest_winner(folder: Path) -> Any:
    """A loaded program whose artifact shows the nearest demonstration.

    For "apple again" that is "apple now", whose answer is "APPLE …".
    """
    (folder / "p").mkdir()
    (folder / "p" / "p.py").write_text(PLAIN)
    (folder / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")
    options = [
        {"question": f"{fruit} {split}", "answer": " ".join([fruit.upper()] * 12), "split": split}
        for split in ("train", "val", "gate", "test") for fruit in FRUITS
    ]  # fmt: skip
    (folder / "d.jsonl").write_text("\n".join(json.dumps(row) for row in options))
    report = assay.compile(
        f"{folder}/p/p.py:QA", rubric=folder / "r.yaml", data=folder / "d.jsonl", lm=scripted_lm(demonstrated),
        optimizer="knn", demos=1, prompt_format="json",
        out=folder / "artifact", store=folder / "s" / "a.db", gate=False,
    )  # fmt: skip
    loaded = assay.load(report.artifact)
    assert (report.outcome.winner, type(loaded).__name__) == ("knn", "NearestDemos")
    return loaded


async def streamed(program: Any, question: str, **options: Any) -> tuple[str, Any]:
    """The chunks of `answer` that the listener received, and the prediction."""
    stream = dspy.streamify(program, stream_listeners=[dspy.streaming.StreamListener("answer")], **options)
    parts = [part async for part in stream(question=question)]
    chunks = "".join(part.chunk for part in parts if isinstance(part, dspy.streaming.StreamResponse))
    return chunks.strip(' "'), parts[-1]  # DSPy gives a JSON value with its quotes


@pytest.mark.parametrize("is_async", [False, True])
def test_a_nearest_demonstrations_program_streams_to_its_listeners(tmp_path: Path, is_async: bool) -> None:
    loaded = nearest_winner(tmp_path)
    before = loaded.dump_state()
    with dspy.context(lm=scripted_lm(demonstrated)):
        heard, prediction = asyncio.run(streamed(loaded, "plum again", is_async_program=is_async))
    assert heard == prediction.answer == " ".join(["PLUM"] * 12)
    assert loaded.dump_state() == before
