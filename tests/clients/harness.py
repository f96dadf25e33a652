"""Runs client programs against a scripted model server, directly and through `assay serve`.

A program reads questions from standard input and answers on standard output, one JSON line each (see
`python/driver.py`); its base URL and key are in its environment. It connects to a tap that forwards to the server or
to the gateway; a second tap is between gateway and server.
"""

import hashlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from tap import Exchange, Tap, tapped

from assay.traces import Rollout, Store
from rigs.serving import get, post, served
from rigs.upstream import ScriptedUpstream

HERE = Path(__file__).parent
KEY = "gateway-key-1"
SERVE = (sys.executable, "-m", "assay", "serve", "--key", KEY, "--port", "0", "--json")
TYPED = '{"value": 1, "unit": "echo"}'  # what the scripted model makes of the agents' schema
PROVIDERS = ("OPENAI", "ANTHROPIC", "MODEL", "GEMINI", "GOOGLE")


# -- environments


def environment(name: str) -> str:
    """Python of an environment with the libraries of `requirements/NAME.txt`, built on first use.

    `project` is the environment that runs the tests.

    ASSAY_NO_CLIENTS=1 skips tests of libraries that are installed for them.
    """
    if name == "project":
        return sys.executable
    if os.environ.get("ASSAY_NO_CLIENTS") == "1":
        pytest.skip("ASSAY_NO_CLIENTS=1")
    requirements = HERE / "requirements" / f"{name}.txt"
    wanted = requirements.read_text() + sys.version
    with made_once(wanted) as (folder, ready):
        python = folder / "env" / "bin" / "python"
        if not ready:
            subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder / "env"], check=True)
            install(
                [
                    sys.executable,
                    "-m",
                    "pip",
                    "--python",
                    str(python),
                    "install",
                    "--quiet",
                    "--retries",
                    "2",
                    "-r",
                    str(requirements),
                ]
            )
    return str(python)


