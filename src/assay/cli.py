"""`assay`: the command line, made from the settings classes of `assay.commands`, and how errors end it.

click splits words, and checks nothing. Exit codes are 2 for wrong usage and 1 for a failure.
"""

import inspect
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import MISSING, dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TextIO, get_args, get_origin

import click
from click.core import ParameterSource

from assay import __version__
from assay.commands import COMMANDS, GROUPS, SHORT_FORMS, command_class, long_form, short_form, short_forms
from assay.errors import (
    AssayError,
    BudgetExceeded,
    ConfigError,
    Names,
    StopRun,
    StoreError,
    WriteFailed,
    spoken,
)
from assay.support.lazy import check_loaded
from assay.support.names import MEANT, meant, nearest, one_of
from assay.support.numbers import counted
from assay.support.options import flag_of
from assay.support.report import Refused, refused, waiting
from assay.support.scrubbing import mask_secrets, message, results, scrub_logs
from assay.support.terminal import echo, escaped, protected, rich_console
from assay.support.values import json_text

if TYPE_CHECKING:
    from assay.support.options import Option
    from assay.support.report import Report, Table

_HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_COLUMN = 26  # width of the names of options in help, one for all groups; a longer name has a line of its own
_INSTEAD = {"--state": "Compile the program with it, and give the artifact to this command."}
_ALIKE = 0.75  # of two names, from 0 to 1


class _Failure(click.ClickException):
    """A command whose report says that it has failed."""

    def show(self, file: Any = None) -> None:
        echo(f"assay: {self.message}", err=True)


def _command_or_group(words: str) -> click.Command | None:
    """The command or group with these words; None if there is none."""
    if words in GROUPS:
        return _Group(words, help=GROUPS[words], epilog=short_forms(words), context_settings=_HELP)
    return _command(words) if words in {*COMMANDS, *SHORT_FORMS} else None


_MEANT = {"dpo": "preferences", "kto": "preferences"}  # methods of TRL, and the export that has their rows


class _Group(click.Group):
    """Commands by their words. The module of a command is imported when it is used, not to list it."""

    @property
    def start(self) -> str:
        """The words before those of its commands."""
        return f"{self.name} "

    def inner(self, items: Iterable[str]) -> list[str]:
        """The names that words have in this group, without those of other groups."""
        start = self.start
        return list(dict.fromkeys(item.removeprefix(start).split()[0] for item in items if item.startswith(start)))

    def list_commands(self, ctx: click.Context) -> list[str]:
        return self.inner(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _command_or_group(f"{self.start}{cmd_name}")

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0] not in (known := self.inner([*COMMANDS, *SHORT_FORMS])):
            meant = _MEANT.get(args[0])
            near = meant if meant in known else nearest(args[0], known)
            hint = f"Did you mean {near!r}?" if near else f"There are {', '.join(known)}."
            if meant is not None and meant not in known:
                hint = f"TRL trains it, with `trl {args[0]}`, on the rows of `assay export {meant}`."
            ctx.fail(f"no command is called {args[0]!r}. {hint}")
        words = f"{self.start}{args[0]}"
        return args[0], _command_or_group(short_form(words, args[1:]) if words in COMMANDS else words), args[1:]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        words = {name: f"{self.start}{name}" for name in self.list_commands(ctx)}
        lines = {**{key: line for key, (_, line) in COMMANDS.items()}, **GROUPS}
        with formatter.section("Commands"):
            formatter.write_dl([(name, lines[key].partition("\n")[0]) for name, key in words.items()])


class _Root(_Group):
    """All commands and groups."""

    start: ClassVar[str] = ""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(super().list_commands(ctx))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BaseException as error:
            failure = _of_database(error)
            _report_end(ctx, failure)
            if failure is error:
                raise
            raise failure from error


class Choice(click.Choice[str]):
    """One of some words; an unknown one gets the nearest in the error, as in `assay.toml` and in Python."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        return f"{str(value)!r} {one_of(str(value), self.choices)}"


class _Command(click.Command):
    """A command whose help shows its options by group: first its own, last those of all commands."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.MissingParameter as error:
            if not getattr(error.param, "key", False):
                raise
            # without the brackets of the usage line
            hint = f"'{str(error.param.name).upper()}'" if isinstance(error.param, click.Argument) else None
            text = "Give it here or in assay.toml, which assay init writes."
            raise click.MissingParameter(text, ctx=ctx, param_hint=hint, param=error.param) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)):
                groups.setdefault(getattr(parameter, "group", "Output"), []).append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl([(names.ljust(_COLUMN), text) for names, text in records], _COLUMN)


