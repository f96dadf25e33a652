"""Each of the five parameters acts; loading; the decision for a tool."""

import json
from math import log
from pathlib import Path
from typing import Any

import dspy
import pytest

from assay.errors import ParameterError, ProgramError
from assay.models import count_tokens, get_lm
from assay.programs import (
    RANGES,
    Agent,
    AgentParameters,
    BaseAgent,
    Classify,
    Extract,
    LeanAdapter,
    MathQA,
    load_program,
    program_inputs,
)
from assay.programs.compose import CallSettings, EnsembleProgram, NearestDemos, configured
from assay.programs.estimate import choice_probabilities
from assay.programs.parameters import reasoning_tokens
from assay.testing import scripted_lm


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


def math(**parameters: Any) -> MathQA:
    return MathQA(parameters=AgentParameters.of(parameters))


@pytest.mark.parametrize("name", RANGES)
def test_out_of_range_names_the_range(name: str) -> None:
    low, high = RANGES[name]
    for wrong in (low - 1, high + 1, "many", None, float("nan")):
        with pytest.raises(ParameterError, match=f"{name}: must be .*between {low:g} and {high:g}, not "):
            AgentParameters.of({name: wrong})
    for right in (low, high):
        assert getattr(AgentParameters.of({name: right}), name) == right


@pytest.mark.parametrize("values", ["json", 3, ["max_steps"], None])
def test_parameters_that_are_no_mapping_are_refused_with_an_example(values: Any) -> None:
    with pytest.raises(ParameterError, match=r"a mapping such as \{'max_steps': 5\}, got a"):
        MathQA().set_parameters(values)
    if values is not None:
        with pytest.raises(ParameterError, match="a mapping such as"):
            MathQA(parameters=values)


def test_a_program_takes_its_parameters_as_a_mapping_too() -> None:
    parameters: Any = {"max_steps": 3}
    assert MathQA(parameters=parameters).agent_parameters == AgentParameters(max_steps=3)


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(ParameterError, match="not an agent parameter"):
        MathQA().set_parameters({"temprature": 1})


def test_defaults_are_the_documented_ones() -> None:
    assert list(AgentParameters().model_dump().values()) == [2000, 0.7, 10, 0.5, 3]


def test_max_steps_1_answers_without_a_tool() -> None:
    prediction = run(math(max_steps=1), scripted_math())
    assert prediction.steps == []
    assert prediction.answer == "2"


def test_an_agent_answers_at_max_steps() -> None:
    agent, lm = math(max_steps=4), scripted_math(answers=99)
    numbers = iter(range(100))
    agent.tools["calculator"] = dspy.Tool(lambda expression: str(next(numbers)), name="calculator")
    script = lm.scripted.script
    lm.scripted.script = lambda request: script(request).replace("1 + 1", f"1 + {lm.scripted.calls}")
    assert len(run(agent, lm).steps) == 3


def test_a_repeated_call_ends_tool_use() -> None:
    assert len(run(math(max_steps=50), scripted_math(answers=99)).steps) == 2


@pytest.mark.parametrize(
    ("need", "threshold", "calls"), [(0.6, 0.5, 1), (0.6, 0.7, 0), (0.1, 0.0, 1), (0.0, 0.0, 1), (0.9, 1.0, 0)]
)
def test_a_tool_is_called_if_the_estimate_reaches_the_threshold(need: float, threshold: float, calls: int) -> None:
    assert len(run(math(tool_usage_threshold=threshold), scripted_math(need=need)).steps) == calls


def test_a_forced_decision_is_demonstrated() -> None:
    agent = math(tool_usage_threshold=0, max_steps=2)
    with dspy.context(lm=scripted_math(need=0.0), trace=[]):
        agent(question="1 + 1?")
        actions = [output.action for predictor, _, output in dspy.settings.trace if predictor is agent.decide]
    assert actions == ["calculator", "answer"]


def test_the_oldest_observations_are_dropped_first_and_the_task_never(small_embedded: str) -> None:
    agent = math(context_length=150)
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


def test_a_failing_tool_is_an_observation_not_a_crash() -> None:
    prediction = run(math(), scripted_math(expression="1 / 0"))
    assert prediction.steps[0]["error"] == "division by zero"
    assert prediction.answer == "2"


def test_an_agent_implements_the_protocol() -> None:
    agent = MathQA()
    assert isinstance(agent, BaseAgent)
    with dspy.context(lm=scripted_math()):
        assert agent.execute({"question": "1 + 1?"}).answer == "2"


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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mathqa", "Did you mean 'math_qa'"),
        ("nowhere.py:X", "no such file"),
        ("assay.programs:Nothing", "has no 'Nothing'"),
        ("no.such.module:X", "cannot be imported"),
        ("json:__all__", "is a list; a program is"),
    ],
)
def test_an_object_that_is_not_a_program_is_refused(name: str, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        load_program(name)


@pytest.mark.parametrize("depth", [1, 5, 10])
def test_the_token_limit_includes_the_reasoning_budget(depth: int) -> None:
    observed: list[Any] = []
    lm = scripted_lm(
        lambda request: '{"thought": "x", "action": "answer", "need": 0, "answer": "1"}', observers=[observed.append]
    ).copy(max_tokens=512)
    with dspy.context(lm=lm):
        MathQA(parameters=AgentParameters(reasoning_depth=depth))(question="What is 1?")
    assert observed[0].request["config"]["max_tokens"] == 512 + reasoning_tokens(depth)


def decided(*tokens: tuple[str, dict[str, float]]) -> dspy.Prediction:
    content = [
        {"token": t, "top_logprobs": [{"token": k, "logprob": log(p)} for k, p in top.items()]} for t, top in tokens
    ]
    return dspy.Prediction(action="answer", logprobs={"content": content})


def test_the_need_of_a_tool_is_read_from_the_first_token_of_the_choice() -> None:
    prediction = decided(
        ('{"action": "', {}), ("answer", {"answer": 0.6, "calc": 0.15, "calculator": 0.05, "zebra": 0.2}), ('"}', {})
    )
    odds = choice_probabilities(prediction, "action", ["calculator", "answer"])
    assert odds["calculator"] == pytest.approx(0.2 / 0.8)  # 0.15 + 0.05 of the 0.8 that begin a choice
    assert sum(odds.values()) == pytest.approx(1)


def test_without_probabilities_the_written_choice_has_probability_1() -> None:
    assert choice_probabilities(dspy.Prediction(action="answer"), "action", ["calculator", "answer"])[
        "answer"
    ] == pytest.approx(1)


@pytest.mark.model
def test_the_threshold_applies_to_probabilities_of_the_embedded_model(embedded: str) -> None:
    def tools(threshold: float) -> int:
        with dspy.context(lm=get_lm(embedded, seed=0)):
            parameters = AgentParameters(tool_usage_threshold=threshold, reasoning_depth=1, max_steps=2)
            program = MathQA(parameters=parameters, prompt_format="lean")
            return len(program(question="What is 12 + 30?").steps)

    assert [tools(0.0), tools(1.0)] == [1, 0]


@pytest.mark.parametrize(
    "program",
    [MathQA(), Classify(["a", "b"]), Extract({"article": "string"})],
    ids=lambda program: type(program).__name__,
)
def test_no_agent_attribute_overrides_a_dspy_method(program: Agent) -> None:
    methods = {name for name in dir(dspy.Module) if callable(getattr(dspy.Module, name))}
    assert not methods & set(vars(program))
    assert program.parameters() == program.predictors()


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
