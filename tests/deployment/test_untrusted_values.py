"""Values in another user's artifact: those that could weaken a limit, import or reach something need trust."""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import dspy
import pytest
from trusted_artifacts import (
    MATH_QA,
    forged,
    of_judge,
    of_predict,
    shipped,
    trust_list as trust_list,
    with_rubric,
    with_state,
)

import assay
from assay.commands.run import run
from assay.deployment import load_artifact, save_artifact
from assay.deployment.allowed import imported_types
from assay.deployment.artifact import with_model_of
from assay.errors import ArtifactError, AssayError
from assay.jobs.loading import load_judge
from assay.judges import Cascade, Jury, PairwiseJudge, PointwiseJudge
from assay.programs import load_program
from assay.programs.compose import EnsembleProgram, NearestDemos
from assay.programs.loading import SHIPPED, program_class
from assay.sources.artifact_files import hash_of_text
from assay.sources.trust import UntrustedArtifact, entries, trust_file

SPEC = {"text": "Is it good?", "scale": ["no", "yes"]}
MEMBER = {"program": "assay.judges:PointwiseJudge", "config": {"spec": SPEC}}
PREDICT = {"program": "dspy:Predict", "config": {"signature": "q -> a", "n": 9}}
ARGUMENTS: dict[str, dict[str, Any]] = {"classify": {"labels": ["a", "b"]}, "extract": {"fields": {"city": "string"}}}


def accepted(artifact: Path, changes: Iterable[dict[str, Any]], load: Callable[[Path], Any]) -> list[dict[str, Any]]:
    """Those of the changes of its manifest with which the artifact is loaded without trust."""
    loaded = []
    for change in changes:
        try:
            load(forged(artifact, **change))
        except UntrustedArtifact:
            continue
        loaded.append(change)
    return loaded


# -- arguments, settings and states

PROGRAMS: dict[str, list[Any]] = {
    "code_repair": [
        {"isolation": "none"}, {"isolation": "None"}, {"isolation": "landlock"}, {"isolation": ["none"]},
        {"timeout_s": 86_400}, {"timeout_s": float("nan")}, {"timeout_s": True}, {"memory_mb": 2**40},
        {"memory_mb": "512"}, {"parameters": {"max_steps": 50}}, {"thinking": 2**31 - 1}, {"policy": {"samples": 50}},
    ],
    "assay.programs:CodeRepair": [{"isolation": "none"}],
    "assay.shipped.programs.code_repair.program:CodeRepair": [{"isolation": "none"}],
    "math_qa": [{"prompt_format": "json"}, ["isolation"]],
    "text_to_sql": [{"rows": 10**9}, {"steps": 10**12}, {"seconds": 1e9}, {"characters": 10**9}],
    "answer_from_documents": [
        {"store": "postgresql://them/x"}, {"store": "/home/you/other.db"}, {"index": "../other"}, {"k": 10**9},
        {"embedder": "openai/text-embedding-3-small"},
    ],
    "converse": [{"user": "model", "user_model": "openai/m"}, {"memory": "salaries"}],
    "tool_user": [{"servers": ["sh -c 'touch ran'"]}, {"tools": ["os.system"]}, {"parallel": 1}],
}  # fmt: skip
OF_DSPY: dict[str, list[dict[str, Any]]] = {  # beside the signature
    "dspy:Predict": [
        {"n": 50}, {"max_tokens": 10**9}, {"temperature": [0, 1]}, {"cache": False}, {"extra_headers": {"x": "y"}},
        {"config": {"n": 50}},
    ],
    "dspy.predict.predict:Predict": [{"n": 50}],
    "dspy.predict:Predict": [{"n": 50}],
    "dspy:ChainOfThought": [{"n": 50}],
    "dspy:ReAct": [{"tools": [], "max_iters": 10**6}],
    "dspy:CodeAct": [{"tools": []}],
    "dspy:ProgramOfThought": [{"max_iters": 10**6}],
    "dspy:RLM": [{"max_iterations": 10**6}],
    "dspy:Flex": [{"max_predictor_calls": None}],
}  # fmt: skip
JUDGES: dict[str, list[dict[str, Any]]] = {
    "PointwiseJudge": [
        {"spec": SPEC, "samples": 10_000}, {"spec": SPEC, "model": "openai/m"}, {"spec": {**SPEC, "use": "../other"}},
    ],
    "ListwiseJudge": [{"spec": SPEC, "orders": 10_000}],
    "Jury": [
        {"members": [MEMBER] * 11},
        {"members": [{"program": "assay.judges:Jury", "config": {"members": [MEMBER]}}]},
        {"members": [{**MEMBER, "config": {"spec": SPEC, "samples": 10_000}}]},
    ],
    "Cascade": [
        {"first": MEMBER, "second": {**MEMBER, "config": {"spec": SPEC, "model": "openai/m"}}},
        {"first": MEMBER, "second": PREDICT},
    ],
}  # fmt: skip


