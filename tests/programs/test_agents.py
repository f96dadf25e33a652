"""Each of the five parameters acts; loading; the decision for a tool, and which one; the calculator."""

import json
import math
from math import isfinite
from pathlib import Path
from typing import Any

import dspy
import pytest
from dspy import lm15
from dspy.lm15 import TokenLogprob, TopLogprob
from hypothesis import given, settings, strategies as st

from assay.errors import ParameterError, ProgramError
from assay.models import count_tokens, get_lm
from assay.models.lm import with_recording
from assay.programs import (
    RANGES,
    Agent,
    AgentParameters,
    Classify,
    Extract,
    LeanAdapter,
    MathQA,
    ToolAgent,
    load_program,
    program_inputs,
)
from assay.programs.calculator import CalculatorError, calculator
from assay.programs.compose import CallSettings, EnsembleProgram, NearestDemos, configured
from assay.programs.estimate import choice_odds
from assay.testing import ScriptedEngine, scripted_lm


def scripted_math(need: float = 0.9, answers: int = 1, expression: str = "1 + 1") -> Any:
    """A model that wants the tool with probability `need`, and finishes after `answers` results."""

    def script(request: Any) -> str:
        user = request.messages[-1].text or ""
        fields = request.config.response_format["schema"]["properties"]
        done = user.count(" = ") >= answers
        reply: dict[str, Any] = {
            "thought": "hm",
            "action": "answer" if done else "calculator",
            "need": 0.0 if done else need,
        }
        reply |= {"expression": expression, "answer": "2"}
        return json.dumps({name: reply[name] for name in fields})

    return scripted_lm(script)


def run(agent: Agent, lm: Any, **inputs: Any) -> Any:
    with dspy.context(lm=lm, trace=[]):
        return agent(**(inputs or {"question": "1 + 1?"}))


def solver(**parameters: Any) -> MathQA:
    return MathQA(parameters=AgentParameters.of(parameters))


@pytest.mark.parametrize("name", RANGES)
def test_out_of_range_names_the_range(name: str) -> None:
    low, high = RANGES[name]
    for wrong in (low - 1, high + 1, "many", None, float("nan")):
        with pytest.raises(ParameterError, match=f"{name}: must be .*between {low:g} and {high:g}, not "):
            AgentParameters.of({name: wrong})
    for right in (low, high):
        assert getattr(AgentParameters.of({name: right}), name) == right


@pytest.mark.parametrize(
    ("need", "threshold", "calls"), [(0.6, 0.5, 1), (0.6, 0.7, 0), (0.1, 0.0, 1), (0.0, 0.0, 1), (0.9, 1.0, 0)]
)
def test_a_tool_is_called_if_the_estimate_reaches_the_threshold(need: float, threshold: float, calls: int) -> None:
    assert len(run(solver(tool_usage_threshold=threshold), scripted_math(need=need)).steps) == calls


def test_the_oldest_observations_are_dropped_first_and_the_task_never(small_embedded: str) -> None:
    agent = solver(context_length=150)
    lm = get_lm(small_embedded)
    observations = [f"{i} + {i} = {2 * i}" for i in range(100, 160)]
    with dspy.context(lm=lm, adapter=LeanAdapter()):
        filled = agent.fit_context(
            agent.respond, agent.respond.signature, {"question": "What now?"}, observations, "results"
        )
        text = "\n".join(m["content"] for m in LeanAdapter().format(agent.respond.signature, filled["demos"], filled))
    lines = filled["results"].splitlines()
    assert lines == observations[-len(lines) :]
    assert 0 < len(lines) < 60
    assert count_tokens(lm, text) <= 150
    assert "What now?" in text


