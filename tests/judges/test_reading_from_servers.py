"""Responses of a judge's model: refusals, empty outputs, servers without token probabilities, decision models."""

import math
from typing import Any

import dspy
import pytest

from assay.errors import ConfigError
from assay.judges import ListwiseJudge, PairwiseJudge, PointwiseJudge
from assay.judges.deciding import JudgeDecider
from assay.judges.loading import load_judge
from assay.models import get_lm
from assay.rubrics import Criterion, JudgeSpec, NoGrade, Rubric
from assay.testing import scripted_lm
from rigs.serving import answering

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


@pytest.mark.parametrize("value", [-0.1, 1.5, True, "much"])
def test_min_mass_out_of_range_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="min_mass"):
        PointwiseJudge(GOOD, min_mass=value)


def test_min_mass_is_part_of_a_judges_file_and_artifact(tmp_path: Any) -> None:
    (tmp_path / "j.yaml").write_text("text: Is it good?\nmin_mass: 0.5\n")
    judge = load_judge(tmp_path / "j.yaml")
    assert isinstance(judge, PointwiseJudge)
    assert PointwiseJudge(**judge.config).min_mass == 0.5
    assert "min_mass" not in PointwiseJudge(GOOD).config, "judges that leave the default keep their version"
    assert PairwiseJudge(min_mass=0.2).min_mass == 0.2


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