def _command(words: str) -> click.Command:
    from assay.commands.groups import Output
    from assay.support.options import options_of

    command = command_class(words)
    output = getattr(command, "OUTPUT", Output)
    own = {name: option for name, option in options_of(command).items() if option.flag.shown}
    takes_keys = any(option.flag.key for option in own.values())
    path, stored, broken = _project(words) if takes_keys else (None, {}, None)
    _, fixed = long_form(words)
    own |= {name: replace(own[name], default=value) for name, value in fixed.items()}
    options = {**own, **{name: replace(option, group="Output") for name, option in options_of(output).items()}}
    parameters = [_parameter(option, options, stored, wanted=broken is None) for option in options.values()]
    for parameter in parameters:
        if parameter.name in fixed:
            vars(parameter)["hidden"] = True  # what a short form stands for

    run = _Run(words, command, fixed, output, options, path, stored, broken)
    text = inspect.cleandoc(command.__doc__ or "").partition("\nRaises:")[0]
    text = spoken(text, lambda name: flag_of(options, name))
    return _Command(
        words, callback=run, params=parameters, help=text, epilog=short_forms(words), context_settings=_HELP
    )


def _project(words: str) -> tuple[Path | None, dict[str, Any], AssayError | None]:
    """The project file, what it sets for a command, and what is wrong with it: help does not depend on the file."""
    from assay.jobs.project_file import find_project

    if find_project() is None:
        return None, {}, None
    from assay.commands.project import read_project

    try:
        return *read_project(words), None
    except AssayError as error:
        return None, {}, error


@dataclass(frozen=True)
class _Run:
    """The function of a click command.

    Attributes:
        words: of the command.
        command: its settings class; `fixed` is what a short form sets.
        output: the class of what only the command line has, such as `--json`.
        options: those of both, by name.
        path: the project file, if there is one; `stored` is what it sets, `broken` what is wrong with it.
    """

    words: str
    command: Any
    fixed: Mapping[str, Any]
    output: Any
    options: Mapping[str, "Option"]
    path: Path | None
    stored: Mapping[str, Any]
    broken: AssayError | None

    def __call__(self, **values: Any) -> None:
        from assay.commands.project import demand_trust
        from assay.sources.trust import trusting
        from assay.support.options import options_of
        from assay.traces.store.location import default_store

        context = click.get_current_context()
        typed = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
        given = {name: value for name, value in values.items() if context.get_parameter_source(name) in typed}
        unset = {name: value for name, value in self.stored.items() if name not in given}
        used = self.command.of_file(unset, given)

        def names(name: str) -> str:
            return f"{name} in {self.path}" if name in used else flag_of(self.options, name)

        with ExitStack() as stack:
            try:
                parsed = {name: _value_of(self.options[name], value) for name, value in given.items()}
                output = self.output(**{name: parsed.pop(name) for name in options_of(self.output) if name in parsed})
                as_json = getattr(output, "json", False)
                stdout = stack.enter_context(stdout_apart()) if as_json else None
                if as_json:
                    stack.enter_context(redirect_stdout(sys.stderr))
                output.begin(stdout)  # processes that run in its place print their own report, or the reason
                context.meta["stdout"] = stdout
                stack.enter_context(trusting(bool(parsed.get("trust"))))
                if self.broken is not None:
                    raise self.broken
                self._check_fixed(parsed)
                if self.path is not None:
                    echo(f"settings: {self.path}", err=True)
                    demand_trust(self.path, self.words, used)
                if store := parsed.get("store"):
                    stack.enter_context(default_store(str(store)))
                known = options_of(self.command)
                shown: dict[str, Any] = {"progress": Console(names)} if "progress" in known else {}
                shown |= {"stdout": context.meta.get("stdout")} if "stdout" in known else {}
                if "on_start" in known:
                    shown["on_start"] = lambda report: _show(report, names, as_json=as_json)
                settings = self.command(**{**self.fixed, **used, **parsed, **shown})
                stack.enter_context(settings.scope())
                if getattr(output, "dry_run", False):
                    from assay.jobs.planning import plan_of

                    _show(plan_of(settings), names, as_json=as_json)
                    return
                report = settings.run()
                if report is None or not output.speaks:
                    return
                _show(report, names, as_json=as_json)
                if page := getattr(output, "report", None):
                    report.write_page(page, store=getattr(settings, "store", None))
                output.finish(settings, report)
            except AssayError as error:
                error.names = names
                if error.report is not None:
                    _show(error.report, names, as_json=as_json)
                raise
            if report.failure:
                raise _Failure(spoken(report.failure, names))

    def _check_fixed(self, parsed: Mapping[str, Any]) -> None:
        """Refuses another value of what a short form sets."""
        for name, value in self.fixed.items():
            if parsed.get(name, value) != value:
                long = long_form(self.words)[0]
                flag = flag_of(self.options, f"{name}={parsed[name]!r}")
                raise ConfigError(
                    f"`assay {self.words}` sets it to {value}", field=name, hint=f"Use `assay {long} {flag}`"
                )