def test_an_argument_outside_of_the_table_needs_trust(own_folder: Path) -> None:
    artifact = shipped(own_folder / "a")
    own = [{"program": name, "config": config} for name, configs in PROGRAMS.items() for config in configs]
    dspys = [
        {"program": name, "config": {"signature": "q -> a", **config}}
        for name, configs in OF_DSPY.items()
        for config in configs
    ]
    assert accepted(artifact, [*own, *dspys], load_artifact) == []
    judges = [
        {"program": f"assay.judges:{name}", "kind": "judge", "config": config}
        for name, configs in JUDGES.items()
        for config in configs
    ]
    assert accepted(artifact, judges, load_judge) == []
    assert not Path("ran").exists()


def test_settings_out_of_range_need_trust(own_folder: Path) -> None:
    settings: list[Any] = [
        {"adapter": "json", "parameters": {"temperature": 99}},
        {"adapter": "json", "parameters": {"max_steps": 10**6}},
        {"adapter": "json", "parameters": {"n": 50}},
        {"adapter": "json", "parameters": {"temperature": [0, 1]}},
        {"adapter": "xml://x", "parameters": {}},
        {"adapter": "json", "parameters": {}, "thinking": 2**31 - 1},
        {"adapter": "json", "parameters": {}, "api_base": "x"},
        ["json"],
    ]
    assert accepted(shipped(own_folder / "a"), [{"settings": values} for values in settings], load_artifact) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda state: {"kind": "ensemble", "members": [state] * 11},
        lambda state: {"kind": "ensemble", "members": [{"kind": "ensemble", "members": [state] * 6}] * 2},
        lambda state: {"kind": "nearest", "inner": state, "pool": [], "k": 10**6},
        lambda state: {**state, "thinking": 2**31 - 1},
        lambda state: {**state, "policy": {"samples": 50}},
        lambda state: {**state, "policy": {"stable": 2, "piece": 4}},
        lambda state: {**state, "state": state["state"] | {"decide": state["state"]["decide"] | {"callbacks": ["x"]}}},
        lambda state: {**state, "state": {**state["state"], "k": 10**6}},
        lambda state: {**state, "kind": "other"},
        lambda state: {**state, "frozen": [state["state"]]},
        lambda state: {"members": []},
    ],
)
def test_a_state_with_more_calls_or_other_parts_needs_trust(own_folder: Path, change: Any) -> None:
    artifact = shipped(own_folder / "a")
    state = change(json.loads((artifact / "program.json").read_text()))
    with pytest.raises(UntrustedArtifact):
        load_artifact(with_state(artifact, state))
    with pytest.raises(UntrustedArtifact):  # also where its state is loaded into one's own program
        load_artifact(artifact, program=load_program("math_qa"))


