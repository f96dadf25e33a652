"""Judges by name: a YAML file, `path.py:NAME` or `package.module:NAME`, or one sentence that says what to judge."""

from pathlib import Path
from typing import Any, Literal

from assay.errors import RubricError
from assay.judges.pointwise import PointwiseJudge
from assay.rubrics import JudgeSpec
from assay.rubrics.loading import JudgeFile, import_check, parse_yaml

__all__ = ["load_judge"]


class _JudgeDefinition(JudgeFile):
    name: str = "judge"
    shows: list[str] = ["task_input", "output"]
    reading: Literal["auto", "probabilities", "text"] = "auto"
    style: Literal["words", "letters"] = "words"
    reasoning: bool = False
    samples: int = 1


def load_judge(source: str | Path, **spec: Any) -> PointwiseJudge:
    """A judge that is not compiled yet.

    Args:
        source: a `.yaml` file, `file.py:NAME` or `package.module:NAME` of a judge or a class of one, or a sentence.
        spec: fields of a `JudgeSpec` (`scale`, `kind`, `anchors`) for a sentence.
    Raises:
        RubricError: the file is wrong (with its line), it is no judge, or fields are given for one that has its own.
    """
    text = str(source)
    path = Path(text)
    if path.suffix.lower() in (".yaml", ".yml"):
        if spec:
            raise RubricError(f"{text} has its own {', '.join(sorted(spec))}; change them there")
        return _from_yaml(path)
    if " " not in text.strip() and ":" in text:
        found = import_check(text)
        judge = found() if isinstance(found, type) else found
        if not isinstance(judge, PointwiseJudge):
            raise RubricError(f"{text!r} is a {type(judge).__name__}, not a judge")
        return judge
    if " " not in text.strip():
        raise RubricError(f"no judge is called {text!r}: give a .yaml file, file.py:NAME, package.module:NAME, an artifact's folder, or a sentence")
    return PointwiseJudge(JudgeSpec(text=text, **spec))


def _from_yaml(path: Path) -> PointwiseJudge:
    try:
        content = path.read_text("utf-8")
    except FileNotFoundError:
        raise RubricError(f"no such file: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RubricError(f"{path}: cannot be read: {error}") from None
    parsed, _ = parse_yaml(content, str(path), _JudgeDefinition, "a judge is a mapping with 'text' and 'scale'")
    if parsed.use:
        raise RubricError(f"{path}: use names a judge from within a rubric; a judge's own file has a text")
    try:
        return PointwiseJudge(
            parsed.spec(), shows=parsed.shows, reading=parsed.reading, style=parsed.style, reasoning=parsed.reasoning, samples=parsed.samples
        )
    except ValueError as error:
        raise RubricError(f"{path}: {error}") from None
