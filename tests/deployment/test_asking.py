"""Side effects of an artifact's data: modules imported for signature types, URLs in model names."""

import json
import sys
from pathlib import Path
from typing import Any

import dspy
import pytest

import assay
from assay.commands.run import run
from assay.deployment import load_artifact, save_artifact
from assay.deployment.allowed import imported_types
from assay.deployment.artifact import with_model_of
from assay.judges import PointwiseJudge
from assay.runs.loading import load_judge
from assay.sources.artifact_files import hash_of_manifest, hash_of_text
from assay.sources.trust import UntrustedArtifact, trust_file

SETTINGS: dict[str, Any] = {"adapter": None, "parameters": {}}


@pytest.fixture(autouse=True)
def trust_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("ASSAY_HOME", raising=False)


def of_predict(folder: Path, signature: str = "q -> a") -> Path:
    manifest = {"program": "dspy:Predict", "model": "openai/m", "settings": SETTINGS}
    return save_artifact(folder, dspy.Predict(signature), manifest, splits={}, report="")


def forged(artifact: Path, **changes: Any) -> Path:
    """The artifact with other values in its manifest, and hashes that fit them."""
    place = artifact / "manifest.json"
    manifest = {**json.loads(place.read_text()), **changes}
    place.write_text(json.dumps({**manifest, "sha256": hash_of_manifest(manifest)}))
    return artifact


HELPER = "import pathlib\npathlib.Path('ran').touch()\nclass helper: pass\n"


@pytest.mark.parametrize(
    "signature",
    [
        "q: helper -> a",
        "q -> a: list[helper.helper]",
        "q -> a: dict[str, Optional[helper.helper]]",
        "q -> a: int | helper",
        "q: this -> a",
    ],
)
@pytest.mark.parametrize(
    ("program", "more"), [("dspy:Predict", {}), ("dspy:ChainOfThought", {}), ("dspy:ReAct", {"tools": []})]
)
def test_signature_types_in_another_users_artifact_import_nothing(
    own_folder: Path, program: str, more: dict[str, Any], signature: str
) -> None:
    Path("helper.py").write_text(HELPER)
    artifact = forged(of_predict(own_folder / "a"), program=program, config={"signature": signature, **more})
    sys.path.insert(0, str(own_folder))
    try:
        with pytest.raises(UntrustedArtifact, match="types of its signature"):
            load_artifact(artifact)
    finally:
        sys.path.remove(str(own_folder))
    assert not Path("ran").exists()
    assert not {"helper", "this"} & sys.modules.keys()


def test_arguments_of_a_judge_import_nothing(own_folder: Path) -> None:
    member = {"program": "dspy:Predict", "config": {"signature": "q: helper -> a"}}
    artifact = forged(
        of_predict(own_folder / "j"), program="assay.judges:Jury", kind="judge", config={"members": [member]}
    )
    with pytest.raises(UntrustedArtifact, match="types of its signature"):
        load_judge(artifact)


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


MODEL = "oobabooga/http://127.0.0.1:9/"


def test_a_model_address_in_another_users_artifact_gets_no_prompt(own_folder: Path) -> None:
    artifact = forged(of_predict(own_folder / "a"), model=MODEL)
    program = assay.load(artifact)  # loads, and calls whichever model is set
    with pytest.raises(UntrustedArtifact, match=r"127\.0\.0\.1"), dspy.context(lm=None):
        program(q="1+1")
    with pytest.raises(UntrustedArtifact):
        run(artifact, {"q": "1+1"})
    with pytest.raises(UntrustedArtifact):  # the model's own address would still be called
        run(artifact, {"q": "1+1"}, api_base="http://127.0.0.1:9/v1")
    with pytest.raises(UntrustedArtifact):
        with_model_of(artifact, {"api_base": "http://127.0.0.1:9/v1"})
    assay.load(artifact, trust=True)
    assert load_artifact(artifact).model == MODEL


def test_an_address_in_a_judges_model_gets_no_prompt(own_folder: Path) -> None:
    judge = PointwiseJudge("Is it good?", model=MODEL)
    manifest = {
        "program": "assay.judges:PointwiseJudge",
        "kind": "judge",
        "model": "scripted/model",
        "settings": SETTINGS,
    }
    text = f"text: Is it good?\nmodel: {MODEL}\n"
    written = save_artifact(
        own_folder / "j", judge, manifest, splits={}, report="", rubric={"judge.yaml": text.encode()}
    )
    load_judge(written)  # one's own
    load_judge(written / "rubric" / "judge.yaml")
    trust_file().unlink()
    for source in (written, written / "rubric" / "judge.yaml"):
        with pytest.raises(UntrustedArtifact, match=r"127\.0\.0\.1"):
            load_judge(source)


@pytest.mark.parametrize(
    "field",
    [
        'list["{code}"]',
        'Optional["{code}"]',
        'dict[str, list["{code}"]]',
        'int | "{code}"',
        'Literal[list["{code}"]]',
        'Annotated[int, "{code}"]',
    ],
)
def test_a_quoted_type_in_another_users_artifact_is_not_evaluated(own_folder: Path, field: str) -> None:
    code = f"__import__('pathlib').Path({str(own_folder / 'ran')!r}).touch()"
    signature = f"q: {field.format(code=code)} -> a"
    with pytest.raises(UntrustedArtifact, match="types of its signature"):
        load_artifact(forged(of_predict(own_folder / "a"), config={"signature": signature}))
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    "more",
    [
        {"api_base": "http://127.0.0.1:9/v1"},
        {"base_url": "127.0.0.1:9"},
        {"vertex_location": "x/#"},
        {"other": "ws://x"},
    ],
)
def test_an_address_in_a_predictors_arguments_gets_no_prompt(own_folder: Path, more: dict[str, Any]) -> None:
    artifact = forged(of_predict(own_folder / "a"), config={"signature": "q -> a", **more})
    with pytest.raises(UntrustedArtifact, match="which its arguments name"):
        assay.load(artifact)
    assert load_artifact(artifact, program=dspy.Predict("q -> a")).program.config == {}


@pytest.mark.parametrize("program", ["dspy:Predict", "dspy:Flex"])
def test_an_address_or_model_in_a_state_is_ignored(own_folder: Path, program: str) -> None:
    """DSPy sets whatever a state of a predictor holds as attributes: `config` is passed on to the model's client."""
    written = of_predict(own_folder / "a")
    kind = getattr(dspy, program.partition(":")[2])
    state = {**kind("q -> a").dump_state(), "config": {"api_base": "http://127.0.0.1:9/v1"}, "lm": {"model": MODEL}}
    text = json.dumps({"kind": "program", "state": state})
    (written / "program.json").write_text(text)
    files = json.loads((written / "manifest.json").read_text())["files"]
    loaded = load_artifact(
        forged(
            written,
            program=program,
            config={"signature": "q -> a"},
            files={**files, "program.json": hash_of_text(text)},
        )
    ).program
    assert getattr(loaded, "config", {}) == {}
    assert loaded.lm is None
