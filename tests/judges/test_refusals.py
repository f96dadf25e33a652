"""A refusal, or any sentence that begins with a label, is not a verdict."""

import math
from typing import Any

import dspy
import pytest
from dspy import lm15
from dspy.lm15 import TokenLogprob, TopLogprob

from assay.judges import PointwiseJudge
from assay.models import with_recording
from assay.rubrics import NoGrade
from assay.testing import ScriptedEngine, scripted_lm

YES_NO = ("no", "yes")
TEN = tuple(f"level {number}" for number in range(10))  # read by the letters A to J
FIVE, NINE, ROMAN = tuple("12345"), tuple("123456789"), ("I", "II", "III")


class Sentences(ScriptedEngine):
    """Answers with a sentence, cut at the limit of tokens. Its words are tokens, the first one with alternatives."""

    def complete(self, request: Any) -> Any:
        sentence, alternatives = self.script(request)
        tokens = [f" {word}" if at else word for at, word in enumerate(sentence.split(" "))]
        tokens = tokens[: request.config.max_tokens]
        top = tuple(TopLogprob(token=token, logprob=math.log(p)) for token, p in alternatives.items())
        return lm15.Response(
            id=None,
            model=request.model,
            message=lm15.Message.assistant([lm15.TextPart("".join(tokens))]),
            finish_reason="stop",
            usage=lm15.Usage(input_tokens=1, output_tokens=len(tokens)),
            logprobs=tuple(
                TokenLogprob(token=token, logprob=0.0, top=() if at else top) for at, token in enumerate(tokens)
            ),
        )


def answered(scale: tuple[str, ...], sentence: str, alternatives: dict[str, float]) -> dspy.Prediction:
    engine = Sentences(lambda _: (sentence, alternatives), logprobs=True)
    with dspy.context(lm=with_recording(dspy.LM("scripted/model", engine=engine, cache=False))):
        return PointwiseJudge({"text": "Good?", "scale": scale})(task_input="q", output="x")


@pytest.mark.parametrize(
    ("scale", "sentence"),
    [
        (TEN, "I cannot rate this."),
        (TEN, "I can't assist with that"),
        (TEN, "A rating is not possible"),
        (ROMAN, "I cannot rate this"),
        (YES_NO, "No comment"),
        (YES_NO, "No puedo evaluar esto"),
        (YES_NO, "No , I cannot say"),
        (YES_NO, "No. Lo siento"),
        (YES_NO, "Yes, but I'm unable to"),
        (YES_NO, "Yes, but I cannot verify it"),
        (YES_NO, "No, this cannot be determined"),
        (YES_NO, "No. It can't be judged"),
        (YES_NO, "Yes, although it is impossible to say"),
        (YES_NO, "No, I don't know"),
        (YES_NO, "No, hard to tell"),
        (FIVE, "3, but it could not be assessed"),
        (("nein", "ja"), "Nein, das ist nicht zu beurteilen"),
        (FIVE, "1 am sorry"),
        (FIVE, "4 out of 5 dentists"),
        (NINE, "9 out of 10 people"),
        (NINE, "9 of the 12 points"),
        (("nein", "ja"), "Nein, ich kann das nicht"),
        (("是", "不"), "不能评价"),
    ],
)
def test_a_sentence_that_begins_with_a_label_is_unscored(scale: tuple[str, ...], sentence: str) -> None:
    first = sentence.split(" ")[0].rstrip(".,")
    first = "不" if first.startswith("不") else first
    with pytest.raises(NoGrade):
        answered(scale, sentence, {first: 0.95, "The": 0.02})


@pytest.mark.parametrize(
    ("scale", "sentence", "verdict"),
    [
        (TEN, "I", "level 8"),
        (TEN, "I. level 8", "level 8"),
        (TEN, "A.", "level 0"),
        (ROMAN, "I", "I"),
        (YES_NO, "No", "no"),
        (YES_NO, "No. The answer is wrong", "no"),
        (YES_NO, "No, it cannot compile", "no"),
        (YES_NO, "Yes, nobody could not answer this", "yes"),
        (YES_NO, "No, the claim cannot be verified", "no"),
        (YES_NO, "Yes, I think so", "yes"),
        (YES_NO, "**Yes**", "yes"),
        (FIVE, "4 out of 5", "4"),
        (FIVE, "4/5", "4"),
        (("poor", "good"), "good - it is", "good"),
    ],
)
def test_a_label_with_what_may_follow_it_is_a_verdict(scale: tuple[str, ...], sentence: str, verdict: str) -> None:
    first = {"**Yes**": "Yes", "4/5": "4"}.get(sentence, sentence.split(" ")[0].rstrip(".,"))
    assert answered(scale, sentence, {first: 0.95}).verdict == verdict


def test_the_letter_i_counts_only_where_the_answer_is_this_letter() -> None:
    mixed = answered(TEN, "B", {"B": 0.5, "I": 0.4, "C": 0.1})
    assert mixed.probabilities["level 8"] < 1e-6
    assert mixed.probabilities["level 1"] == pytest.approx(0.5 / 0.6)
    with pytest.raises(NoGrade):
        answered(TEN, "B", {"B": 0.04, "I": 0.95})


def test_what_is_left_on_the_scale_beside_a_refusal_is_read() -> None:
    left = answered(YES_NO, "No comment", {"No": 0.5, "yes": 0.4, "no": 0.0001})
    assert left.verdict == "yes"


@pytest.mark.parametrize(
    "text",
    ["1 am sorry", "I cannot rate this", "No comment", "9 out of 10 people", "No, I can't", "No, it cannot be rated"],
)
@pytest.mark.parametrize("scale", [YES_NO, FIVE, NINE, ROMAN])
def test_a_written_refusal_is_unscored(text: str, scale: tuple[str, ...]) -> None:
    judge = PointwiseJudge({"text": "Good?", "scale": scale})
    with dspy.context(lm=scripted_lm(lambda request: text)), pytest.raises(NoGrade):
        judge(task_input="q", output="x")


def test_a_verdict_in_json_is_read_whatever_stands_beside_it() -> None:
    judge = PointwiseJudge({"text": "Good?", "scale": YES_NO})
    with dspy.context(lm=scripted_lm(lambda request: '{"reason": "I cannot find an error", "verdict": "Yes."}')):
        assert judge(task_input="q", output="x").verdict == "yes"


def test_more_labels_than_letters_are_written() -> None:
    hundred = {"text": "Percent?", "scale": tuple(map(str, range(101))), "kind": "numeric"}
    with dspy.context(lm=scripted_lm(lambda request: '{"verdict": "73"}', logprobs=True)):
        assert PointwiseJudge(hundred)(task_input="q", output="x").verdict == "73"
