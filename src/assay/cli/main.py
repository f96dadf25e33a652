"""`assay`: the group, its lazily loaded commands, and how errors end it: 2 for wrong usage, 1 for a failure."""

import os
import signal
import sys
from typing import Any

import click

from assay import __version__
from assay.cli.derived import derived_command, top_level
from assay.support.dspy_versions import check_loaded
from assay.support.numbers import counted
from assay.support.refused import refused
from assay.support.scrubbing import scrub_logs
from assay.support.terminal import echo, protected


def _listed() -> dict[str, str]:
    """All commands and groups, with a line of help."""
    return dict(sorted(top_level().items()))


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_listed())

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return derived_command(name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_listed().items()))

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in (listed := _listed()):
            import difflib

            similar = difflib.get_close_matches(args[0], listed, 1)
            ctx.fail(
                f"no command is called {args[0]!r}."
                + (f" Did you mean {similar[0]!r}?" if similar else f" There are {', '.join(listed)}.")
            )
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BaseException as error:
            _report_end(ctx, error)
            raise


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="assay")
def group() -> None:
    """Improve LLM agents (DSPy programs) measured by a rubric: prompts, parameters, judges and weights."""
    from assay.cli.shared import REFUSED_BEFORE

    click.get_current_context().meta[REFUSED_BEFORE] = refused()


@group.result_callback()
def require_stored(result: object) -> None:
    """Raise `StoreError` if a store or disk did not take all of the command that has ended: its exit code is 1."""
    from assay.cli.shared import refused_by_command
    from assay.errors import StoreError

    new = refused_by_command()
    if new.rows:
        raise StoreError(f"{counted(new.rows, 'rows')} could not be stored. What was stored before is intact")
    if new.full_disks:
        raise StoreError(f"the disk is full: free space. {how_to_continue(sys.argv[1:])}")


def _report_end(ctx: click.Context, error: BaseException) -> None:
    """With `--json`, prints an object with the reason of a command that a cap, a signal or a full disk ended before its
    report, and the number of rows that were not stored."""
    from assay.cli.shared import REPORTED, print_json, refused_by_command
    from assay.errors import StopRun, StoreError, WriteFailed

    as_json = ctx.meta.pop("stdout", None) is not None
    is_stop = isinstance(error, StopRun | KeyboardInterrupt | StoreError | WriteFailed)
    if as_json and REPORTED not in ctx.meta and (is_stop or refused_by_command().rows):
        print_json({"stopped": _reason_of(error) or "by the user"})


def _reason_of(error: BaseException) -> str:
    from assay.cli.wording import in_flags, message_of
    from assay.errors import AssayError

    command = command_of(sys.argv[1:])
    return message_of(error, command) if isinstance(error, AssayError) else in_flags(str(error), command)


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
    from assay.errors import (
        AssayError,
        BudgetExceeded,
        StopRun,
    )

    _end_on_signals()
    scrub_logs()
    sys.stdout, sys.stderr = protected(sys.stdout, texts=True), protected(sys.stderr)
    code = 0
    try:
        ended = _called()  # what a command's `ctx.exit` was given
        code = ended if isinstance(ended, int) else 0
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption):
            from assay.cli.unknown import explained

            error = explained(error, group)
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
    except OSError as error:  # of a full or read-only disk: its class says nothing to the user
        where = f"{error.filename}: " if error.filename else ""
        echo(f"assay: {where}{error.strerror or error}", err=True)
        code = 1
    except Exception as error:
        if os.environ.get("ASSAY_DEBUG"):
            raise
        echo(f"assay: {type(error).__name__}: {error} (ASSAY_DEBUG=1 shows where)", err=True)
        code = 1
    _leave(code)


def command_of(arguments: list[str]) -> Any:
    """The command that the arguments call."""
    command: Any = group
    for argument in arguments:
        if isinstance(command, click.Group):
            command = command.get_command(None, argument) or command  # type: ignore[arg-type]
    return command


def how_to_continue(arguments: list[str]) -> str:
    """Message of a stopped command: what was stored, and the option that resumes it."""
    command = command_of(arguments)
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    if "--resume" in options:
        return "What was found so far is kept; --resume continues from here."
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
