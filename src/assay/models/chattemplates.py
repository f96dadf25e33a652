"""Chat templates: where a model's template is found on this machine, and rendering messages with it as transformers does.

Loads no weights and downloads nothing. A template is a program of whoever made the model: it runs in Jinja's sandbox.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from assay.errors import AssayError, ModelError
from assay.models.registry import EMBEDDED, FILE_PREFIX, spec

__all__ = ["ChatTemplate", "TemplateRefused", "find_template", "hub_name", "template_of_tokenizer"]

_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class TemplateRefused(AssayError, ValueError):
    """The template cannot render these messages: it raised an error."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template with the special tokens that it may name. `source` says where it was found."""

    text: str
    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)

    @property
    def marks_generation(self) -> bool:
        """Whether it marks what the assistant said, as a loss on assistant tokens alone needs."""
        return "endgeneration" in self.text

    def render(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), generate: bool = False) -> str:
        """The text that a model reads for these messages.

        Args:
            tools: definitions in OpenAI's form.
            generate: end with the beginning of an assistant's turn.
        Raises:
            TemplateRefused: the template raised an error, or is no template.
        """
        try:
            compiled = _compiled(self.text)
            return str(compiled.render(messages=messages, tools=tools or None, add_generation_prompt=generate, **self.tokens))
        except Exception as error:  # templates are programs, and fail in ways of their own
            raise TemplateRefused(f"{str(error) or type(error).__name__}"[:200]) from error


@lru_cache(maxsize=8)
def _compiled(text: str) -> Any:
    """As transformers compiles it (`transformers.utils.chat_template_utils`): its settings, filter, functions and `generation` tag."""
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> str:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=refuse, strftime_now=time.strftime)
    return environment.from_string(text)


def find_template(name: str) -> ChatTemplate | None:
    """The chat template of a model as it is on this machine; None where it is not, or the model has none.

    Args:
        name: a folder, a name on the hub (from the local cache), `embedded/NAME`, `embedded:FILE` or the hub's name of an embedded model.
    Raises:
        ModelError: an embedded model of that name does not exist.
    """
    if name.startswith(FILE_PREFIX):
        return _plain(spec(name).chat_template, name)
    if name.startswith("embedded/"):
        return _plain(spec(name.partition("+")[0]).chat_template, name)
    if Path(name).is_dir():
        return _of_files(Path(name) / "chat_template.jinja", Path(name) / "tokenizer_config.json")
    found = _of_files(*(_cached(name, file) for file in ("chat_template.jinja", "tokenizer_config.json")))
    if found is None:
        embedded = next((model for model in EMBEDDED.values() if model.base_repo == name), None)
        found = _plain(embedded.chat_template, f"embedded/{embedded.name}") if embedded is not None else None
    return found


def hub_name(name: str) -> str:
    """The name by which transformers loads a model: the hub's name of an embedded one, a folder's whole path."""
    if name.startswith("embedded/"):
        return spec(name.partition("+")[0]).base_repo or name
    return str(Path(name).absolute()) if Path(name).is_dir() else name


def template_of_tokenizer(tokenizer: Any) -> ChatTemplate | None:
    """The template of a tokenizer of transformers."""
    text = tokenizer.chat_template
    text = text.get("default") if isinstance(text, dict) else text
    tokens = {name: str(value) for name in _TOKENS if (value := getattr(tokenizer, name, None)) is not None}
    return ChatTemplate(text, "the tokenizer", tokens) if isinstance(text, str) and text else None


def _plain(text: str, source: str) -> ChatTemplate | None:
    return ChatTemplate(text, source) if text else None


def _of_files(template: Path | None, config: Path | None) -> ChatTemplate | None:
    """From the files of a tokenizer: the template in one of its own, or in the configuration."""
    told: Any = {}
    if config is not None and config.is_file():
        try:
            told = json.loads(config.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"{config} cannot be read: {error}") from error
    told = told if isinstance(told, dict) else {}
    given = {name: told.get(name) for name in _TOKENS}
    tokens = {name: str(value.get("content") if isinstance(value, dict) else value) for name, value in given.items() if value}
    if template is not None and template.is_file():
        return ChatTemplate(template.read_text(encoding="utf-8"), str(template), tokens)
    text = told.get("chat_template")
    if isinstance(text, list):  # several by name
        text = next((one.get("template") for one in text if isinstance(one, dict) and one.get("name") == "default"), None)
    return ChatTemplate(text, str(config), tokens) if isinstance(text, str) and text else None


def _cached(name: str, file: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(name, file)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None