FLEX = "class FlexModule(dspy.Module):\n    def __init__(self):\n        super().__init__()\n        self.predict = "


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("call", ["dspy.Predict('q -> a', n=50)", "dspy.RLM('q -> a', max_llm_calls=10**6)"])
def test_code_in_a_state_needs_trust(own_folder: Path, call: str, frozen: bool) -> None:
    """DSPy's sandbox runs the code, but it chooses the arguments of predictors, and so how many calls there are."""
    flex = dspy.Flex("q -> a")
    artifact = shipped(own_folder / "a", program="dspy:Flex", config={"signature": "q -> a"})
    code = {"module_src": f"{FLEX}{call}\n\n    def forward(self, q):\n        return self.predict(q=q)"}
    state: dict[str, Any] = {"kind": "program", "state": flex.dump_state() if frozen else code}
    for made in [state | {"frozen": {"x": code}}] if frozen else [state, {"kind": "ensemble", "members": [state]}]:
        with pytest.raises(UntrustedArtifact):
            load_artifact(with_state(artifact, made))
        with pytest.raises(UntrustedArtifact):
            load_artifact(artifact, program=dspy.Flex("q -> a"))


@pytest.mark.parametrize(
    "criterion",
    [
        "check: tests_pass, with: {isolation: none}",
        "metric: tests_pass, with: {isolation: none}",
        "check: null, metric: tests_pass, with: {isolation: none}",
        "check: tests_pass, with: {isolation: [none]}",
        "check: tests_pass, with: {timeout_s: 80000}",
        "check: tests_pass, with: {memory_mb: 1000000}",
        "check: tests_pass, with: {timeout_s: 20, test_timeout_s: 21}",
        "check: tests_pass, with_: {isolation: none}",
        "judge: {text: 'Is it good?', samples: 10000}",
    ],
)
def test_a_rubric_in_an_artifact_that_weakens_a_limit_needs_trust(own_folder: Path, criterion: str) -> None:
    artifact = shipped(own_folder / "a")
    with pytest.raises(UntrustedArtifact):
        assay.load_rubric(with_rubric(artifact, criterion))
    within = with_rubric(artifact, "check: tests_pass, with: {timeout_s: 5, field: code}")
    assert assay.load_rubric(within).name == "r"


# -- what needs no trust


def of_program(folder: Path, name: str, **arguments: Any) -> Path:
    program = load_program(name, config=arguments or None)
    settings = {"adapter": "json", "parameters": program.agent_parameters.model_dump()}
    return save_artifact(folder, program, {"program": name, "settings": settings}, splits={}, report="")


def test_shipped_programs_with_their_default_arguments_need_no_trust(own_folder: Path) -> None:
    for name in SHIPPED:
        artifact = of_program(own_folder / name, name, **ARGUMENTS.get(name, {}))
        assert type(load_artifact(artifact).program) is program_class(name)
    demos = [{"key": "1 + 1", "demos": {"decide": []}}]
    members = [load_program("math_qa")] * 3
    for at, program in enumerate((EnsembleProgram(members), NearestDemos(members[0], demos))):
        artifact = save_artifact(own_folder / f"a{at}", program, MATH_QA, splits={}, report="")
        assert type(load_artifact(artifact).program) is type(program)
    assert entries() == []


def test_shipped_judges_need_no_trust(own_folder: Path) -> None:
    judges = [
        PointwiseJudge("Is it good?", samples=5, reading="text"),
        PairwiseJudge(),
        Jury([PointwiseJudge("Is it good?"), PointwiseJudge("Is it right?")], how="mean"),
        Cascade(PointwiseJudge("Is it good?"), PointwiseJudge("Is it right?")),
    ]
    for at, judge in enumerate(judges):
        assert type(load_judge(of_judge(own_folder / f"j{at}", judge))) is type(judge)
    assert entries() == []


def test_the_users_own_artifact_keeps_its_values(own_folder: Path) -> None:
    artifact = of_program(own_folder / "a", "code_repair", isolation="none", timeout_s=100.0)
    assert load_artifact(artifact).program.isolation == "none"
    trust_file().unlink()
    with pytest.raises(UntrustedArtifact):
        load_artifact(artifact)
    assert assay.load(artifact, trust=True) is not None
    assert load_artifact(artifact).program.timeout_s == 100.0


# -- signatures: their types are imported


