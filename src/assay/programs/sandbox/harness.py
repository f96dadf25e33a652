"""Both ends of a test run that are inside of sandboxes.

`serve` holds the solution: it evaluates expressions and calls for the parent. Nothing it answers is trusted; it is the
solution's own claim. `check` holds test functions: names of the solution are stand-ins there, whose calls go to `serve`
through the parent. The solution's process never has the tests' source or expected values.

A script of its own, with `values.py` from its own folder as its only import besides the standard library.
"""

import ast
import builtins
import json
import operator
import os
import signal
import sys
import time
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from assay.programs.sandbox.values import NotPlain, decode, encode
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from values import NotPlain, decode, encode

    del sys.path[0]


_SPECIAL: dict[str, Callable[..., Any]] = {
    **{"len": len, "getitem": operator.getitem, "contains": operator.contains, "iter": iter, "next": next},
    **{"str": str, "repr": repr, "setitem": operator.setitem, "getattr": getattr},
}


# The channel


class _Channel:
    """JSON messages over two descriptors: requests after their length, answers as lines.

    Reads no byte beyond a request, so that a fork may read on.
    """

    def __init__(self, requests: int, replies: int) -> None:
        self.requests, self.replies = requests, replies

    def read(self) -> dict[str, Any] | None:
        head = self._exactly(8)
        content = self._exactly(int(head, 16)) if head else b""
        message: dict[str, Any] | None = json.loads(content) if content else None
        return message

    def _exactly(self, size: int) -> bytes:
        """Empty at the end of the pipe."""
        content = bytearray()
        while len(content) < size:
            part = os.read(self.requests, size - len(content))
            if not part:
                return b""
            content += part
        return bytes(content)

    def write(self, message: dict[str, Any]) -> None:
        rest = memoryview(json.dumps(message).encode() + b"\n")
        while rest:
            rest = rest[os.write(self.replies, rest) :]


# The solution's side


def serve(channel: _Channel, path: str, module_name: str, test_timeout_s: float) -> None:
    """Runs each session of requests in a fork of its own, so that no test sees what another one did."""
    channel.write({"ready": True})
    while (request := channel.read()) is not None:
        if request.get("op") != "begin":
            continue  # an `end` for a session that ended before
        child = os.fork()
        if child == 0:
            try:
                _session(channel, request, path, module_name)
            finally:
                os._exit(0)
        channel.write({"over": request["id"], "how": _await(child, test_timeout_s)})


def _await(child: int, timeout_s: float) -> str:
    deadline, pause = time.monotonic() + timeout_s, 0.0005
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return f"exit {os.waitstatus_to_exitcode(status)}"
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "time"
        time.sleep(pause)
        pause = min(0.01, pause * 1.5)


def _session(channel: _Channel, request: dict[str, Any], path: str, module_name: str) -> None:
    objects: list[Any] = []

    def keep(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    module = types.ModuleType(module_name)
    module.__file__ = path
    sys.modules[module_name] = module
    sys.path.append(os.getcwd())  # after the standard library: other files of the solution
    names = module.__dict__

    def load(_: dict[str, Any]) -> None:
        with open(path, "rb") as file:
            exec(compile(file.read(), path, "exec", dont_inherit=True), names)

    def apply(request: dict[str, Any]) -> Any:
        parts = [decode(part, lambda number, _: objects[number]) for part in request["args"]]
        keywords = {name: decode(part, lambda number, _: objects[number]) for name, part in request["kwargs"].items()}
        return parts[0](*parts[1:], **keywords) if request["action"] == "call" else _SPECIAL[request["action"]](*parts)

    actions: dict[str, Callable[[dict[str, Any]], Any]] = {
        **{"begin": load, "apply": apply, "name": lambda request: names[request["name"]]},
        "eval": lambda request: eval(compile(request["expression"], "<test>", "eval", dont_inherit=True), names),
    }
    current: dict[str, Any] | None = request
    while current is not None and current["op"] != "end":
        try:
            answer = {"value": encode(actions[current["op"]](current), keep)}
        except BaseException as error:
            answer = {"raised": type(error).__name__, "text": _text_of(error)}
        channel.write({"id": current["id"], **answer})
        current = channel.read()


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:500]
    except BaseException:
        return ""


# The tests' side


class Gone(BaseException):
    """The solution's process ended or did not answer."""


class Unavailable(Exception):
    """A package that the tests import is not installed."""


class Raised(Exception):
    """The solution raised an exception of a class of its own."""


