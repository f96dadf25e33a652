"""Which project files need the user's trust: those of others, and those that send keys or data elsewhere."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import assay
from assay.cli import group
from assay.commands.project import project_settings
from assay.models.roles import is_loopback
from assay.sources import trust
from assay.sources.trust import UntrustedArtifact

HARMLESS = '[defaults]\nseed = 3\nthreads = 2\n[program]\nmodel = "openai/m"\n[judge]\nmodel = "anthropic/j"\n'
EVIL = "https://evil.example/v1"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASSAY_HOME", str(tmp_path / "assay-home"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    inner = tmp_path / "work" / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(inner)
    return tmp_path


def test_a_harmless_file_of_the_working_directory_needs_no_trust() -> None:
    Path("assay.toml").write_text(HARMLESS)
    assert project_settings("evaluate")["seed"] == 3


@pytest.mark.parametrize("command", ["compile", "runs list", "traces list", "serve", "export sft"])
def test_a_file_above_the_project_must_be_trusted(command: str, place: Path) -> None:
    file = place / "work" / "assay.toml"
    file.write_text(
        "[defaults]\nseed = 3\n[serve]\nport = 1\n[runs]\nlimit = 2\n[traces]\nlimit = 2\n[export]\ngated = true\n"
    )
    with pytest.raises(UntrustedArtifact):
        project_settings(command)
    trust.add(trust.hash_of_file(file), file)
    assert project_settings(command) != {}
    file.write_text(file.read_text() + "\n")  # another content
    with pytest.raises(UntrustedArtifact):
        project_settings(command)
    assert project_settings(command, trust=True) == project_settings(command) != {}


@pytest.mark.parametrize("mark", [".git", ".hg", ".svn", ".jj"])
def test_version_control_around_the_file_makes_it_the_users_if_it_is_the_nearest(mark: str, place: Path) -> None:
    (place / "work" / "assay.toml").write_text(HARMLESS)
    root = place / "work" / mark
    root.mkdir()
    assert project_settings("evaluate")["seed"] == 3
    root.rmdir()
    root.touch()  # of a git worktree it is a file
    assert project_settings("evaluate")["seed"] == 3
    (place / "work" / "a" / ".git").mkdir()  # a clone of somebody else's, inside or beside the own project
    with pytest.raises(UntrustedArtifact):
        project_settings("evaluate")


def test_the_home_folder_is_the_users_without_version_control(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "home" / "assay.toml").write_text(HARMLESS)
    (place / "home" / "x").mkdir()
    monkeypatch.chdir(place / "home" / "x")
    assert project_settings("evaluate")["seed"] == 3


ADDRESSES = [
    ("evaluate", f'[program]\nmodel = "openai/m"\napi_base = "{EVIL}"'),
    ("evaluate", f'[judge]\nmodel = "openai/j"\napi_base = "{EVIL}"'),
    ("compile", f'[reflection]\nmodel = "openai/r"\napi_base = "{EVIL}"'),
    ("compile", f'[compile]\nreflection_api_base = "{EVIL}"'),
    ("run", f'[defaults]\napi_base = "{EVIL}"'),
    ("tune", f'[tune]\njudge_api_base = "{EVIL}"'),
    ("judge audit", f'[judge]\napi_base = "{EVIL}"'),
    ("judge fidelity", f'[judge.fidelity]\napi_base = "{EVIL}"'),
    ("traces score", f'[traces.score]\njudge_api_base = "{EVIL}"'),
    ("serve", f'[serve]\nupstream = "{EVIL}"'),
    ("serve", f'[serve]\notlp_endpoint = "{EVIL}"'),
    ("traces export", f'[traces.export]\nendpoint = "{EVIL}"'),
    ("agent run", f'[agent.run]\nserver = "{EVIL}"'),
    ("tune", '[tune]\nstorage = "postgresql://evil.example/studies"'),
    ("evaluate", '[program]\nmodel = "huggingface/https://evil.example/m"'),
    ("index", '[index]\nembedder = "huggingface/https://evil.example/m"'),
    ("improve", '[improve.grpo]\nmodel = "huggingface/https://evil.example/m"'),
    ("evaluate", '[program]\nmodel = "openai/m"\napi_key_env = "GITHUB_TOKEN"'),
    ("evaluate", '[judge]\nmodel = "openai/j"\napi_key_env = "ANTHROPIC_API_KEY"'),
    ("evaluate", '[program]\nmodel = "/m"\napi_key_env = "GITHUB_TOKEN"'),
    ("evaluate", '[program]\nmodel = "key/m"\napi_key_env = "OTHER_KEY"'),
    ("evaluate", '[program]\nmodel = "ai/m"\napi_key_env = "OPENAI_API_KEY"'),
    ("improve", '[improve.grpo]\njudge_api_key_env = "GITHUB_TOKEN"'),
    ("serve", '[serve]\nhost = "0.0.0.0"'),
    ("serve", '[defaults]\nhost = "::"'),
    ("serve", '[serve]\nallow_host = ["localhost", "evil.example"]'),  # its page in a browser reaches the gateway
    ("view", '[view]\nallow_host = ["evil.example"]'),
    ("train grpo", '[train.grpo]\nagent_listen = "0.0.0.0:7000"'),
]


def test_a_file_that_sends_keys_or_data_elsewhere_must_be_trusted() -> None:
    Path(".git").mkdir()
    for command, text in ADDRESSES:
        Path("assay.toml").write_text(text)
        with pytest.raises(UntrustedArtifact):
            project_settings(command)
        assert project_settings(command, trust=True) != {}, text
        assert project_settings(command) != {}


def test_a_file_of_another_user_must_be_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shared folder such as /tmp anybody may write one."""
    Path("assay.toml").write_text(HARMLESS)
    owner = Path("assay.toml").stat().st_uid
    monkeypatch.setattr("os.getuid", lambda: owner + 1)
    with pytest.raises(UntrustedArtifact):
        project_settings("evaluate")
    assert project_settings("evaluate", trust=True)["seed"] == 3