def _show(report: "Report", names: Names, *, as_json: bool) -> None:
    """Writes a report to standard output."""
    lines = [] if as_json else list(report.lines())
    if as_json:
        if not report.is_stream:
            print_json(report.to_dict(), with_key=report.has_key)
    elif not lines and report.none:
        echo(spoken(report.none, names), err=True)
    for line in lines:
        if not isinstance(line, str):
            rich_console().print(_drawn(line))
            continue
        text = line if report.is_data else spoken(line, names)
        if report.is_list:
            echo_line(text)
        else:
            echo(text, with_key=report.has_key)
    for line in report.warnings():
        echo(spoken(line, names), err=True, with_key=report.has_key)


def _drawn(table: "Table") -> Any:
    """A table of a report, for a terminal."""
    from rich.table import Table as Drawn

    drawn = Drawn(
        *table.header,
        title=table.title,
        title_justify="left",
        show_header=bool(table.header),
        box=None,
        padding=(0, 2, 0, 0),
    )
    for row in table.rows:
        drawn.add_row(*row, style="bold" if row[0] in table.strong else None)
    return drawn


def _parameter(
    option: "Option", options: Mapping[str, "Option"], stored: Mapping[str, Any], *, wanted: bool
) -> click.Parameter:
    """An option for click, which only splits the words: values are checked where the Python function checks them."""
    default = stored.get(option.name, option.default)
    required = wanted and option.required and option.name not in stored
    hidden = default in (None, MISSING, False, "", (), [], {}) or option.flag.name.startswith(" ")
    shown = "" if hidden else str(_default(option, default))
    extras = "; ".join(filter(None, (option.rule, shown and f"default: {shown}")))
    meaning = spoken(option.help, lambda name: flag_of(options, name))
    text = meaning + (f"  [{extras}]" if extras else "")
    parameter: click.Parameter
    if option.positional:
        many = get_origin(option.type) is Sequence
        parameter = click.Argument(
            [option.name],
            type=Choice(option.choices) if option.choices else None,
            required=required,
            nargs=-1 if many else 1,
            metavar=_positional(option, required=required, many=many),
        )
    elif option.type is bool:
        parameter = click.Option([option.switch, option.name], is_flag=True, help=text)
    else:
        flags = (option.flag.name or option.flag_name).split("/")
        parameter = click.Option(
            [*flags, option.name],
            type=Choice(option.choices) if option.choices else None,
            multiple=get_origin(option.type) in (Sequence, Mapping) and not option.flag.commas,
            required=required,
            envvar=option.flag.env or None,
            show_envvar=True,
            metavar=option.flag.metavar or _metavar(option),
            help=text,
        )
    columns = {"meaning": meaning, "rule": option.rule, "shown_default": shown}  # of the reference
    vars(parameter).update(group=option.group or "Options", key=option.flag.key, **columns)
    return parameter


def _positional(option: "Option", *, required: bool, many: bool) -> str | None:
    name = option.flag.metavar
    if not name:
        return None
    return f"{name}..." if many and required else name if required else f"[{name}]"