@contextmanager
def made_once(wanted: str) -> Iterator[tuple[Path, bool]]:
    """A locked folder in the user's cache and whether it is complete; marked complete on exit without an error."""
    folder = Path.home() / ".cache" / "assay" / "test-clients" / hashlib.sha256(wanted.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        yield folder, (folder / "ready").is_file()
        (folder / "ready").touch()


def install(command: Sequence[str], **options: Any) -> None:
    """Runs a package manager; a test fails with what it said."""
    try:
        made = subprocess.run(command, capture_output=True, text=True, timeout=600, **options)
        output = "\n".join(line for line in made.stderr.splitlines() if not line.startswith("WARNING"))
    except (subprocess.TimeoutExpired, OSError) as error:
        made, output = None, str(error)
    if made is None or made.returncode:
        pytest.fail(
            f"the client libraries could not be installed; ASSAY_NO_CLIENTS=1 leaves their tests out\n{output[-2000:]}",
            pytrace=False,
        )


def variables(url: str, key: str = KEY) -> dict[str, str]:
    """The environment of a client whose model is at this address."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith((*PROVIDERS, "PYTHON", "LANGSMITH", "LANGCHAIN"))
    }
    for name in PROVIDERS:
        environment[f"{name}_BASE_URL"] = url + ("" if name in ("ANTHROPIC", "GEMINI", "GOOGLE") else "/v1")
        environment[f"{name}_API_KEY"] = key
    environment["GOOGLE_GEMINI_BASE_URL"] = url
    return environment | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True"}


# -- processes


@contextmanager
def started(*command: str) -> Iterator[str]:
    """The address that a server says as its first line."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline() if process.stdout else ""
        assert line, f"{command} did not start"
        yield json.loads(line)["url"]
    finally:
        process.terminate()
        process.communicate(timeout=120)


class Program:
    """A client program that runs until it is closed."""

    def __init__(self, command: Sequence[str], url: str, folder: Path, extra: Mapping[str, str]) -> None:
        self._log = folder / "program.log"
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=variables(url) | dict(extra),
                cwd=folder,
            )

    def ask(self, mode: str, question: str, timeout_s: float = 120.0) -> dict[str, Any]:
        """What the agent answered: `{"answer": …}` or `{"error": …}`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"mode": mode, "question": question}).encode() + b"\n")
        self._process.stdin.flush()
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._process.stdout, selectors.EVENT_READ)
            line = self._process.stdout.readline() if waiting.select(timeout_s) else b""
        assert line, f"{mode} gave no answer within {timeout_s:g} s\n{self.complaints()}"
        reply: dict[str, Any] = json.loads(line)
        return reply

    def complaints(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(120)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# -- clients and their runs


@dataclass(frozen=True, kw_only=True)
class Client:
    """A program and what it is expected to do in each of its modes.

    Args:
        command: of the program, for the folder that it runs in; None uses `environment` and `script` (in `python/`).
        modes: the program's own names of its modes; those that stream contain "stream".
        ask: what the scripted model reads in each question.
        outputs: text of each call; `tools` are its tool calls with arguments and results, in order.
        answer: what the program prints; by default the last text.
        prediction: of the rollout; by default the answer.
        conversations: rows of `export sft --whole`; more than one where the client rewrites its history.
        streamed: calls that are streamed; by default all in modes with "stream" in their names, and none in others.
        retries: calls in all of a run whose first call is answered with 429 (1: the client gives up).
        by_mode: other values of these fields in single modes.
    """

    name: str
    environment: str = "newest"
    script: str = ""
    command: Callable[[Path], Sequence[str]] | None = None
    modes: tuple[str, ...] = ("sync", "stream")
    ask: str = "use the tool #steps2"
    outputs: tuple[str, ...] = ("", "", "echo: 42")
    tools: tuple[tuple[str, Any, str | None], ...] = (("calculator", {"expression": "6*7"}, "42"),) * 2
    answer: Any = None
    prediction: Any = None
    streamed: int | None = None
    conversations: int = 1
    retries: int = 4
    variables: Mapping[str, str] = field(default_factory=dict)
    by_mode: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def at(self, mode: str) -> "Client":
        return replace(self, **self.by_mode.get(mode, {}))


@dataclass(frozen=True)
class Run:
    """One run of a program: what it said, what its side of the wire saw, and what the model server saw."""

    reply: dict[str, Any]
    front: list[Exchange]
    back: list[Exchange]

    @property
    def statuses(self) -> list[int]:
        return [exchange.status for exchange in self.front]


class ClientSetup:
    """A scripted server, `assay serve` in front of it, the two taps, and one client program."""

    def __init__(
        self,
        upstream: ScriptedUpstream,
        direct: str,
        front: Tap,
        back: Tap,
        gateway: str,
        store: Path,
        program: Program,
    ) -> None:
        self.upstream, self.direct, self.front, self.back, self.gateway, self.store = (
            upstream,
            direct,
            front,
            back,
            gateway,
            store,
        )
        self.program, self._known = program, set[str]()

    def run(self, mode: str, question: str, number: int, *, through: bool) -> Run:
        """Runs the program once; the same number gives the same answers of the server."""
        self.upstream.restart(number)
        self.front.point(self.gateway if through else self.direct)
        since = time.monotonic()
        reply = self.program.ask(mode, question)
        return Run(reply, self.front.exchanges(since), self.back.exchanges(since))

    def new_rollouts(self, calls: int) -> list[Rollout]:
        """Rollouts of the last run, closed as a success, once so many calls are in the store."""
        for _ in range(100):
            rollouts = [rollout for rollout in self._all() if rollout.id not in self._known]
            if sum(len(rollout.transitions) for rollout in rollouts) >= calls:
                break
            time.sleep(0.1)
        for rollout in rollouts:
            post(f"{self.gateway}/assay/rollouts/{rollout.id}/close", {"reward": 1.0}, Authorization=f"Bearer {KEY}")
        rollouts = [rollout for rollout in self._all() if rollout.id not in self._known]
        self._known |= {rollout.id for rollout in rollouts}
        return rollouts

    def counts(self) -> dict[str, int]:
        stats = get(f"{self.gateway}/assay/stats", Authorization=f"Bearer {KEY}")
        return {name: stats[name] for name in ("calls", "stored", "unrecorded")} | {
            "past": sum(stats["refused_paths"].values())
        }

    def _all(self) -> list[Rollout]:
        with Store(self.store) as store:
            return [store.rollout(rollout.id) for rollout in store.rollouts(limit=None)][::-1]


@contextmanager
def client_setup(client: Client, folder: Path) -> Iterator[ClientSetup]:
    command = (
        client.command(folder)
        if client.command
        else [environment(client.environment), str(HERE / "python" / client.script)]
    )
    upstream = ScriptedUpstream()
    with ExitStack() as running:
        direct = running.enter_context(served(upstream.app()))
        front, back = running.enter_context(tapped(direct)), running.enter_context(tapped(direct))
        flags = ("--upstream", back.url, "--upstream-key", "upstream-secret", "--store", str(folder / "s.db"))
        gateway = running.enter_context(started(*SERVE, *flags))
        program = Program(command, front.url, folder, client.variables)
        running.callback(program.close)
        yield ClientSetup(upstream, direct, front, back, gateway, folder / "s.db", program)
