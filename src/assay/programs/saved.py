"""Reads the state of a program that DSPy's `program.save("x.json")` wrote.

Nothing is unpickled: a `.pkl` file, and a folder that `save_program=True` wrote, are refused with the way out.
"""

import json
from pathlib import Path
from typing import Any

import dspy

from assay.errors import ProgramError
from assay.support.places import no_such_file

_LARGEST = 256 << 20  # bytes


def read_saved_state(path: Path) -> tuple[dict[str, Any], str]:
    """The state in a file, without its metadata, and where it comes from: the file, and another version that saved it.

    Raises:
        ProgramError: the file is not the state of a program; the message says what it is.
    """
    state = _read(path)
    saved_by = state.pop("metadata", {}).get("dependency_versions", {}).get("dspy")
    differs = saved_by and saved_by != dspy.__version__
    version = f" (saved by DSPy {saved_by}, this is {dspy.__version__})" if differs else ""
    return state, f"{path}{version}"


def models_in_state(path: Path) -> dict[str, str]:
    """Names of the models that a state has, by predictor. They are not loaded: a crafted state could name a server."""
    state, _ = read_saved_state(path)
    models = {name: part["lm"] for name, part in state.items() if isinstance(part, dict) and part.get("lm")}
    return {name: str(lm.get("model") if isinstance(lm, dict) else lm) for name, lm in models.items()}


def saved_program_hint(path: Path) -> str | None:
    """What to do with a file or folder that DSPy saved and that was given as the program; None for any other path."""
    if path.suffix == ".json":
        return (
            f"{str(path)!r} is not a program; if it is the state of one, give it beside its class: file.py:Class with "
            f"state={str(path)!r}"
        )
    if path.suffix in (".pkl", ".pickle") or (path / "program.pkl").is_file():
        return _pickled(path)
    return None


def _pickled(path: Path) -> str:
    how = (
        f"dspy.load({str(path)!r}, allow_pickle=True)"
        if path.is_dir()
        else f"program.load({str(path)!r}, allow_pickle=True)"
    )
    return (
        f"{str(path)!r} is a pickle, which is not loaded: it can run any code. If you trust it, load it in Python with "
        f"{how}, save its state with program.save('state.json'), and give that as the state (state=…) of file.py:Class"
    )


def _read(path: Path) -> dict[str, Any]:
    """The JSON object of a file. Raises `ProgramError` for any other file, with what it is."""
    if path.is_dir():
        if (path / "manifest.json").is_file():
            raise ProgramError(f"state={str(path)!r} is an artifact: give its folder as the program, without a state")
        raise ProgramError(saved_program_hint(path) or f"state={str(path)!r} is a folder, not a file of program.save()")
    if path.suffix in (".pkl", ".pickle"):
        raise ProgramError(_pickled(path))
    try:
        if path.stat().st_size > _LARGEST:
            raise ProgramError(f"state={str(path)!r} is larger than {_LARGEST >> 20} MiB: not the state of a program")
        state = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ProgramError(f"state: {no_such_file(path)}") from None
    except OSError as error:
        raise ProgramError(f"state={str(path)!r} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise ProgramError(
            f"state={str(path)!r} is not JSON; a state is what program.save('state.json') wrote"
        ) from None
    if isinstance(state, dict) and "kind" in state and {"state", "members", "inner"} & state.keys():
        raise ProgramError(f"state={str(path)!r} is a part of an artifact: give the artifact's folder as the program")
    metadata = state.get("metadata", {}) if isinstance(state, dict) else None
    if not isinstance(metadata, dict) or not isinstance(metadata.get("dependency_versions", {}), dict):
        raise ProgramError(
            f"state={str(path)!r} is not the state of a program: program.save('state.json') writes an object with an "
            "entry for each predictor"
        )
    return dict(state)
