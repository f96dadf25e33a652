"""The only module that names DSPy's internals. Each is looked up where it is used, so that one may be missing.

Internals are `dspy._vendor`, `dspy.clients`, `dspy.adapters`, `dspy.teleprompt`, `dspy.utils.callback`,
`dspy.utils.parallelizer` and attributes of DSPy's classes that are replaced. Patches take functions, so that this
module imports no other package of assay than `assay.errors` and `assay.support`.
"""

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import dspy
from tqdm.std import tqdm

from assay.errors import ConfigError
from assay.support.lazy import check_version, version_of

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]

_LEGACY = {"forward", "aforward"}  # further entries of DSPy 3.4's models
TRANSPORTS = "dspy._vendor.lm15.transports"  # sockets of DSPy's own engine


class PartMoved(ConfigError):
    """A part of DSPy that something needs is not where it was."""


_installed = version_of(dspy)
check_version(_installed)
# prompt format of programs without an adapter
DEFAULT_FORMAT = "chat" if _installed.startswith("3.4.") else "xml"


@dataclass(frozen=True)
class Part:
    """A function or method of DSPy.

    Attributes:
        arguments: names of arguments that it must take, without self.
    """

    module: str
    name: str
    arguments: tuple[str, ...] = ()

    @property
    def place(self) -> tuple[Any, str]:
        """The module or class that has it, and its name there."""
        owner, _, name = self.name.rpartition(".")
        module = importlib.import_module(self.module)
        return functools.reduce(getattr, owner.split("."), module) if owner else module, name

    @functools.cached_property
    def moved(self) -> bool:
        """Whether it is not there or takes other arguments. Decided once, before it is patched."""
        try:
            owner, name = self.place
            parameters = inspect.signature(vars(owner)[name]).parameters  # an inherited one is another part
        except (ImportError, AttributeError, KeyError, TypeError, ValueError):
            return True
        return not set(self.arguments) <= set(parameters)

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def needed_by(self, use: str) -> Any:
        """The function, method or class.

        Raises:
            PartMoved: it has moved, which says what cannot be used.
        """
        if self.moved:
            raise PartMoved(f"{use} cannot be used with DSPy {_installed}, where {self} is missing")
        return getattr(*self.place)


def has_adaptive_thinking(name: str) -> bool:
    """Whether a model of Anthropic takes effort words instead of a token budget.

    Raises:
        PartMoved: DSPy does not say so.
    """
    return bool(_ADAPTIVE.needed_by("a token budget of Anthropic's models")(name))


def filter_truncation_warnings(relevant: Callable[[logging.LogRecord], bool]) -> None:
    """Adds a filter to the logger of DSPy's LMs; adding it again has no effect."""
    logging.getLogger("dspy.clients.lm").addFilter(relevant)


def prompt_text(prompt: Any) -> str:
    """Text of what `Adapter.format` returns: a list of messages in DSPy 3.4, in 3.5 a prompt with `lm15` messages."""
    if isinstance(prompt, list):
        return "\n".join(str(message["content"]) for message in prompt)
    parts = [part for message in prompt.messages for part in message.parts]
    system = [prompt.system] if isinstance(prompt.system, str) else list(prompt.system or ())
    return "\n".join(part if isinstance(part, str) else getattr(part, "text", str(part)) for part in [*system, *parts])


def patch_calls(lm: Wrapper, tool: Wrapper) -> None:
    """Wraps the calls of every LM and of every tool, sync and async, as DSPy's own classes have them."""
    others = [] if _TYPE_SAFE.moved else [(getattr(*_TYPE_SAFE.place), lm)]
    for owner, wrap in ((dspy.BaseLM, lm), *others, (dspy.Tool, tool)):
        for name in public_entries(owner):
            setattr(owner, name, wrap(getattr(owner, name)))
    for name in _LEGACY & vars(dspy.LM).keys():
        setattr(dspy.LM, name, lm(getattr(dspy.LM, name)))


def patch_overrides(wrap: Wrapper) -> None:
    """Wraps the methods of the user's classes of LMs, existing and future ones, that call a model by themselves: those
    that have the name of one of DSPy's and do not lead to it."""
    entries = {*public_entries(dspy.BaseLM), *_LEGACY} - {"stream", "astream"}

    def patch(owner: Any) -> None:
        if owner.__module__.partition(".")[0] not in ("dspy", "assay"):
            for name in entries & vars(owner).keys():
                if not _leads_on(inspect.unwrap(vars(owner)[name])):
                    setattr(owner, name, wrap(vars(owner)[name]))

    _patch_subclasses(dspy.BaseLM, patch)


