"""Options that do not exist: which one was probably meant, and which other command has it."""

from collections.abc import Iterator
from difflib import get_close_matches

import click

from assay.support.meant import MEANT, meant

_INSTEAD = {"--state": "Compile the program with it, and give the artifact to this command."}
_ALIKE = 0.75  # of two names, from 0 to 1


def explained(error: click.NoSuchOption, commands: click.Group) -> click.NoSuchOption:
    """The error with the option that was probably meant, or with the commands that have the one that was given.

    Args:
        commands: all commands. They are loaded only if the option's name resembles none of its own command.
    """
    name, command = error.option_name, error.ctx.command if error.ctx else commands
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
    elif others := [path for path, other in _walk(commands, "assay") if _has(other, name)]:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        text += f" It belongs to {', '.join(others[:3])}{more}. {_INSTEAD.get(name, '')}".rstrip()
    return click.NoSuchOption(name, text, ctx=error.ctx)


def _has(command: click.Command, name: str) -> bool:
    return any(name in option.opts for option in command.params)


def _walk(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    """Each command below a group with its words."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from _walk(command, f"{path} {name}")
        elif command is not None:
            yield f"{path} {name}", command