def _default(option: "Option", value: Any) -> Any:
    if option.type is bool:
        return (option.flag_name if value else option.switch.rpartition("/")[2]).removeprefix("--")
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else value


def _metavar(option: "Option") -> str | None:
    if get_origin(option.type) is Mapping:
        return "NAME=VALUE"
    if get_origin(option.type) is Sequence and not option.flag.commas:
        return option.flag_name.removeprefix("--").replace("-", "_").upper()
    return {int: "INTEGER", float: "NUMBER"}.get(option.type)


def _value_of(option: "Option", value: Any) -> Any:
    """What was typed, as a number where the setting takes one and as a mapping of NAME=VALUE pairs."""
    kind = get_origin(option.type)
    if kind is Mapping:
        return _pairs(option, value)
    members = {option.type, *get_args(option.type)}
    if kind is Sequence and option.flag.commas:
        value = [word.strip() for word in value.split(",") if word.strip()]
    if not members & {int, float}:
        return list(value) if kind is Sequence else value
    return [_number(item) for item in value] if kind is Sequence else _number(value)


def _pairs(option: "Option", words: Iterable[str]) -> dict[str, Any]:
    from assay.support.options import Pair

    kind = get_args(option.type)[1]
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name:
            raise ConfigError(f"must be NAME=VALUE, not {word!r}", field=option.name)
        if name in values:
            raise ConfigError(f"gives {name!r} twice", field=option.name)
        low, colon, high = text.partition(":")
        is_text, is_pair = kind is str, kind == Pair
        if is_pair and not colon:
            raise ConfigError(f"must be NAME=LOW:HIGH, not {word!r}", field=option.name)
        values[name] = text if is_text else (_number(low), _number(high)) if is_pair else _literal(text)
    return values


def _number(text: Any) -> Any:
    for kind in (int, float):
        with suppress(ValueError, TypeError):
            return kind(text)
    return text


def _literal(text: str) -> Any:
    """A value as JSON if it is JSON, otherwise as text."""
    with suppress(ValueError):
        return json.loads(text)
    return text


@click.group(cls=_Root, context_settings=_HELP)
@click.version_option(__version__, prog_name="assay")
def group() -> None:
    """Improve LLM agents (DSPy programs) measured by a rubric: prompts, parameters, judges and weights."""
    context = click.get_current_context()
    context.meta[REFUSED_BEFORE] = refused()
    context.call_on_close(say_waiting)


@group.result_callback()
def require_stored(result: object) -> None:
    """Raise `StoreError` if a store or disk did not take all of the command that has ended: its exit code is 1."""
    new = refused_by_command()
    if new.rows:
        raise StoreError(f"{counted(new.rows, 'rows')} could not be stored. What was stored before is intact")
    if new.full_disks:
        raise StoreError(f"the disk is full: free space. {how_to_continue(sys.argv[1:])}")


def _report_end(ctx: click.Context, error: BaseException) -> None:
    """With `--json`, prints an object with the reason of a command that ended with exit code 1 before its report, and
    the number of rows that were not stored: `stopped` if a cap, a signal, the store or a full disk ended it, otherwise
    `error`."""
    if ctx.meta.pop("stdout", None) is None or REPORTED in ctx.meta:
        return
    if isinstance(error, StopRun | KeyboardInterrupt | StoreError | WriteFailed) or refused_by_command().rows:
        print_json({"stopped": _reason_of(error) or "by the user"})
    elif getattr(error, "exit_code", 1) == 1 and not isinstance(error, BrokenPipeError | click.Abort):
        print_json({"error": _reason_of(error)})


def _of_database(error: BaseException) -> BaseException:
    """A driver's error as a `StoreError`, without the statement that failed; any other error as it is."""
    alchemy = sys.modules.get("sqlalchemy")  # not imported: most commands fail before they need it
    if alchemy is None or not isinstance(error, alchemy.exc.DBAPIError):
        return error
    return StoreError(f"the database failed: {error.orig}")


