"""llama.cpp in process, behind DSPy's engine contract.

One server per model file and process; copies of a language model share it. Concurrent calls use the server's slots and
reuse each other's prompt prefixes. Constrained output: llama.cpp compiles JSON schemas to grammars; a schema marked
`LINES` becomes a grammar of `name: value` lines, for the prompt format `lean`.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from assay.errors import LoopStopped, MissingExtra, ModelError
from assay.models.codec import pruned_reply, text_of
from assay.models.loops import Loop, LoopDetector, find_final_loop
from assay.models.lora import Adapter, with_adapters, write_merged
from assay.models.registry import EmbeddedModel, find_model, model_home, spec
from assay.models.scope import current_field
from assay.models.thinking import Thinking, llama_request, template_thinks
from assay.support.sections import LINES

if TYPE_CHECKING:
    from dspy import lm15


# -- Tool calls that a model wrote as text: small models omit the marks by which llama.cpp detects tool calls.


_SPACE = re.compile(r"\s*")
_MARKS = re.compile(r"</?tool_call>|```(?:json)?|\[\[ ## \w+ ## \]\]")  # what models and prompts write around an object


def with_tool_calls(reply: dict[str, Any], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The reply with tool calls, if its whole text is JSON objects that name an offered tool and its arguments."""
    message = ((reply.get("choices") or [{}])[0] or {}).get("message") or {}
    text = message.get("content")
    if message.get("tool_calls") or not isinstance(text, str):
        return reply
    names = {str(tool.get("function", {}).get("name")) for tool in tools}
    parsed = [_call(value, names) for value in _objects(_MARKS.sub(" ", text))]
    if not parsed or None in parsed:
        return reply
    calls = [
        {
            "id": f"call_{at}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for at, (name, arguments) in enumerate(call for call in parsed if call is not None)
    ]
    choice = {
        **reply["choices"][0],
        "finish_reason": "tool_calls",
        "message": {**message, "content": None, "tool_calls": calls},
    }
    return {**reply, "choices": [choice, *reply["choices"][1:]]}


def _objects(text: str) -> list[Any]:
    """The JSON values that a text consists of; empty if it contains anything else."""
    values, at, decoder = list[Any](), 0, json.JSONDecoder()
    text = text.strip()
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        values.append(value)
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it always matches
    return values


def _call(value: Any, names: set[str]) -> tuple[str, dict[str, Any]] | None:
    if (
        not isinstance(value, dict)
        or value.get("name") not in names
        or not set(value) <= {"name", "arguments", "parameters"}
    ):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    return (str(value["name"]), arguments) if isinstance(arguments, dict) else None


# -- Watches an embedded model's generation as it is made, and stops it if it repeats itself.
#
# The reply is assembled from its chunks. Text, usage and finish reason are those of an unwatched call, but llama.cpp
# reports no log-probability for the token that ends the turn, and none for tokens whose text it holds back for a
# moment: their ids are then unknown.


LOOP = "assay_loop"  # key of a stopped reply: the loop's kind, and the words it repeated


def watched_reply(
    generate: Callable[[dict[str, Any], Callable[[Any], bool]], Any], body: Mapping[str, Any]
) -> dict[str, Any]:
    """The raw reply to a chat request, cut off where the text began to repeat itself for too long.

    Args:
        generate: llama.cpp's in-process chat handler: it calls back with each chunk, and stops if that returns True.
    """
    chunks: list[dict[str, Any]] = []
    detector = LoopDetector()

    def on_chunk(chunk: Any) -> bool:
        chunk = json.loads(chunk) if isinstance(chunk, str | bytes) else chunk
        for part in chunk if isinstance(chunk, list) else [chunk]:
            chunks.append(part)
            for choice in part.get("choices") or ():
                delta = choice.get("delta") or {}
                detector.add(str(delta.get("content") or delta.get("reasoning_content") or ""))
        return detector.loop is not None

    streaming = {**body, "stream": True, "stream_options": {"include_usage": True}}
    generate(streaming, on_chunk)
    failed = next((chunk for chunk in chunks if "choices" not in chunk), None)
    return failed if failed is not None else _assembled(chunks, detector.loop)


def _assembled(chunks: list[dict[str, Any]], loop: Loop | None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    tokens: list[Any] = []
    reply: dict[str, Any] = {}
    reason = None
    for chunk in chunks:
        reply |= {key: value for key, value in chunk.items() if key != "choices"}
        for choice in chunk.get("choices") or ():
            for name in ("content", "reasoning_content"):
                if (text := (choice.get("delta") or {}).get(name)) is not None:
                    message[name] = message.get(name, "") + text
            tokens += ((choice.get("logprobs") or {}).get("content")) or []
            reason = choice.get("finish_reason") or reason
    choice = {"index": 0, "finish_reason": "length" if loop else reason, "message": message}
    reply |= {"object": "chat.completion", "choices": [{**choice, "logprobs": {"content": tokens}}]}
    if loop is not None:  # stopped before llama.cpp reported the usage
        reply[LOOP] = _described(loop)
        reply["usage"] = {"completion_tokens": len(tokens), **(reply.get("usage") or {})}
    return reply


def stopped_loop(response: "lm15.Response | None", message: str | None = None) -> LoopStopped | None:
    """The error of an answer that ended in a loop: stopped there, or cut by its limit while it repeated itself.

    Args:
        message: of the error if it is known, as for an answer from the response cache.
    """
    if response is None:
        return None
    text = text_of(response)
    if message is not None:
        return LoopStopped(message, text=text)
    raw = response.provider_data
    stopped = raw.get(LOOP) if isinstance(raw, Mapping) else None
    if stopped is None and response.finish_reason == "length":
        thought = "".join(str(getattr(part, "text", "")) for part in response.message.parts if part.type == "thinking")
        loop = find_final_loop(text) or find_final_loop(thought)
        stopped = None if loop is None else _described(loop)
    if not isinstance(stopped, Mapping):
        return None
    tokens = response.usage.output_tokens
    after = "" if tokens is None else f" after {tokens} tokens"
    return LoopStopped(
        f"the model repeated itself ({stopped['kind']}, from word {stopped['start'] + 1} on) and ended{after}",
        text=text,
    )


def _described(loop: Loop) -> dict[str, Any]:
    return {"kind": loop.kind, "period": loop.period, "start": loop.start, "words": loop.repeated}


_SLOTS = 8  # more than the number of concurrent calls: each predictor of a program keeps its own prompt prefix
_PROMPT_CACHE_MIB = 256  # prompts cached outside the slots; llama.cpp's default is 8 GiB, and is used up
# by default llama.cpp samples from the 40 likeliest tokens, of those with 0.05 times the first one's probability
_UNTRUNCATED = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
_WATCHED = 64  # a shorter answer has too few words for a loop
_CONTEXT = 16384  # tokens shared by all slots; 22 kB of cache per token for SmolLM2-135M

_MERGED = 6  # merged models stored on disk, 145 MB each for SmolLM2-135M
_LOADED = 2  # of those, models held in memory: up to a gigabyte each after use

_servers: dict[Path, Any] = {}  # merged models are in order of their last use
_published: set[Path] = set()  # files whose server address was returned by `server_url`: these stay loaded
_servers_lock = threading.Lock()


def idle_threads() -> int:
    """Threads for the server: the number of idle cores, at least 1, at most 8. `ASSAY_THREADS` overrides it.

    Two threads on two busy cores wait for each other at every layer and can be ten times slower than one.
    """
    if chosen := os.environ.get("ASSAY_THREADS"):
        return max(1, int(chosen))
    busy = min(busy_cores(0.1) for _ in range(3))  # the minimum ignores short peaks of load
    return max(1, min(8, round(cores() - busy)))


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def busy_cores(window_s: float) -> float:
    """Mean number of busy cores of the machine over `window_s`; 0 where /proc/stat cannot be read."""

    def read() -> tuple[float, float] | None:
        try:
            fields = [float(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            return None
        return sum(fields), fields[3] + fields[4]  # total, idle + iowait

    before = read()
    if before is None:
        return 0.0
    time.sleep(window_s)
    after = read()
    if after is None or after[0] <= before[0]:
        return 0.0
    return (1 - (after[1] - before[1]) / (after[0] - before[0])) * (os.cpu_count() or 1)


def _server(path: Path) -> Any:
    with _servers_lock:
        if path not in _servers:
            # By default, threads that wait for each other spin for milliseconds: two such processes on two cores took
            # over 7 s per call, with this 2.1 s, and one process alone 0.8 s either way. Read when the library loads.
            os.environ.setdefault("GOMP_SPINCOUNT", "1000")
            try:
                import xllamacpp
            except ImportError as error:
                raise MissingExtra("xllamacpp", "embedded") from error
            params = xllamacpp.CommonParams()
            params.model.path = str(path)
            params.n_ctx, params.n_parallel, params.kv_unified = _CONTEXT, _SLOTS, True
            params.cpuparams.n_threads = params.cpuparams_batch.n_threads = idle_threads()
            params.cpuparams.poll = params.cpuparams_batch.poll = 0  # sleep, do not spin: spinning starves other work
            params.cache_ram_mib = _PROMPT_CACHE_MIB
            params.verbosity = -1
            try:
                _servers[path] = xllamacpp.Server(params)
            except Exception as error:
                raise ModelError(f"llama.cpp cannot load {path}: {error}") from error
        if path.parent == _merged_home():
            _servers[path] = _servers.pop(path)
            merged = [file for file in _servers if file.parent == path.parent and file not in _published]
            for old in merged[:-_LOADED]:
                del _servers[old]  # a call in flight keeps a reference until it has its answer
        return _servers[path]


def _merged_home() -> Path:
    return model_home() / "merged"


def _merged(base: EmbeddedModel, adapters: tuple[Adapter, ...]) -> Path:
    """File of the base model with the adapters merged in, made on first use; least recently used files are removed."""
    path = find_model(base.name)
    if not adapters:
        return path
    hashes = ":".join([base.sha256, *(adapter.sha256 for adapter in adapters)])
    digest = hashlib.sha256(hashes.encode()).hexdigest()[:24]
    target = _merged_home() / f"{base.name}-{digest}.gguf"
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / ".lock"):
        if not target.is_file():
            if shutil.disk_usage(target.parent).free < 4 * path.stat().st_size:
                raise ModelError(
                    f"{target.parent} has too little free space for {base.name} with its adapters: "
                    "free some, or set ASSAY_HOME to another folder"
                )
            write_merged(path, [adapter.gguf for adapter in adapters], target)
        os.utime(target)
        for old in sorted(target.parent.glob("*.gguf"), key=lambda file: file.stat().st_mtime)[:-_MERGED]:
            old.unlink(missing_ok=True)
    return target


def loaded_models() -> list[Path]:
    """Files of the models in memory, least recently used first; without those that `server_url` made public."""
    with _servers_lock:
        return [path for path in _servers if path not in _published]


def unload(path: Path) -> None:
    """Frees the memory of a model once its calls have ended. The next call loads it again."""
    with _servers_lock:
        _servers.pop(path, None)


def server_url(name: str) -> str:
    """Loopback address of the model's OpenAI-compatible HTTP server (llama.cpp's own). The model stays loaded."""
    base, adapters = with_adapters(name)
    path = _merged(spec(base), adapters)
    _published.add(path)
    return str(_server(path).listening_address)


class LlamaBackend:
    """Backend that completes a `dspy.lm15.Request` with an embedded model.

    Samples as llama.cpp does by default: from the 40 likeliest tokens, of those with at least 0.05 times the
    probability of the first. With `top_p=1` it samples from all tokens.
    Thread-safe: calls beyond the number of slots queue in llama.cpp.
    """

    supports_reasoning = False
    stops_loops = False  # see `get_lm`
    sampling: Mapping[str, Any] = {}  # overrides the request
    supports_response_schema = True
    supported_params = frozenset(
        {
            "temperature",
            "max_tokens",
            "top_p",
            "top_k",
            "stop",
            "seed",
            "response_format",
            "logprobs",
            "top_logprobs",
            LINES,
        }
    )
    price_usd = 0.0

    @property
    def concurrency(self) -> int:
        """Number of concurrent calls that is worthwhile: one per two cores.

        On two cores four concurrent calls took as long as sequential ones (13 s for 50). Each slot had to process every
        prompt prefix itself (51 s instead of 29 s from a cold start).
        """
        return max(1, min(_SLOTS // 2, cores() // 2))

    def __init__(self, name: str) -> None:
        if importlib.util.find_spec("xllamacpp") is None:
            raise MissingExtra("xllamacpp", "embedded")
        base, adapters = with_adapters(name)
        self.spec = spec(base)
        self._parts = adapters
        self.path = _merged(self.spec, adapters)
        self.weights = self.spec.sha256
        self.adapters = tuple(adapter.sha256 for adapter in adapters)
        self.supports_function_calling = "tools" in self.spec.chat_template
        self.thinks = template_thinks(self.spec.chat_template)

    def __deepcopy__(self, memo: object) -> "LlamaBackend":
        return self

    def _engine(self) -> Any:
        if self.path not in _servers and not self.path.is_file():  # removed because other models were merged since
            self.path = _merged(self.spec, self._parts)
        return _server(self.path)

    def with_thinking(self, request: Any, thinking: Thinking) -> Any:
        """The request with a thinking budget; see `llama_request`."""
        return llama_request(request, thinking, name=self.spec.name, thinks=self.thinks)

    def complete(self, request: Any) -> tuple[Any, float]:
        """Response and its cost in dollars (0: the model runs locally)."""
        from dspy import lm15

        from assay.models.codec import chat_body

        body = {key: value for key, value in chat_body(request).items() if value is not None}
        if "max_completion_tokens" in body:
            body.setdefault("max_tokens", body.pop("max_completion_tokens"))
        schema = _schema(body)
        if schema is not None and schema.get(LINES):
            del body["response_format"]
            body["grammar"] = lines_grammar(schema)
        body["logprobs"] = True  # every transition records token ids and behaviour log-probabilities
        requested = bool(body.get("top_logprobs"))
        body["top_logprobs"] = body.get("top_logprobs") or 1
        if body.get("top_p") == 1 and "top_k" not in body:  # top_p=1 requests the whole distribution
            body |= _UNTRUNCATED
        body |= self.sampling
        raw = self._reply(body)
        if body.get("tools"):
            raw = with_tool_calls(raw, body["tools"])
        if "choices" not in raw:
            error = raw.get("error", raw)
            details = error if isinstance(error, dict) else {"message": error}
            message = str(details.get("message", details))
            if details.get("type") == "exceed_context_size_error":  # llama.cpp's error type
                raise lm15.ContextLengthError(message)
            raise lm15.InvalidRequestError(message)
        # pruned before parsing: up to two hundred alternatives per token
        pruned_reply(raw, requested=requested, field=current_field.get())
        return lm15.response_from_openai_chat(raw, model=request.model), self.price_usd

    def _reply(self, body: dict[str, Any]) -> Any:
        """Raw reply; with `stops_loops`, that of a generation that is stopped if it repeats itself."""
        engine = self._engine()
        if self.stops_loops and not body.get("tools") and int(body.get("max_tokens") or _WATCHED) >= _WATCHED:
            reply = watched_reply(engine.handle_chat_completions, body)
            if LOOP in reply:  # llama.cpp reports the usage only at the end
                prompt = self.post("/apply-template", {"messages": body["messages"]})["prompt"]
                reply["usage"]["prompt_tokens"] = self.count_tokens(prompt)
            return reply
        raw = engine.handle_chat_completions(body)
        return json.loads(raw) if isinstance(raw, str | bytes) else raw

    def count_tokens(self, text: str) -> int:
        """Number of tokens of `text` by the model's own tokenizer."""
        return len(self.post("/tokenize", {"content": text})["tokens"])

    def post(self, route: str, body: dict[str, Any]) -> Any:
        """JSON reply of llama.cpp's HTTP server to a POST request."""
        engine = self._engine()
        request = urllib.request.Request(
            engine.listening_address + route,
            data=json.dumps(body).encode("utf-8", "replace"),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)


class PolicyBackend(LlamaBackend):
    """An embedded model in training: its last adapter changes after every step.

    Samples from the whole distribution. llama.cpp reports log-probabilities of the distribution at temperature 1,
    before a grammar is applied. They are then the log-probabilities of the behaviour policy at temperature 1. Inside
    `greedy` the likeliest token is taken.
    """

    chat_fields = frozenset({"max_tokens", "stop", "response_format", "tools", "tool_choice", "parallel_tool_calls"})

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.sampling = dict(_UNTRUNCATED)
        base, adapters = with_adapters(name)
        self.base, self._ggufs = find_model(base), [adapter.gguf for adapter in adapters]
        self._before, self._before_sha = self.path, self.adapters

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """llama.cpp's reply to a chat request, with token ids and logprobs; instead of choices it may have an error."""
        return dict(self._reply({**body, "stream": False, "logprobs": True, "top_logprobs": 1, **self.sampling}))

    def swap(self, adapter: Path | None, folder: Path | None = None) -> None:
        """Serve the model with this adapter from now on. No call may be in flight.

        Args:
            adapter: a GGUF file; None serves the model without an adapter in training.
            folder: folder for the merged weights while they are served.
        """
        if self.path != self._before:
            unload(self.path)
            self.path.unlink(missing_ok=True)
        self.path, self.adapters = self._before, self._before_sha
        if adapter is not None and folder is not None:
            with open(adapter, "rb") as file:
                sha = hashlib.file_digest(file, "sha256").hexdigest()
            merged = folder / f"{sha[:24]}.merged.gguf"
            write_merged(self.base, [*self._ggufs, adapter], merged, keep=True)
            self.path, self.adapters = merged, (*self._before_sha, sha)

    @contextmanager
    def greedy(self) -> Iterator[None]:
        """Inside, calls take the likeliest token."""
        before, self.sampling = self.sampling, {"temperature": 0.0}
        try:
            yield
        finally:
            self.sampling = before


def _schema(body: dict[str, Any]) -> dict[str, Any] | None:
    response_format = body.get("response_format")
    if not isinstance(response_format, dict) or response_format.get("type") != "json_schema":
        return None
    return response_format.get("json_schema", {}).get("schema")


# of patterns in a grammar: a character class, or a character that has no meaning in regular expressions
_ATOM, _TIMES = r"(?:\[(?:[^\]\\]|\\.)+\]|[A-Za-z0-9 ,:;_=/-])", r"(?:\{\d+(?:,\d+)?\}|[+*?])?"


def lines_grammar(schema: dict[str, Any]) -> str:
    """GBNF grammar for an object schema, written as one `name: value` line per property, in order, all required.

    Enums, numbers, booleans, and strings whose `pattern` is a sequence of characters and character classes with
    repetitions are constrained exactly, and so are objects and arrays. Any other value is one line of text, to be
    validated after parsing.
    """
    if any(_is_nested(value) for value in schema["properties"].values()):
        return _nested_lines_grammar(schema)
    rows = [f"{json.dumps(f'{name}: ')} {_value_rule(value)}" for name, value in schema["properties"].items()]
    # The optional last newline is needed by models trained to end a turn with one: they do not stop without it.
    return "root ::= " + ' "\\n" '.join(rows) + ' "\\n"?'


def _is_nested(schema: dict[str, Any]) -> bool:
    return schema.get("type") in ("object", "array")


def _nested_lines_grammar(schema: dict[str, Any]) -> str:
    """As `lines_grammar`, with objects and arrays as JSON on one line, in llguidance's dialect of Lark."""
    compact = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    rows, rules = [], []
    for number, (name, value) in enumerate(schema["properties"].items()):
        rows.append(f"{json.dumps(f'{name}: ', ensure_ascii=False)} v{number}")
        if _is_nested(value):
            rules.append(f"v{number}: %json {json.dumps({**value, 'x-guidance': compact}, ensure_ascii=False)}")
        elif "enum" in value or "const" in value:
            choices = value.get("enum", [value.get("const")])
            rules.append(f"v{number}: " + " | ".join(json.dumps(str(one), ensure_ascii=False) for one in choices))
        else:
            rules.append(f"v{number}: /{_line_pattern(value)}/")
    return "\n".join(["%llguidance {}", "start: " + ' "\\n" '.join(rows) + ' "\\n"?', *rules])


def _line_pattern(schema: dict[str, Any]) -> str:
    """Regular expression of a number, boolean or text on one line."""
    kinds = {"integer": "-?[0-9]{1,18}", "number": r"-?[0-9]{1,18}(\.[0-9]{1,12})?", "boolean": "(true|false)"}
    return kinds.get(schema.get("type", ""), f"[^\\n]{{1,{schema.get('maxLength', 2000)}}}")


def _value_rule(schema: dict[str, Any]) -> str:
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return "(" + " | ".join(json.dumps(str(value)) for value in values) + ")"
    kind = schema.get("type")
    if kind == "integer":
        return '"-"? [0-9]{1,18}'
    if kind == "number":
        return '"-"? [0-9]{1,18} ("." [0-9]{1,12})?'
    if kind == "boolean":
        return '("true" | "false")'
    pattern = schema.get("pattern", "")
    if re.fullmatch(rf"\^(?:{_ATOM}{_TIMES})+\$", pattern):
        return " ".join(
            f"{atom if len(atom) > 1 else json.dumps(atom)}{times}"
            for atom, times in re.findall(f"({_ATOM})({_TIMES})", pattern[1:-1])
        )
    return f"[^\\n]{{1,{schema.get('maxLength', 2000)}}}"
