"""Agents of any framework in a job: the program of one by its name, the address at which it calls the model, and the
proof that its texts are in its requests."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dspy

from assay.datasets import Task
from assay.errors import ConfigError
from assay.evaluation import Progress, RecordedProgram, Session
from assay.models.limits import limited
from assay.programs.foreign_agent import ForeignAgent, TextAgent, foreign_agent_in
from assay.programs.loading import full_name
from assay.programs.runners import AgentRunner, CallableRunner, CommandRunner, RemoteRunner, runner_of
from assay.programs.texts import ChangedFile, TextFiles, apply_files, refuse_changed, relative_path
from assay.sources.artifact_files import TEXTS, is_artifact, read_manifest, verified
from assay.sources.modules import qualified_name
from assay.support.numbers import counted
from assay.traces import Store
from assay.traces.gateway.agents import AgentGateway
from assay.traces.gateway.routes import Leases

if TYPE_CHECKING:
    from assay.jobs.groups import AgentServing

REMOTE = "remote"  # the agent runs on machines that ask for tasks
_MARKER = "assay: does this line reach the model?"
_WHY = {
    "gateway": "Check that the agent sends the text as its file has it (placeholders may be rendered), in one message "
    "or tool definition, and to the address in OPENAI_BASE_URL",
    "copy": "Check that the agent reads the file from its working directory or from beside its own code",
    "task": "Check that the agent reads the text from task['texts'], or from the JSON file in ASSAY_TEXTS",
}
_SHOWN = 8  # tasks that show in which requests the texts of an agent are


def program_or_agent(
    agent: str | Callable[..., Any] | None,
    program: Any,
    *,
    texts: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    trains: bool = False,
) -> str | dspy.Module:
    """The program of a job: the given one, with the class in its name, or one that runs the agent.

    Args:
        texts: of the agent, as `AgentText.name`; the program then has them as its prompts.
        options: further arguments of `TextAgent`.
        trains: the agent's model is in training.
    Raises:
        ConfigError: both were given, or neither; or the agent or a text cannot be loaded.
    """
    if agent is None and program is not None:
        if not isinstance(program, str | Path | dspy.Module):
            raise ConfigError(f"`program={program!r}` must be a name, an artifact's path or a dspy.Module")
        return program if isinstance(program, dspy.Module) else full_name(str(program))
    if agent is None or program is not None:
        hint = ""
        if isinstance(program, str | Path) and is_artifact(program) and read_manifest(Path(program)).get("agent"):
            hint = f"{program} runs its agent by itself: leave out the `agent`"
        raise ConfigError("give either a `program` or an `agent`", hint=hint)
    name = agent if isinstance(agent, str) else qualified_name(agent)
    runner = _runner(agent)
    if not texts:
        return ForeignAgent(name, runner, trains=trains)
    files = TextFiles(texts)
    fields = [{"name": text.name, "text": text.text, "is_value": text.is_value} for text in files.texts]
    options = dict(options or {})
    if options.get("delivery") == "copy" and not isinstance(runner, CommandRunner):
        raise ConfigError("must be gateway or task for an agent that is not a command", field="delivery")
    of_texts = TextAgent(name, fields, runner=runner, **options)
    of_texts.host.files = files
    return of_texts


def _runner(agent: str | Callable[..., Any]) -> AgentRunner:
    if not isinstance(agent, str):
        return CallableRunner(agent)
    return RemoteRunner(Leases()) if agent == REMOTE else runner_of(agent)


@contextmanager
def serving(
    agent: ForeignAgent, store: Store, model: str, config: "AgentServing", progress: Progress
) -> Iterator[None]:
    """Inside, an agent can call the model of each of its runs.

    Args:
        model: its name.
    Raises:
        ConfigError: an address beyond loopback, or runners on other machines, without a key.
    """
    host, port = address_of(config.agent_listen)
    accepts = [config.agent_model] if config.agent_model else []
    gateway = AgentGateway(store, model, host=host, port=port, key=config.agent_key, accepts=accepts)
    if isinstance(agent.runner, RemoteRunner):
        if config.agent_key is None:
            raise ConfigError(
                "is required by runners on other machines: give the key that `assay agent run` sends", field="agent_key"
            )
        gateway.add_routes(agent.runner.leases.add_to)
    agent.gateway = gateway
    try:
        progress.say(f"{model} is served to {agent.name} at {gateway.address}/v1")
        yield
    finally:
        gateway.close()
        agent.gateway = None


def address_of(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`.

    Raises:
        ConfigError: it is something else.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"must be HOST:PORT, such as 127.0.0.1:0, not {text!r}", field="agent_listen")
    return host.strip("[]"), int(port)


def find_texts(recorded: RecordedProgram, tasks: Sequence[Task], session: Session) -> None:
    """Runs the agent of a `TextAgent` on some of the tasks until each of its texts was in a request. From then on a
    text is replaced only in the roles in which it was found.

    Raises:
        ConfigError: a text is in no request.
    """
    program = recorded.program
    if not isinstance(program, TextAgent):
        return
    tasks, learned = tasks[:_SHOWN], program.host.learned
    names = [text["name"] for text in program.texts]
    program.host.marker = "" if program.delivery == "gateway" else _MARKER
    with session.phase("preflight"), session.context(), limited(session.task_timeout):
        for task in tasks:
            if all(learned[name] for name in names):
                break
            recorded.run(task)
    program.host.marker = ""
    if missing := [name for name in names if not learned[name]]:
        names_missing, others = ", ".join(map(repr, missing)), {"gateway", "copy", "task"} - {program.delivery}
        whole = any(Path(name).suffix.lower() in (".json", ".yaml", ".yml") for name in missing)
        value = ". A value of a JSON or YAML file is named FILE#/json/pointer" if whole else ""
        raise ConfigError(
            f"{names_missing} is in no request of the agent's first {counted(len(tasks), 'tasks')}. "
            f"{_WHY[program.delivery]}, or take another `delivery` ({' or '.join(sorted(others))}){value}",
            field="text",
        )
    program.roles = {name: sorted(learned[name]) for name in names}
    where = "; ".join(f"{name} in {', '.join(roles)}" for name, roles in program.roles.items())
    session.progress.say(f"texts found in requests: {where}")
    for name, places in program.host.places.items():
        if places > 1:
            roles = ", ".join(program.roles[name])
            session.progress.say(
                f"warning: {name} is in {places} places of one request (roles: {roles}), and a new text is put into "
                "each of them, also into a quotation"
            )


def agent_notes(program: dspy.Module) -> list[str]:
    """What happened to the runs of an agent; nothing for a program."""
    agent = foreign_agent_in(program)
    return [] if agent is None else agent.notes()


def changed_files(program: dspy.Module) -> list[ChangedFile]:
    """The files that the texts of a `TextAgent` change; empty for other programs, and for one without files."""
    files = program.host.files if isinstance(program, TextAgent) else None
    return [] if files is None or not isinstance(program, TextAgent) else files.with_texts(program.whole_texts())


def apply_texts(artifact: Path) -> tuple[list[Path], list[Path]]:
    """Writes the new texts of an artifact into the agent's files.

    Returns:
        The files that were written, and the old ones that were kept, see `apply_files`.
    Raises:
        ConfigError: a file has changed since the compile read it. Nothing was written.
    """
    changed, meanwhile = list[ChangedFile](), list[Path]()
    for name, before in verified(artifact)["texts_before"].items():
        path, new = Path(name), artifact / TEXTS / relative_path(Path(name))
        if not new.is_file():
            continue
        content = path.read_bytes() if path.is_file() else None
        if content is None or hashlib.sha256(content).hexdigest() != before:
            meanwhile.append(path)
        else:
            changed.append(ChangedFile(path=path, before=content, after=new.read_bytes()))
    refuse_changed(meanwhile)
    return [file.path for file in changed], apply_files(changed)
