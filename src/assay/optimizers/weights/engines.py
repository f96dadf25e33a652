"""Where the policy in training answers: llama.cpp in process, its adapter swapped after every step, or the trainer's own generation in
batches (transformers on CPU and GPU, vLLM). Programs call it as any language model."""

import contextvars
import copy
import functools
import itertools
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from assay.datasets import Task
from assay.errors import Cancelled
from assay.models import LanguageModel
from assay.models.embedded import PolicyBackend
from assay.models.limits import limited
from assay.models.lm import NOT_KNOWN, lm_over
from assay.models.lora import write_gguf
from assay.optimizers.session import Session, Student

__all__ = ["Crew", "LlamaPolicy", "PolicyEngine", "Run", "TrainerPolicy", "serve"]

Run = tuple[Student, Task]
_LOOK_S = 0.1  # between looks at the clock while rollouts run


class PolicyEngine(ABC):
    """Serves a policy in training to programs. `lm` is what they are run with."""

    lm: LanguageModel
    behaviour = True  # whether its log-probabilities are those at the temperature that is trained at
    stop: threading.Event | None = None  # set by a signal
    timeout_s = float("inf")  # of a rollout
    answers_before = True  # whether it answers before a training has begun

    def work_in(self, folder: Path) -> None:  # noqa: B027
        """Takes a folder for what it keeps on disk."""

    @abstractmethod
    def sync(self, trainer: Any) -> None:
        """Serves the trainer's weights as they are now."""

    @abstractmethod
    def play(self, runs: Sequence[Run], session: Session) -> list[Any | None]:
        """Scored predictions in the order of the runs; None where one took longer than `timeout_s`.

        Raises:
            Cancelled: `stop` was set.
        """

    @abstractmethod
    def greedy(self) -> AbstractContextManager[None]:
        """Inside: the likeliest token at every place."""

    def execute(self, student: Student, tasks: Sequence[Task], session: Session) -> Iterator[tuple[Task, Any]]:
        """The engine as an executor of `assay.optimizers.evaluate`; a task whose run takes too long has no result."""
        runs = [(student, task) for task in tasks]
        found = zip(tasks, self.play(runs, session), strict=True)
        yield from ((task, prediction) for task, prediction in found if prediction is not None)

    @abstractmethod
    def before(self) -> AbstractContextManager[None]:
        """Inside: the model as it was before training."""

    @abstractmethod
    def close(self) -> None:
        """Frees what it holds."""


