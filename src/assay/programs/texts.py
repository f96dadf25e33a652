"""The texts of an agent that was written with anything: files, marked sections, and values of JSON and YAML files.

A text is named FILE, FILE#NAME (between `<!-- assay:NAME -->` and `<!-- /assay:NAME -->`) or FILE#/json/pointer (RFC
6901). What may be changed leaves out the front matter of a file; a new text must have the placeholders and the code
blocks of the old one. Files are changed only if they are as they were when they were read.
"""

import copy
import difflib
import hashlib
import json
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from assay.errors import ConfigError
from assay.support.names import nearest
from assay.support.placeholders import inner_of, outer_of, pieces_of, placeholders_in
from assay.support.places import no_such_file, write_whole
from assay.support.yaml_files import MOST_BYTES, read_yaml

LEAST_CHARACTERS = 8  # of one literal piece of a text: a shorter one would be found by chance in other texts
# A byte order mark, and front matter in YAML or TOML; neither is sent to a model.
_FRONT = re.compile(r"\A\ufeff?(?:(---|\+\+\+)[ \t]*\r?\n.*?^\1[ \t]*\r?$\n?)?", re.DOTALL | re.MULTILINE)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\u2028\u2029\ufeff]")  # all but tab and the end of a line
_CODE = re.compile(r"^[ \t]*(```|~~~).*?(?:^[ \t]*\1[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_MARKER = re.compile(r"<!--\s*/?assay:\S+\s*-->")
_NAME = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True, kw_only=True)
class AgentText:
    """A text of an agent.

    Attributes:
        name: as it was given: FILE, FILE#NAME or FILE#/pointer.
        path: of its file.
        text: what may be changed, without white space around it, with `\\n` at the ends of lines.
        is_value: whether it is a value of a JSON or YAML file, such as the description of a tool.
    """

    name: str
    path: Path
    text: str
    is_value: bool = False


@dataclass(frozen=True, kw_only=True)
class ChangedFile:
    """A file with new texts.

    Attributes:
        before: its content when the texts were read.
    """

    path: Path
    before: bytes
    after: bytes


