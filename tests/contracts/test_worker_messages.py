"""A worker's error messages are only for people. The gateway forwards them unparsed and decides by fields and codes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

GATEWAY = Path(__file__).resolve().parents[2] / "services" / "gateway"
READER = GATEWAY / "dispatch" / "refusals.py"
CUT = "why_of"  # function of services/shared/field_refusal.py; removes the field's name from the beginning of a message
Function = ast.FunctionDef | ast.AsyncFunctionDef


def imported(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yields (target, value) of an assignment. Tuples are split into their items."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for part, its in zip(target.elts, value.elts, strict=True):
            yield from pairs(part, its)
    elif isinstance(target, ast.Tuple | ast.List):
        yield from ((part, value) for part in target.elts)
    else:
        yield target, value


class MessageNames:
    """Finds the expressions of one module that contain a worker's message.

    The analysis uses names only. If a variable, parameter or function has a message once, all uses of its name count as messages.
    """

    def __init__(self, tree: ast.AST) -> None:
        self._tree = tree
        self._functions = {node.name: node for node in ast.walk(tree) if isinstance(node, Function)}
        self._names: set[str] = set()
        before = -1
        while before != len(self._names):
            before = len(self._names)
            self._names |= set(self._bound())

    def contain(self, node: ast.AST | None) -> bool:
        match node:
            case ast.Attribute(attr="message", ctx=ast.Load()):
                return True
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value="message"), *_]):
                return True
            case ast.Call(func=ast.Name(id=name)) if name in self._names:
                return True
            case ast.Call(func=ast.Name(id=name), args=args) if name in ("str", "repr", CUT):
                return any(map(self.contain, args))
            case ast.Call(func=ast.Attribute(value=value)):
                return self.contain(value)
            case ast.Name(id=name):
                return name in self._names
            case ast.NamedExpr(value=value) | ast.Starred(value=value) | ast.FormattedValue(value=value):
                return self.contain(value)
            case ast.Subscript(value=value):
                return self.contain(value)
            case ast.BoolOp(values=values) | ast.JoinedStr(values=values):
                return any(map(self.contain, values))
            case ast.BinOp(left=left, right=right):
                return self.contain(left) or self.contain(right)
            case ast.IfExp(body=body, orelse=orelse):
                return self.contain(body) or self.contain(orelse)
        return False

    def _bound(self) -> Iterator[str]:
        for node in ast.walk(self._tree):
            bindings: list[tuple[ast.expr, ast.expr]] = []
            match node:
                case ast.Assign(targets=targets, value=value):
                    bindings = [pair for target in targets for pair in pairs(target, value)]
                case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.AugAssign(target=target, value=value):
                    bindings = [(target, value)]
                case ast.NamedExpr(target=target, value=value):
                    bindings = [(target, value)]
                case ast.Call(func=ast.Name(id=name)) if name in self._functions:
                    yield from self._parameters(self._functions[name], node)
            yield from (target.id for target, value in bindings if isinstance(target, ast.Name) and self.contain(value))
        for name, function in self._functions.items():
            if any(isinstance(node, ast.Return) and self.contain(node.value) for node in ast.walk(function)):
                yield name

    def _parameters(self, function: Function, call: ast.Call) -> Iterator[str]:
        names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        yield from (name for name, value in zip(names, call.args, strict=False) if self.contain(value))
        yield from (each.arg for each in call.keywords if each.arg and self.contain(each.value))


def content_uses(tree: ast.AST) -> list[int]:
    """Returns the numbers of lines that use the content of a message. A test whether a message is empty does not count."""
    words = MessageNames(tree)

    def uses_content(node: ast.AST) -> bool:
        match node:
            case ast.Call(func=ast.Attribute(value=value)) if words.contain(value):
                return True
            case ast.Call(
                func=ast.Attribute(value=ast.Constant(value=str()) | ast.Name(id="re" | "json" | "fnmatch")), args=args
            ):
                return any(map(words.contain, args))
            case ast.Call(func=ast.Name(id="len" | "ord" | "list" | "tuple" | "set" | "sorted" | "int" | "float"), args=args):
                return any(map(words.contain, args))
            case ast.Compare(left=left, comparators=others):
                return any(map(words.contain, (left, *others)))
            case ast.Subscript(value=value, slice=part) if words.contain(value):
                return not (isinstance(part, ast.Slice) and part.lower is None and part.step is None)
            case ast.For(iter=value) | ast.comprehension(iter=value) | ast.Match(subject=value):
                return words.contain(value)
        return False

    return sorted({getattr(node, "lineno", 0) for node in ast.walk(tree) if uses_content(node)})


def test_modules_that_read_worker_messages_do_not_import_the_regex_module() -> None:
    trees = {path: ast.parse(path.read_text()) for path in GATEWAY.rglob("*.py")}
    reading = {path for path, tree in trees.items() if "rootstock_llm.protos.worker_pb2" in imported(tree)}
    assert READER in reading and "finish.message" in ast.unparse(trees[READER]), (
        "the reader of finish.message must be among the checked modules"
    )
    assert not [path for path in reading if "re" in imported(trees[path])]


def test_gateway_does_not_interpret_worker_messages() -> None:
    found = {str(path.relative_to(GATEWAY)): content_uses(ast.parse(path.read_text())) for path in GATEWAY.rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}


USES = {
    "a method": "finish.message.partition(': ')",
    "a method of a name": "text = finish.message[:9]\ntext.partition(': ')",
    "of one of several names": "code, text = finish.error, finish.message[:9]\ntext.startswith('a')",
    "of an alternative": "text = finish.message or 'none'\ntext.lower()",
    "of a copy": "first = finish.message\nlast = first\nlast.split()",
    "of an annotated name": "text: str = finish.message\ntext.strip()",
    "of a name within": "if text := finish.message:\n    text.find('a')",
    "a containment test": "'too long' in finish.message",
    "its equal": "finish.message == 'gone'",
    "a character": "finish.message[0]",
    "its rest": "text = finish.message\ntext[3:]",
    "a regex": "re.match('a', finish.message)",
    "a join": "''.join(finish.message)",
    "its length": "len(finish.message)",
    "a loop": "for char in finish.message:\n    pass",
    "a comprehension": "[char for char in finish.message]",
    "a match": "match finish.message:\n    case 'a':\n        pass",
    "by getattr": "getattr(finish, 'message').split()",
    "by a parameter": "def of(words):\n    return words.split()\nof(finish.message)",
    "by a keyword": "def of(*, words):\n    return words == 'a'\nof(words=finish.message)",
    "by a result": "def why(finish):\n    return finish.message\nwhy(finish).split()",
    "of a text that contains it": "f'{finish.message}!'.split()",
    "of the message without its field": f"{CUT}(finish.message, finish.field, None).split()",
    "a copy by str": "str(finish.message).lower()",
}
PASSES_ON = {
    "whole": "fail(finish.message)",
    "a prefix": "text = finish.message[:MAX]\nfail(text or 'It failed.')",
    "in a text": "text = finish.message\nfail(f'{own}: {text}')",
    "a test for emptiness": "if finish.message:\n    fail(finish.message)",
    "beside a code": "code, text = finish.error, finish.message[:9]\nif code == 1:\n    fail(text)",
    "the message without its field": f"text = {CUT}(finish.message, finish.field, None)[:9]\nfail(text)",
    "another's field": "finish.field.partition('.')",
}


def test_each_use_of_the_content_of_a_message_is_found() -> None:
    assert [name for name, source in USES.items() if not content_uses(ast.parse(source))] == []


def test_forwarded_message_does_not_count_as_a_use_of_the_content() -> None:
    assert [name for name, source in PASSES_ON.items() if content_uses(ast.parse(source))] == []
