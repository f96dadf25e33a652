"""Responses of a judge's model: refusals, sentences that begin with a label, servers without token probabilities."""

import math
from typing import Any

import dspy
import pytest
from dspy import lm15
from dspy.lm15 import TokenLogprob, TopLogprob

from assay.judges import ListwiseJudge, PairwiseJudge, PointwiseJudge
from assay.judges.deciding import JudgeDecider
from assay.models import get_lm, with_recording
from assay.rubrics import Criterion, JudgeSpec, NoGrade, Rubric
from assay.testing import ScriptedEngine, scripted_lm
from rigs.serving import answering

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


GOOD = JudgeSpec(text="Is it good?")
REFUSAL = {"I": 0.9975, "yes": 0.0014, "no": 0.0001}


def completion(text: str, top: dict[str, float] | None = None) -> dict[str, Any]:
    alternatives = [{"token": token, "logprob": math.log(p), "bytes": None} for token, p in (top or {}).items()]
    logprobs = (
        {"content": [{"token": text, "logprob": 0.0, "bytes": None, "top_logprobs": alternatives}]} if top else None
    )
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
        "logprobs": logprobs,
    }
    return {
        "id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice],
        "usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6},
    }  # fmt: skip


def judged(judge: PointwiseJudge, script: Any, *, logprobs: bool = True, **settings: Any) -> dspy.Prediction:
    with dspy.context(lm=scripted_lm(script, logprobs=logprobs)):
        return judge(**{"task_input": "q", "output": "x", **settings})


def test_a_refusal_is_unscored_whatever_the_other_probabilities() -> None:
    with pytest.raises(NoGrade, match=r"0\.15% on \['no', 'yes'\] and 99\.75% on other tokens \(99\.75% on 'I'\)"):
        judged(PointwiseJudge(GOOD), lambda request: REFUSAL)
    assert judged(PointwiseJudge(GOOD, min_mass=0.0), lambda request: REFUSAL).verdict == "yes", (
        "who asks for it gets it"
    )
    rubric = Rubric("r", [Criterion(name="good", judge=GOOD)])
    scored = rubric.with_resolver(
        lambda c: JudgeDecider(PointwiseJudge(GOOD), scripted_lm(lambda request: REFUSAL, logprobs=True))
    )
    assert math.isnan(scored.score({"question": "q"}, {"answer": "x"}).value)


@pytest.mark.parametrize(
    "probabilities",
    [
        {"Sorry": 0.9, "yes": 0.05, "no": 0.01},
        {"I": 0.3, "Sorry": 0.3, "As": 0.3, "yes": 0.02, "no": 0.01},
        {**{f"word{n}": 0.1 for n in range(9)}, "yes": 0.006, "no": 0.001},
        {"N": 0.9, "yes": 0.06, "no": 0.01},
    ],
    ids=["less certain", "in three words", "in nine", "a letter"],
)
def test_a_refusal_in_any_words_is_unscored(probabilities: dict[str, float]) -> None:
    with pytest.raises(NoGrade, match="no verdict: the model puts"):
        judged(PointwiseJudge(GOOD), lambda request: probabilities)


def test_a_listwise_judge_falls_back_to_written_verdicts() -> None:
    written = '{"grades": [{"id": "A", "grade": "yes"}, {"id": "B", "grade": "no"}]}'
    with dspy.context(lm=scripted_lm(lambda request: written, logprobs=True)):
        assert set(ListwiseJudge(GOOD, orders=2)(task_input="q", outputs={"x": "1", "y": "2"}).grades) == {"x", "y"}


def test_a_server_with_logprobs_is_read_from_its_probabilities() -> None:
    with answering(lambda *_: (200, completion("yes", {"yes": 0.6, "Yes": 0.2, "no": 0.1, "maybe": 0.1}))) as served:
        address, requests = served
        with dspy.context(lm=get_lm("openai/some-judge", api_base=f"{address}/v1", api_key="none")):
            verdict = PointwiseJudge(GOOD)(task_input="q", output="x")
    assert (verdict.verdict, verdict.confidence) == ("yes", pytest.approx(0.8 / 0.9, abs=1e-3))
    assert (requests[0]["logprobs"], requests[0]["top_logprobs"]) == (True, 20)


@pytest.mark.parametrize("refuses", [False, True])
def test_a_server_without_logprobs_is_read_from_its_text(refuses: bool) -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if refuses and body.get("logprobs"):
            return 400, {"error": {"message": "logprobs are not supported with this model"}}
        return 200, completion('{"verdict": "no"}')

    with answering(answer) as (address, requests):
        judge = PointwiseJudge(GOOD)
        with dspy.context(lm=get_lm("openai/some-judge", api_base=f"{address}/v1", api_key="none")):
            assert [judge(task_input="q", output=str(n)).verdict for n in range(3)] == ["no"] * 3
    assert len(requests) == 4


class DecisionClient:
    """A client of a decision server, as DSPy knows them."""

    supports_decision_requests = True

    def __init__(self, **probabilities: float) -> None:
        self.probabilities, self.requests = probabilities, list[Any]()

    def __call__(self, state: Any, questions: Any) -> Any:
        self.requests.append((state, questions))
        best = max(self.probabilities, key=lambda label: self.probabilities[label])
        return {"verdict": {"choice": best, "probabilities": self.probabilities, "confidence": 0.75}}


def test_a_judge_is_read_from_a_decision_models_probabilities() -> None:
    client = DecisionClient(no=0.25, yes=0.75)
    with dspy.context(lm=client):
        verdict = PointwiseJudge(GOOD)(task_input="q", output="x")
        pair = PairwiseJudge(JudgeSpec(text="Which?", scale=("no", "tie", "yes")))
        with pytest.raises(NoGrade, match=r"no probability for \['tie'\]"):
            pair(task_input="q", output_a="x", output_b="y")
    assert (verdict.verdict, verdict.value) == ("yes", 0.75)
    state, questions = client.requests[0]
    assert state["inputs"] == {"task_input": '"q"', "output": '"x"'}
    assert questions["verdict"]["criteria"] == {"no": None, "yes": None}
