"""The command line as a user has it: `assay.cli:main`, the entry point of pyproject.toml, called in this process.

The only module that knows how the command line is entered. No interpreter is started: a second one takes 1.5 seconds of
CPU time.
"""

import contextlib
import inspect
import io
import json
import os
import re
import signal
import sys
import threading
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from unittest import mock

import click

from assay.cli import main


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def report(self) -> Any:
        """The JSON object of a command with `--json`."""
        return json.loads(self.stdout)


class _Left(BaseException):
    """The process would have ended here."""


def _leave(code: int) -> NoReturn:
    raise _Left(code)


class _Output(io.TextIOWrapper):
    """A stream of the command; `on_line` is called with each line when it is written."""

    def __init__(self, on_line: Callable[[str], None] | None = None) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8")
        self.on_line, self.text = on_line, ""

    def write(self, text: str) -> int:
        before, self.text = self.text.count("\n"), self.text + text
        if self.on_line is not None:
            for line in self.text.split("\n")[before:-1]:
                self.on_line(line)
        return len(text)


def assay_command(*arguments: str, stdin: str = "", on_line: Callable[[str], None] | None = None) -> Done:
    """Runs `assay ARGUMENTS`. `on_line` gets each line of standard output when it is printed."""
    out, err = _Output(on_line), _Output()
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    handlers = {number: signal.getsignal(number) for number in numbers}
    with (
        mock.patch.object(sys, "argv", ["assay", *arguments]),
        mock.patch.object(sys, "stdin", io.StringIO(stdin)),
        mock.patch.object(sys, "stdout", out),
        mock.patch.object(sys, "stderr", err),
        mock.patch.object(os, "_exit", _leave),
    ):
        code = 0
        try:
            main()
        except (_Left, SystemExit) as end:
            code = end.args[0] if end.args else 0
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return Done(int(code or 0), out.text, err.text)


def while_serving(*arguments: str, client: Callable[[Any], Any]) -> tuple[Any, Done]:
    """What `client` returns, called in another thread with the first JSON line of a command that serves, and how the
    command ended: it gets SIGTERM when the client has returned.
    """
    results: list[Any] = []

    def work(line: str) -> None:
        try:
            results.append(client(json.loads(line)))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # a shell's background process ignores Ctrl-C

    def start(line: str) -> None:
        if not started:
            started.append(threading.Thread(target=work, args=(line,), daemon=True))
            started[0].start()

    started: list[threading.Thread] = []
    done = assay_command(*arguments, on_line=start)
    assert results, done.stderr
    return results[0], done


def root_command() -> click.Group:
    """The group of all commands, as the entry point calls it."""
    called: list[Any] = []
    with (
        mock.patch.object(click.Command, "main", lambda command, *_, **__: called.append(command)),
        contextlib.suppress(_Left, SystemExit),
    ):
        assay_command("--help")
    (root,) = called
    assert isinstance(root, click.Group)
    return root


def leaves(command: click.Command | None = None, words: Sequence[str] = ()) -> Iterator[tuple[str, click.Command]]:
    """Each command that does something, by its words."""
    command = command or root_command()
    if not isinstance(command, click.Group):
        yield " ".join(words), command
        return
    context = click.Context(command)
    for name in sorted(command.list_commands(context)):
        inner = command.get_command(context, name)
        assert inner is not None
        yield from leaves(inner, (*words, name))


def described(command: click.Command) -> dict[str, Any]:
    """Arguments and options of a command, without their help."""
    context = click.Context(command)
    arguments = [parameter for parameter in command.params if isinstance(parameter, click.Argument)]
    options = [parameter for parameter in command.get_params(context) if isinstance(parameter, click.Option)]
    return {
        "arguments": [f"{item.name}{' …' if item.nargs == -1 else ''}" for item in arguments],
        "options": {
            " ".join([*sorted(option.opts), *sorted(option.secondary_opts)]): _option(option, context)
            for option in sorted(options, key=lambda option: option.opts)
            if "--help" not in option.opts
        },
    }


def _option(option: click.Option, context: click.Context) -> dict[str, Any]:
    """What an option takes. Default and `required` are read where a user reads them, at the end of its help."""
    help_text = (option.get_help_record(context) or ("", ""))[1]
    notes = " ".join(re.findall(r"\[([^\[\]]*)\]", help_text))
    default = re.search(r"default: ([^;\]]+)", notes)
    facts: dict[str, Any] = {
        "default": _value(default[1].strip(), option) if default else None,
        "choices": sorted(getattr(option.type, "choices", ())),
        "flag": option.is_flag,
        "many": option.multiple,
        "required": bool(re.search(r"\brequired\b", notes)),
        "variable": option.envvar,
    }
    return {name: fact for name, fact in facts.items() if fact not in (None, False, [])}


def _value(default: str, option: click.Option) -> Any:
    """The value of a default as help shows it; a switch is on or off."""
    if option.secondary_opts:
        return f"--{default}" in option.opts
    try:
        return json.loads(default)
    except json.JSONDecodeError:
        return default


def keywords(function: Any) -> list[str]:
    """Parameters of a function; for `**options: Unpack[…]` the keys of the typed dictionary."""
    names: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            names.append(parameter.name)
        elif inner := typing.get_args(parameter.annotation):
            names += inner[0].__annotations__
    return sorted(names)
