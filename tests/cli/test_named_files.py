"""A file or folder that a command names and that cannot be used is wrong usage: exit code 2, before anything is run."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from assay.api.judge.label import to_label
from assay.api.rollouts import list_rollouts, rollouts_to_rate
from assay.cli.main import command_of
from assay.cli.wording import message_of
from assay.errors import AssayError, DataError
from assay.support.places import check_writable
from assay.traces import Rollout, Store

JOB = ["math_qa", "--rubric", "math_qa", "--data", "arithmetic:size=60"]
ITEM = '{"task_input": "2", "output": "2"}\n'


def refused(*arguments: str) -> tuple[int, str]:
    with pytest.raises(AssayError) as caught:
        CliRunner().invoke(command_of([]), arguments, standalone_mode=False, catch_exceptions=False)
    return caught.value.exit_code, message_of(caught.value, command_of(list(arguments)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["tune", *JOB, "--also", "nosuch"],
            "--also nosuch is not an artifact to try as well: there is no such folder",
        ),
        (["evaluate", *JOB, "--model", "embedded:nosuch.gguf"], "no such model file: nosuch.gguf"),
        (["judge", "card", "nosuch"], "nosuch has no card"),
        (["trust", "add", "nosuch"], "nosuch is no artifact"),
        (["judge", "score", "Is it 2?", "--data", "items.jsonl", "--out", "file/x"], "--out file/x cannot be written"),
        (
            ["judge", "drift", "Is it 2?", "--freeze", "items.jsonl", "--anchors", "file/x"],
            "--anchors file/x cannot be written",
        ),
        (["run", "math_qa", "--file", "items.jsonl", "--out", "file/x"], "--out file/x cannot be written"),
        (["loop", "install", "a", "--out", "file"], "cannot be written"),
        (["compile", *JOB, "--out", "file/x"], "cannot write the artifact to"),
        (["run", "math_qa", "--file", "items.jsonl", "--out", "./items.jsonl"], "--out ./items.jsonl is read, so"),
        (["judge", "score", "Is it 2?", "--data", "items.jsonl", "--out", "items.jsonl"], "is read, so"),
        (["evaluate", *JOB, "--model", "embedded/smollm"], "Did you mean 'smollm2-135m'?"),
        (["traces", "stats", "--store", "items.jsonl"], "--store items.jsonl is no SQLite database. Name another file"),
        (["index", ".", "--store", "folder"], "--store folder is a folder. Name another file"),
        (["traces", "import", "otlp", "folder"], "folder is a folder: name one file to import"),
        (["train", "sft", "folder", "--name", "a"], "manifest.json cannot be read as the manifest of an export"),
        pytest.param(
            ["index", ".", "--embedder", "nothing"],
            "--embedder nothing names no provider: write openai/nothing",
            marks=pytest.mark.slow,  # loads litellm
        ),
    ],
)
def test_a_named_file_that_cannot_be_used_is_wrong_usage(arguments: list[str], message: str, own_folder: Path) -> None:
    (own_folder / "items.jsonl").write_text(ITEM)
    (own_folder / "file").write_text("")
    (own_folder / "folder").mkdir()
    (own_folder / "folder" / "manifest.json").write_text("{}")
    code, text = refused(*arguments)
    assert message in text
    assert code == 2
    assert (own_folder / "items.jsonl").read_text() == ITEM


def test_a_report_does_not_replace_a_file_of_another_kind(own_folder: Path) -> None:
    (own_folder / "items.jsonl").write_text(ITEM)
    done = CliRunner().invoke(command_of([]), ["evaluate", *JOB, "--report", "items.jsonl"])
    assert done.exit_code == 2
    assert "items.jsonl exists and is not overwritten, because its name does not end in .html" in done.output


def test_a_run_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with Store(tmp_path / "a.db") as store:
        store.put_rollout(Rollout(run_id="abcd"))
        store.flush()
        assert list_rollouts(store, run_id="abcd")
        for call in (list_rollouts, rollouts_to_rate):
            with pytest.raises(DataError, match="there is no run 'gone'; `assay runs list` shows the runs"):
                call(store, run_id="gone")
        with pytest.raises(DataError, match="there is no run 'gone'"):
            to_label("Is it 2?", store, run_id="gone")


def test_a_file_that_can_be_written_is_left_as_it_is(own_folder: Path) -> None:
    (own_folder / "there").write_text("text")
    check_writable(own_folder / "there", "out")
    check_writable(own_folder / "new" / "file", "out")
    assert (own_folder / "there").read_text() == "text"
    assert list((own_folder / "new").iterdir()) == []
