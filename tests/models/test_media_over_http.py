"""Recordings and files reach a server of the chat API, and names of files do not stop a call."""

from typing import Any

import dspy
import pytest
from prompt_server import serving

from assay.models import get_lm


class Ask(dspy.Signature):
    """Answer."""

    recording: dspy.Audio = dspy.InputField()
    paper: dspy.File = dspy.InputField()
    image: dspy.Image = dspy.InputField()
    question: str = dspy.InputField()
    answer: str = dspy.OutputField()


@pytest.mark.parametrize("form", [dspy.ChatAdapter, dspy.XMLAdapter, dspy.JSONAdapter])
@pytest.mark.parametrize(
    ("paper", "sent"),
    [
        (
            {"file_data": "data:application/pdf;base64,JVBERi0xLjQ=", "filename": "a.pdf"},
            {"filename": "file.pdf", "file_data": "data:application/pdf;base64,JVBERi0xLjQ="},
        ),
        ({"file_id": "file-1"}, {"file_id": "file-1"}),
    ],
)
def test_media_are_sent_as_the_chat_api_takes_them(
    form: Any, paper: dict[str, str], sent: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    pixel = "data:image/png;base64,AAAA"
    with serving() as server:
        with dspy.context(lm=get_lm("openai/main", api_base=server.url), adapter=form()):
            found = dspy.Predict(Ask)(
                recording=dspy.Audio(data="UklGRg==", audio_format="mp3"), paper=dspy.File(**paper),
                image=dspy.Image(pixel), question="What is 3 + 1?",
            )  # fmt: skip
        blocks = server.last["messages"][-1]["content"]
    assert found.answer in ("4", "5")
    assert [block for block in blocks if block["type"] != "text"] == [
        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "mp3"}},
        {"type": "file", "file": sent},
        {"type": "image_url", "image_url": {"url": pixel}},
    ]
