"""The changed statements between two sources: inserted, deleted, changed and moved ones. Does not run code.

Formatting, comments, docstrings, names of local variables and the order of imports do not count. Definitions are
matched by name, so that a moved function is one change. Inside a pair, statements are aligned by the edit distance of
their headers, at first without local names: these are matched by the statements that they occur in.
"""

import ast
import symtable
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any

from assay.errors import RubricError

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MOST_CHARACTERS = 500_000  # of a source; the largest module of the standard library has 230,000
MOST_STATEMENTS = 20_000  # and 2,600 statements; this many take about five seconds
_PARAMETER_VOTES = 1000
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")
_IGNORED = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_BOUND: dict[type[ast.AST], str] = {  # fields with the name of a variable
    **dict.fromkeys((*FUNCTIONS, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar), "name"),
    **{ast.MatchMapping: "rest", ast.Nonlocal: "names"},
}
_BY_NAME = frozenset({"dir", "eval", "exec", "locals", "vars"})  # they look names up at run time

Local = tuple[int, str]  # line of the outermost function, and the name
Token = str | Local
Names = Mapping[str, Token]  # what stands for the names of local variables


class UnreadableCode(ValueError):
    """A source cannot be compared: it is not Python, nested too deeply, or too long."""


@dataclass(slots=True, eq=False)
class Statement:
    """One statement, `except` clause, `case` or imported name.

    Args:
        tokens: its header, without the statements inside it.
        parameters: of a function, those that can be passed by keyword.
    """

    tokens: tuple[Token, ...]
    line: int
    text: str
    node: ast.AST
    parent: "Statement | None" = None
    parameters: Mapping[str, Local] = field(default_factory=dict)


@dataclass(frozen=True)
class Edit:
    """One changed statement.

    Args:
        kind: `added`, `removed`, `changed` or `moved`.
        line: in the source after the edit; of a removed statement in the source before.
        text: first line of the statement.
        key: equal for equal edits of one source.
        nodes: changed expressions and names in its header.
    """

    kind: str
    line: int
    text: str
    key: tuple[Any, ...] = field(default=(), repr=False)
    before: Statement | None = field(default=None, repr=False)
    after: Statement | None = field(default=None, repr=False)
    nodes: int = field(default=0, repr=False)

    def __str__(self) -> str:
        return f"line {self.line} {self.kind}: {self.text}"


# Sources


@lru_cache(maxsize=16)  # the rollouts of a group share their source
def read_source(text: str) -> "Source":
    """Parses a file.

    Raises:
        UnreadableCode: no text, not Python, nested too deeply, or longer than `MOST_CHARACTERS`.
    """
    if not isinstance(text, str):
        raise UnreadableCode(f"it is of type {type(text).__name__}, not text")
    if len(text) > MOST_CHARACTERS:
        raise UnreadableCode(f"it has {len(text)} characters; at most {MOST_CHARACTERS} are compared")
    text = text.removeprefix("\ufeff")  # the mark of a UTF-8 file, which Python skips
    try:
        tree = ast.parse(text)
        if (count := sum(1 for _ in statements_of(tree))) > MOST_STATEMENTS:
            raise UnreadableCode(f"it has {count} statements; at most {MOST_STATEMENTS} are compared")
        return Source(tree, text, count)
    except SyntaxError as error:
        line = "" if error.lineno is None else f" (line {error.lineno})"  # of null bytes there is none
        raise UnreadableCode(f"not valid Python: {error.msg}{line}") from None
    except (RecursionError, MemoryError):
        raise UnreadableCode("it is nested too deeply to parse") from None
    except UnreadableCode:
        raise
    except ValueError as error:  # null bytes and unpaired surrogates
        raise UnreadableCode(f"not valid Python: {error}") from None