class Crew:
    """Calls in daemon threads, so many at a time. One that hangs keeps its thread, and nobody waits for it."""

    def __init__(self, calls: Sequence[Callable[[], Any]], size: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.left = list(reversed(list(enumerate(calls))))
        self.results: dict[int, Any] = {}
        self.errors: list[BaseException] = []
        self.began: dict[int, float] = {}
        self.given_up: set[int] = set()
        self.count = len(calls)
        self.changed = threading.Condition()
        self.size = min(size, len(calls))

    def start(self) -> None:
        for _ in range(self.size):
            self._hire()

    def _hire(self) -> None:
        threading.Thread(target=contextvars.copy_context().run, args=(self._work,), daemon=True, name="assay-rollouts").start()

    def _work(self) -> None:
        while True:
            with self.changed:
                if not self.left or self.errors:
                    return
                at, call = self.left.pop()
                self.began[at] = time.monotonic()
            _place.set(at)
            found, error = None, None
            try:
                found = call()
            except BaseException as failure:  # it belongs to whoever waits
                error = failure
            with self.changed:
                self.began.pop(at, None)
                late = at in self.given_up
                if not late:
                    if error is not None:
                        self.errors.append(error)
                    self.results[at] = found
                self.changed.notify_all()
            if late:
                return

    @property
    def active(self) -> int:
        """Runs at work, those given up left out."""
        return len(self.began)

    @property
    def done(self) -> bool:
        return bool(self.errors) or len(self.results) == self.count

    def look(self, stop: threading.Event | None) -> None:
        """Gives up what takes too long, and raises what a run raised. Call it with `changed` held."""
        if stop is not None and stop.is_set():
            self.left.clear()
            raise Cancelled("stopped by a signal")
        if self.errors:
            raise self.errors[0]
        now = time.monotonic()
        for at in [at for at, since in self.began.items() if now - since > self.timeout_s]:
            del self.began[at]
            self.given_up.add(at)
            self.results[at] = None
            self._hire()

    def waited(self, seconds: float) -> None:
        """Seconds that all of them waited for an engine count for none. Call it with `changed` held."""
        self.began = {at: since + seconds for at, since in self.began.items()}

    def ordered(self) -> list[Any | None]:
        return [self.results[at] for at in range(self.count)]

    def finished(self, stop: threading.Event | None) -> list[Any | None]:
        """Starts all and waits: what they gave, in their order, None where one took longer than `timeout_s`.

        Raises:
            Cancelled: `stop` was set.
        """
        self.start()
        with self.changed:
            while True:
                self.look(stop)
                if self.done:
                    return self.ordered()
                self.changed.wait(_LOOK_S)


_place: contextvars.ContextVar[int] = contextvars.ContextVar("assay_place", default=0)


def _calls(runs: Sequence[Run], session: Session) -> list[Callable[[], Any]]:
    def call(student: Student, task: Task) -> Any:
        with session.context(), limited(None):  # the crew has a limit of its own, which leaves out what it waits for the engine
            return student(**dict(task.inputs))

    return [functools.partial(call, *run) for run in runs]


def serve(trainer: Any, backend: PolicyBackend, folder: Path, number: int) -> Path:
    """Serves the trainer's weights as they are from now on; gives the adapter's GGUF file in the folder."""
    trainer.accelerator.unwrap_model(trainer.model).save_pretrained(str(folder / "peft"))
    out = folder / f"{number}.gguf"
    write_gguf(folder / "peft", backend.base, out)
    backend.swap(out, folder)
    return out


class LlamaPolicy(PolicyEngine):
    """An embedded model, in process. Its folder holds the adapter that is served now."""

    def __init__(self, name: str, *, temperature: float = 1.0, max_completion: int = 128, seed: int = 0) -> None:
        self.backend, self._numbers = PolicyBackend(name), itertools.count()
        self.lm = lm_over(self.backend, name, max_tokens=max_completion, seed=seed).copy(top_p=1.0)
        self.behaviour = temperature == 1.0
        self._served: Path | None = None

    def work_in(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder = folder

    def sync(self, trainer: Any) -> None:
        out = serve(trainer, self.backend, self.folder, next(self._numbers))
        if self._served is not None:
            self._served.unlink(missing_ok=True)
        self._served = out

    def play(self, runs: Sequence[Run], session: Session) -> list[Any | None]:
        return Crew(_calls(runs, session), session.threads, self.timeout_s).finished(self.stop)

    def greedy(self) -> AbstractContextManager[None]:
        return self.backend.greedy()

    @contextmanager
    def before(self) -> Iterator[None]:
        self.backend.swap(None)
        try:
            yield
        finally:
            self.backend.swap(self._served, self.folder)

    def close(self) -> None:
        self.backend.swap(None)
        if self._served is not None:
            self._served.unlink(missing_ok=True)


class TrainerPolicy(PolicyEngine):
    """Any causal model of transformers, answering through the trainer's own generation: transformers or vLLM, as the trainer is set.

    All rollouts run at once; whenever each of them waits for an answer, the questions are one batch. Every process takes part in every
    batch, with nothing to ask where its rollouts have ended.
    """

    def __init__(self, name: str, *, max_completion: int = 128) -> None:
        self.backend = _Desk(name)
        self.lm = lm_over(self.backend, name, max_tokens=max_completion)
        self.behaviour, self.answers_before = True, False
        self.trainer: Any = None

    def sync(self, trainer: Any) -> None:
        self.trainer, self.backend.tokenizer = trainer, trainer._tokenizer
        trainer._last_loaded_step = -1  # so that TRL brings vLLM's weights up to date before it generates

    def play(self, runs: Sequence[Run], session: Session) -> list[Any | None]:
        from assay.optimizers.weights.trainer import over_ranks

        crew, desk = Crew(_calls(runs, session), len(runs), self.timeout_s), self.backend
        desk.open(crew)
        crew.start()
        while True:
            with crew.changed:
                while not crew.done and len(desk.waiting) < crew.active + len(crew.left):
                    crew.look(self.stop)
                    crew.changed.wait(_LOOK_S)
                crew.look(self.stop)
                asked = desk.taken()
            counts = over_ranks([len(asked)])
            if not any(counts):
                if all(over_ranks([crew.done])):
                    return crew.ordered()
                continue
            clock, most = time.monotonic(), max(counts) if self.trainer.use_vllm else max(1, len(asked))
            # TRL asks vLLM for all processes at once, and shares the answers out equally: each must ask as many
            idle = [[self.trainer._tokenizer.eos_token_id]] * (most - len(asked))
            ids, logprobs = self.trainer._generate_single_turn([*(question.prompt for question in asked), *idle], None, {}, 1)
            with crew.changed:
                crew.waited(time.monotonic() - clock)
                for at, question in enumerate(asked):
                    question.answer = (ids[at], None if logprobs is None else logprobs[at])
                crew.changed.notify_all()

    @contextmanager
    def greedy(self) -> Iterator[None]:
        trainer = self.trainer
        if trainer.use_vllm:
            engine = trainer.vllm_generation
            before, engine.temperature = engine.temperature, 0.0
            try:
                yield
            finally:
                engine.temperature = before
            return
        before, trainer.generation_config = trainer.generation_config, copy.deepcopy(trainer.generation_config)
        kwargs, trainer.generation_kwargs = trainer.generation_kwargs, {**trainer.generation_kwargs, "do_sample": False}
        trainer.generation_config.update(do_sample=False, temperature=None, top_k=None, top_p=None)
        try:
            yield
        finally:
            trainer.generation_config, trainer.generation_kwargs = before, kwargs

    @contextmanager
    def before(self) -> Iterator[None]:
        """The adapter scaled to nothing: one that was merely disabled would still be merged into what vLLM is given."""
        from peft.tuners.lora import LoraLayer

        layers = [part for part in self.trainer.accelerator.unwrap_model(self.trainer.model).modules() if isinstance(part, LoraLayer)]
        scales = [dict(layer.scaling) for layer in layers]
        for layer in layers:
            layer.scaling = dict.fromkeys(layer.scaling, 0.0)
        self.sync(self.trainer)
        try:
            yield
        finally:
            for layer, scale in zip(layers, scales, strict=True):
                layer.scaling = scale
            self.sync(self.trainer)

    def close(self) -> None:
        self.trainer = None


class _Question:
    def __init__(self, place: int, prompt: list[int]) -> None:
        self.place, self.prompt = place, prompt
        self.answer: tuple[list[int], list[float] | None] | None = None


class _Desk:
    """An engine's backend where questions wait until the trainer answers all at once."""

    weights = ""
    adapters: tuple[str, ...] = ()
    concurrency = 1024
    supports_function_calling = supports_reasoning = supports_response_schema = False
    supported_params = frozenset({"max_tokens", "temperature"})
    price_usd = 0.0

    def __init__(self, name: str) -> None:
        self.name, self.waiting = name, list[_Question]()
        self.tokenizer: Any = None
        self.crew: Any = None

    def __deepcopy__(self, memo: object) -> "_Desk":
        return self

    def open(self, crew: Crew) -> None:
        self.crew, self.waiting = crew, []

    def taken(self) -> list[_Question]:
        """What waits, in the order of the runs."""
        found, self.waiting = sorted(self.waiting, key=lambda question: question.place), []
        return found

    def complete(self, request: Any) -> tuple[Any, float]:
        from dspy.clients.lm15_boundary import request_kwargs, response_value

        body, crew, tokenizer = request_kwargs(request, "chat"), self.crew, self.tokenizer
        prompt = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, tokenize=True, return_dict=False)
        question = _Question(_place.get(), list(prompt))
        with crew.changed:
            self.waiting.append(question)
            crew.changed.notify_all()
            while question.answer is None:
                if crew.errors or _place.get() in crew.given_up:
                    raise Cancelled("its rollout was given up")
                crew.changed.wait(1.0)
        ids, logprobs = question.answer
        eos = tokenizer.eos_token_id
        ended = bool(ids) and ids[-1] in (eos, tokenizer.pad_token_id)
        content = [
            {"token": tokenizer.decode([token]), "id": token, "logprob": NOT_KNOWN if logprobs is None else float(logprobs[at])}
            for at, token in enumerate(ids)
        ]
        raw = {
            "id": "", "object": "chat.completion", "created": 0, "model": self.name,
            "choices": [{
                "index": 0, "finish_reason": "stop" if ended else "length", "logprobs": {"content": content},
                "message": {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)},
            }],
            "usage": {"prompt_tokens": len(question.prompt), "completion_tokens": len(ids), "total_tokens": len(question.prompt) + len(ids)},
        }  # fmt: skip
        return response_value(raw, "chat", request), self.price_usd

    def count_tokens(self, text: str) -> int:
        return len(self.tokenizer(text)["input_ids"])
