"""Programs, checks and judges in the user's files: helper modules, artifacts on other machines, state after loading."""

import asyncio
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dspy
import pytest

import assay
from assay.datasets import make_task
from assay.errors import ArtifactError, ConfigError, ProgramError
from assay.evaluation import SilentProgress
from assay.programs import load_program
from assay.sources.modules import load_source
from assay.testing import scripted_lm
from assay.testing.serving import served
from assay.testing.upstream import ScriptedUpstream

PROGRAM = """
import dspy
from helper import PREFIX
from parts import deep

class QA(dspy.Module):
    def __init__(self, k: int = 1):
        super().__init__()
        self.k = k
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        import late
        said = self.answer(question=question)
        return dspy.Prediction(answer=f"{PREFIX}{late.mark()}{deep.mark()}{self.k} {said.answer}")
"""


PLAIN = """
import dspy

class QA(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        return self.answer(question=question)
"""


def write_program(folder: Path, prefix: str = "A") -> str:
    """A program with a helper beside it, one in a package, and one that is only imported when it runs."""
    (folder / "parts").mkdir(parents=True)
    (folder / "agent.py").write_text(PROGRAM)
    (folder / "helper.py").write_text(f"PREFIX = '{prefix}'\n")
    (folder / "late.py").write_text("from helper import PREFIX\ndef mark(): return 'late' + PREFIX\n")
    (folder / "parts" / "__init__.py").write_text("")
    (folder / "parts" / "deep.py").write_text("from . import deeper\ndef mark(): return deeper.MARK\n")
    (folder / "parts" / "deeper.py").write_text("MARK = '-deep-'\n")
    return f"{folder / 'agent.py'}:QA"


def answer(request: Any) -> str:
    if request.config.response_format is None:
        return "[[ ## answer ## ]]\n4\n\n[[ ## completed ## ]]"
    return json.dumps(dict.fromkeys(request.config.response_format["schema"]["properties"], "4"))


def rows(folder: Path, count: int = 8) -> str:
    path = folder / "rows.jsonl"
    splits = ("train", "val", "gate", "test")
    path.write_text(
        "\n".join(
            json.dumps({"question": f"What is {i} + 0?", "answer": "4", "split": splits[i % 4]}) for i in range(count)
        )
    )
    return str(path)


RUBRIC = "name: r\ncriteria:\n  - name: right\n    check: contains\n"