class TextFiles:
    """The files of an agent's texts, as they were when they were read.

    Args:
        names: of the texts, each as `AgentText.name`.
    Raises:
        ConfigError: a file cannot be read, there is no such text in it, it is named twice, or it is too short.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._contents: dict[Path, bytes] = {}
        self._places: dict[str, _Place] = {}
        for name in names:
            if name in self._places:
                raise _refused(name, "is given twice")
            self._places[name] = self._place(name)
        self._check_overlaps()
        self.texts = [
            AgentText(name=name, path=place.path, text=place.text, is_value=isinstance(place, _Value))
            for name, place in self._places.items()
        ]
        by_text = defaultdict[str, list[str]](list)
        for text in self.texts:
            by_text[text.text].append(text.name)
            if max(len(piece.strip()) for piece in pieces_of(text.text)[::2]) < LEAST_CHARACTERS:
                raise _refused(
                    text.name,
                    f"has no part of {LEAST_CHARACTERS} characters without a placeholder, so it cannot be recognised",
                )
        if same := next((found for found in by_text.values() if len(found) > 1), None):
            raise _refused(same[1], f"has the same text as {same[0]}: a request does not show which of them it is")

    @property
    def hashes(self) -> dict[str, str]:
        """sha256 of each file, by its path."""
        return {str(path): hashlib.sha256(content).hexdigest() for path, content in self._contents.items()}

    def with_texts(self, texts: Mapping[str, str]) -> list[ChangedFile]:
        """The files that new texts change.

        Args:
            texts: new texts by name; those left out stay as they are.
        Raises:
            ConfigError: a value of a YAML file cannot be changed alone, such as one with an alias.
        """
        by_path = defaultdict[Path, list[tuple[_Place, str]]](list)
        for name, text in texts.items():
            place = self._places[name]
            if text != place.text:
                by_path[place.path].append((place, text))
        changed = []
        for path, places in by_path.items():
            source = self._contents[path].decode("utf-8")
            for place, text in sorted(places, key=lambda pair: -pair[0].start):  # from the end: places stay valid
                source = place.written(source, text)
            changed.append(ChangedFile(path=path, before=self._contents[path], after=source.encode("utf-8")))
        return changed

    def _place(self, name: str) -> "_Place":
        file, section = (name, "") if Path(name).is_file() else _parted(name)
        path = Path(file)
        if path not in self._contents:
            self._contents[path] = _read(name, path)
        source = self._contents[path].decode("utf-8")
        if section.startswith("/"):
            return _Value(name, path, source, section)
        return _Section(name, path, source, section) if section else _Whole(name, path, source)

    def _check_overlaps(self) -> None:
        for one, place in self._places.items():
            for other, second in self._places.items():
                if one != other and place.path == second.path and place.start <= second.start < place.end:
                    raise _refused(other, f"is a part of {one}: give one of them")


def _parted(name: str) -> tuple[str, str]:
    file, hash_mark, section = name.rpartition("#")
    if not hash_mark:
        return name, ""
    if not section.startswith("/") and not _NAME.fullmatch(section):
        raise _refused(name, "must be FILE, FILE#NAME (letters, digits, '.', '_' and '-') or FILE#/json/pointer")
    return file, section


def _read(name: str, path: Path) -> bytes:
    try:
        content = path.read_bytes()
        content.decode("utf-8")
    except FileNotFoundError:
        raise _refused(name, f"cannot be read: {no_such_file(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise _refused(name, f"cannot be read: {error}") from None
    if len(content) > MOST_BYTES:
        raise _refused(name, f"is in a file of more than {MOST_BYTES >> 20} MiB")
    return content


def _refused(name: str, why: str) -> ConfigError:
    return ConfigError(f"{name!r} {why}", field="text")


class _Place:
    """A part of a file: `source[start:end]`, of which the white space around the text stays as it is."""

    def __init__(self, name: str, path: Path, source: str, start: int, end: int) -> None:
        self.name, self.path = name, path
        inside = source[start:end]
        self.start, self.end = start + len(inside) - len(inside.lstrip()), start + len(inside.rstrip())
        if self.end <= self.start:
            raise _refused(name, "is empty")
        self.text = source[self.start : self.end].replace("\r\n", "\n")

    def written(self, source: str, text: str) -> str:
        """The file with a new text."""
        if "\r\n" in source:
            text = text.replace("\n", "\r\n")
        return source[: self.start] + text + source[self.end :]


class _Whole(_Place):
    def __init__(self, name: str, path: Path, source: str) -> None:
        front = _FRONT.match(source)
        super().__init__(name, path, source, front.end() if front else 0, len(source))


class _Section(_Place):
    def __init__(self, name: str, path: Path, source: str, section: str) -> None:
        begins, ends = (
            list(re.finditer(rf"<!--\s*{slash}assay:{re.escape(section)}\s*-->", source)) for slash in ("", "/")
        )
        if len(begins) != 1 or len(ends) != 1 or ends[0].start() < begins[0].end():
            marks = f"<!-- assay:{section} --> and <!-- /assay:{section} -->"
            known = sorted(set(re.findall(r"<!--\s*assay:(\S+)\s*-->", source)))
            hint = f"; it has the sections {', '.join(known)}" if known and not begins else ""
            raise _refused(name, f"needs {marks} in {path}, once each and in this order{hint}")
        super().__init__(name, path, source, begins[0].end(), ends[0].start())


class _Value(_Place):
    """A text in a JSON or YAML file. Only its scalar is written anew; the rest of the file keeps its form."""

    def __init__(self, name: str, path: Path, source: str, pointer: str) -> None:
        self.name, self.path, self.is_json = name, path, path.suffix.lower() == ".json"
        self.keys = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
        self.content, root = self._parsed(source)
        value = _value_at(self.content, self.keys, name)
        if not isinstance(value, str) or root is None:
            raise _refused(name, f"must be a text, and is {type(value).__name__}")
        self.node, self.indent = _node_at(root, self.keys)
        self.start = self.node.start_mark.index
        # the node of a block has the blank lines after it too
        self.end = self.start + len(source[self.start : self.node.end_mark.index].rstrip())
        self.value, self.text = value, value.strip().replace("\r\n", "\n")
        if not self.text:
            raise _refused(name, "is empty")

    def _parsed(self, source: str) -> tuple[Any, yaml.Node | None]:
        if not self.is_json:
            return read_yaml(source, str(self.path), ConfigError)
        try:
            content = json.loads(source)
        except (ValueError, RecursionError) as error:
            raise _refused(self.name, f"is in a file that is not JSON: {error}") from None
        # JSON is YAML, apart from tabs between values; in its texts a tab is written as \t
        return content, read_yaml(source.replace("\t", " "), str(self.path), ConfigError)[1]

    def written(self, source: str, text: str) -> str:
        stripped = self.value.strip()
        at = self.value.index(stripped)
        value = self.value[:at] + text + self.value[at + len(stripped) :]
        expected = copy.deepcopy(self._parsed(source)[0])
        _set_at(expected, self.keys, value)
        for scalar in self._scalars(source, value):
            new = source[: self.start] + scalar + source[self.end :]
            try:
                content = self._parsed(new)[0]
            except ConfigError:
                continue
            if content == expected:
                return new
        raise _refused(
            self.name, "cannot be changed without changing other values: it has an anchor or an alias. Write it out"
        )

    def _scalars(self, source: str, value: str) -> Iterator[str]:
        """The value as it may be written, the best form first."""
        body, ends = value.rstrip("\n"), len(value) - len(value.rstrip("\n"))
        if getattr(self.node, "style", None) in ("|", ">") and ends < 2:
            indicator = "2" if body[:1] in (" ", "\n") else ""
            lines = [" " * (self.indent + 2) + line if line else "" for line in body.split("\n")]
            yield ("\r\n" if "\r\n" in source else "\n").join([f"|{indicator}{'' if ends else '-'}", *lines])
        if self.is_json:
            yield json.dumps(value, ensure_ascii=source.isascii())
        else:
            yield yaml.safe_dump(value, default_style='"', width=MOST_BYTES, allow_unicode=True).strip()


def _value_at(content: Any, keys: Sequence[str], name: str) -> Any:
    for key in keys:
        known = [str(at) for at in range(len(content))] if isinstance(content, list) else []
        known = [str(one) for one in content] if isinstance(content, dict) else known
        if key not in known:
            near = nearest(key, known)
            there = f"there are {', '.join(known[:20])}" if known else "that value has no parts"
            raise _refused(name, f"has no {key!r}: {there}" + (f". Did you mean {near!r}?" if near else ""))
        content = content[int(key)] if isinstance(content, list) else next(
            value for one, value in content.items() if str(one) == key
        )  # fmt: skip
    return content


def _set_at(content: Any, keys: Sequence[str], value: str) -> None:
    for key in keys[:-1]:
        content = content[int(key)] if isinstance(content, list) else content[_key_of(content, key)]
    content[int(keys[-1]) if isinstance(content, list) else _key_of(content, keys[-1])] = value


def _key_of(content: Mapping[Any, Any], key: str) -> Any:
    return next(one for one in content if str(one) == key)


def _node_at(node: yaml.Node, keys: Sequence[str]) -> tuple[yaml.Node, int]:
    """The scalar of a value, and the column of what holds it."""
    indent = 0
    for key in keys:
        indent = node.start_mark.column
        if isinstance(node, yaml.MappingNode):
            node = next(value for name, value in reversed(node.value) if name.value == key)
        else:
            node = node.value[int(key)]
    return node, indent


# -- What a new text must keep.


def why_refused(before: str, after: str) -> str | None:
    """Why a text must not be replaced by another one, as `rule: reason`; None if it may.

    The rule is `control`, `placeholder`, `code` or `marker`.
    """
    if added_characters := sorted(set(_CONTROL.findall(after)) - set(_CONTROL.findall(before))):
        return f"control: it has the character {added_characters[0]!r}, which files and terminals read as a command"
    kept, given = Counter(placeholders_in(before)), Counter(placeholders_in(after))
    if kept != given:
        lost, added = sorted((kept - given).elements()), sorted((given - kept).elements())
        differences = [f"it {verb} {', '.join(names)}" for verb, names in (("lacks", lost), ("adds", added)) if names]
        return f"placeholder: {' and '.join(differences)}"
    if inner_of(after, outer_of(before)) is None:
        return "placeholder: one at the beginning or the end is in another place"
    if kept and any(after.count(brace) > before.count(brace) for brace in "{}"):
        return "placeholder: it adds a brace, which a template may read as one"
    if _code_in(before) != _code_in(after):
        return "code: a code block differs"
    if (own := _MARKER.findall(before)) != _MARKER.findall(after):
        return f"marker: it {'lacks or moves' if own else 'has'} the marker of a section"
    return None


def _code_in(text: str) -> list[str]:
    return [match[0].strip() for match in _CODE.finditer(text)]


# -- Changes of files.


def patch_of(files: Sequence[ChangedFile]) -> str:
    """The changes as `git apply` and `patch -p1` take them; paths are relative to the repository's root, without one
    to the working directory."""
    return "".join(_difference(file) for file in files if file.before != file.after)


def _difference(file: ChangedFile) -> str:
    place = relative_path(file.path).as_posix()
    before, after = (re.findall(r"[^\n]*\n|[^\n]+\Z", content.decode("utf-8")) for content in (file.before, file.after))
    lines = difflib.unified_diff(before, after, f"a/{place}", f"b/{place}")
    text = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return f"diff --git a/{place} b/{place}\n{text}"


def relative_path(path: Path) -> Path:
    """The path from the root of its git repository, else from the working directory, else its name."""
    absolute = path.absolute()
    for folder in (_repository_of(absolute), Path.cwd()):
        if folder is not None and absolute.is_relative_to(folder):
            return absolute.relative_to(folder)
    return Path(absolute.name)


def _repository_of(path: Path) -> Path | None:
    return next((folder for folder in path.parents if (folder / ".git").exists()), None)


def apply_files(files: Sequence[ChangedFile]) -> list[Path]:
    """Writes changed files; none, if one of them has changed. Outside of a git repository the old file is kept as
    `FILE.orig`.

    Returns:
        The old files that were kept.
    Raises:
        ConfigError: a file has changed since it was read. Nothing was written.
        WriteFailed: a file cannot be written.
    """
    refuse_changed([file.path for file in files if not file.path.is_file() or file.path.read_bytes() != file.before])
    kept = []
    for file in files:
        path = file.path.resolve()  # a link stays a link
        if _repository_of(path) is None:
            kept.append(_free_name(path))
            shutil.copy2(path, kept[-1])
        mode = path.stat().st_mode
        write_whole(path, file.after)
        path.chmod(mode)
    return kept


def refuse_changed(paths: Sequence[Path]) -> None:
    """Raises `ConfigError` if any file is given: it has changed since it was read."""
    if paths:
        raise ConfigError(
            f"{', '.join(map(str, paths))} changed while this ran, so nothing was written: apply the patch with "
            "`git apply --3way`, or take over the texts by hand",
            field="apply",
        )


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.orig{number}") for number in ("", *(f"-{n}" for n in range(2, 10_000))))
    return next(name for name in names if not name.exists())
