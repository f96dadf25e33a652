"""Export rows rendered by the model's chat template: no answer is dropped, and the loss covers the recorded answers."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import export_rows
import pytest
from export_rows import ADD, add_rollout, store as store, tool_call, tool_turn, turn

from assay.errors import DataError, ModelError
from assay.models.chat_templates import ChatTemplate, TemplateRefused, find_template
from assay.traces import Store, Transition
from assay.traces.export.rendering import shows_tools, training_template
from assay.traces.export.settings import Gates, UngatedExport

exported = partial(export_rows.exported, privacy="off")
# ChatML that renders tools, as small models with tools have it
NATIVE = ChatTemplate(
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>{% endfor "
    "%}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "test",
)


def agent(question: str, prefix: str = "c", **arguments: Any) -> list[Transition]:
    """A call of a tool, its result, and the answer."""
    prompt = [{"role": "system", "content": "You add."}, {"role": "user", "content": question}]
    call = tool_call("add", arguments or {"a": 1, "b": 2}, f"{prefix}0")
    result = {"role": "tool", "tool_call_id": f"{prefix}0", "content": "3"}
    answer = {"role": "assistant", "content": "It is 3."}
    return [tool_turn(0, prompt, call), tool_turn(1, [*prompt, call, result], answer)]


def smollm2() -> ChatTemplate:
    template = find_template("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert template is not None
    return template


def learned(row: dict[str, Any], template: ChatTemplate) -> str:
    """The text of a row that is trained on: the text after its prompt."""
    tools = json.loads(row["tools"]) or ()
    prompt = template.render(row["prompt"], tools=tools, generate=True)
    return template.render([*row["prompt"], *row["completion"]], tools=tools).removeprefix(prompt)


def folder_of(template: ChatTemplate, path: Path) -> Path:
    path.mkdir()
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template.text, "eos_token": "<|im_end|>"}))
    return path


# -- sft


def test_no_row_of_any_api_is_trained_on_an_empty_answer(store: Store) -> None:
    bodies = {
        "chat": (
            {"messages": [{"role": "user", "content": "1 + 2?"}], "tools": [ADD]},
            {"choices": [{"message": tool_call("add", {"a": 1})}]},
        ),
        "responses": (
            {"input": "1 + 2?", "tools": [{"type": "function", **ADD["function"]}]},
            {"output": [{"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'}]},
        ),
        "messages": (
            {"messages": [{"role": "user", "content": "1 + 2?"}], "tools": [{"name": "add", "input_schema": {}}]},
            {"content": [{"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}]},
        ),
    }
    for dialect, (body, answer) in bodies.items():
        request = {"dialect": dialect, "body": body}
        add_rollout(store, Transition(t=0, model="m", request=request, response={"body": answer}), task=dialect)
    rows, manifest = exported(store, "sft")
    assert len(rows) == 3
    assert all('"name": "add"' in learned(row, smollm2()) for row in rows)
    assert manifest["template"]["converted"] == 3


def test_a_call_whose_answer_is_not_rendered_is_refused_and_fails_the_gate(store: Store) -> None:
    add_rollout(store, *agent("1 + 2?"))
    rows, manifest = exported(store, "sft", tools="native")
    assert ([row["t"] for row in rows], manifest["problems"]) == ([1], {"template": 1})
    assert manifest["template"]["reasons"] == {"the chat template leaves out tool calls": 1}
    (gate,) = (gate for gate in manifest["gates"] if gate["gate"] == "template")
    assert gate["warning"] == "left out 1: the chat template leaves out tool calls"
    with pytest.raises(UngatedExport, match=r"clean is 0\.5, required is 0\.95: 1 template"):
        exported(store, "sft", "strict", tools="native", gates=Gates())


def test_calls_that_the_template_refuses_are_left_out_with_the_reason(store: Store, tmp_path: Path) -> None:
    strict = ChatTemplate(
        NATIVE.text + "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}", "test"
    )
    add_rollout(store, *agent("1 + 2?"))
    reason = "2 calls with a problem: template; 2 calls: the chat template refuses the messages: no system role"
    with pytest.raises(DataError, match=reason):
        exported(store, "sft", "none", model=str(folder_of(strict, tmp_path / "model")))
    add_rollout(store, turn(0, "hi", "hello"), task="t2")
    rows, manifest = exported(store, "sft", model=str(tmp_path / "model"))
    assert [row["task"] for row in rows] == ["t2"]
    assert manifest["template"]["reasons"] == {"the chat template refuses the messages: no system role": 2}


# -- other kinds


def test_grpo_rows_have_the_tools_and_show_them_in_the_prompt(store: Store) -> None:
    add_rollout(store, *agent("1 + 2?"), inputs={"question": "1 + 2?", "tools": "mine"})
    (row,), _ = exported(store, "grpo", rubric="math_qa")
    assert json.loads(row["tools"]) == [ADD]
    assert json.dumps(ADD) in row["prompt"][0]["content"]  # trl's GRPO trainer does not render the column
    assert row["tools_"] == "mine"


def test_whole_conversations_are_refused_where_trl_cannot_find_the_assistants_text(
    store: Store, tmp_path: Path
) -> None:
    add_rollout(store, *agent("1 + 2?"))
    rewrites = ChatTemplate(  # earlier turns, once others follow
        "{% for m in messages %}{{ m.role }}{% if not loop.last %}!{% endif %}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        "test",
    )
    for at, template in enumerate((NATIVE, rewrites)):
        with pytest.raises(UngatedExport):
            exported(store, "sft", f"out{at}", model=str(folder_of(template, tmp_path / f"m{at}")), whole=True)
        assert not Path(f"out{at}").exists()
    marks = NATIVE.text.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    model = str(folder_of(ChatTemplate(marks, "test"), tmp_path / "marked"))
    assert len(exported(store, "sft", "marked-rows", model=model, whole=True)[0]) == 1


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_whole_conversations_are_exported_for_templates_that_trl_knows(store: Store, tmp_path: Path, name: str) -> None:
    trl = pytest.importorskip("trl")
    text = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    add_rollout(store, *agent("1 + 2?"))
    model = str(folder_of(ChatTemplate(text, name), tmp_path / "model"))
    assert len(exported(store, "sft", model=model, whole=True)[0]) == 1


SPELLED = '{"b":2,"a":1e0}'


def spelled_agent() -> list[Transition]:
    turns = agent("1 + 2?")
    call = turns[0].response["body"]["choices"][0]["message"]["tool_calls"][0]  # type: ignore[index]
    call["function"]["arguments"] = SPELLED
    turns[1].request["body"]["messages"][2]["tool_calls"][0]["function"]["arguments"] = SPELLED
    return turns


@pytest.mark.parametrize("tools", ["auto", "text"])
def test_tool_calls_keep_the_spelling_of_the_model(store: Store, tmp_path: Path, tools: str) -> None:
    add_rollout(store, *spelled_agent())
    (first, second), _ = exported(store, "sft", tools=tools)
    call = f'<tool_call>\n{{"name": "add", "arguments": {SPELLED}}}\n</tool_call>'
    assert first["completion"][0]["content"] == second["prompt"][2]["content"] == call


def test_one_answer_never_has_both_labels(store: Store) -> None:
    for score in (1.0, 0.0, 1.0):
        add_rollout(store, *agent("1 + 2?", prefix=f"c{score}"), score=score)  # the ids of the calls differ
    add_rollout(store, *agent("1 + 2?", a=9, b=9), score=0.0)
    add_rollout(store, *agent("1 + 2?", a=9, b=9), score=0.0, group_id="another")
    add_rollout(store, *agent("1 + 2?", a=9, b=9), score=1.0, group_id="last")
    add_rollout(store, *agent("1 + 2?", a=7, b=7), score=1.0, group_id="last")
    rows, manifest = exported(store, "preferences", unpaired=True)
    labels: dict[str, set[bool]] = {}
    for row in rows:
        labels.setdefault(json.dumps([row["prompt"], row["completion"]]), set()).add(row["label"])
    assert labels
    assert all(len(found) == 1 for found in labels.values())
    assert sum(manifest["left_out"].values()) == 14 - len(rows)


# -- templates


def test_the_template_of_an_embedded_model_is_that_of_its_file(tmp_path: Path) -> None:
    assert smollm2().text == find_template("embedded/smollm2-135m+warm").text  # type: ignore[union-attr]
    assert find_template("nobody/unknown") is None
    with pytest.raises(ModelError, match="no embedded model is called"):
        find_template("embedded/none")


def test_a_folders_template_is_read_from_its_file_or_the_tokenizers_settings(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "{{ bos_token }}d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named, "bos_token": {"content": "<s>"}}))
    template = find_template(str(folder))
    assert template is not None
    assert template.render([]) == "<s>d"
    (folder / "chat_template.jinja").write_text("own")
    assert find_template(str(folder)).text == "own"  # type: ignore[union-attr]


def test_a_template_runs_in_a_sandbox_and_reports_why_it_fails() -> None:
    for text, why in (
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception('roles') }}", "roles"),
        ("{% if %}", "Expected"),
    ):
        with pytest.raises(TemplateRefused, match=why):
            ChatTemplate(text, "test").render([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("name", "tools"),
    [("qwen2_5", True), ("llama3_1", True), ("llama3", False), ("gemma", False), ("deepseek_r1_distill", False)],
)
def test_templates_of_known_families_are_recognised_as_rendering_tools_or_not(name: str, tools: bool) -> None:
    trl = pytest.importorskip("trl")
    text = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    assert shows_tools(ChatTemplate(text, name, {"bos_token": "<s>", "eos_token": "</s>"})) is tools


def test_a_marked_template_renders_as_its_original_or_there_is_none() -> None:
    turns = [
        {"role": "user", "content": " a\n"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    trimmed = ChatTemplate(
        "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}\n"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
        "t",
    )
    for template in (smollm2(), trimmed):
        marked = training_template(template)
        assert marked is not None
        for messages in (turns, [{"role": "system", "content": "s"}, *turns]):
            for generate in (True, False):
                rendered = template.render(messages, generate=generate)
                assert marked.render(messages, generate=generate) == rendered
    merged = ChatTemplate(
        "{{ messages | map(attribute='content') | join(' ') }}{% if add_generation_prompt %}:{% endif %}", "t"
    )
    assert training_template(merged) is None
    # its special tokens are not known
    assert training_template(ChatTemplate("{{ bos_token }}" + trimmed.text, "t")) is None