@pytest.mark.parametrize("kind", ["classify", "extract"])
def test_parameters_apply_to_single_step_programs(kind: str) -> None:
    def calls_of(text: str = "a text", demos: int = 0, **parameters: Any) -> list[Any]:
        observed: list[Any] = []

        def script(request: Any) -> str:
            observed.append(request)
            fields = request.config.response_format["schema"]["properties"]
            return json.dumps({name: "red" if name == "label" else "x" for name in fields})

        agent = {"parameters": AgentParameters.of(parameters)}
        program = Classify(["red", "blue"], **agent) if kind == "classify" else Extract({"name": "string"}, **agent)
        inputs = {"text": "word " * 50, "label": "red", "name": "x"}
        program.predict.demos = [dspy.Example(**inputs) for _ in range(demos)]
        run(program, scripted_lm(script), text=text)
        return observed

    def size(request: Any) -> int:
        return len(str(request.messages))

    assert calls_of(temperature=1.3)[0].config.temperature == 1.3
    assert "thought" not in calls_of(reasoning_depth=3)[0].config.response_format["schema"]["properties"]
    budgets = [
        calls_of(reasoning_depth=d)[0].config.response_format["schema"]["properties"]["thought"]["maxLength"]
        for d in (4, 5, 9)
    ]
    assert budgets == sorted(set(budgets))
    assert [len(calls_of(reasoning_depth=d)) for d in (5, 6)] == [1, 2]  # the answer is reviewed
    assert len(calls_of(reasoning_depth=6, max_steps=1)) == 1  # and not where no step is left
    wide, narrow = (calls_of(demos=8, context_length=length)[0] for length in (5000, 200))
    assert size(narrow) < size(wide) / 3
    long = "long " * 2000
    assert long.strip() in str(calls_of(text=long, demos=8, context_length=300)[0].messages)  # the task is never cut
    assert (
        size(calls_of(text=long, demos=8, context_length=300)[0]) < len(long) + 3000
    )  # and leaves no room for demonstrations