def _leads_on(method: Any) -> bool:
    """Whether a method calls that of its base class, or another one of its object, as far as its names tell."""
    waiting, names = [getattr(method, "__code__", None)], set[str]()
    while waiting:
        if (code := waiting.pop()) is not None:
            names.update(code.co_names, code.co_freevars)
            waiting += [constant for constant in code.co_consts if inspect.iscode(constant)]
    return bool(names & {"super", "__class__", "__call__", "acall", *_LEGACY})


def _patch_subclasses(base: Any, patch: Callable[[Any], None]) -> None:
    """Calls a function with each subclass of a class, existing and future ones."""
    plain = vars(base).get("__init_subclass__")

    def and_patch(cls: Any, /, **kwargs: Any) -> None:
        if plain is None:
            super(base, cls).__init_subclass__(**kwargs)
        else:
            plain.__func__(cls, **kwargs)
        patch(cls)

    base.__init_subclass__ = classmethod(and_patch)
    waiting = list(base.__subclasses__())
    while waiting:
        owner = waiting.pop()
        waiting += owner.__subclasses__()
        patch(owner)


def call_with_messages(lm: Any, body: dict[str, Any]) -> Any:
    """Calls a model by a body of OpenAI's chat API, as an adapter of DSPy 3.4 does.

    Raises:
        PartMoved: DSPy takes requests alone.
    """
    with _BY_MESSAGES.needed_by("a request with audio or documents")(lm, body["messages"]):
        return dspy.LM.__call__(lm, **body)


@contextmanager
def handed_over(lm: Any, other: Any) -> Iterator[None]:
    """Inside, what an adapter of DSPy 3.4 sends to `lm` is its call to `other`: DSPy would warn of it as the user's."""
    try:
        from dspy.clients._deprecation import _adapter_call, adapter_message_call
    except ImportError:  # its adapters send requests
        yield
        return
    origin = _adapter_call.get()
    with adapter_message_call(other, origin[1]) if origin is not None and origin[0] is lm else nullcontext():
        yield


def calls_itself(lm: Any) -> bool:
    """Whether DSPy sends a model's requests by itself; else, or if it does not say so, it imports litellm."""
    if _BACKEND.moved:
        return False
    try:
        return bool(getattr(*_BACKEND.place)(lm).native)
    except Exception:  # the call itself raises it, with its own words
        return False


def public_entries(owner: type) -> tuple[str, ...]:
    """Names of the public methods of a class of models that call the model, as far as this version of DSPy has them."""
    names = ("__call__", "acall", "generate", "agenerate", "stream", "astream")
    return tuple(name for name in names if hasattr(owner, name))


def set_engines(lm: Any, engine: Any, async_engine: Any) -> None:
    """Replaces the engines of a model; None: it has none.

    Raises:
        PartMoved: a model keeps its engine elsewhere.
    """
    if not hasattr(lm, "_engine_spec"):
        raise PartMoved(
            f"a model that the program makes itself cannot be recorded with DSPy {_installed}, where LM._engine_spec "
            "is missing: use the job's model"
        )
    lm._engine_spec, lm._async_engine_spec = engine, async_engine


def engine_of(lm: Any) -> Any:
    """A model's engine, or the name of one of DSPy's; None for a class that has none, or keeps it elsewhere."""
    return getattr(lm, "_engine_spec", None)


def async_engine_of(lm: Any) -> Any:
    """The asynchronous counterpart of a model's engine, or None."""
    return getattr(lm, "_async_engine_spec", None)


def patch_parsing(wrap: Wrapper) -> None:
    """Wraps `parse` of all existing and future adapter classes, because each has its own."""

    def patch(adapter: Any) -> None:
        adapter.parse = wrap(adapter.parse)

    _patch_subclasses(dspy.Adapter, patch)


def keep_converters() -> None:
    """Lets DSPy's adapters make one converter of a plain type instead of one for each value of a prompt, which was most
    of the time of rendering demonstrations."""
    if _CONVERTER.moved:
        return
    owner, name = _CONVERTER.place
    plain: Any = getattr(owner, name)
    kept = {kind: plain(kind) for kind in (str, int, float, bool, type(None), list, dict)}

    def converter(kind: Any, *args: Any, **options: Any) -> Any:
        if isinstance(kind, type) and kind in kept and not args and not options:
            return kept[kind]
        return plain(kind, *args, **options)

    setattr(owner, name, converter)


class _Bars(WeakSet[Any]):
    """The progress bars that tqdm knows, which threads may forget at any time."""

    def remove(self, item: Any) -> None:
        self.discard(item)

    def clear(self) -> None:
        with tqdm.get_lock():
            super().clear()