def statements_of(tree: ast.AST) -> Iterator[ast.stmt]:
    """All statements below a node, without looking into expressions."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.stmt):
            yield node
        for block in _BLOCKS:
            if isinstance(nodes := getattr(node, block, None), list):
                waiting += nodes


def arguments_of(arguments: ast.arguments) -> Iterator[ast.arg]:
    yield from [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    yield from (argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None)


@dataclass(frozen=True)
class Source:
    """A parsed file."""

    tree: ast.Module
    text: str
    count: int  # of statements

    @cached_property
    def _lines(self) -> list[bytes]:
        """Lines as the parser counts them; `splitlines` also splits at form feeds and other separators."""
        return self.text.replace("\r\n", "\n").replace("\r", "\n").encode("utf-8").split(b"\n")

    @cached_property
    def _functions(self) -> dict[tuple[str, int], symtable.Function]:
        try:
            tables = _with_inner(symtable.symtable(self.text, "<unknown>", "exec"))
        except SyntaxError:  # it can be parsed, and not compiled: all of its names count
            return {}
        functions = [table for table in tables if isinstance(table, symtable.Function)]
        return {(table.get_name(), table.get_lineno()): table for table in reversed(functions)}

    def written(self, node: Any) -> bytes:
        """A statement with its decorators, as written."""
        first = min([node, *getattr(node, "decorator_list", [])], key=lambda part: part.lineno)
        lines = self._lines[first.lineno - 1 : node.end_lineno]
        lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][first.col_offset :]
        return b"\n".join(lines)

    def statements(self, nodes: Sequence[ast.AST]) -> list[Statement]:
        """The statements of a block outside of functions, with those inside of them, in the order of the file."""
        result: list[Statement] = []
        self._add(result, nodes, "", None, {})
        return result

    def _add(
        self, result: list[Statement], nodes: Sequence[ast.AST], role: str, parent: Statement | None, names: Names
    ) -> None:
        """Adds a block. `role` tells blocks of one statement apart: `orelse` from the rest."""
        for is_import, run in groupby(nodes, lambda node: isinstance(node, ast.Import | ast.ImportFrom)):
            if is_import:
                result += self._imports(list(run), role, parent, names)
                continue
            for node in run:
                inner = names
                if isinstance(node, FUNCTIONS) and not names:
                    inner = {name: (node.lineno, name) for name in self._local_names(node)}
                tokens: list[Token] = [role]
                _write(node, names, inner, tokens)
                added = self._statement(node, tokens, parent)
                if isinstance(node, FUNCTIONS):
                    passed = [argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]]
                    added.parameters = {name: token for name in passed if isinstance(token := inner.get(name), tuple)}
                result.append(added)
                for block in _BLOCKS:
                    if isinstance(listed := getattr(node, block, None), list):
                        listed = _without_docstring(node, listed) if block == "body" else listed
                        self._add(result, listed, block if block in ("orelse", "finalbody") else "", added, inner)

    def _statement(self, node: Any, tokens: Sequence[Token], parent: Statement | None) -> Statement:
        place = node if hasattr(node, "lineno") else node.pattern  # a `case` has no position of its own
        text = self._lines[place.lineno - 1].decode("utf-8", "replace").strip()
        return Statement(tuple(tokens), place.lineno, text[:120], node, parent)

    def _imports(self, nodes: Sequence[Any], role: str, parent: Statement | None, names: Names) -> list[Statement]:
        """One statement per imported name; sorted, unless the order can matter (`*`, one name bound twice)."""
        single = [(node, alias) for node in nodes for alias in node.names]
        statements = []
        for node, alias in single:
            name, module = alias.asname or alias.name.partition(".")[0], ""
            if isinstance(node, ast.ImportFrom):
                module = f"{'.' * node.level}{node.module or ''}"
            whole = not module and alias.asname is None and "." in alias.name  # `import a.b` binds `a`
            tokens = [role, "(Import", module, alias.name, str(whole), names.get(name, f"name {name}"), ")"]
            alone = type(node)(**{**dict(ast.iter_fields(node)), "names": [alias]})
            statements.append(self._statement(ast.copy_location(alone, node), tokens, parent))
        bound = {alias.asname or alias.name for _, alias in single}
        if "*" not in bound and len(bound) == len(single):
            statements.sort(key=_shape)
        return statements

    def _local_names(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
        """Local names of a function and of those inside it.

        Left out are names that also stand for a global variable or a member of a class somewhere in the function, and
        all names of a function that looks names up at run time.
        """
        function = self._functions.get((node.name, node.lineno))
        local, kept = set[str](), set[str]()
        for table in _with_inner(function) if function is not None else ():
            for symbol in table.get_symbols():
                member = isinstance(table, symtable.Class) and symbol.is_local()
                (kept if member or symbol.is_global() else local).add(symbol.get_name())
        return set() if kept & _BY_NAME else local - kept


def _with_inner(table: symtable.SymbolTable) -> list[symtable.SymbolTable]:
    """A table of the compiler, with those of the functions and classes inside it."""
    tables = [table]
    for one in tables:
        tables += one.get_children()
    return tables


def _without_docstring(node: ast.AST, nodes: list[Any]) -> Sequence[ast.AST]:
    if not isinstance(node, (*FUNCTIONS, ast.ClassDef)) or ast.get_docstring(node, clean=False) is None:
        return nodes
    return nodes[1:] or [ast.copy_location(ast.Pass(), nodes[0])]


def _write(part: Any, names: Names, inner: Names, out: list[Token]) -> None:
    """Appends the tokens of a part; of a statement, those of its header.

    Args:
        inner: names of the parameters, if the part is a function.
    """
    if isinstance(part, list):
        out.append("[")
        for item in part:
            _write(item, names, inner, out)
        out.append("]")
    elif isinstance(part, ast.Name):
        out.append(names.get(part.id, f"name {part.id}"))
    elif isinstance(part, ast.Constant):
        value = part.value
        out.append(f"const {hex(value)}" if type(value) is int else f"const {value!r}")  # hex: of any length
    elif isinstance(part, ast.arguments):
        _write_parameters(part, names, inner, out)
    elif isinstance(part, _COMPREHENSIONS):
        _write_comprehension(part, names, out)
    elif isinstance(part, ast.AST):
        out.append(f"({type(part).__name__}")
        for name, value in ast.iter_fields(part):
            if name in _IGNORED or (name in _BLOCKS and isinstance(value, list)):
                continue
            if name == _BOUND.get(type(part)) and value is not None:
                out += [names.get(one, f"name {one}") for one in (value if isinstance(value, list) else [value])]
            else:
                _write(value, names, inner, out)
        out.append(")")
    else:
        out.append(f"= {part!r}")


def _write_parameters(arguments: ast.arguments, names: Names, inner: Names, out: list[Token]) -> None:
    """Parameters: those that can be passed by keyword with their names, the others as local names."""
    kinds: list[tuple[str, list[Any]]] = [
        *(("", arguments.posonlyargs), ("args", arguments.args), ("keyword", arguments.kwonlyargs)),
        *(("*", [arguments.vararg]), ("**", [arguments.kwarg])),
    ]
    for kind, listed in kinds:
        for argument in (one for one in listed if one is not None):
            named = argument.arg if kind in ("args", "keyword") else ""
            out += [f"({kind} {named}", inner.get(argument.arg, f"name {argument.arg}")]
            _write(argument.annotation, names, inner, out)
            out.append(")")
    _write(arguments.defaults, names, inner, out)
    _write(arguments.kw_defaults, names, inner, out)


def _write_comprehension(node: Any, names: Names, out: list[Token]) -> None:
    """The first iterable is evaluated outside, everything else inside, where the variables are numbered."""
    parts = [part for one in node.generators for part in ast.walk(one.target)]
    bound = [part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)]
    outside = sum(isinstance(token, str) for token in names.values())
    inner = {**names, **{name: f"${outside + at}" for at, name in enumerate(dict.fromkeys(bound))}}
    out.append(f"({type(node).__name__}")
    for at, generator in enumerate(node.generators):
        out.append(f"(for {generator.is_async}")
        _write(generator.iter, inner if at else names, inner, out)
        _write([generator.target, *generator.ifs], inner, inner, out)
        out.append(")")
    for name in ("elt", "key", "value"):
        if hasattr(node, name):
            _write(getattr(node, name), inner, inner, out)
    out.append(")")


# Comparison


def compare(before: Source, after: Source) -> tuple[Edit, ...]:
    """The changed statements, in the order of lines.

    Raises:
        UnreadableCode: nested too deeply.
    """
    try:
        edits = list(_bodies(before, after, _members(before.tree), _members(after.tree)))
    except RecursionError:
        raise UnreadableCode("it is nested too deeply to compare") from None
    return tuple(sorted(edits, key=lambda edit: edit.line))


def _bodies(before: Source, after: Source, old: Sequence[ast.stmt], new: Sequence[ast.stmt]) -> Iterator[Edit]:
    """Edits between two modules or class bodies."""
    from rapidfuzz.distance import LCSseq

    old_named, new_named = _definitions(old), _definitions(new)
    common = [key for key in new_named if key in old_named]
    order = {key: at for at, key in enumerate(key for key in old_named if key in new_named)}
    for code in LCSseq.opcodes(range(len(common)), [order[key] for key in common]):
        for key in common[code.dest_start : code.dest_end] if code.tag != "equal" else ():
            yield Edit("moved", new_named[key].lineno, f"definition of {key[1]}", ("moved", key))
    for key in common:
        a, b = old_named[key], new_named[key]
        if before.written(a) == after.written(b):
            continue
        if isinstance(a, ast.ClassDef) and isinstance(b, ast.ClassDef):
            yield from _align(before.statements([_bare(a)]), after.statements([_bare(b)]))
            yield from _bodies(before, after, _members(a), _members(b))
        else:
            yield from _align(before.statements([a]), after.statements([b]))
    matched = {id(named[key]) for named in (old_named, new_named) for key in common}
    rest_old, rest_new = ([node for node in nodes if id(node) not in matched] for nodes in (old, new))
    yield from _align(before.statements(rest_old), after.statements(rest_new))


def _definitions(nodes: Sequence[ast.stmt]) -> dict[tuple[bool, str, int], ast.stmt]:
    """Functions and classes by kind, name and occurrence (a property is defined several times)."""
    counts = Counter[tuple[bool, str]]()
    result: dict[tuple[bool, str, int], ast.stmt] = {}
    for node in nodes:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            key = (isinstance(node, ast.ClassDef), node.name)
            result[*key, counts[key]] = node
            counts[key] += 1
    return result


def _bare(node: ast.ClassDef) -> ast.ClassDef:
    """A class without its members, for its header."""
    header = {name: value for name, value in ast.iter_fields(node) if name != "body"}
    return ast.copy_location(ast.ClassDef(**header, body=[]), node)


def _members(node: ast.Module | ast.ClassDef) -> list[ast.stmt]:
    return node.body if ast.get_docstring(node, clean=False) is None else node.body[1:]


def _align(old: Sequence[Statement], new: Sequence[Statement]) -> list[Edit]:
    """Aligns two blocks twice: without local names, to match the names; then with the matched names."""
    names = _matched_names(old, new)
    before = {a: tuple(_label(token, token) for token in a.tokens) for a in old}
    after = {b: tuple(_label(token, names.get(token)) for token in b.tokens) for b in new}
    pairs = _pairs(old, new, list(before.values()), list(after.values()))
    partner: dict[Statement | None, Statement] = {a: b for a, b in pairs if a is not None and b is not None}
    origin = set(partner.values())
    edits = []
    for a, b in pairs:
        if b is None:
            assert a is not None
            edits.append(_edit("removed", a, None, before[a], ()))
        elif a is None:
            edits.append(_edit("added", None, b, (), after[b]))
        elif before[a] != after[b]:
            edits.append(_edit("changed", a, b, before[a], after[b]))
        elif partner.get(_nearest(a, partner)) is not _nearest(b, origin):  # a block of another statement
            edits.append(_moved(a, b, after[b]))
    return _joined(edits)


def _label(token: Token, name: Token | None) -> str:
    """The token of a name: that of the old block, or `new` for one that stands for none of its names."""
    return token if isinstance(token, str) else str(name or "new")


def _nearest(statement: Statement, paired: Container[Any]) -> Statement | None:
    """The nearest statement around one that is in both blocks: around it, an inserted `if` moves nothing."""
    parent = statement.parent
    while parent is not None and parent not in paired:
        parent = parent.parent
    return parent


def _edit(kind: str, a: Statement | None, b: Statement | None, before: tuple[str, ...], after: tuple[str, ...]) -> Edit:
    from rapidfuzz.distance import Levenshtein

    statement = b or a
    assert statement is not None
    key = (kind, a.line if a is not None else None, after or before)
    return Edit(kind, statement.line, statement.text, key, a, b, Levenshtein.distance(before, after))


def _moved(a: Statement, b: Statement, label: tuple[str, ...]) -> Edit:
    return Edit("moved", b.line, b.text, ("moved", a.line, label), a, b)


def _joined(edits: Sequence[Edit]) -> list[Edit]:
    """Joins a removed and an added statement that are equal: the statement was moved.

    The first token, the block that it is in, does not count.
    """
    removed: dict[Any, list[Edit]] = {}
    for edit in edits:
        if edit.kind == "removed":
            removed.setdefault(edit.key[2][1:], []).append(edit)
    gone, result = set[int](), []
    for edit in edits:
        if edit.kind == "added" and (same := removed.get(edit.key[2][1:])):
            old = same.pop()
            gone.add(id(old))
            assert old.before is not None
            assert edit.after is not None
            edit = _moved(old.before, edit.after, edit.key[2])
        result.append(edit)
    return [edit for edit in result if id(edit) not in gone]


def _matched_names(old: Sequence[Statement], new: Sequence[Statement]) -> dict[Token, Local]:
    """Local name of the new block -> the old block's name that it stands for.

    Names are matched by the number of places that they share in aligned statements of the same shape.
    """
    votes = Counter[tuple[Local, Local]]()
    for a, b in _pairs(old, new, list(map(_shape, old)), list(map(_shape, new))):
        if a is None or b is None:
            continue
        if _shape(a) == _shape(b):
            tokens = zip(a.tokens, b.tokens, strict=True)
            votes.update((s, t) for s, t in tokens if isinstance(s, tuple) and isinstance(t, tuple))
        for name in a.parameters.keys() & b.parameters.keys():
            votes[a.parameters[name], b.parameters[name]] += _PARAMETER_VOTES
    matched: dict[Token, Local] = {}
    taken = set[Local]()
    for (s, t), _ in votes.most_common():
        if t not in matched and s not in taken:
            taken.add(s)
            matched[t] = s
    return matched


def _shape(statement: Statement) -> tuple[str, ...]:
    """The tokens of a statement without its local names."""
    return tuple("$" if isinstance(token, tuple) else token for token in statement.tokens)


Pair = tuple[Statement | None, Statement | None]


def _pairs(
    old: Sequence[Statement], new: Sequence[Statement], old_labels: Sequence[Any], new_labels: Sequence[Any]
) -> list[Pair]:
    """Pairs of an alignment with the fewest inserted, deleted and changed statements."""
    from rapidfuzz.distance import Levenshtein

    numbers: dict[Any, int] = {}
    a, b = ([numbers.setdefault(label, len(numbers)) for label in labels] for labels in (old_labels, new_labels))
    pairs: list[Pair] = []
    codes = Levenshtein.opcodes(a, b)
    for equal, run in groupby(codes, lambda code: code.tag == "equal"):
        hunk = list(run)
        first = old[hunk[0].src_start : hunk[-1].src_end]
        second = new[hunk[0].dest_start : hunk[-1].dest_end]
        pairs += zip(first, second, strict=True) if equal else _paired(first, second)
    return pairs


def _paired(old: Sequence[Statement], new: Sequence[Statement]) -> list[Pair]:
    """The statements between two equal ones, paired from their beginnings or ends, where more are of one kind."""

    def alike(at: int) -> int:
        return sum(type(a.node) is type(b.node) for a, b in zip(old, new[at:], strict=False))

    if len(old) > len(new):
        return [(a, b) for b, a in _paired(new, old)]
    at = max(0, len(new) - len(old), key=alike)
    return [
        *((None, b) for b in new[:at]),
        *zip(old, new[at:], strict=False),
        *((None, b) for b in new[at + len(old) :]),
    ]


# -- How much of an edit was needed: its changed statements against the smallest known fix. Does not run code.


Edits = tuple[Edit, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class MinimalDiff(int):
    """Result of `minimal_diff`. As a number it is `excess`.

    Args:
        excess: changed statements above `needed`; 0 is best.
        changed: changed statements of the edit.
        needed: changed statements of the reference; 0 without a reference.
        nodes: changed expressions and names inside the changed statements. Of two edits with equally many statements
            the one with fewer nodes is smaller.
        edits: the changed statements.
        unnecessary: those that the reference does not change in the same way, if there is an excess.
        grade: in [0, 1], higher is better: needed / (needed + excess), where at least one statement counts as needed;
            0 for an edit that changes nothing, leaves no statement or cannot be read.
        reason: explanation; empty if nothing is wrong.
    """

    excess: int
    changed: int
    needed: int
    nodes: int = 0
    edits: tuple[Edit, ...] = ()
    unnecessary: tuple[Edit, ...] = ()
    grade: float
    reason: str = ""

    def __new__(cls, value: int | None = None, **fields: Any) -> "MinimalDiff":
        return super().__new__(cls, fields.get("excess", value or 0))

    @property
    def size(self) -> tuple[int, int]:
        """Statements, then nodes: the order in which edits are compared."""
        return self.changed, self.nodes


def minimal_diff(before: str, after: str, reference: str | None = None) -> MinimalDiff:
    """Counts the changed statements of an edit that a fix did not need.

    Sources are compared as normalised syntax trees: formatting, comments, docstrings, names of local variables and the
    order of imports do not count. A changed, inserted, deleted or moved statement counts 1; of a compound statement
    only the header. A moved definition counts 1.

    Args:
        before: source that was edited.
        after: the edited source. One that is not valid Python, has no statements, or is too long to compare, gets the
            grade 0.
        reference: source with the smallest known fix. Without it the excess is the number of changed statements.
    Raises:
        RubricError: `before` or `reference` cannot be read.
    """
    source = _readable(before, "before")
    fixed = None if reference is None else _readable(reference, "reference")
    fix = None if fixed is None else _compared(source, fixed, "reference")
    needed = len(fix) if fix is not None else 0
    try:
        edited = read_source(after)
        if source.count and not edited.count and (fixed is None or fixed.count):
            raise UnreadableCode("it has no statements")
        edits = compare(source, edited)
    except UnreadableCode as error:
        everything = max(1, source.count)
        return MinimalDiff(
            excess=everything,
            changed=everything + needed,
            needed=needed,
            grade=0.0,
            reason=f"The edit is unusable: {error}.",
        )
    return _result(edits, fix)


def _result(edits: Edits, fix: Edits | None) -> MinimalDiff:
    needed = len(fix) if fix is not None else 0
    excess = max(0, len(edits) - needed)
    unnecessary = _without(edits, fix) if fix is not None and excess else ()
    if not len(edits) and (fix is None or needed):
        grade, reason = 0.0, "The edit changes nothing."
    else:
        least = max(1, needed)  # without a reference, one changed statement is the smallest edit
        beyond = max(0, len(edits) - least) if fix is None else excess
        grade, reason = least / (least + beyond), _reason(edits, needed, excess, unnecessary)
    return MinimalDiff(
        excess=excess,
        changed=len(edits),
        needed=needed,
        nodes=sum(edit.nodes for edit in edits),
        edits=edits,
        unnecessary=unnecessary,
        grade=grade,
        reason=reason,
    )


def _compared(source: Source, other: Source, name: str) -> Edits:
    try:
        return compare(source, other)
    except UnreadableCode as error:
        raise RubricError(f"{name} cannot be compared: {error}") from None


def _readable(text: str, name: str) -> Source:
    try:
        return read_source(text)
    except UnreadableCode as error:
        raise RubricError(f"{name} cannot be read: {error}. Pass Python source") from None


def _without(edits: Sequence[Edit], needed: Sequence[Edit]) -> tuple[Edit, ...]:
    """The edits that the fix does not have. A statement of the fix is recognised whichever statement it replaces.

    Where a statement was inserted next to the fix, the alignment may pair the old statement with either of them.
    """
    rest, missing = _unmatched(edits, needed, lambda edit: edit.key)
    written = [[edit for edit in part if edit.after is not None] for part in (rest, missing)]
    beyond, _ = _unmatched(written[0], written[1], lambda edit: edit.key[2])
    removed = [edit for edit in rest if edit.after is None]
    return tuple(sorted([*beyond, *removed], key=lambda edit: edit.line))


def _unmatched(
    edits: Sequence[Edit], others: Sequence[Edit], key: Callable[[Edit], Any]
) -> tuple[list[Edit], list[Edit]]:
    """The edits of each side whose key has no partner on the other one."""
    counts = Counter(map(key, edits)), Counter(map(key, others))
    sides = []
    for side, spare in ((edits, counts[1].copy()), (others, counts[0].copy())):
        left = []
        for edit in side:
            if spare[key(edit)] > 0:
                spare[key(edit)] -= 1
            else:
                left.append(edit)
        sides.append(left)
    return sides[0], sides[1]


_LISTED = 5


def _reason(edits: Edits, needed: int, excess: int, unnecessary: Sequence[Edit]) -> str:
    if not excess or not needed:
        return ""
    listed = "; ".join(map(str, unnecessary[:_LISTED]))
    more = f"; and {len(unnecessary) - _LISTED} more" if len(unnecessary) > _LISTED else ""
    return f"{len(edits)} statements changed, {needed} needed. Not in the smallest known fix: {listed}{more}."
