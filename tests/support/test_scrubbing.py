"""Secrets in what commands print, log, cache, export and store, for models called in process."""

import io
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

import assay
from assay.models import ResponseCache
from assay.support.scrubbing import MARK, add_secrets, fields, mask_secrets, message, results, scrub_logs, scrubbed
from assay.traces import Recorder, Rollout, Store
from assay.traces.export.files import RowWriter
from rigs.command_line import assay_command
from rigs.serving import served


def secret(number: int) -> str:
    return f"plant{number:02d}Qz7wXk{number * 7919:06d}"


@pytest.fixture
def echo() -> Iterator[str]:
    """A server that repeats the key it receives: in a 401, or in the answer to a prompt that requests it."""

    async def answer(request: web.Request) -> web.Response:
        text = f"the key is {request.headers.get('Authorization')}, {request.headers.get('X-Team')}"
        if "say it" not in await request.text():
            return web.json_response({"error": {"message": text}}, status=401)
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        )

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    with served(app) as url:
        yield url


@pytest.mark.parametrize("engine", ["lm15", "litellm"])
def test_a_key_that_the_server_repeats_is_in_no_store_cache_or_error(echo: str, tmp_path: Path, engine: str) -> None:
    key = secret(1)
    with Store(tmp_path / "s.db") as store:
        recorder, cache = Recorder(store), ResponseCache(tmp_path / "cache.db")
        lm = assay.get_lm(
            "openai/m",
            api_base=f"{echo}/v1",
            api_key=key,
            num_retries=0,
            cache=cache,
            observers=[recorder.observe],
            engine=engine,
        )
        rollout = Rollout()
        with pytest.raises(Exception, match="key"), recorder.rollout(rollout):
            lm("hello")
        with recorder.rollout(Rollout()):
            lm("say it")
        with recorder.rollout(Rollout()):
            (again,) = lm("say it")
        store.flush()
        transitions = [t for r in store.rollouts() for t in store.rollout(r.id).transitions]
    assert sorted(t.output for t in transitions) == ["", *[f"the key is Bearer {MARK}, None"] * 2]
    assert again == f"the key is Bearer {MARK}, None"  # from the cache
    assert MARK in str(rollout.error)
    assert key not in str(rollout.error) + str(transitions)
    assert key.encode() not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


def test_a_key_that_litellm_reads_from_the_environment_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "MISTRAL_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "HF_TOKEN",
        "PGPASSWORD",
        "MY_CLIENT_SECRET",
        "SERVICE_KEY_2",
    ):
        monkeypatch.setenv(name, secret(2))
        assert mask_secrets(f"a {secret(2)} b") == f"a {MARK} b", name
        monkeypatch.delenv(name)
        assert mask_secrets(f"a {secret(2)} b") == f"a {secret(2)} b", name
    monkeypatch.setenv("QUEUE_URL", f"amqp://u:{secret(3)}@h/d")
    assert secret(3) not in mask_secrets(f"x {secret(3)}")


UNCHANGED = (
    *("max_tokens: 4096 is more than 2048", "the basic understanding of bearer certificates", "token: required"),
    "api_key_env names the environment variable MY_KEY, which is not set",
)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        (
            "Incorrect API key provided: sk-proj-abc***xyz. See https://h/keys",
            f"Incorrect API key provided: {MARK} See https://h/keys",
        ),
        ("Authorization: Bearer abcDEF123", f"Authorization: Bearer {MARK}"),
        ("{'Authorization': 'Basic dXNlcjpwYXNz'}", f"{{'Authorization': 'Basic {MARK}'}}"),
        ('{"x-api-key": "hunter2hunter2", "n": 1}', f'{{"x-api-key": "{MARK}", "n": 1}}'),
        ("OPENAI_API_KEY=hunter2hunter2 is wrong", f"OPENAI_API_KEY={MARK} is wrong"),
        ("cannot open postgresql+psycopg://me:hunter2@db:5432/x", f"cannot open postgresql+psycopg://{MARK}@db:5432/x"),
        ("cannot open postgresql://me@db:5432/x", "cannot open postgresql://me@db:5432/x"),
        # with an id, as pytest writes the text of a parameter into an environment variable
        pytest.param(*["postgresql://USER:PASSWORD@HOST/NAME"] * 2, id="hint"),
        ("GET https://hunter2hunter2@h/v1: 403", f"GET https://{MARK}@h/v1: 403"),
        ("GET https://h/v1?key=hunter2hunter2&alt=json: 403", f"GET https://h/v1?key={MARK}&alt=json: 403"),
        ("password: hunter2", f"password: {MARK}"),
        *((text, text) for text in UNCHANGED),
        ("passcode=Plant0123 jwt: Plant0123 pw=Plant0123", f"passcode={MARK} jwt: {MARK} pw={MARK}"),
        (
            "POST https://hooks.slack.com/services/T01/B02/Plant0123: 404",
            f"POST https://hooks.slack.com/services/{MARK}: 404",
        ),
        (
            "GET https://h/a?X-Amz-Credential=Plant0123&X-Amz-Date=2026",
            f"GET https://h/a?X-Amz-Credential={MARK}&X-Amz-Date=2026",
        ),
        (f"{'x' * 50}token=Plant0123", f"{'x' * 50}token={MARK}"),
    ],
)
def test_keys_are_removed_from_messages_and_nothing_else(text: str, masked: str) -> None:
    assert message(text) == masked
    assert message(masked) == masked