HERE = ["http://localhost:1/v1", "http://127.0.0.1:1/v1", "https://127.8.9.1", "http://[::1]:1/v1", "http://LOCALHOST/"]
ELSEWHERE = [
    "http://127.0.0.1.evil.example/", "http://localhost.evil.example/", "http://evil.example/127.0.0.1",
    "http://localhost@evil.example/", "http://127.0.0.1:1@evil.example/", "http://127.0.0.1\\@evil.example/",
    "http://evil.example#localhost", "http://evil.example?localhost", "http://10.0.0.1/", "http://192.168.1.1/",
    "http://169.254.169.254/", "http://0x7f.1.evil.example", "http://localhost\t.evil.example", " http://evil.example",
    "http:evil.example", "//evil.example", "http:///evil.example", "", "http://[::ffff:8.8.8.8]/", "http://127.1.evil",
]  # fmt: skip


def test_this_machine_the_provider_and_a_key_of_the_provider_need_no_trust() -> None:
    tables = [("evaluate", f'[program]\nmodel = "openai/m"\napi_base = "{address}"') for address in (*HERE, "provider")]
    for variable in ("OPENAI_API_KEY", "MY_OPENAI_KEY", "openai"):
        tables.append(("evaluate", f'[program]\nmodel = "openai/m"\napi_key_env = "{variable}"'))
    for host in ("localhost", "::1", "127.0.0.2"):
        tables.append(("serve", f'[serve]\nhost = "{host}"\nallow_host = ["localhost", "gateway.local"]'))
    for command, text in tables:
        Path("assay.toml").write_text(text)
        assert project_settings(command) != {}, text
    assert [is_loopback(address) for address in HERE] == [True] * len(HERE)


def test_an_address_that_only_looks_like_loopback_is_none() -> None:
    assert [address for address in ELSEWHERE if is_loopback(address)] == []


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_flags_override_the_file_without_trust(json_flag: list[str]) -> None:
    Path("assay.toml").write_text(f'[program]\nmodel = "openai/m"\napi_base = "{EVIL}"\n')
    call = ["evaluate", "p.py:P", "--rubric", "r.yaml", "--data", "d.jsonl", *json_flag]

    def failure(*flags: str) -> BaseException | None:
        return CliRunner().invoke(group, [*call, *flags]).exception

    assert isinstance(failure(), UntrustedArtifact)
    assert not isinstance(failure("--api-base", "http://127.0.0.1:9/v1"), UntrustedArtifact)
    assert not isinstance(failure("--api-base", "provider"), UntrustedArtifact)
    assert not isinstance(failure("--trust"), UntrustedArtifact)
    assert not isinstance(failure(), UntrustedArtifact)  # now it is


def test_the_first_line_of_a_run_names_the_file_that_was_read() -> None:
    Path("assay.toml").write_text("[runs]\nlimit = 2\n")
    for flags in ([], ["--json"]):
        result = CliRunner().invoke(group, ["runs", "list", *flags])
        assert str(Path("assay.toml").resolve()) in result.stderr.splitlines()[0]
        assert "assay.toml" not in result.stdout


def test_trust_is_added_listed_and_removed(place: Path) -> None:
    file = place / "work" / "assay.toml"
    file.write_text(HARMLESS)

    def invoke(*words: str) -> str:
        return CliRunner().invoke(group, ["trust", *words], catch_exceptions=False).output

    invoke("add", str(file))
    assert project_settings("evaluate")["seed"] == 3
    assert [entry["path"] for entry in json.loads(invoke("list", "--json"))["trusted"]] == [str(file)]
    invoke("remove", str(file))
    with pytest.raises(UntrustedArtifact):
        project_settings("evaluate")


def test_a_judge_file_that_sends_prompts_elsewhere_must_be_trusted() -> None:
    for model, is_refused in (
        ("huggingface/https://evil.example/m", True), ("huggingface/http://127.0.0.1:9/m", False), ("openai/m", False)
    ):  # fmt: skip
        Path("j.yaml").write_text(f"text: Is it good?\nscale: ['no', 'yes']\nmodel: {model}\n")
        if is_refused:
            with pytest.raises(UntrustedArtifact):
                assay.load_judge("j.yaml")
        assert assay.load_judge("j.yaml", trust=is_refused).model == model


def test_no_file_of_variables_is_read_by_itself() -> None:
    """litellm reads `.env` of the working directory, if Python is interactive, or of a folder above its own."""
    Path(".env").write_text(f"OPENAI_BASE_URL={EVIL}\n")
    script = "import os, assay, litellm; print(os.environ.get('OPENAI_BASE_URL'))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"