def compiled(program: Any, folder: Path, **options: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rubric = folder / "r.yaml"
    rubric.write_text(RUBRIC.replace("contains", "check.py:right"))
    (folder / "check.py").write_text(
        "def right(task, prediction, rollout):\n    return 1.0 if prediction['answer'] else 0.0\n"
    )
    options = {"lm": scripted_lm(answer), "optimizer": "labeled", "store": folder / "s" / "a.db", **options}
    report = assay.compile(program, rubric=rubric, data=rows(folder), out=folder / "artifact", **options)
    return report.artifact


def test_helper_modules_are_imported_and_isolated_between_programs(tmp_path: Path) -> None:
    before = list(sys.path)
    first, second = (load_program(write_program(tmp_path / name, name)) for name in ("one", "two"))
    with dspy.context(lm=scripted_lm(answer)):
        assert [p(question="?").answer for p in (first, second, first)] == [
            "onelateone-deep-1 4",
            "twolatetwo-deep-1 4",
            "onelateone-deep-1 4",
        ]
    assert sys.path == before
    assert "helper" not in sys.modules


def test_a_changed_helper_is_reloaded(tmp_path: Path) -> None:
    name = write_program(tmp_path / "p")
    load_program(name)
    (tmp_path / "p" / "helper.py").write_text("PREFIX = 'changed'\n")
    with dspy.context(lm=scripted_lm(answer)):
        assert load_program(name)(question="?").answer.startswith("changed")


def test_checks_and_judges_import_from_their_folder_the_working_directory_and_the_programs(
    tmp_path: Path, monkeypatch: Any
) -> None:
    load_program(write_program(tmp_path / "programs"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "work" / "shared.py").write_text("HERE = 1.0\n")
    (tmp_path / "rubrics").mkdir()
    (tmp_path / "rubrics" / "beside.py").write_text("RIGHT = '4'\n")
    (tmp_path / "rubrics" / "check.py").write_text(
        "import beside, shared\nfrom helper import PREFIX\ndef right(task, prediction, rollout):\n"
        "    return shared.HERE * (prediction['answer'] == PREFIX + beside.RIGHT)\n"
    )
    (tmp_path / "rubrics" / "r.yaml").write_text(
        RUBRIC.replace("contains", "check.py:right").replace("right\n    check", "one\n    check")
    )
    rubric = assay.load_rubric(tmp_path / "rubrics" / "r.yaml")
    task = make_task({"question": "?", "answer": "4"})
    assert rubric.score(task, dspy.Prediction(answer="A4")).value == 1.0
    (tmp_path / "rubrics" / "judging.py").write_text(
        "from shared import HERE\nfrom assay.judges import PointwiseJudge\nmood = PointwiseJudge('Is it kind?')\n"
    )
    assert assay.load_judge(f"{tmp_path}/rubrics/judging.py:mood").labels == ("no", "yes")


def test_modules_of_the_working_directory_are_importable_by_name(tmp_path: Path, monkeypatch: Any) -> None:
    write_program(tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    assert str(tmp_path / "work") not in sys.path
    assert load_program("agent:QA").k == 1
    (tmp_path / "work" / "checks_here.py").write_text("def right(task, prediction, rollout): return 1.0\n")
    (tmp_path / "r.yaml").write_text(RUBRIC.replace("contains", "checks_here:right"))
    assert assay.load_rubric(tmp_path / "r.yaml").criteria[0].check is not None


DYNAMIC = """
import importlib
from importlib import import_module, resources

import dspy

class QA(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        plugin, deep = importlib.import_module("plugin"), import_module(name="parts.deep")
        marks = [plugin.MARK, deep.MARK, __import__("third").MARK]
        marks.append(importlib.import_module(".near", package=parts_name()).MARK)
        return dspy.Prediction(answer=" ".join([*marks, self.answer(question=question).answer]))

def parts_name():
    import parts
    return parts.__name__
"""


def write_dynamic(folder: Path, mark: str) -> str:
    (folder / "parts").mkdir(parents=True)
    (folder / "agent.py").write_text(DYNAMIC)
    (folder / "parts" / "__init__.py").write_text("")
    for name in ("plugin", "third", "parts/deep"):
        (folder / f"{name}.py").write_text(f"MARK = '{mark}'\n")
    (folder / "parts" / "near.py").write_text("MARK = 'near'\n")
    (folder / "parts" / "deep.py").write_text(
        f"from importlib import import_module\nMARK = import_module('.near', __package__).MARK + '{mark}'\n"
    )
    return f"{folder / 'agent.py'}:QA"


def test_modules_imported_by_name_in_a_string_are_isolated_between_programs(tmp_path: Path) -> None:
    first, second = (load_program(write_dynamic(tmp_path / name, name)) for name in ("one", "two"))
    with dspy.context(lm=scripted_lm(answer)):
        assert [p(question="?").answer for p in (first, second, first)] == [
            f"{m} near{m} {m} near 4" for m in ("one", "two", "one")
        ]
    assert not {"plugin", "third", "parts"} & sys.modules.keys()


@pytest.mark.slow
def test_modules_imported_by_name_in_a_string_are_in_the_artifact(tmp_path: Path) -> None:
    artifact = compiled(write_dynamic(tmp_path / "p", "one"), tmp_path / "out")
    present = {path.name for path in (artifact / "source").rglob("*.py")}
    assert present == {"agent.py", "__init__.py", "plugin.py", "third.py", "deep.py", "near.py"}
    shutil.rmtree(tmp_path / "p")
    text = in_another_place(
        artifact,
        tmp_path / "elsewhere",
        "dspy.configure(lm=dspy.utils.DummyLM([{'answer': '4'}]))\nprint(loaded(question='?').answer)",
    )
    assert text.strip().endswith("one nearone one near 4")


def test_a_file_named_like_an_installed_module_does_not_shadow_it(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text(
        "import json, dspy\nassert json.loads('1') == 1\nqa = dspy.ChainOfThought('question -> answer')\n"
    )
    assert load_program(f"{tmp_path}/json.py:qa").predictors()
    assert json.__name__ == sys.modules["json"].__name__ == "json"


def test_a_missing_data_file_is_not_reported_as_a_missing_program(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("import dspy\ntext = open('prompt.txt').read()\n")
    with pytest.raises(ProgramError, match=r"cannot be imported: FileNotFoundError: .*prompt.txt.*p\.py:2"):
        load_program(f"{tmp_path}/p.py:QA")
    with pytest.raises(ProgramError, match=r"no such file: .*q\.py"):
        load_program(f"{tmp_path}/q.py:QA")


def test_loading_state_does_not_change_a_module_level_program(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("import dspy\nqa = dspy.ChainOfThought('question -> answer')\n")
    program = load_program(f"{tmp_path}/p.py:qa")
    program.predictors()[0].demos = [dspy.Example(question="?", answer="!")]
    assert load_source(tmp_path / "p.py").qa.predictors()[0].demos == []


def in_another_place(artifact: Path, elsewhere: Path, code: str, *, server: str = "") -> str:
    """What a fresh Python prints that knows the artifact's copy alone."""
    elsewhere.mkdir(parents=True)
    shutil.copytree(artifact, elsewhere / "a")
    script = f"import json, dspy, assay\nloaded = assay.load('a')\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=elsewhere, capture_output=True, text=True, env=_environment(server)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def _environment(server: str) -> dict[str, str]:
    return {**os.environ, "OPENAI_API_KEY": "none", **({"OPENAI_API_BASE": server} if server else {})}


@pytest.mark.slow
def test_an_artifact_runs_from_another_folder_after_its_program_is_deleted(tmp_path: Path) -> None:
    artifact = compiled(write_program(tmp_path / "p"), tmp_path / "job")
    manifest = json.loads((artifact / "manifest.json").read_text())
    assert sorted(manifest["source"]["files"]) == [
        "agent.py",
        "helper.py",
        "late.py",
        "parts/__init__.py",
        "parts/deep.py",
        "parts/deeper.py",
    ]
    shutil.rmtree(tmp_path / "p")
    code = (
        "from assay.testing import scripted_lm\n"
        "with dspy.context(lm=scripted_lm(lambda r: '[[ ## answer ## ]]\\n4\\n\\n[[ ## completed ## ]]'), "
        "adapter=dspy.ChatAdapter()):\n    print(loaded(question='?').answer)"
    )
    assert in_another_place(artifact, tmp_path / "far", code) == "AlateA-deep-1 4"
    repeated = compiled(
        str(tmp_path / "far" / "a"), tmp_path / "again"
    )  # and what is compiled from it carries the source on
    shutil.rmtree(tmp_path / "far")
    assert in_another_place(repeated, tmp_path / "farther", code) == "AlateA-deep-1 4"


@pytest.mark.parametrize("wrong", ["changed", "added", "missing"])
def test_changed_source_is_refused_before_it_runs(tmp_path: Path, wrong: str) -> None:
    artifact = compiled(write_program(tmp_path / "p"), tmp_path / "job")
    helper = artifact / "source" / "helper.py"
    if wrong == "missing":
        helper.unlink()
    else:
        target = helper if wrong == "changed" else artifact / "source" / "random.py"
        target.write_text("raise SystemExit('ran')\n")
    with pytest.raises(ArtifactError, match=r"source/(helper|random)\.py"):
        assay.load(artifact)


def test_listed_extra_files_are_in_the_artifact(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    source = (
        "import dspy\nfrom pathlib import Path\nARTIFACT_FILES = ['words.txt']\n"
        "WORD = (Path(__file__).parent / 'words.txt').read_text()\n"
    )
    source += (
        "class QA(dspy.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.answer = dspy.Predict('question -> answer')\n"
    )
    source += (
        "    def forward(self, question):\n"
        "        return dspy.Prediction(answer=WORD + self.answer(question=question).answer)\n"
    )
    (tmp_path / "p" / "p.py").write_text(source)
    (tmp_path / "p" / "words.txt").write_text("word ")
    artifact = compiled(f"{tmp_path}/p/p.py:QA", tmp_path / "job")
    shutil.rmtree(tmp_path / "p")
    with dspy.context(lm=scripted_lm(answer)):
        assert assay.load(artifact)(question="?").answer == "word 4"


def test_instances_are_rebuilt_with_their_arguments(tmp_path: Path) -> None:
    kind = load_source(write_program(tmp_path / "p").removesuffix(":QA")).QA
    signature = "question: str, hints: list[str] -> answer: Literal['a', 'b'], sure: bool"
    artifacts = [
        compiled(program, tmp_path / f"job{i}")
        for i, program in enumerate([kind(k=3), dspy.ChainOfThought("question -> answer")])
    ]
    assert assay.load(artifacts[0]).program.k == 3
    with dspy.context(lm=scripted_lm(answer)):
        assert assay.load(artifacts[1])(question="?").answer == "4"
    from assay.programs.constructor import constructor_config

    built = dspy.Predict(**constructor_config(dspy.Predict(signature)))
    assert built.signature.equals(dspy.Signature(signature))


@pytest.mark.slow
def test_the_class_of_a_script_is_stored_without_rerunning_the_script(tmp_path: Path) -> None:
    script = PROGRAM.replace("class QA", "SCALE = 2\n\ndef twice(x):\n    return x * SCALE\n\nclass QA").replace(
        "{self.k}", "{twice(self.k)}"
    )
    write_program(tmp_path / "p")
    (tmp_path / "p" / "main.py").write_text(
        script + "\nimport sys, json, assay\nfrom assay.testing import scripted_lm\n"
        "lm = scripted_lm(lambda r: json.dumps(dict.fromkeys(r.config.response_format['schema']['properties'], '4')) "
        "if r.config.response_format"
        " else '[[ ## answer ## ]]\\n4\\n\\n[[ ## completed ## ]]')\n"
        f"report = assay.compile(QA(k=5), rubric='classify', data={rows(tmp_path)!r}, rename={{'answer': 'label'}}, "
        "lm=lm, optimizer='labeled', out='a')\n"
    )
    done = subprocess.run([sys.executable, "main.py"], cwd=tmp_path / "p", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    shutil.move(tmp_path / "p" / "a", tmp_path / "a")
    shutil.rmtree(tmp_path / "p")
    assert "assay.compile" not in (tmp_path / "a" / "source" / "main.py").read_text()
    with dspy.context(lm=scripted_lm(answer)):
        assert assay.load(tmp_path / "a")(question="?").answer == "AlateA-deep-10 4"


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
    """Says what the last demonstration says; without one, nothing that is right."""
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
        out=folder / "artifact", store=folder / "s" / "a.db",
    )  # fmt: skip
    loaded = assay.load(report.artifact)
    assert (report.outcome.winner, type(loaded.program).__name__) == ("knn", "NearestDemos")
    return loaded


async def streamed(program: Any, question: str, **options: Any) -> tuple[str, Any]:
    """What the listener of `answer` heard, and the prediction."""
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


def test_concurrent_calls_stream_with_their_own_demonstrations(tmp_path: Path) -> None:
    loaded, together = nearest_winner(tmp_path), threading.Barrier(len(FRUITS))

    def at_once(request: Any) -> str:
        together.wait(20)
        return demonstrated(request)

    async def all_of_them() -> list[tuple[str, Any]]:
        return await asyncio.gather(*(streamed(loaded, f"{fruit} again") for fruit in FRUITS))

    with dspy.context(lm=scripted_lm(at_once)):
        result = asyncio.run(all_of_them())
    assert [(heard, prediction.answer) for heard, prediction in result] == [
        (" ".join([fruit.upper()] * 12),) * 2 for fruit in FRUITS
    ]


def test_an_async_program_is_awaited_and_a_predictors_own_model_is_kept(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text(
        "import dspy\nclass QA(dspy.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.answer = dspy.Predict('question -> answer')\n"
        "        self.other = dspy.Predict('question -> answer')\n"
        "        self.other.lm = dspy.LM('openai/of-its-own', api_key='x')\n"
        "    def forward(self, question):\n        return self.answer(question=question)\n"
        "    async def aforward(self, question):\n        said = await self.answer.acall(question=question)\n"
        "        return dspy.Prediction(answer='async ' + said.answer)\n"
    )
    loaded = assay.load(compiled(f"{tmp_path}/p.py:QA", tmp_path / "job"))
    with dspy.context(lm=scripted_lm(answer)):
        assert asyncio.run(loaded.acall(question="?")).answer == "async 4"
    assert loaded.program.other.lm.model == "openai/of-its-own"


def test_a_program_compared_with_an_artifact_uses_the_artifacts_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a model, both sides run with the artifact's, and the report names it."""
    folder = compiled(write_program(tmp_path / "p"), tmp_path / "c")
    requests: list[Any] = []

    def evaluated(program: Any, **options: Any) -> Any:
        requests.append((program, options.get("model")))
        return SimpleNamespace(evaluation=SimpleNamespace(scores={"t": 1.0}))

    monkeypatch.setattr("assay.api.compare.evaluate", evaluated)
    measured = json.loads((folder / "manifest.json").read_text())["model"]
    report = assay.compare("p.py:P", str(folder), rubric="r.yaml", data="d.jsonl")
    assert requests == [("p.py:P", measured), (str(folder), measured)]
    assert report.models == (measured, measured)


def test_names_in_place_of_objects_are_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match="a name goes into model=NAME"):
        assay.evaluate(lambda question: question, rubric="math_qa", data=[{"question": "1"}], lm="openai/m")
    with pytest.raises(ConfigError, match="rubric=None must be a Rubric"):
        assay.evaluate(
            lambda question: question, rubric=None, data=[{"question": "1", "split": "val"}], lm=scripted_lm(answer)
        )  # type: ignore[arg-type]


READER = """
import json
from pathlib import Path

import dspy

HERE = Path(__file__).parent
PROMPT = (HERE / "prompt.txt").read_text()

class QA(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict(dspy.Signature("question -> answer", PROMPT))

    def forward(self, question):
        suffix = json.loads((HERE / "conf" / "suffix.json").read_text())
        for name in (".env", "api_secret.txt", "rows.db", "rows.jsonl"):
            if (HERE / name).exists():
                (HERE / name).read_bytes()
        (HERE.parent / "above.txt").read_text() if (HERE.parent / "above.txt").exists() else ""
        return dspy.Prediction(answer=self.answer(question=question).answer + suffix)
"""


def write_reader(folder: Path) -> str:
    (folder / "conf").mkdir(parents=True)
    (folder / "agent.py").write_text(READER)
    (folder / "prompt.txt").write_text("Add up.")
    (folder / "conf" / "suffix.json").write_text('"!"')
    (folder / "other.txt").write_text("nobody reads it")
    return f"{folder / 'agent.py'}:QA"


@pytest.mark.slow
def test_files_that_the_program_reads_are_in_its_artifact(tmp_path: Path) -> None:
    artifact = compiled(write_reader(tmp_path / "p"), tmp_path / "job")
    assert sorted(json.loads((artifact / "manifest.json").read_text())["source"]["files"]) == [
        "agent.py",
        "conf/suffix.json",
        "prompt.txt",
    ]
    shutil.rmtree(tmp_path / "p")
    code = (
        "dspy.configure(lm=dspy.utils.DummyLM([{'answer': '4'}]))\n"
        "print(loaded(question='?').answer, loaded.predictors()[0].signature.instructions)"
    )
    assert in_another_place(artifact, tmp_path / "far", code) == "4! Add up."
    repeated = compiled(str(tmp_path / "far" / "a"), tmp_path / "again")
    shutil.rmtree(tmp_path / "far")
    assert in_another_place(repeated, tmp_path / "farther", code) == "4! Add up."


def test_secrets_databases_data_and_outside_files_are_reported_and_not_copied(tmp_path: Path) -> None:
    name = write_reader(tmp_path / "p")
    for secret in (".env", "api_secret.txt", "rows.db"):
        (tmp_path / "p" / secret).write_text("KEY=1")
    (tmp_path / "above.txt").write_text("outside")
    rubric = tmp_path / "r.yaml"
    rubric.write_text(RUBRIC)
    report = assay.compile(
        name,
        rubric=rubric,
        data=rows(tmp_path / "p"),
        out=tmp_path / "artifact",
        lm=scripted_lm(answer),
        optimizer="labeled",
    )
    assert sorted(json.loads((report.artifact / "manifest.json").read_text())["source"]["files"]) == [
        "agent.py",
        "conf/suffix.json",
        "prompt.txt",
    ]
    for file in (".env", "api_secret.txt", "rows.db", "rows.jsonl"):
        assert any(f"reads {file}, which its artifact does not contain" in note for note in report.to_dict()["notes"])
    assert "api_secret.txt" in (report.artifact / "report.md").read_text()


HIDDEN = """
import sqlite3
from importlib import import_module
from pathlib import Path

import dspy

class QA(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        name = "plug"
        mark = import_module(f"{name}in").MARK
        with sqlite3.connect(Path(__file__).parent / "prices.db") as store:
            store.execute("select * from prices").fetchall()
        return dspy.Prediction(answer=mark + self.answer(question=question).answer)
"""


def test_files_missing_from_the_artifact_are_reported_before_the_first_call(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "agent.py").write_text(HIDDEN)
    (tmp_path / "p" / "plugin.py").write_text("import helper\nMARK = '-'\n")
    (tmp_path / "p" / "helper.py").write_text("")
    with sqlite3.connect(tmp_path / "p" / "prices.db") as store:
        store.execute("create table prices (price)")
    (tmp_path / "r.yaml").write_text(RUBRIC)
    messages: list[tuple[str, int]] = []

    class CapturedProgress(SilentProgress):
        def say(self, text: str) -> None:
            messages.append((text, lm.scripted.calls))

    lm = scripted_lm(answer)
    report = assay.compile(
        f"{tmp_path / 'p' / 'agent.py'}:QA", rubric=tmp_path / "r.yaml", data=rows(tmp_path), out=tmp_path / "artifact",
        lm=lm, optimizer="labeled",
        progress=CapturedProgress(),
    )  # fmt: skip
    assert [note for note in report.to_dict()["notes"] if "no such table: prices" in note and "ARTIFACT_FILES" in note]
    assert [calls for text, calls in messages if "no such table" in text] == [1]  # that of the preflight
    assert {path.name for path in (report.artifact / "source").rglob("*")} == {"agent.py", "plugin.py", "helper.py"}


def test_an_artifact_contains_the_rubrics_checks_and_judges_with_hashes(tmp_path: Path) -> None:
    artifact = compiled(write_program(tmp_path / "p"), tmp_path / "job")
    files = json.loads((artifact / "manifest.json").read_text())["rubric_files"]
    assert sorted(files) == ["code/0/check.py", "rubric.yaml"]
    shutil.rmtree(tmp_path / "p")
    (tmp_path / "job" / "check.py").unlink()
    rubric = assay.load_rubric(artifact / "rubric" / "rubric.yaml")
    assert rubric.score(make_task({"question": "?", "answer": "4"}), dspy.Prediction(answer="4")).value == 1.0
    (artifact / "rubric" / "code" / "0" / "check.py").write_text(
        "def right(task, prediction, rollout):\n    return 1.0\n"
    )
    with pytest.raises(ArtifactError, match=r"rubric/code/0/check.py was changed"):
        assay.load(artifact)
