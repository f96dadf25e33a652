"""Values in another user's artifact: those that could weaken a limit or protection need trust."""

import hashlib
import json
from pathlib import Path
from typing import Any

import dspy
import pytest
from trusted_artifacts import forged, shipped, trust_list as trust_list

import assay
from assay.deployment import load_artifact, save_artifact
from assay.errors import ArtifactError, AssayError
from assay.judges import Cascade, Jury, PairwiseJudge, PointwiseJudge
from assay.programs import load_program
from assay.programs.compose import EnsembleProgram, NearestDemos
from assay.programs.loading import SHIPPED, program_class
from assay.runs.loading import load_judge
from assay.sources.artifact_files import hash_of_text
from assay.sources.trust import UntrustedArtifact, entries, trust_file

SPEC = {"text": "Is it good?", "scale": ["no", "yes"]}
MEMBER = {"program": "assay.judges:PointwiseJudge", "config": {"spec": SPEC}}
ARGUMENTS: dict[str, dict[str, Any]] = {"classify": {"labels": ["a", "b"]}, "extract": {"fields": {"city": "string"}}}


def with_state(artifact: Path, state: dict[str, Any]) -> Path:
    text = json.dumps(state)
    (artifact / "program.json").write_text(text)
    files = json.loads((artifact / "manifest.json").read_text())["files"]
    return forged(artifact, files={**files, "program.json": hash_of_text(text)})


def of_program(folder: Path, name: str, **arguments: Any) -> Path:
    program = load_program(name, config=arguments or None)
    settings = {"adapter": "json", "parameters": program.agent_parameters.model_dump()}
    return save_artifact(folder, program, {"program": name, "settings": settings}, splits={}, report="")


@pytest.mark.parametrize(
    ("program", "config"),
    [
        ("code_repair", {"isolation": "none"}),
        ("code_repair", {"isolation": "None"}),
        ("code_repair", {"isolation": "landlock"}),
        ("code_repair", {"isolation": ["none"]}),
        ("code_repair", {"timeout_s": 86_400}),
        ("code_repair", {"timeout_s": float("nan")}),
        ("code_repair", {"timeout_s": True}),
        ("code_repair", {"memory_mb": 2**40}),
        ("code_repair", {"memory_mb": "512"}),
        ("code_repair", {"parameters": {"max_steps": 50}}),
        ("code_repair", {"thinking": 2**31 - 1}),
        ("code_repair", {"policy": {"samples": 50}}),
        ("assay.programs:CodeRepair", {"isolation": "none"}),
        ("assay.shipped.programs.code_repair.program:CodeRepair", {"isolation": "none"}),
        ("math_qa", {"prompt_format": "json"}),
        ("text_to_sql", {"rows": 10**9}),
        ("text_to_sql", {"steps": 10**12}),
        ("text_to_sql", {"seconds": 1e9}),
        ("text_to_sql", {"characters": 10**9}),
        ("answer_from_documents", {"store": "postgresql://them/x"}),
        ("answer_from_documents", {"store": "/home/you/other.db"}),
        ("answer_from_documents", {"index": "../other"}),
        ("answer_from_documents", {"k": 10**9}),
        ("answer_from_documents", {"embedder": "openai/text-embedding-3-small"}),
        ("converse", {"user": "model", "user_model": "openai/m"}),
        ("converse", {"memory": "salaries"}),
        ("tool_user", {"servers": ["sh -c 'touch ran'"]}),
        ("tool_user", {"tools": ["os.system"]}),
        ("tool_user", {"parallel": 1}),
        ("dspy:Predict", {"signature": "q -> a", "n": 50}),
        ("dspy:Predict", {"signature": "q -> a", "max_tokens": 10**9}),
        ("dspy:Predict", {"signature": "q -> a", "temperature": [0, 1]}),
        ("dspy:Predict", {"signature": "q -> a", "cache": False}),
        ("dspy:Predict", {"signature": "q -> a", "extra_headers": {"x": "y"}}),
        ("dspy:Predict", {"signature": "q -> a", "config": {"n": 50}}),
        ("dspy.predict.predict:Predict", {"signature": "q -> a", "n": 50}),
        ("dspy.predict:Predict", {"signature": "q -> a", "n": 50}),
        ("dspy:ChainOfThought", {"signature": "q -> a", "n": 50}),
        ("dspy:ReAct", {"signature": "q -> a", "tools": [], "max_iters": 10**6}),
        ("dspy:CodeAct", {"signature": "q -> a", "tools": []}),
        ("dspy:ProgramOfThought", {"signature": "q -> a", "max_iters": 10**6}),
        ("dspy:RLM", {"signature": "q -> a", "max_iterations": 10**6}),
        ("dspy:Flex", {"signature": "q -> a", "max_predictor_calls": None}),
        ("math_qa", ["isolation"]),
    ],
)
def test_an_argument_outside_of_the_table_needs_trust(own_folder: Path, program: str, config: Any) -> None:
    with pytest.raises(UntrustedArtifact):
        load_artifact(shipped(own_folder / "a", program=program, config=config))
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("PointwiseJudge", {"spec": SPEC, "samples": 10_000}),
        ("PointwiseJudge", {"spec": SPEC, "model": "openai/m"}),
        ("PointwiseJudge", {"spec": {**SPEC, "use": "../other"}}),
        ("ListwiseJudge", {"spec": SPEC, "orders": 10_000}),
        ("Jury", {"members": [MEMBER] * 11}),
        ("Jury", {"members": [{"program": "assay.judges:Jury", "config": {"members": [MEMBER]}}]}),
        ("Jury", {"members": [{**MEMBER, "config": {"spec": SPEC, "samples": 10_000}}]}),
        ("Cascade", {"first": MEMBER, "second": {**MEMBER, "config": {"spec": SPEC, "model": "openai/m"}}}),
        (
            "Cascade",
            {"first": MEMBER, "second": {"program": "dspy:Predict", "config": {"signature": "q -> a", "n": 9}}},
        ),
    ],
)
def test_an_argument_of_a_judge_outside_of_the_table_needs_trust(
    own_folder: Path, kind: str, config: dict[str, Any]
) -> None:
    with pytest.raises(UntrustedArtifact):
        load_judge(shipped(own_folder / "j", program=f"assay.judges:{kind}", kind="judge", config=config))