def guard_bars() -> None:
    """Lets programs that call `dspy.Parallel` run in several threads.

    Each call empties the set of tqdm's bars, which all threads share. A bar that another thread was making at that
    moment raises KeyError or RuntimeError, and its program failed.
    """
    tqdm._instances = _Bars(tqdm._instances)


def with_callbacks(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method of which DSPy's callbacks are told; the method itself if that has moved."""
    return function if _CALLBACKS.moved else getattr(*_CALLBACKS.place)(function)


_CALLBACKS = Part("dspy.utils.callback", "with_callbacks", ("fn",))
_TYPE_SAFE = Part("dspy.clients.typesafe", "TypeSafe")
_BACKEND = Part("dspy.clients.backend_selection", "select_backend", ("lm",))
_CONVERTER = Part("dspy.adapters.utils", "TypeAdapter", ("type",))
_BY_MESSAGES = Part("dspy.clients._deprecation", "adapter_message_call", ("lm", "messages"))
_ADAPTIVE = Part("dspy._vendor.lm15.providers.anthropic", "anthropic_adaptive_class")
EVALUATE = Part("dspy.evaluate.evaluate", "Evaluate.__call__", ("program", "metric", "devset"))
EXECUTOR = Part(
    "dspy.utils.parallelizer", "ParallelExecutor.__init__", ("timeout", "max_errors", "disable_progress_bar")
)
EXECUTE = Part("dspy.utils.parallelizer", "ParallelExecutor.execute", ("function", "data"))
SET_LM = Part("dspy.primitives.module", "Module.set_lm", ("lm",))
SIMBA_MODELS = Part("dspy.teleprompt.simba", "prepare_models_for_resampling", ("program", "n"))
SIMBA_PROGRAM = Part("dspy.teleprompt.simba", "wrap_program", ("program", "metric"))
MIPRO_CANDIDATE = Part(
    "dspy.teleprompt.mipro_optimizer_v2",
    "eval_candidate_program",
    ("batch_size", "trainset", "candidate_program", "evaluate"),
)
GEPA_BATCH = Part("dspy.teleprompt.gepa.gepa_utils", "DspyAdapter.evaluate", ("batch",))
GEPA_TEXTS = Part("dspy.teleprompt.gepa.gepa_utils", "DspyAdapter.propose_new_texts", ("candidate",))
_OPTUNA_OBJECTIVE = Part("dspy.teleprompt.teleprompt_optuna", "BootstrapFewShotWithOptuna.objective", ("trial",))
_RULES = Part("dspy.teleprompt.infer_rules", "InferRules.update_program_instructions", ("natural_language_rules",))
BOOTSTRAP = Part("dspy.teleprompt.bootstrap", "BootstrapFewShot._bootstrap")
_NEEDED: dict[str, tuple[Part, ...]] = {
    "LabeledFewShot": (),
    "BootstrapFewShot": (BOOTSTRAP,),
    "BootstrapFewShotWithRandomSearch": (EVALUATE,),
    "BootstrapFewShotWithOptuna": (
        EVALUATE,
        _OPTUNA_OBJECTIVE,
    ),
    "COPRO": (EVALUATE,),
    "MIPROv2": (EVALUATE, MIPRO_CANDIDATE),
    "SIMBA": (EVALUATE, EXECUTOR, EXECUTE, SIMBA_PROGRAM),
    "GEPA": (EVALUATE, GEPA_BATCH, GEPA_TEXTS),
    "InferRules": (
        EVALUATE,
        _RULES,
    ),
}


def moved_parts(optimizer: str) -> list[Part]:
    """The parts of DSPy that an optimizer needs, by the name of its class, and that have moved: the class or others."""
    if optimizer not in _NEEDED:
        return []
    return [part for part in (Part("dspy", optimizer), *_NEEDED[optimizer]) if part.moved]


def optimizer_class(name: str) -> Any:
    """A class of DSPy's optimizers; a class without anything if it is gone, which `moved_parts` says."""
    return getattr(dspy, name, type(name, (), {}))


def patch_parts(*wrappers: tuple[Part, Wrapper]) -> None:
    """Wraps parts of DSPy. Those that have moved are left out: the optimizers that need them are refused."""
    for part, wrap in wrappers:
        if not part.moved:
            owner, name = part.place
            setattr(owner, name, wrap(getattr(owner, name)))


@contextmanager
def patched_parts(*wrappers: tuple[Part, Wrapper]) -> Iterator[None]:
    """Inside, the parts are wrapped. One context at a time."""
    places = [part.place for part, _ in wrappers if not part.moved]
    originals = [(owner, name, getattr(owner, name)) for owner, name in places]
    patch_parts(*wrappers)
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
