"""Small faults to plant in Python source, each an edit of a few bytes that keeps the rest of the file as it is."""

import ast
import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SWAPS: dict[type, tuple[str, str]] = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "&"),
}
LOGGING = {"print", "console.print", "say", "typer.echo", "typer.secho", "warnings.warn", "log", "self.log"}
WORDING = {"help", "description", "title", "metavar"}  # keywords whose value is text for people
NO_DECORATOR = {"overload", "abstractmethod", "override"}  # they change nothing at run time


@dataclass(frozen=True)
class Mutant:
    """One edit of one file: the bytes from `start` to `end` become `new`."""

    path: str
    line: int
    reach: range  # lines whose tests can notice it: its statement, or the body of the function that it declares
    scope: str  # the dotted name of the function or class around it, "" for the module
    runs_on_import: bool
    kind: str
    start: int
    end: int
    new: str
    line_before: str
    line_after: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]

    def key(self) -> str:
        """Return the mutant's name in the list of equivalents, which survives a move to another line."""
        return f"{self.path}::{self.scope} | {self.line_before} => {self.line_after}".strip()

    def id(self, source: bytes) -> str:
        digest = hashlib.sha256(source + f"{self.start}:{self.end}:{self.new}".encode())
        return digest.hexdigest()[:16]


class Finder:
    """The mutants of one file, statement by statement."""

    def __init__(self, path: str, source: bytes):
        self.path, self.source = path, source
        self.mutants: list[Mutant] = []
        self.line_starts = [0]
        for line in source.splitlines(keepends=True):
            self.line_starts.append(self.line_starts[-1] + len(line))
        self.scope: list[str] = []
        self.functions = 0
        self.line = 1
        self.reach = range(1, 2)
        self.declared: range | None = None  # the body of the function whose decorators or defaults are visited

    def find(self) -> list[Mutant]:
        self.body(ast.parse(self.source).body)
        return self.mutants

    def span(self, node: ast.AST) -> tuple[int, int]:
        start = self.line_starts[node.lineno - 1] + node.col_offset
        return start, self.line_starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, start: int, end: int) -> str:
        return self.source[start:end].decode()

    def add(self, kind: str, start: int, end: int, new: str) -> None:
        on_import = not self.functions and self.declared is None
        place = (self.path, self.line, self.declared or self.reach, ".".join(self.scope), on_import)
        self.mutants.append(Mutant(*place, kind, start, end, new, *self.lines(start, end, new)))

    def lines(self, start: int, end: int, new: str) -> tuple[str, str]:
        """Return the whole lines around an edit, before and after it, with single spaces."""
        first = self.source.rfind(b"\n", 0, start) + 1
        last = self.source.find(b"\n", end)
        head, tail = self.text(first, start), self.text(end, last if last >= 0 else len(self.source))
        return " ".join(self.text(first, last).split()), " ".join((head + new + tail).split())

    def replace(self, kind: str, node: ast.AST, new: str) -> None:
        self.add(kind, *self.span(node), new)

    # Statements

    def body(self, statements: list[ast.stmt]) -> None:
        previous = None
        for statement in statements:
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):  # a docstring
                self.statement(statement)
                if is_call(previous) and is_call(statement):
                    self.swap_calls(previous, statement)
            previous = statement

    def swap_calls(self, first: ast.stmt, second: ast.stmt) -> None:
        (start, middle), (later, end) = self.span(first), self.span(second)
        swapped = self.text(later, end) + self.text(middle, later) + self.text(start, middle)
        if swapped != self.text(start, end):
            self.add("swapped calls", start, end, swapped)

    def statement(self, node: ast.stmt) -> None:
        if is_type_checking(node):
            return None
        compound = getattr(node, "body", None)
        last = compound[0].lineno - 1 if compound else node.end_lineno
        self.line, self.reach = node.lineno, range(node.lineno, max(node.lineno, last) + 1)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return self.definition(node)
        self.drop_statement(node)
        if isinstance(node, ast.Return) and node.value is not None and not is_constant(node.value, None):
            self.replace("returned None", node.value, "None")
        if isinstance(node, ast.AugAssign):
            self.swap_operator(node.op, self.span(node.target)[1], self.span(node.value)[0])
        if isinstance(node, (ast.If, ast.While, ast.Assert)):
            self.negate(node.test)
        self.expressions(node)
        for field in ("body", "orelse", "finalbody"):
            self.body(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            self.body(handler.body)
        for case in getattr(node, "cases", []):
            self.body(case.body)
        return None

    def definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        if node.name == "__repr__":
            return
        self.scope.append(node.name)
        if isinstance(node, ast.ClassDef):
            self.decorators(node)
            for child in [*node.bases, *node.keywords]:
                self.expression(child)
            self.body(node.body)
        else:
            self.declared = range(node.body[0].lineno, node.end_lineno + 1)
            self.decorators(node)
            self.line = node.lineno
            for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
                self.expression(default)
            self.declared = None
            self.functions += 1
            self.body(node.body)
            self.functions -= 1
        self.scope.pop()

    def decorators(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        for decorator in node.decorator_list:
            self.line, self.reach = decorator.lineno, range(decorator.lineno, decorator.end_lineno + 1)
            start, end = self.span(decorator)
            if ast.unparse(decorator).split(".")[-1] not in NO_DECORATOR:
                at = self.source.rindex(b"@", 0, start)
                self.add("dropped decorator", at, end, "")
            self.expression(decorator)

    def drop_statement(self, node: ast.stmt) -> None:
        simple = (ast.Raise, ast.AugAssign, ast.Delete, ast.Assert, ast.Continue, ast.Break)
        assigns = isinstance(node, ast.Assign) and any(
            isinstance(t, (ast.Attribute, ast.Subscript)) for t in node.targets
        )
        leaves = isinstance(node, ast.Return) and node.value is None
        if isinstance(node, simple) or is_call(node) or assigns or leaves:
            self.replace("dropped statement", node, "pass")

    # Expressions

    def expressions(self, node: ast.stmt) -> None:
        """Mutate the expressions of a statement, without its annotations and the statements inside."""
        for field, value in ast.iter_fields(node):
            if field == "annotation":
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.withitem):
                    self.expression(child.context_expr)
                elif isinstance(child, ast.expr) and not self.is_message(node, field):
                    self.expression(child)

    def is_message(self, node: ast.stmt, field: str) -> bool:
        return isinstance(node, ast.Raise) or (isinstance(node, ast.Assert) and field == "msg")

    def expression(self, node: ast.AST) -> None:
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.keyword) and node.arg in WORDING):
            return
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for op, left, right in zip(node.ops, sides, sides[1:], strict=False):
                self.swap_operator(op, self.span(left)[1], self.span(right)[0])
        elif isinstance(node, ast.BoolOp):
            self.swap_operator(node.op, self.span(node.values[0])[1], self.span(node.values[1])[0])
        elif isinstance(node, ast.BinOp) and not (is_text(node.left) or is_text(node.right)):
            self.swap_operator(node.op, self.span(node.left)[1], self.span(node.right)[0])
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            if not isinstance(node.operand, ast.Constant):
                self.add("dropped operator", *self.span(node), self.text(*self.span(node.operand)))
        elif isinstance(node, ast.Constant):
            self.constant(node)
        elif isinstance(node, ast.IfExp):
            self.negate(node.test)
        elif isinstance(node, ast.comprehension):
            for test in node.ifs:
                self.negate(test)
        elif isinstance(node, ast.Call):
            if ast.unparse(node.func) in LOGGING:
                return
            self.drop_arguments(node)
        elif isinstance(node, ast.Lambda):
            self.functions += 1
            self.expression(node.body)
            self.functions -= 1
            return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.expr, ast.keyword, ast.comprehension)):
                self.expression(child)

    def swap_operator(self, op: ast.AST, start: int, end: int) -> None:
        old, new = SWAPS.get(type(op), ("", ""))
        between = self.text(start, end)
        if old and between.count(old) == 1:
            at = start + len(between[: between.index(old)].encode())
            self.add("swapped operator", at, at + len(old), new)

    def constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.replace("changed constant", node, str(not node.value))
        elif isinstance(node.value, int):
            self.replace("changed constant", node, str(node.value + 1))
        elif isinstance(node.value, float):
            self.replace("changed constant", node, repr(node.value * 2 or 1.0))

    def negate(self, test: ast.expr) -> None:
        if not isinstance(test, (ast.Compare, ast.UnaryOp)):  # those have mutants of their own with the same effect
            self.replace("negated condition", test, f"(not ({self.text(*self.span(test))}))")

    def drop_arguments(self, node: ast.Call) -> None:
        calls = [ast.Call(node.func, node.args[:-1], node.keywords)] if len(node.args) > 1 else []
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg not in WORDING:
                calls.append(ast.Call(node.func, node.args, [k for k in node.keywords if k is not keyword]))
        for call in calls:
            self.replace("dropped argument", node, ast.unparse(call))


def is_call(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await))


def is_constant(node: ast.AST, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING"


def find_mutants(root: Path, packages: list[str]) -> Iterator[Mutant]:
    """Yield every mutant below `packages` (files or folders relative to `root`), in the order of paths and lines."""
    for package in packages:
        top = root / package
        for file in [top] if top.is_file() else sorted(top.rglob("*.py")):
            yield from Finder(str(file.relative_to(root)), file.read_bytes()).find()


def sample(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants of different lines: lines are drawn evenly, however much there is to change in one."""
    lines: dict[tuple[str, int], list[Mutant]] = {}
    for mutant in mutants:
        lines.setdefault((mutant.path, mutant.line), []).append(mutant)
    chance = random.Random(seed)
    chosen = chance.sample(sorted(lines), min(count, len(lines)))
    return [chance.choice(lines[line]) for line in chosen]