class _Remote:
    """Proxy of an object of the solution that is not a plain value. Equal only to itself."""

    def __init__(self, ask: Callable[..., Any], number: int, name: str) -> None:
        self.__dict__.update(_ask=ask, _number=number, _name=name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask("call", self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._ask("getattr", self, name)

    def __len__(self) -> int:
        length: int = self._ask("len", self)
        return length

    def __getitem__(self, key: Any) -> Any:
        return self._ask("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("setitem", self, key, value)

    def __contains__(self, value: Any) -> bool:
        return self._ask("contains", self, value) is True

    def __iter__(self) -> Any:
        return self._ask("iter", self)

    def __next__(self) -> Any:
        return self._ask("next", self)

    def __str__(self) -> str:
        return str(self._ask("str", self))

    def __repr__(self) -> str:
        return f"<{self._name} object of the solution>"

    def __bool__(self) -> bool:
        raise TypeError(f"the solution returned an object of the type {self._name!r} where a plain value is tested")


class _Solution(types.ModuleType):
    """The solution as a module, for `from solution import f`. `ask` is the first request of each name."""

    def __init__(self, name: str, named: Callable[[str], Any]) -> None:
        super().__init__(name)
        self.__dict__["_named"] = named

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._named(name)


def check(channel: _Channel) -> None:
    """Runs one test function at a time, as the parent asks for them."""
    tests = channel.read()
    if tests is None:
        return
    sys.path += tests["packages"]
    channel.write({"ready": True})
    while (request := channel.read()) is not None:
        try:
            reason = _run_test(channel, tests, request["run"])
        except Unavailable as error:
            channel.write({"done": request["run"], "missing": str(error)})
        else:
            channel.write({"done": request["run"], "passed": reason is None, "reason": reason or ""})


def _run_test(channel: _Channel, tests: dict[str, Any], name: str) -> str | None:
    """None if the test passes, otherwise why it does not."""

    def answer(request: dict[str, Any]) -> Any:
        channel.write({"ask": request})
        reply = channel.read()
        if reply is None or "gone" in reply:
            raise Gone(reply["gone"] if reply else "the parent ended")
        if "raised" in reply:
            raise _exception(reply["raised"], reply["text"])
        return decode(reply["value"], lambda number, kind: _Remote(ask, number, kind))

    def ask(action: str, *args: Any, **kwargs: Any) -> Any:
        parts = [encode(part, _number_of) for part in args]
        named = {key: encode(part, _number_of) for key, part in kwargs.items()}
        return answer({"op": "apply", "action": action, "args": parts, "kwargs": named})

    def named(wanted: str) -> Any:
        return answer({"op": "name", "name": wanted})

    module = tests["module"]
    sys.modules[module] = _Solution(module, named)
    names: dict[str, Any] = {"__name__": "tests"}
    try:
        for free in tests["free"]:
            try:
                names[free] = named(free)
            except Exception:
                continue  # the test itself says what is missing
        exec(compile(tests["source"], "<tests>", "exec", dont_inherit=True), names)
        if name == "check" and tests["entry_point"]:
            names["check"](named(tests["entry_point"]))
        else:
            names[name]()
    except BaseException as error:
        # an exception of the solution has no `name`: it is made again from its text
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            raise Unavailable(error.name) from None
        return _reason(error, tests["source"])
    return None


def _number_of(value: Any) -> int:
    if type(value) is not _Remote:
        raise NotPlain(f"a {type(value).__name__!r} cannot be given to the solution: only plain values can")
    number: int = value._number
    return number


def _exception(name: str, text: str) -> BaseException:
    """The exception of the solution as the test sees it. What would end the process is an ordinary exception here."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except Exception:
            pass
    return Raised(f"{name}: {text}")


def _reason(error: BaseException, source: str) -> str:
    """The error with the statement of the test that it comes from."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<tests>":
            line = trace.tb_lineno
        trace = trace.tb_next
    text = f"{type(error).__name__}: {error}"[:500].removesuffix(": ")
    if line is None:
        return text
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    inside = [node for node in statements if node.lineno <= line <= (node.end_lineno or node.lineno)]
    statement = ast.unparse(max(inside, key=lambda node: node.lineno))[:300] if inside else f"line {line}"
    return f"{statement}: {text}"


def main() -> None:
    role, requests, replies, *rest = sys.argv[1:]
    channel = _Channel(int(requests), int(replies))
    if role == "serve":
        serve(channel, rest[0], rest[1], float(rest[2]))
    else:
        check(channel)


if __name__ == "__main__":
    main()