@pytest.mark.parametrize(
    "token",
    [
        "sk-Plant012", "sk_live_Plant012", "rk_test_Plant012",
        *(f"{start}_Plant0123Plant0123" for start in ("ghp", "gho", "ghu", "ghs", "ghr")),
        "github_pat_Plant0123Plant0123", "glpat-Plant0123Plant0123", "xoxb-Plant01234", "AKIAPLANTPLANTPLANTP",
        "ASIAPLANTPLANTPLANTP",
        f"AIza{'Plant' * 6}", "ya29.Plant0123Plant0123", f"hf_{'Plant' * 4}", "gsk_Plant0123Plant0123",
        "r8_Plant0123Plant0123",
        "fw_Plant0123Plant0123", "xai-Plant0123Plant0123", "pplx-Plant0123Plant0123", "nvapi-Plant0123Plant0123",
        "eyJPlant0123.Plant0123.Plant",
        "hooks.slack.com/services/Plant0123", "HOOKS.SLACK-GOV.COM/triggers/Plant0123",
        "discordapp.com/api/webhooks/Plant0123",
        "BEARER Plant0123", "ba\u017fic%20Plant0123", "db://u:Plant0123@h", "/a?KEY=Plant0123",
        "\u017fecret: Plant0123", "apiKey=Plant0123",
        "author\u0131zation=Plant0123", "credent\u0131als=Plant0123", "coo\u212a\u0131e=Plant0123",
    ],
)  # fmt: skip
def test_every_form_of_a_credential_is_removed_from_a_message_and_no_other_word(token: str) -> None:
    masked = message(f"before {token} after{40 * ' '}")
    assert "plant" not in masked.lower()
    assert masked.startswith("before ")
    assert masked.rstrip().endswith(" after")


def test_keys_are_removed_from_errors_of_results_but_texts_are_kept() -> None:
    text = "Authorization: Bearer abcDEF123"
    result: dict[str, Any] = {
        "output": text,
        "error": text,
        "why_failed": text,
        "rows": [{"answer": text, "reason": text}],
        "api_key": secret(4),
    }
    masked = f"Authorization: Bearer {MARK}"
    assert results(result) == {
        "output": text,
        "error": masked,
        "why_failed": masked,
        "rows": [{"answer": text, "reason": masked}],
        "api_key": MARK,
    }
    plain = {"a": [1, 2.5, None, True, {"b": "c"}], "max_tokens": 5}
    assert results(plain) is plain
    assert fields(plain) is plain


def test_streams_and_logs_contain_no_secrets(caplog: pytest.LogCaptureFixture) -> None:
    add_secrets(secret(5))
    out, texts = io.StringIO(), io.StringIO()
    print(f"failed: Bearer abcDEF123 {secret(5)}", file=scrubbed(out))
    print(f"said: Bearer abcDEF123 {secret(5)}", file=scrubbed(texts, texts=True))
    assert (out.getvalue(), texts.getvalue()) == (f"failed: Bearer {MARK} {MARK}\n", f"said: Bearer abcDEF123 {MARK}\n")
    before = logging.getLogRecordFactory()
    try:
        scrub_logs()
        with caplog.at_level(logging.INFO):
            logging.getLogger("any.library").info("sent %s with %s", {"Authorization": "Bearer abcDEF123"}, secret(5))
            try:
                raise ValueError(f"bad {secret(5)}")
            except ValueError:
                logging.getLogger("any.library").exception("it failed")
    finally:
        logging.setLogRecordFactory(before)
    assert "abcDEF123" not in caplog.text
    assert secret(5) not in caplog.text
    assert "ValueError: bad [key]" in caplog.text


@pytest.mark.parametrize("parquet", [False, True])
def test_rows_of_stores_with_secrets_are_exported_without_them(
    tmp_path: Path, parquet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", secret(6))
    request = {
        "body": {
            "messages": [{"role": "user", "content": f"x {secret(6)}"}],
            "tools": [{"type": "mcp", "authorization": secret(7)}],
        }
    }
    row: dict[str, Any] = {"output": f"y {secret(6)}", "input": request, "tools": [], "t": 0}
    if parquet:
        from assay.traces.export.transitions import parquet_schema

        encoded = dict.fromkeys(("adapters", "token_ids", "logprobs", "step_rewards", "tools"), "[]") | {
            "input": orjson.dumps(request).decode()
        }
        row = dict.fromkeys(name for name, _ in parquet_schema()) | row | encoded
    with RowWriter(tmp_path, parquet=parquet) as writer:
        writer.write(row)
    text = (tmp_path / "data.jsonl").read_text()
    assert text.count(MARK) == 3
    assert not re.search(r"plant0[67]", text + "".join(map(str, (path.read_bytes() for path in tmp_path.iterdir()))))


@pytest.mark.parametrize("debug", ["", "1"])
def test_a_command_prints_no_key_that_a_server_repeats(
    echo: str, debug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.py").write_text("import dspy\n\np = dspy.Predict('question -> answer')\n")
    monkeypatch.setenv("MY_KEY", secret(8))
    monkeypatch.setenv("ASSAY_DEBUG", debug)
    model = ["--model", "openai/m", "--api-base", f"{echo}/v1", "--api-key-env", "MY_KEY"]
    done = assay_command("run", "p.py:p", "question=x", *model, *(["--json"] if debug else []))
    assert done.code == 1
    assert MARK in done.stderr
    assert secret(8) not in done.stdout + done.stderr
    assert not any(secret(8).encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