def test_programs_are_loaded_by_name_file_and_module(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import dspy\nclass Mine(dspy.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.p = dspy.Predict('a, b -> c')\n    def forward(self, a, b):\n        return self.p(a=a, b=b)\n"
    )
    mine = load_program("mine.py:Mine")
    assert program_inputs(mine) == ["a", "b"]
    two = dspy.ChainOfThought("a -> c")
    mine.other = two  # no longer the inputs of the only predictor
    for composed in (
        NearestDemos(mine, [{"key": "x", "demos": {}}]),
        EnsembleProgram([mine]),
        configured(mine.deepcopy(), CallSettings(prompt_format="json")),
    ):
        assert program_inputs(composed) == ["a", "b"]
    assert program_inputs(load_program("math_qa")) == ["question"]
    assert isinstance(load_program("assay.programs:MathQA"), MathQA)


@pytest.mark.model
def test_the_threshold_applies_to_probabilities_of_the_embedded_model(embedded: str) -> None:
    def tools(threshold: float) -> int:
        with dspy.context(lm=get_lm(embedded, seed=0)):
            parameters = AgentParameters(tool_usage_threshold=threshold, reasoning_depth=1, max_steps=2)
            program = MathQA(parameters=parameters, prompt_format="lean")
            return len(program(question="What is 12 + 30?").steps)

    assert [tools(0.0), tools(1.0)] == [1, 0]


@pytest.mark.parametrize(
    "optimizer",
    [
        dspy.LabeledFewShot(k=2),
        dspy.BootstrapFewShot(metric=lambda *_: True, max_bootstrapped_demos=1),
        dspy.BootstrapFewShotWithRandomSearch(metric=lambda *_: True, num_candidate_programs=1, num_threads=1),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_stock_dspy_optimizers_compile_an_agent(optimizer: Any) -> None:
    examples = [dspy.Example(text=f"text {number}", label="a").with_inputs("text") for number in range(6)]
    with dspy.context(lm=scripted_lm(lambda request: json.dumps({"label": "a"}))):
        compiled = optimizer.compile(Classify(["a", "b"]), trainset=examples)
        assert compiled(text="another").label == "a"


Tokens = list[tuple[str, dict[str, float]]]
NAMES = ["search_web", "search_db", "answer"]
# P(search) = 0.8, P(_ | search) = 1, P(db | search_) = 0.7 and P(web | search_) = 0.2 of the 0.9 that begin a choice
DB: Tokens = [
    ('{"action": "', {}),
    ("search", {"search": 0.8, "answer": 0.2}),
    ("_", {"_": 0.9, '"': 0.1}),
    ("db", {"db": 0.7, "web": 0.2, "x": 0.1}),
    ('"}', {'"}': 1.0}),
]
# the written answer leaves both searches at one token: only their sum, 0.45, is known
ANSWER: Tokens = [('{"action": "', {}), ("answer", {"answer": 0.55, "search": 0.45}), ('"}', {'"}': 1.0})]


def decided(tokens: Tokens, action: str) -> dspy.Prediction:
    content = [
        {
            "token": token,
            "logprob": math.log(top.get(token, 1.0)),
            "top_logprobs": [{"token": k, "logprob": math.log(p)} for k, p in top.items()],
        }
        for token, top in tokens
    ]
    return dspy.Prediction(action=action, logprobs={"content": content})


def test_choices_that_diverge_at_the_same_token_have_a_joint_probability() -> None:
    odds = choice_odds(decided(ANSWER, "answer"), "action", NAMES)
    assert odds.together == [(frozenset({"search_web", "search_db"}), pytest.approx(0.45))]
    assert odds.probabilities["answer"] == pytest.approx(0.55)
    assert odds.probabilities["search_web"] == odds.probabilities["search_db"] == pytest.approx(0.225)


class Turns(ScriptedEngine):
    """Answers each call with the next of the given answers, token by token."""

    def __init__(self, *answers: Tokens) -> None:
        super().__init__(lambda _: "", logprobs=True)
        self.answers, self.requests = list(answers), list[Any]()

    def complete(self, request: Any) -> Any:
        self.requests.append(request)
        answer = self.answers.pop(0)
        spelled = tuple(
            TokenLogprob(
                token=token,
                logprob=math.log(top.get(token, 1.0)),
                top=tuple(TopLogprob(token=word, logprob=math.log(p)) for word, p in top.items()),
            )
            for token, top in answer
        )
        text = "".join(token for token, _ in answer)
        return lm15.Response(
            id=None, model=request.model, message=lm15.Message.assistant([lm15.TextPart(text)]), finish_reason="stop",
            usage=lm15.Usage(input_tokens=1, output_tokens=1), logprobs=spelled,
        )  # fmt: skip


def plain(text: str) -> Tokens:
    return [(text, {})]


def agent(threshold: float) -> ToolAgent:
    def search_web(query: str) -> str:
        """Searches the web."""
        return f"web: {query}"

    def search_db(query: str) -> str:
        """Searches the customer database."""
        return f"db: {query}"

    arguments = {name: {"query": (str, dspy.OutputField())} for name in ("search_web", "search_db")}
    parameters = AgentParameters(tool_usage_threshold=threshold, max_steps=2, reasoning_depth=1)
    return ToolAgent("question -> reply", [search_web, search_db], arguments=arguments, parameters=parameters)


def calls_of(engine: Turns, threshold: float) -> list[str]:
    lm = with_recording(dspy.LM("scripted/model", engine=engine, cache=False, num_retries=0))
    with dspy.context(lm=lm):
        return [step["tool"] for step in agent(threshold)(question="Who is Ann?").steps]


def test_tools_with_only_a_joint_probability_are_resolved_by_another_call() -> None:
    among: Tokens = [DB[0], ("search", {"search": 1.0}), ("_", {"_": 1.0}), ("db", {"db": 0.9, "web": 0.1}), ('"}', {})]
    engine = Turns(ANSWER, among, plain('{"query": "Ann"}'), plain('{"reply": "Ann"}'))
    assert calls_of(engine, 0.4) == ["search_db"]  # need 0.45, and search_web comes first in the list
    prompt = str(engine.requests[1])
    assert "search_db" in prompt
    assert "Literal['search_web', 'search_db', 'answer']" not in prompt


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(3/5)^(-2)", "2.777777778"),
        ("sqrt(7)", "2.645751311"),
        ("12/(3*4)", "1"),
        ("0.1+0.2", "0.3"),
        ("2**10", "1024"),
        ("5 - (-3) = 9", "8"),
        ("1/3*3", "1"),
        ("1000000000000/7", "142857142857.143"),
    ],
)
def test_the_calculator_evaluates_expressions(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "hostile",
    [
        "9**9**9**9",
        "1/0",
        "__import__('os').system('ls')",
        "(1).__class__",
        "a",
        "",
        "1" * 300,
        "((((1" * 20,
        "sqrt(-1)",
        "[1]*9",
        "'a'*9",
        "1<2",
        "True+1",
        "1e999",
        "lambda: 1",
    ],
)
@pytest.mark.timeout(60)
def test_the_calculator_refuses_invalid_and_expensive_expressions(hostile: str) -> None:
    with pytest.raises(CalculatorError):
        calculator(hostile)


@settings(max_examples=200)
@given(st.text(alphabet="0123456789+-*/^(). sqrt=e", max_size=60))
def test_the_calculator_answers_or_refuses_any_text(text: str) -> None:
    try:
        assert isfinite(float(calculator(text)))
    except CalculatorError:
        pass


def test_classify_and_extract_infer_their_fields_from_the_data() -> None:
    from assay.datasets import make_task

    labels = [make_task({"text": str(i), "label": name}) for i, name in enumerate(["red", "blue", "red"])]
    assert Classify.from_tasks(labels).config == {"labels": ["blue", "red"]}
    with pytest.raises(ProgramError, match="at least two labels"):
        Classify.from_tasks(labels[:1])
    fields = [make_task({"inputs": {"text": "x"}, "expected": {"year": 2001, "name": "a"}})]
    assert Extract.from_tasks(fields).config == {"fields": {"name": "string", "year": "integer"}}