HELPER = "import pathlib\npathlib.Path('ran').touch()\nclass helper: pass\n"
IMPORTING = (
    "q: helper -> a", "q -> a: list[helper.helper]", "q -> a: dict[str, Optional[helper.helper]]",
    "q -> a: int | helper", "q: this -> a",
)  # fmt: skip
CODE = "__import__('pathlib').Path('ran').touch()"
QUOTED = (
    f'list["{CODE}"]', f'Optional["{CODE}"]', f'dict[str, list["{CODE}"]]', f'int | "{CODE}"',
    f'Literal[list["{CODE}"]]', f'Annotated[int, "{CODE}"]',
)  # fmt: skip


def test_signature_types_in_another_users_artifact_import_and_evaluate_nothing(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("helper.py").write_text(HELPER)
    monkeypatch.syspath_prepend(str(own_folder))
    programs: dict[str, dict[str, Any]] = {"dspy:Predict": {}, "dspy:ChainOfThought": {}, "dspy:ReAct": {"tools": []}}
    artifact = of_predict(own_folder / "a")
    changes = [
        {"program": program, "config": {"signature": signature, **more}}
        for program, more in programs.items()
        for signature in (*IMPORTING, *(f"q: {field} -> a" for field in QUOTED))
    ]
    assert accepted(artifact, changes, load_artifact) == []
    with pytest.raises(UntrustedArtifact, match="types of its signature"):
        load_artifact(artifact)
    member = {"program": "dspy:Predict", "config": {"signature": "q: helper -> a"}}
    forged(artifact, program="assay.judges:Jury", kind="judge", config={"members": [member]})
    with pytest.raises(UntrustedArtifact, match="types of its signature"):
        load_judge(artifact)
    assert not Path("ran").exists()
    assert not {"helper", "this"} & sys.modules.keys()


@pytest.mark.parametrize(
    "signature",
    [
        "question: str, n: int -> answer: bool",
        "q -> a: list[str], b: Optional[Literal['x', 'y']]",
        "q: dspy.Image, h: dspy.History -> a: dict[str, list[int | None]]",
        "q: list[dspy.Image] -> when: list[datetime.date], cost: list[decimal.Decimal]",
        "q: typing.Any -> a: Literal['a', 'b']",
    ],
)
def test_the_types_of_python_and_dspy_need_no_trust(own_folder: Path, signature: str) -> None:
    assert imported_types({"signature": signature}) == []
    artifact = forged(of_predict(own_folder / "a", signature), config={"signature": signature})
    trust_file().unlink(missing_ok=True)
    assert isinstance(load_artifact(artifact).program, dspy.Predict)


def test_a_signature_with_user_types_needs_its_own_trust(own_folder: Path) -> None:
    written = of_predict(own_folder / "a", "q -> a: list[fractions.Fraction]")
    assert "fractions.Fraction" in json.loads((written / "manifest.json").read_text())["config"]["signature"]
    assert isinstance(load_artifact(written).program, dspy.Predict)
    trust_file().unlink()
    with pytest.raises(UntrustedArtifact, match=r"fractions\.Fraction"):
        load_artifact(written)


# -- addresses, model files


MODEL = "oobabooga/http://127.0.0.1:9/"
ADDRESS = "http://127.0.0.1:9/v1"


def test_a_model_address_in_another_users_artifact_gets_no_prompt(own_folder: Path) -> None:
    artifact = forged(of_predict(own_folder / "a"), model=MODEL)
    program = assay.load(artifact)  # loads, and calls whichever model is set
    with pytest.raises(UntrustedArtifact, match=r"127\.0\.0\.1"), dspy.context(lm=None):
        program(q="1+1")
    with pytest.raises(UntrustedArtifact):
        run(artifact, {"q": "1+1"})
    with pytest.raises(UntrustedArtifact):  # the model's own address would still be called
        run(artifact, {"q": "1+1"}, api_base=ADDRESS)
    with pytest.raises(UntrustedArtifact):
        with_model_of(artifact, {"api_base": ADDRESS})
    assay.load(artifact, trust=True)
    assert load_artifact(artifact).model == MODEL


def test_an_address_with_a_key_and_a_model_file_of_another_user_are_not_used(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "k")
    keyed = shipped(own_folder / "a", api_base=ADDRESS, api_key_env="MY_SECRET", model="openai/m")
    file = shipped(own_folder / "b", model=f"embedded:{own_folder}/b/theirs.gguf")
    for artifact, named in ((keyed, r"MY_SECRET.*127\.0\.0\.1"), (file, "")):
        program = assay.load(artifact)  # loads, with the model of the settings
        with pytest.raises(UntrustedArtifact, match=named), dspy.context(lm=None):
            program(question="1+1")
    with pytest.raises(UntrustedArtifact):
        run(keyed, {"question": "1+1"})
    assay.load(keyed, trust=True)
    assert load_artifact(keyed).endpoint.api_base == ADDRESS


def test_an_address_in_a_judges_model_gets_no_prompt(own_folder: Path) -> None:
    judge, text = PointwiseJudge("Is it good?", model=MODEL), f"text: Is it good?\nmodel: {MODEL}\n"
    written = of_judge(own_folder / "j", judge, rubric={"judge.yaml": text.encode()})
    sources = (written, written / "rubric" / "judge.yaml")
    for source in sources:
        load_judge(source)  # one's own
    trust_file().unlink()
    for source in sources:
        with pytest.raises(UntrustedArtifact, match=r"127\.0\.0\.1"):
            load_judge(source)


def test_an_address_in_a_predictors_arguments_gets_no_prompt(own_folder: Path) -> None:
    artifact = of_predict(own_folder / "a")
    for more in ({"api_base": ADDRESS}, {"base_url": "127.0.0.1:9"}, {"vertex_location": "x/#"}, {"other": "ws://x"}):
        forged(artifact, config={"signature": "q -> a", **more})
        with pytest.raises(UntrustedArtifact, match="which its arguments name"):
            assay.load(artifact)
        assert load_artifact(artifact, program=dspy.Predict("q -> a")).program.config == {}


@pytest.mark.parametrize("program", ["dspy:Predict", "dspy:Flex"])
def test_an_address_or_model_in_a_state_is_ignored(own_folder: Path, program: str) -> None:
    """DSPy sets whatever a state of a predictor holds as attributes: `config` is passed on to the model's client."""
    plain = getattr(dspy, program.partition(":")[2])("q -> a").dump_state()
    state = {"kind": "program", "state": {**plain, "config": {"api_base": ADDRESS}, "lm": {"model": MODEL}}}
    artifact = with_state(of_predict(own_folder / "a"), state, program=program, config={"signature": "q -> a"})
    loaded = load_artifact(artifact).program
    assert getattr(loaded, "config", {}) == {}
    assert loaded.lm is None


# -- depth and length


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("text", ["[" * 10_000_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000])
@pytest.mark.parametrize("name", ["manifest.json", "program.json"])
def test_deeply_nested_json_is_refused(own_folder: Path, name: str, text: str) -> None:
    artifact = shipped(own_folder / "a")
    files = json.loads((artifact / "manifest.json").read_text())["files"]
    (artifact / name).write_text(text)
    if name == "program.json":
        forged(artifact, files={**files, name: hash_of_text(text)})
    with pytest.raises(ArtifactError):
        load_artifact(artifact)


@pytest.mark.parametrize("depth", [101, 300, 600])
def test_a_manifest_has_a_limit_on_depth_wherever_it_is_nested(own_folder: Path, depth: int) -> None:
    for key in ("config", "shown", "settings", "result", "more"):
        with pytest.raises(ArtifactError, match="within each other"):
            load_artifact(shipped(own_folder / key, **{key: {"a": nested(depth)}}))


@pytest.mark.parametrize(
    "types",
    ["list[" * 5000 + "str" + "]" * 5000, "str" + "|str" * 4000, "str" + "[int]" * 4000, "a" + ".a" * 4000, "(" * 9000],
)
def test_a_signature_of_any_length_is_answered(own_folder: Path, types: str) -> None:
    artifact = shipped(own_folder / "a", program="dspy:Predict")
    for part in (types, types[:900]):
        with pytest.raises(AssayError):
            load_artifact(forged(artifact, config={"signature": f"q: {part} -> a"}))