def _reason_of(error: BaseException) -> str:
    """An error as the command line prints it."""
    if isinstance(error, AssayError):
        return error.text(error.names)
    if isinstance(error, OSError):  # of a full or read-only disk: its class says nothing to the user
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    if isinstance(error, StopRun | KeyboardInterrupt | click.ClickException):
        return spoken(str(error), names_of(sys.argv[1:]))
    return f"{type(error).__name__}: {error} (ASSAY_DEBUG=1 shows where)"


def _terminate(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt(f"by {signal.Signals(signum).name}")


def _end_on_signals() -> None:
    """SIGTERM, and SIGHUP unless it is ignored (`nohup`), end a command as Ctrl-C does."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _terminate)


def _called() -> Any:
    try:
        return group(standalone_mode=False)
    except (AttributeError, ImportError):
        check_loaded()
        raise


def main() -> None:
    """Entry point."""
    _end_on_signals()
    scrub_logs()
    sys.stdout, sys.stderr = protected(sys.stdout, texts=True), protected(sys.stderr)
    code = 0
    try:
        ended = _called()  # what a command's `ctx.exit` was given
        code = ended if isinstance(ended, int) else 0
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption):
            error = _explained(error)
        error.show()
        code = error.exit_code
    except AssayError as error:
        echo(f"assay: {_reason_of(error)}", err=True)
        code = error.exit_code
    except (StopRun, KeyboardInterrupt, click.Abort) as error:
        stopped = error.__cause__ if isinstance(error, click.Abort) and error.__cause__ else error
        reason = _reason_of(stopped) or "by the user"
        echo(f"assay: stopped: {reason}. {how_to_continue(sys.argv[1:])}", err=True)
        code = 1 if isinstance(error, BudgetExceeded) else 130
    except BrokenPipeError:
        code = 0
    except Exception as error:
        if os.environ.get("ASSAY_DEBUG") and not isinstance(error, OSError):
            raise
        echo(f"assay: {_reason_of(error)}", err=True)
        code = 1
    _leave(code)


def command_of(arguments: list[str]) -> Any:
    """The command that the arguments call."""
    command: Any = group
    for argument in arguments:
        if isinstance(command, click.Group):
            command = command.get_command(None, argument) or command  # type: ignore[arg-type]
    return command


def names_of(arguments: list[str]) -> Names:
    """How settings are written on the command line of the command that the arguments call."""
    run = command_of(arguments).callback
    return partial(flag_of, run.options) if isinstance(run, _Run) else str


def how_to_continue(arguments: list[str]) -> str:
    """Message of a stopped command: what was stored, and the option that resumes it."""
    command = command_of(arguments)
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    if "--resume" in options:
        return "The results so far are stored; --resume continues from here."
    if "--no-cache" in options and "--no-cache" not in arguments:
        return "Run the same command again to continue: the answers so far are in the response cache."
    return "What is in the store is kept."


def _leave(code: int) -> None:
    """Exits without waiting for worker threads, which may still wait for a model."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (BrokenPipeError, ValueError):
            pass
    os._exit(code)


def _explained(error: click.NoSuchOption) -> click.NoSuchOption:
    """The error with the option that was probably meant, or with the commands that have the one that was given.

    All commands are loaded only if the option's name resembles none of its own command.
    """
    name, command = error.option_name, error.ctx.command if error.ctx else group
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    flags = {str(option.name): max(option.opts or option.secondary_opts, key=len) for option in options}
    word = name.strip("-").replace("-", "_")
    settings = [word] if word in flags else meant(word, flags)  # a setting whose flag has another name
    likely = [flags[setting] for setting in settings]
    if not likely and word not in MEANT:  # a name of the table means something else than one spelled alike
        likely = get_close_matches(name, [flag for option in options for flag in option.opts], 3, _ALIKE)
    text = f"No such option {name!r}."
    if likely:
        text += f" Did you mean {', '.join(likely)}?"
    elif others := [path for path, other in _walk(group, "assay") if _has(other, name)]:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        text += f" It belongs to {', '.join(others[:3])}{more}. {_INSTEAD.get(name, '')}".rstrip()
    return click.NoSuchOption(name, text, ctx=error.ctx)


def _has(command: click.Command, name: str) -> bool:
    return any(name in option.opts for option in command.params)


def _walk(commands: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    """Each command below a group with its words."""
    context = click.Context(commands)
    for name in commands.list_commands(context):
        command = commands.get_command(context, name)
        if isinstance(command, click.Group):
            yield from _walk(command, f"{path} {name}")
        elif command is not None:
            yield f"{path} {name}", command


# -- Output: JSON, lists and progress.


PROGRESS_LINE_EVERY_S = 30.0
REFUSED_BEFORE = "refused_before"  # key of a command's context: what was refused before it began
REPORTED = "reported"  # key of a command's context, once it has printed its JSON


def print_json(value: Any, *, with_key: bool = False) -> None:
    """One object on standard output. `with_key`: it holds a key that was made for the user, and is printed as it is."""
    context = click.get_current_context(silent=True)
    out = None
    if context is not None:
        out, context.meta[REPORTED] = context.meta.get("stdout"), True
    value = value if with_key else results(value)
    if isinstance(value, dict) and (rows := refused_by_command().rows):
        value = {**value, "rows_not_stored": rows}
    if isinstance(value, dict) and (rows := sum(waiting.values())):
        value = {**value, "rows_waiting": rows}
    text = json_text(value)
    echo(text if with_key else mask_secrets(text), file=out, with_key=with_key)


def refused_by_command() -> Refused:
    """What disk and store did not take since the command began."""
    context, now = click.get_current_context(silent=True), refused()
    return now.since(now if context is None else context.meta.get(REFUSED_BEFORE, now))


def say_waiting() -> None:
    """Says which rows of other processes the command has found for the stores that it opened."""
    if rows := refused_by_command().recovered:
        echo(f"note: {counted(rows, 'rows')} that earlier processes could not write are in the store now", err=True)
    for place, rows in waiting.items():
        if rows:
            echo(f"warning: {counted(rows, 'rows')} of other processes wait for the store in {place}", err=True)


def echo_line(line: str) -> None:
    """Prints one line of a list. In a terminal it is cut at the right edge, so that each item has one line."""
    line = escaped(line)
    if sys.stdout.isatty() and len(line) > (width := shutil.get_terminal_size().columns):
        line = f"{line[: width - 1]}…"
    echo(line)


class Console:
    """Progress on standard error: bars in a terminal, plain lines elsewhere. Implements `assay.evaluation.Progress`."""

    def __init__(self, names: Names = str) -> None:
        self.rich, self._names = rich_console(err=True), names

    def say(self, text: str) -> None:
        self.rich.print(spoken(message(text), self._names), soft_wrap=True)

    @contextmanager
    def bar(self, name: str, total: int | None) -> Iterator[Callable[[int], None]]:
        if not self.rich.is_terminal:
            self.say(f"{name} ({total}) …" if total is not None else f"{name} …")
            yield self._lines(name, total)
            return
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with (
            Progress(*columns, console=self.rich, transient=False) as progress,  # puts streams of its own in place
            redirect_stdout(protected(sys.stdout, texts=True)),
            redirect_stderr(protected(sys.stderr)),
        ):
            task = progress.add_task(name, total=total)
            yield lambda count: progress.advance(task, count)

    def _lines(self, name: str, total: int | None) -> Callable[[int], None]:
        """Progress where there is no terminal: a line every `PROGRESS_LINE_EVERY_S` seconds at most."""
        done, printed_at = 0, time.monotonic()

        def advance(count: int) -> None:
            nonlocal done, printed_at
            done += count
            if done != total and time.monotonic() - printed_at >= PROGRESS_LINE_EVERY_S:
                printed_at = time.monotonic()
                self.say(f"{name}: {done}" + ("" if total is None else f" of {total}"))

        return advance


@contextmanager
def stdout_apart() -> Iterator[TextIO]:
    """Standard output as a file of its own; inside, file descriptor 1, which other processes inherit, is standard
    error.
    """
    try:
        if sys.stdout.fileno() != 1:
            raise OSError  # what a test or a caller has put in its place is not written by other processes
        sys.stdout.flush()
        apart = os.dup(1)
    except OSError:
        yield sys.stdout
        return
    try:
        os.dup2(2, 1)
        with open(apart, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, closefd=False) as file:
            yield protected(file, texts=True)
    finally:
        os.dup2(apart, 1)
        os.close(apart)
