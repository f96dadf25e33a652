"""Static files, and the start of the server: no heavy package, no access to other servers."""

import hashlib
import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from assay.traces import Store
from assay.web.rendering import STATIC, compile_templates, static_file
from rigs.command_line import assay_command

# dist/htmx.min.js of the package htmx.org 2.0.11 in the npm registry, licence 0BSD.
HTMX_SHA256 = "d6fdc75f204e6bdefa99b69bf1e6d4ac69b8a364f77929f45c13476b4000f717"


def test_htmx_is_the_released_file() -> None:
    content, _ = static_file("htmx.min.js")
    assert hashlib.sha256(content).hexdigest() == HTMX_SHA256


def test_own_files_name_no_other_server() -> None:
    for name in set(STATIC) - {"htmx.min.js"}:
        assert re.findall(rb"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", static_file(name)[0]) == []


def test_the_command_prints_its_address_and_ends_on_a_signal(tmp_path: Path) -> None:
    Store(tmp_path / "s.db").close()
    flags = ["--port", "0", "--json", "--store", str(tmp_path / "s.db")]
    with subprocess.Popen(
        [sys.executable, "-m", "assay", "view", *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["address"]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", address)
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with opener.open(address) as answer:
            assert "The store holds no runs yet." in answer.read().decode()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=120) == ("", "")
    assert process.returncode == 0


def test_invalid_options_of_the_page_are_refused(tmp_path: Path) -> None:
    ended = assay_command("view", "--store", str(tmp_path / "missing.db"))
    assert (ended.code, "there is no store" in ended.stderr) == (1, True)
    ended = assay_command("view", "--host", "0.0.0.0", "--store", str(tmp_path / "missing.db"))
    assert (ended.code, "--key" in ended.stderr) == (2, True)


def test_all_templates_compile() -> None:
    assert {"base.html", "runs.html", "rollout.html", "label.html"} <= set(compile_templates())