@pytest.mark.parametrize(
    "settings",
    [
        {"adapter": "json", "parameters": {"temperature": 99}},
        {"adapter": "json", "parameters": {"max_steps": 10**6}},
        {"adapter": "json", "parameters": {"n": 50}},
        {"adapter": "json", "parameters": {"temperature": [0, 1]}},
        {"adapter": "xml://x", "parameters": {}},
        {"adapter": "json", "parameters": {}, "thinking": 2**31 - 1},
        {"adapter": "json", "parameters": {}, "api_base": "x"},
        ["json"],
    ],
)
def test_settings_out_of_range_need_trust(own_folder: Path, settings: Any) -> None:
    with pytest.raises(UntrustedArtifact):
        load_artifact(shipped(own_folder / "a", settings=settings))


@pytest.mark.parametrize(
    "change",
    [
        lambda state: {"kind": "ensemble", "members": [state] * 11},
        lambda state: {"kind": "ensemble", "members": [{"kind": "ensemble", "members": [state] * 6}] * 2},
        lambda state: {"kind": "nearest", "inner": state, "pool": [], "k": 10**6},
        lambda state: {**state, "thinking": 2**31 - 1},
        lambda state: {**state, "policy": {"samples": 50}},
        lambda state: {**state, "policy": {"stable": 2, "piece": 4}},
        lambda state: {
            **state,
            "state": {**state["state"], "decide": {**state["state"]["decide"], "callbacks": ["x"]}},
        },
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


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_program_with_its_default_arguments_needs_no_trust(own_folder: Path, name: str) -> None:
    artifact = of_program(own_folder / "a", name, **ARGUMENTS.get(name, {}))
    assert entries() == []
    assert type(load_artifact(artifact).program) is program_class(name)


@pytest.mark.parametrize(
    "judge",
    [
        PointwiseJudge("Is it good?", samples=5, reading="text"),
        PairwiseJudge(),
        Jury([PointwiseJudge("Is it good?"), PointwiseJudge("Is it right?")], how="mean"),
        Cascade(PointwiseJudge("Is it good?"), PointwiseJudge("Is it right?")),
    ],
)
def test_a_shipped_judge_needs_no_trust(own_folder: Path, judge: Any) -> None:
    name = f"{type(judge).__module__}:{type(judge).__name__}"
    manifest = {"program": name, "kind": "judge", "settings": {"adapter": None, "parameters": {}}}
    artifact = save_artifact(own_folder / "j", judge, manifest, splits={}, report="")
    assert entries() == []
    assert type(load_judge(artifact)) is type(judge)


@pytest.mark.slow
def test_composed_programs_of_an_optimizer_need_no_trust(own_folder: Path) -> None:
    demos = [{"key": "1 + 1", "demos": {"decide": []}}]
    for at, program in enumerate(
        (
            EnsembleProgram([load_program("math_qa")] * 3),
            NearestDemos(load_program("math_qa"), demos),
        )
    ):
        settings = {"adapter": "json", "parameters": {}}
        manifest = {"program": "math_qa", "settings": settings}
        artifact = save_artifact(own_folder / f"a{at}", program, manifest, splits={}, report="")
        assert type(load_artifact(artifact).program) is type(program)
    assert entries() == []


def test_the_users_own_artifact_keeps_its_values(own_folder: Path) -> None:
    artifact = of_program(own_folder / "a", "code_repair", isolation="none", timeout_s=100.0)
    assert load_artifact(artifact).program.isolation == "none"
    trust_file().unlink()
    with pytest.raises(UntrustedArtifact):
        load_artifact(artifact)
    assert assay.load(artifact, trust=True) is not None
    assert load_artifact(artifact).program.timeout_s == 100.0


@pytest.mark.parametrize(
    "entry",
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
def test_a_rubric_in_an_artifact_that_weakens_a_limit_needs_trust(own_folder: Path, entry: str) -> None:
    text = f"name: r\ncriteria:\n- {{name: right, {entry}}}\n"
    artifact = shipped(own_folder / "a")
    (artifact / "rubric").mkdir()
    (artifact / "rubric" / "rubric.yaml").write_text(text)
    forged(artifact, rubric_files={"rubric.yaml": hashlib.sha256(text.encode()).hexdigest()})
    with pytest.raises(UntrustedArtifact):
        assay.load_rubric(artifact / "rubric" / "rubric.yaml")


def test_a_rubric_in_an_artifact_within_the_limits_needs_no_trust(own_folder: Path) -> None:
    text = "name: r\ncriteria:\n- {name: right, check: tests_pass, with: {timeout_s: 5, field: code}}\n"
    artifact = shipped(own_folder / "a")
    (artifact / "rubric").mkdir()
    (artifact / "rubric" / "rubric.yaml").write_text(text)
    forged(artifact, rubric_files={"rubric.yaml": hashlib.sha256(text.encode()).hexdigest()})
    assert assay.load_rubric(artifact / "rubric" / "rubric.yaml").name == "r"


def test_a_model_file_of_another_users_artifact_is_not_read(own_folder: Path) -> None:
    artifact = shipped(own_folder / "a", model=f"embedded:{own_folder}/a/theirs.gguf")
    program = assay.load(artifact)
    with pytest.raises(UntrustedArtifact), dspy.context(lm=None):
        program(question="1 + 1")


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("text", ["[" * 10_000_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000])
@pytest.mark.parametrize("name", ["manifest.json", "program.json"])
def test_deeply_nested_json_is_refused(own_folder: Path, name: str, text: str) -> None:
    artifact = shipped(own_folder / "a")
    (artifact / name).write_text(text)
    if name == "program.json":
        forged(
            artifact, files={**json.loads((artifact / "manifest.json").read_text())["files"], name: hash_of_text(text)}
        )
    with pytest.raises(ArtifactError):
        load_artifact(artifact)


@pytest.mark.parametrize("depth", [101, 300, 600])
@pytest.mark.parametrize("key", ["config", "shown", "settings", "result", "more"])
def test_a_manifest_has_a_limit_on_depth_wherever_it_is_nested(own_folder: Path, key: str, depth: int) -> None:
    with pytest.raises(ArtifactError, match="within each other"):
        load_artifact(shipped(own_folder / "a", **{key: {"a": nested(depth)}}))


@pytest.mark.parametrize(
    "types",
    ["list[" * 5000 + "str" + "]" * 5000, "str" + "|str" * 4000, "str" + "[int]" * 4000, "a" + ".a" * 4000, "(" * 9000],
)
def test_a_signature_of_any_length_is_answered(own_folder: Path, types: str) -> None:
    for part in (types, types[:900]):
        with pytest.raises(AssayError):
            load_artifact(shipped(own_folder / "a", program="dspy:Predict", config={"signature": f"q: {part} -> a"}))
