"""Inference engines of a policy in training. Programs call them as any language model.

`LlamaPolicy` runs llama.cpp in this process and swaps the adapter after every step. `TrainerPolicy` uses the batched
generation of the trainer (transformers on CPU or GPU, or vLLM).
"""

import contextvars
import copy
import functools
import itertools
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from assay.datasets import Task
from assay.errors import Cancelled
from assay.evaluation.session import RecordedProgram, Session
from assay.models import LanguageModel
from assay.models.embedded import PolicyBackend
from assay.models.limits import giving_up, limited
from assay.models.lm import lm_over
from assay.models.lora import write_gguf
from assay.models.recording import NOT_KNOWN
from assay.programs.foreign_agent import ForeignAgent
from assay.programs.runners import RunnerLost
from assay.rubrics.scoring import ScoredRun

# -- Runs rollouts in threads with a time limit. Does not train, and knows no engine.


Run = tuple[RecordedProgram, Task]
CHECK_S = 0.1  # interval of the timeout checks while rollouts run
_ATTEMPTS = 3  # runs of a task whose runner is lost each time

place_in_pool: contextvars.ContextVar[int] = contextvars.ContextVar("assay_place", default=0)


class TimeoutPool:
    """Runs calls in at most `size` daemon threads at a time.

    A call that exceeds `timeout_s` is abandoned: it keeps its thread, and a new thread takes its place.
    """

    def __init__(self, calls: Sequence[Callable[[], Any]], size: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.queued = list(reversed(list(enumerate(calls))))
        self.results: dict[int, Any] = {}
        self.errors: list[BaseException] = []
        self.began: dict[int, float] = {}
        self.abandoned: set[int] = set()
        self.count = len(calls)
        self.changed = threading.Condition()
        self.size = min(size, len(calls))

    def start(self) -> None:
        for _ in range(self.size):
            self._hire()

    def _hire(self) -> None:
        threading.Thread(
            target=contextvars.copy_context().run, args=(self._work,), daemon=True, name="assay-rollouts"
        ).start()

    def _work(self) -> None:
        while True:
            with self.changed:
                if not self.queued or self.errors:
                    return
                at, call = self.queued.pop()
                self.began[at] = time.monotonic()
            place_in_pool.set(at)
            result, error = None, None
            try:
                with giving_up(lambda at=at: self.timeout_s if at in self.abandoned else None):  # type: ignore[misc]
                    result = call()
            except BaseException as failure:  # raised again in the waiting thread, by `check_calls`
                error = failure
            with self.changed:
                self.began.pop(at, None)
                late = at in self.abandoned
                if not late:
                    if error is not None:
                        self.errors.append(error)
                    self.results[at] = result
                self.changed.notify_all()
            if late:
                return

    @property
    def active(self) -> int:
        """Number of running calls, without the abandoned ones."""
        return len(self.began)

    @property
    def done(self) -> bool:
        return bool(self.errors) or len(self.results) == self.count

    def check_calls(self, stop: threading.Event | None) -> None:
        """Abandons calls that exceed the limit; raises the error of a failed call. Call it with `changed` held."""
        if stop is not None and stop.is_set():
            self.queued.clear()
            raise Cancelled("by a signal")
        if self.errors:
            raise self.errors[0]
        now = time.monotonic()
        for at in [at for at, since in self.began.items() if now - since > self.timeout_s]:
            del self.began[at]
            self.abandoned.add(at)
            self.results[at] = None
            self._hire()

    def waited(self, seconds: float) -> None:
        """Excludes seconds spent waiting for the engine from all time limits. Call it with `changed` held."""
        self.began = {at: since + seconds for at, since in self.began.items()}

    def ordered(self) -> list[Any | None]:
        return [self.results[at] for at in range(self.count)]

    def finished(self, stop: threading.Event | None) -> list[Any | None]:
        """Runs all calls. Returns their results in order; None for a call that took longer than `timeout_s`.

        Raises:
            Cancelled: `stop` was set.
        """
        self.start()
        with self.changed:
            while True:
                self.check_calls(stop)
                if self.done:
                    return self.ordered()
                self.changed.wait(CHECK_S)


def calls_of(runs: Sequence[Run], session: Session) -> list[Callable[[], Any]]:
    """The runs as calls. A run whose runner is lost is made again, as another rollout."""

    def call(recorded: RecordedProgram, task: Task) -> Any:
        # no limit here: the pool has its own, which excludes the time spent waiting for the engine
        with session.context(), limited(None):
            for _ in range(_ATTEMPTS):
                run = recorded.run(task)
                if not isinstance(run.error, RunnerLost):
                    break
            return run

    return [functools.partial(call, *run) for run in runs]


# -- Engines.


# A rollout may wait for something else than an answer, such as a free runner for an agent of another process, or a task
# that runs alone: the requests of the others are then answered without it.
_PATIENCE_S = 0.5


class PolicyEngine(ABC):
    """Serves a policy in training to programs, which run with `lm`."""

    lm: LanguageModel
    behaviour = True  # whether its log-probabilities are those at the training temperature
    stop: threading.Event | None = None  # set by a signal
    timeout_s = float("inf")  # limit of one rollout
    answers_before = True  # whether it can answer before the training starts

    def work_in(self, folder: Path) -> None:  # noqa: B027
        """Sets the folder for its files."""

    @abstractmethod
    def sync(self, trainer: Any) -> None:
        """Serves the current weights of the trainer."""

    @abstractmethod
    def play(self, runs: Sequence[Run], session: Session) -> list[ScoredRun | None]:
        """The scored runs, in their order; None where one took longer than `timeout_s`.

        Raises:
            Cancelled: `stop` was set.
        """

    @abstractmethod
    def greedy(self) -> AbstractContextManager[None]:
        """Inside: greedy decoding."""

    def execute(
        self, recorded: RecordedProgram, tasks: Sequence[Task], session: Session
    ) -> Iterator[tuple[Task, ScoredRun]]:
        """Executor for `assay.evaluation.evaluate`; a task whose run exceeds `timeout_s` has no result."""
        runs = [(recorded, task) for task in tasks]
        results = zip(tasks, self.play(runs, session), strict=True)
        yield from ((task, run) for task, run in results if run is not None)

    @abstractmethod
    def before(self) -> AbstractContextManager[None]:
        """Inside: the model as it was before training."""

    @abstractmethod
    def close(self) -> None:
        """Releases the engine's resources."""


def serve(trainer: Any, backend: PolicyBackend, folder: Path, number: int) -> Path:
    """Serves the current weights of the trainer. Returns the adapter's GGUF file in the folder."""
    trainer.accelerator.unwrap_model(trainer.model).save_pretrained(str(folder / "peft"))
    out = folder / f"{number}.gguf"
    write_gguf(folder / "peft", backend.base, out)
    backend.swap(out, folder)
    return out


class LlamaPolicy(PolicyEngine):
    """An embedded model in this process. Its folder holds the adapter that is served."""

    def __init__(self, name: str, *, temperature: float = 1.0, max_completion: int = 128, seed: int = 0) -> None:
        self.backend, self._numbers = PolicyBackend(name), itertools.count()
        self.lm = lm_over(self.backend, name, max_tokens=max_completion, seed=seed).copy(top_p=1.0)
        self.behaviour = temperature == 1.0
        self._served: Path | None = None

    def work_in(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def sync(self, trainer: Any) -> None:
        out = serve(trainer, self.backend, self.folder, next(self._numbers))
        if self._served is not None:
            self._served.unlink(missing_ok=True)
        self._served = out

    def play(self, runs: Sequence[Run], session: Session) -> list[ScoredRun | None]:
        return TimeoutPool(calls_of(runs, session), session.threads, self.timeout_s).finished(self.stop)

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
    """Any causal model of transformers, with the generation of the trainer: transformers or vLLM, by its settings.

    All rollouts run at once. When every running rollout waits for an answer, their requests become one batch; where not
    all may run at once (agents in other processes, tasks that run alone after a death), also when no other request
    comes for a moment. Every process joins every batch, with no requests once its rollouts have ended.
    """

    def __init__(self, name: str, *, max_completion: int = 128) -> None:
        self.backend = _Desk(name)
        self.lm = lm_over(self.backend, name, max_tokens=max_completion)
        self.behaviour, self.answers_before = True, False
        self.trainer: Any = None

    def sync(self, trainer: Any) -> None:
        self.trainer, self.backend.tokenizer = trainer, trainer._tokenizer
        # a chat model may end with another token than its tokenizer's: Gemma's <end_of_turn>, Llama's <|eot_id|>
        self.backend.ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
        trainer._last_loaded_step = -1  # makes TRL update vLLM's weights before it generates

    def play(self, runs: Sequence[Run], session: Session) -> list[ScoredRun | None]:
        from assay.optimizers.finetuning.trl_trainer import over_ranks

        pool, desk = TimeoutPool(calls_of(runs, session), len(runs), self.timeout_s), self.backend
        foreign = any(isinstance(recorded.program, ForeignAgent) for recorded, _ in runs)
        desk.patience_s = _PATIENCE_S if foreign or session.deaths.has_suspects else math.inf
        desk.open(pool)
        pool.start()
        while True:
            with pool.changed:
                while not pool.done and not desk.complete_batch():
                    pool.check_calls(self.stop)
                    pool.changed.wait(CHECK_S)
                pool.check_calls(self.stop)
                requests = desk.take_requests()
            counts = over_ranks([len(requests)])
            if not any(counts):
                if all(over_ranks([pool.done])):
                    return pool.ordered()
                continue
            clock, most = time.monotonic(), max(counts) if self.trainer.use_vllm else max(1, len(requests))
            # TRL calls vLLM once for all processes and splits the answers equally: each must send as many requests
            idle = [[self.trainer._tokenizer.eos_token_id]] * (most - len(requests))
            ids, logprobs = self.trainer._generate_single_turn(
                [*(question.prompt for question in requests), *idle], None, {}, 1
            )
            with pool.changed:
                pool.waited(time.monotonic() - clock)
                for at, question in enumerate(requests):
                    question.answer = (ids[at], None if logprobs is None else logprobs[at])
                pool.changed.notify_all()

    @contextmanager
    def greedy(self) -> Iterator[None]:
        self.backend.sampling = {"temperature": 0.0}
        try:
            with self._greedy_generation():
                yield
        finally:
            self.backend.sampling = {}

    @contextmanager
    def _greedy_generation(self) -> Iterator[None]:
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
        """Inside: the adapter is scaled to 0. A disabled one would still be merged into the weights that vLLM gets."""
        from peft.tuners.lora import LoraLayer

        layers = [
            part
            for part in self.trainer.accelerator.unwrap_model(self.trainer.model).modules()
            if isinstance(part, LoraLayer)
        ]
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
        self.trainer = self.backend.pool = None  # ends a call that still waits


class _Question:
    def __init__(self, place: int, prompt: list[int]) -> None:
        self.place, self.prompt, self.came = place, prompt, time.monotonic()
        self.answer: tuple[list[int], list[float] | None] | None = None


class _Desk:
    """Backend that collects requests until the trainer answers them in one batch."""

    weights = ""
    adapters: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = {}
    chat_fields = frozenset({"max_tokens"})
    concurrency = 1024
    supports_function_calling = supports_reasoning = supports_response_schema = False
    supported_params = frozenset({"max_tokens", "temperature"})
    price_usd = 0.0

    def __init__(self, name: str) -> None:
        self.name, self.waiting, self.patience_s = name, list[_Question](), math.inf
        self.tokenizer: Any = None
        self.ends: Set[int] = frozenset()
        self.pool: Any = None

    def __deepcopy__(self, memo: object) -> "_Desk":
        return self

    def open(self, pool: TimeoutPool) -> None:
        self.pool, self.waiting = pool, []

    def complete_batch(self) -> bool:
        """Whether every running rollout waits for an answer, or no request has come for `patience_s`."""
        if len(self.waiting) >= self.pool.active + len(self.pool.queued):
            return True
        return bool(self.waiting) and time.monotonic() - self.waiting[-1].came >= self.patience_s

    def take_requests(self) -> list[_Question]:
        """Removes and returns the waiting requests, in the order of the runs."""
        questions, self.waiting = sorted(self.waiting, key=lambda question: question.place), []
        return questions

    def complete(self, request: Any) -> tuple[Any, float]:
        from dspy import lm15

        from assay.models.codec import chat_body

        return lm15.response_from_openai_chat(self.chat(chat_body(request)), model=request.model), self.price_usd

    def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The trainer's answer to a chat request, as a chat completion."""
        pool, tokenizer = self.pool, self.tokenizer
        prompt = tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        question = _Question(place_in_pool.get(), list(prompt))
        with pool.changed:
            self.waiting.append(question)
            pool.changed.notify_all()
            while question.answer is None:
                if pool.errors or pool is not self.pool or place_in_pool.get() in pool.abandoned:
                    raise Cancelled("its rollout was given up")
                pool.changed.wait(1.0)
        ids, logprobs = question.answer
        ended = bool(ids) and ids[-1] in self.ends
        content = [
            {
                "token": tokenizer.decode([token]),
                "id": token,
                "logprob": NOT_KNOWN if logprobs is None else float(logprobs[at]),
            }
            for at, token in enumerate(ids)
        ]
        return {
            "id": "", "object": "chat.completion", "created": 0, "model": self.name,
            "choices": [{
                "index": 0, "finish_reason": "stop" if ended else "length", "logprobs": {"content": content},
                "message": {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)},
            }],
            "usage": {
                "prompt_tokens": len(question.prompt), "completion_tokens": len(ids),
                "total_tokens": len(question.prompt) + len(ids),
            },
        }  # fmt: skip

    def count_tokens(self, text: str) -> int:
        return len(self.tokenizer(text)["input_ids"])
