"""Anonymization: the table of surrogates, its key, and the engines."""

import json
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from privacy_values import KEY, make

from assay.errors import ConfigError, DataError, MissingExtra
from assay.traces.privacy.anonymizer import Anonymizer, key_of, restore
from assay.traces.privacy.names import KnownValue


def test_the_table_is_encrypted_and_its_key_is_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "chmod", lambda *_: None)  # the files are never readable by others
    anonymizer = make()
    out = anonymizer.text("mail jane@gmail.com, password=hunter2, \ud800", [KnownValue("person", "mail")])
    table, key = tmp_path / "export" / "table.bin", tmp_path / "keys" / "table.key"
    anonymizer.save_table(table, key)
    assert b"jane" not in table.read_bytes()
    assert stat.S_IMODE(os.stat(key).st_mode) == stat.S_IMODE(os.stat(table).st_mode) == 0o600
    loaded = Anonymizer.read_table(table, key)
    assert loaded == anonymizer.table
    assert restore(out, loaded) == "mail jane@gmail.com, password=[secret password], \ud800"
    secret = key.read_bytes()
    assert key_of(key) == secret
    anonymizer.text("joe@gmail.com")
    anonymizer.save_table(table, key)
    assert key.read_bytes() == secret
    assert "joe@gmail.com" in Anonymizer.read_table(table, key).values()


def test_a_key_in_the_folder_of_the_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "export")
    for key in ("export/key", "export/deeper/key", "link/key", "export/../export/key"):
        with pytest.raises(ConfigError, match="is inside the table's folder"):
            make().save_table(tmp_path / "export" / "table", tmp_path / key)
    assert not list(tmp_path.glob("**/key"))


def test_an_invalid_key_or_one_that_others_can_read_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "key"
    make().save_table(tmp_path / "a" / "table", key)
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        make().save_table(tmp_path / "a" / "table", key)
    key.chmod(0o600)
    key.write_text("not a key")
    with pytest.raises(ConfigError, match="does not contain a key"):
        make().save_table(tmp_path / "a" / "table", key)


def test_a_table_with_another_key_or_of_a_newer_assay_is_refused(tmp_path: Path) -> None:
    from cryptography.fernet import Fernet

    make().save_table(tmp_path / "a" / "table", tmp_path / "k1")
    make().save_table(tmp_path / "b" / "table", tmp_path / "k2")
    with pytest.raises(DataError, match="InvalidToken"):
        Anonymizer.read_table(tmp_path / "a" / "table", tmp_path / "k2")
    with pytest.raises(DataError, match="No such file"):
        Anonymizer.read_table(tmp_path / "nothing", tmp_path / "k2")
    newer = Fernet((tmp_path / "k1").read_bytes()).encrypt(json.dumps({"version": 99, "surrogates": {}}).encode())
    (tmp_path / "a" / "table").write_bytes(newer)
    with pytest.raises(DataError, match="format 99"):
        Anonymizer.read_table(tmp_path / "a" / "table", tmp_path / "k1")


def test_without_cryptography_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.fernet", None)
    for use in (make().save_table, Anonymizer.read_table):
        with pytest.raises(MissingExtra, match=r"assay\[privacy\]"):
            use(tmp_path / "a" / "table", tmp_path / "key")
    with pytest.raises(MissingExtra, match=r"assay\[privacy\]"):
        key_of(tmp_path / "key")
    assert not (tmp_path / "key").exists()


def test_a_short_key_and_an_unknown_engine_are_refused() -> None:
    with pytest.raises(ConfigError, match="key has 5 bytes"):
        Anonymizer(b"short")
    with pytest.raises(ConfigError, match="engine='spacy' must be one of"):
        Anonymizer(KEY, engine="spacy")


def test_without_presidio_auto_uses_patterns_and_presidio_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "presidio_analyzer", None)
    monkeypatch.setattr("assay.traces.privacy.names.available", lambda: False)
    assert (Anonymizer(KEY).engine_name, Anonymizer(KEY).finds_names) == ("patterns", False)
    assert make().text("Jane Doe of Leeds") == "Jane Doe of Leeds"
    with pytest.raises(MissingExtra, match="'presidio-analyzer' is not installed"):
        Anonymizer(KEY, engine="presidio")


def test_presidio_without_a_model_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("presidio_analyzer")
    spacy = pytest.importorskip("spacy")
    monkeypatch.setattr(spacy.util, "get_installed_models", lambda: [])
    for engine in ("auto", "presidio"):
        anonymizer = Anonymizer(KEY, engine=engine)
        assert (anonymizer.engine_name, anonymizer.finds_names) == ("presidio/none", False)
        assert anonymizer.text("Jane Doe, jane@gmail.com").startswith("Jane Doe, person")


def test_presidio_finds_names_and_agrees_with_what_is_known() -> None:
    pytest.importorskip("presidio_analyzer")
    anonymizer = Anonymizer(KEY, engine="auto")
    if not anonymizer.finds_names:
        pytest.skip("no English model of spaCy is installed")
    assert anonymizer.engine_name.startswith("presidio/en_")
    text = "Yesterday John Smith met Mary Jones in Berlin.\nThe answer to 42 - 73 is -31."
    out = anonymizer.text(text)
    assert anonymizer.counts == {"person": 2, "place": 1}
    assert Anonymizer(KEY, engine="auto").text(out) == out
    assert restore(out, anonymizer.table) == text
    assert make().text("John Smith", [KnownValue("person", "John Smith")]) in out
    assert anonymizer.value({"John Smith": 1}) == {"John Smith": 1}


def test_the_example_in_the_documentation_works(own_folder: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "privacy.md").read_text()
    block = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert block
    names: dict[str, Any] = {"key": KEY}
    exec(block[1], names)
    assert re.fullmatch(r"Person [0-9a-f]{8}-[0-9a-f]{8}, person[0-9a-f]{8}@example\.org", names["text"])
    assert names["data"]["phone"].startswith("+1-")
    assert restore(names["text"], names["anonymizer"].table) == "Jane Doe, jane@gmail.com"
    assert (own_folder / "keys" / "table.key").exists()
