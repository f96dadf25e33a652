"""Texts of an agent in its files: what is read, what a new text must keep, how files are changed."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings, strategies as st

from assay.errors import ConfigError
from assay.programs.texts import TextFiles, apply_files, patch_of, why_refused

SKILL = """---
name: refunds
description: Answers questions about refunds.
---

Answer questions about refunds politely.

Ask for the {order} first.
"""
TOOLS = """{
\t"tools": [
\t\t{"name": "search", "description": "Searches the catalogue."},
\t\t{"name": "buy", "description": "Buys a product for the user."}
\t]
}
"""
CREW = """researcher:
  role: >
    {topic} Senior Data Researcher
  goal: |
    Uncover developments.

    Be thorough.

  backstory: "You know how to find things."
"""


def written(name: str, text: str) -> str:
    """The text of the file after a change of one text in it."""
    (changed,) = TextFiles([name]).with_texts({name: text})
    return changed.after.decode()


def refusal(name: str) -> str:
    with pytest.raises(ConfigError) as refused:
        TextFiles([name])
    assert refused.value.field == "text"
    return str(refused.value)


@pytest.mark.parametrize("skill", [SKILL, SKILL.replace("---", "+++").replace(": ", " = "), f"\ufeff{SKILL}"])
def test_a_file_is_a_text_without_its_front_matter(skill: str, own_folder: Path) -> None:
    Path("SKILL.md").write_text(skill)
    (text,) = TextFiles(["SKILL.md"]).texts
    assert text.text == "Answer questions about refunds politely.\n\nAsk for the {order} first."
    assert not text.is_value
    assert written("SKILL.md", "Be brief. {order}") == skill.split("Answer q")[0] + "Be brief. {order}\n"


def test_a_section_lies_between_its_markers(own_folder: Path) -> None:
    page = "# Agent\n<!-- assay:rules -->\nAlways be polite.\n<!-- /assay:rules -->\nDo not change this.\n"
    Path("a.md").write_text(page)
    assert TextFiles(["a.md#rules"]).texts[0].text == "Always be polite."
    assert written("a.md#rules", "Be brief.") == page.replace("Always be polite.", "Be brief.")
    assert "it has the sections rules" in refusal("a.md#rule")
    Path("a.md").write_text(page.replace("<!-- /assay:rules -->", ""))
    assert "once each and in this order" in refusal("a.md#rules")


def test_a_value_of_json_is_changed_alone(own_folder: Path) -> None:
    Path("tools.json").write_text(TOOLS)
    name = "tools.json#/tools/1/description"
    (text,) = TextFiles([name]).texts
    assert (text.text, text.is_value) == ("Buys a product for the user.", True)
    new = 'Buys "one" product. ä\n\tAsk first.'
    after = written(name, new)
    assert json.loads(after)["tools"][1]["description"] == new
    assert after.splitlines()[:3] == TOOLS.splitlines()[:3]
    assert after.isascii()  # as the file was


@pytest.mark.parametrize(
    ("key", "new"),
    [
        ("goal", "Find out.\n\n  - with care: #1"),
        ("goal", "  indented first"),
        ("role", "{topic} junior"),
        ("backstory", 'You "know": it\nall'),
    ],
)
def test_a_value_of_yaml_is_changed_alone(own_folder: Path, key: str, new: str) -> None:
    Path("agents.yaml").write_text(CREW)
    before, after = yaml.safe_load(CREW), yaml.safe_load(written(f"agents.yaml#/researcher/{key}", new))
    assert after["researcher"].pop(key).strip() == new.strip()
    before["researcher"].pop(key)
    assert after == before


def test_a_block_of_yaml_stays_a_block(own_folder: Path) -> None:
    Path("agents.yaml").write_text(CREW)
    after = written("agents.yaml#/researcher/goal", "One.\n\nTwo.")
    assert after == CREW.replace("Uncover developments.\n\n    Be thorough.", "One.\n\n    Two.")


def test_a_value_with_an_alias_is_not_changed(own_folder: Path) -> None:
    Path("a.yaml").write_text("a: &x 'a long text'\nb: *x\n")
    with pytest.raises(ConfigError, match="an anchor or an alias"):
        written("a.yaml#/a", "another text")


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=("Cs", "Cc")) | st.just("\n"), min_size=1).filter(str.strip))
def test_any_text_reads_back_from_any_form(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder, text = tmp_path_factory.getbasetemp(), text.strip()
    for name, content, place in (
        ("a.json", TOOLS, "#/tools/0/description"),
        ("a.yaml", CREW, "#/researcher/goal"),
        ("b.yaml", CREW, "#/researcher/backstory"),
    ):
        path = folder / name
        path.write_text(content)
        path.write_bytes(TextFiles([f"{path}{place}"]).with_texts({f"{path}{place}": text})[0].after)
        read = (json.loads if name.endswith("json") else yaml.safe_load)(path.read_text())
        value = read["tools"][0]["description"] if "tools" in read else read["researcher"][place.rpartition("/")[2]]
        assert value.strip() == text.strip()


def test_several_texts_of_one_file_are_changed_together(own_folder: Path) -> None:
    Path("tools.json").write_text(TOOLS)
    names = [f"tools.json#/tools/{at}/description" for at in (0, 1)]
    (changed,) = TextFiles(names).with_texts({names[0]: "Finds what is sold here.", names[1]: "Buys it at once."})
    after = json.loads(changed.after)
    assert [tool["description"] for tool in after["tools"]] == ["Finds what is sold here.", "Buys it at once."]
    assert TextFiles(names).with_texts({names[0]: "Searches the catalogue."}) == []


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("none.md", "no such file"),
        ("tools.json#/tools/2/description", "has no '2': there are 0, 1"),
        ("tools.json#/tools/0/descripton", "Did you mean 'description'"),
        ("tools.json#/tools", "must be a text, and is list"),
        ("empty.md", "is empty"),
        ("short.md", "has no part of 8 characters without a placeholder"),
        ("binary.md", "cannot be read"),
        ("tools.json#a b", "must be FILE, FILE#NAME"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused(own_folder: Path, name: str, rule: str) -> None:
    Path("tools.json").write_text(TOOLS)
    Path("empty.md").write_text("---\na: b\n---\n\n")
    Path("short.md").write_text("Hi {name}, {question}")
    Path("binary.md").write_bytes(b"\xff\xfe")
    assert rule in refusal(name)


def test_texts_that_cannot_be_told_apart_are_refused(own_folder: Path) -> None:
    Path("a.md").write_text("x\n<!-- assay:one -->\nAlways be polite.\n<!-- /assay:one -->\n")
    Path("b.md").write_text("Always be polite.\n")
    for names, rule in (
        (["a.md", "a.md#one"], "is a part of a.md"),
        (["b.md", "a.md#one"], "has the same text as b.md"),
        (["b.md", "b.md"], "is given twice"),
    ):
        with pytest.raises(ConfigError, match=rule):
            TextFiles(names)


@pytest.mark.parametrize(
    ("before", "after", "rule"),
    [
        ("Answer {question} now.", "Answer now.", "placeholder: it lacks {question}"),
        ("Answer {question} now.", "Answer {question}, {name}.", "placeholder: it adds {name}"),
        ("Use {{ tone }} please, ${name}.", "${name}: use {{tone}}.", "placeholder: it lacks {{ tone }}"),
        ("{role}\nAnswer the user.", "Answer the user. {role}", "placeholder: one at the beginning"),
        ("Run:\n```\nmake\n```\nDone.", "Run:\n```\nmake all\n```\nDone.", "code: a code block differs"),
        ("Be polite.", "Be polite. <!-- /assay:rules -->", "marker: it has the marker"),
        ("Answer {question} now.", "Answer {question} as {\\n}.", "placeholder: it adds a brace"),
        ('Write {{"answer": 1}} in JSON.', "Write JSON.", "placeholder: it lacks"),
    ],
)
def test_a_new_text_keeps_placeholders_and_code(before: str, after: str, rule: str) -> None:
    assert (why_refused(before, after) or "").startswith(rule)


def test_a_new_text_may_move_its_placeholders() -> None:
    before = "Write to {name} about {topic}. Costs $5, 100 % sure.\n```\nmake\n```\nDone."
    assert why_refused(before, "About {topic}: write to {name}.\n```\nmake\n```\nReady.") is None


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize("end", ["\n", ""])
def test_the_patch_applies_with_git(own_folder: Path, end: str) -> None:
    subprocess.run(["git", "init", "-q", "."], check=True)
    Path("prompts").mkdir()
    Path("prompts/a.md").write_text("One line.\n\nAnother\x0cline." + end)
    (changed,) = TextFiles(["prompts/a.md"]).with_texts({"prompts/a.md": "A new line.\n\nAnother\x0cline.\nA third."})
    done = subprocess.run(["git", "apply"], input=patch_of([changed]), text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert Path("prompts/a.md").read_bytes() == changed.after


def test_a_file_that_changed_meanwhile_is_not_overwritten(own_folder: Path) -> None:
    for name in ("a.md", "b.md"):
        Path(name).write_text(f"The text of {name}.\n")
    files = TextFiles(["a.md", "b.md"])
    changed = files.with_texts({"a.md": "A new text.", "b.md": "Another new text."})
    Path("b.md").write_text("Edited by hand.\n")
    with pytest.raises(ConfigError, match=r"b.md changed while this ran, so nothing was written"):
        apply_files(changed)
    assert Path("a.md").read_text() == "The text of a.md.\n"


def test_without_git_the_old_file_is_kept(own_folder: Path) -> None:
    Path("a.md").write_text("The text of a.md.\n")
    Path("a.md.orig").write_text("mine")
    Path("a.md").chmod(0o640)
    (kept,) = apply_files(TextFiles(["a.md"]).with_texts({"a.md": "A new text."}))
    assert (Path("a.md").read_text(), kept.read_text()) == ("A new text.\n", "The text of a.md.\n")
    assert Path("a.md.orig").read_text() == "mine"
    assert Path("a.md").stat().st_mode & 0o777 == 0o640


def test_a_new_text_keeps_the_markers_of_a_section_inside_it() -> None:
    own = "You sell.\n<!-- assay:b -->Be polite.<!-- /assay:b -->"
    assert why_refused(own, own.replace("sell", "buy")) is None
    assert str(why_refused(own, "You buy. Be polite.")).startswith("marker: ")
    assert str(why_refused("You buy.", own)).startswith("marker: ")
