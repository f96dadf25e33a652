"""Chat templates: finds a model's template on this machine, and renders messages with it as transformers does.

Loads no weights and downloads nothing. A template is untrusted code by the model's author: it runs in Jinja's sandbox.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from assay.errors import AssayError, ModelError
from assay.models.registry import EMBEDDED, FILE_PREFIX, spec

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as TRL finds it
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class TemplateRefused(AssayError, ValueError):
    """The template raised an error for these messages, or is not valid Jinja."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template and its special tokens. `source` is the place where it was found."""

    text: str
    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)

    @property
    def marks_generation(self) -> bool:
        """Whether the template marks assistant text (`{% generation %}`), as a loss on assistant tokens alone needs."""
        return _GENERATION.search(self.text) is not None

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), generate: bool = False
    ) -> str:
        """Prompt text for a list of messages.

        Args:
            tools: definitions in OpenAI's format.
            generate: append the start of an assistant turn.
        Raises:
            TemplateRefused: the template raised an error or is not valid.
        """
        try:
            compiled = _compiled(self.text)
            return str(
                compiled.render(messages=messages, tools=tools or None, add_generation_prompt=generate, **self.tokens)
            )
        except Exception as error:  # templates are code, and may raise anything
            raise TemplateRefused(f"{str(error) or type(error).__name__}"[:200]) from error


@lru_cache(maxsize=8)
def _compiled(text: str) -> Any:
    """Compile as transformers does (`transformers.utils.chat_template_utils`): settings, filters and functions."""
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

    def tojson(value: Any, **settings: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **settings})

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=refuse, strftime_now=time.strftime)
    return environment.from_string(text)


def find_template(name: str) -> ChatTemplate | None:
    """Chat template of a model that is on this machine; None if it is not, or has none.

    Args:
        name: a folder, a name on the hub (read from the local cache), `embedded/NAME`, `embedded:FILE`, or the hub name
            of an embedded model.
    Raises:
        ModelError: no embedded model has this name.
    """
    if name.startswith(FILE_PREFIX):
        return _plain(spec(name).chat_template, name)
    if name.startswith("embedded/"):
        return _plain(spec(name.partition("+")[0]).chat_template, name)
    if Path(name).is_dir():
        return _from_files(Path(name) / "chat_template.jinja", Path(name) / "tokenizer_config.json")
    template = _from_files(*(_cached(name, file) for file in ("chat_template.jinja", "tokenizer_config.json")))
    if template is None:
        embedded = next((model for model in EMBEDDED.values() if model.base_repo == name), None)
        template = _plain(embedded.chat_template, f"embedded/{embedded.name}") if embedded is not None else None
    return template


def hub_name(name: str) -> str:
    """Name by which transformers loads a model: the hub name of an embedded model, the absolute path of a folder."""
    if name.startswith("embedded/"):
        return spec(name.partition("+")[0]).base_repo or name
    return str(Path(name).absolute()) if Path(name).is_dir() else name


def template_of_tokenizer(tokenizer: Any) -> ChatTemplate | None:
    """Chat template of a transformers tokenizer; None if it has none."""
    text = tokenizer.chat_template
    text = text.get("default") if isinstance(text, dict) else text
    tokens = {name: str(value) for name in _TOKENS if (value := getattr(tokenizer, name, None)) is not None}
    return ChatTemplate(text, "the tokenizer", tokens) if isinstance(text, str) and text else None


def _plain(text: str, source: str) -> ChatTemplate | None:
    return ChatTemplate(text, source) if text else None


def _from_files(template: Path | None, config: Path | None) -> ChatTemplate | None:
    """Template from a tokenizer's files: a template file, else the configuration."""
    settings: Any = {}
    if config is not None and config.is_file():
        try:
            settings = json.loads(config.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read {config}: {error}") from error
    settings = settings if isinstance(settings, dict) else {}
    values = {name: settings.get(name) for name in _TOKENS}
    tokens = {
        name: str(value.get("content") if isinstance(value, dict) else value) for name, value in values.items() if value
    }
    if template is not None and template.is_file():
        return ChatTemplate(template.read_text(encoding="utf-8"), str(template), tokens)
    text = settings.get("chat_template")
    if isinstance(text, list):  # several named templates
        defaults = (item.get("template") for item in text if isinstance(item, dict) and item.get("name") == "default")
        text = next(defaults, None)
    return ChatTemplate(text, str(config), tokens) if isinstance(text, str) and text else None


def _cached(name: str, file: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        path = try_to_load_from_cache(name, file)
    except HFValidationError:
        return None
    return Path(path) if isinstance(path, str) else None
