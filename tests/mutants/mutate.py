"""Small changes of a module, one at a time, as somebody's slip could be."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of a module."""

    line: int
    what: str
    """The changed expression or statement, and what became of it; the line may move."""
    tree: ast.Module


def mutants(source: str) -> Iterator[Mutant]:
    """Every change, in the order of the lines; annotations and docstrings stay as they are."""
    tree = ast.parse(source)
    inside = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    places = {id(node) for function in inside for node in _body(function)}
    for index, node in enumerate(ast.walk(tree)):
        if id(node) not in places:
            continue
        for change in _changes(node):
            copy = deepcopy(tree)
            twin = next(each for at, each in enumerate(ast.walk(copy)) if at == index)
            before = ast.unparse(twin).partition("\n")[0]
            text = f"{before} => {change(twin)}"
            yield Mutant(twin.lineno, text, ast.fix_missing_locations(copy))


def _body(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """All nodes that a call executes."""
    for number, statement in enumerate(function.body):
        is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if number == 0 and is_docstring:
            continue
        unused = {id(node) for each in _types(statement) for node in ast.walk(each)}
        for node in ast.walk(statement):
            if id(node) not in unused and not isinstance(node, ast.FunctionDef | ast.arguments):
                yield node


def _types(statement: ast.stmt) -> Iterator[ast.AST]:
    """Annotations inside of it, which no call executes."""
    for node in ast.walk(statement):
        match node:
            case ast.AnnAssign(annotation=annotation):
                yield annotation
            case ast.FunctionDef(args=args, returns=returns):
                yield args
                if returns is not None:
                    yield returns


def _changes(node: ast.AST) -> Iterator[Callable[[ast.AST], str]]:
    """What may be done to a node; each returns what the node reads like then."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in _COMPARISONS:
            yield _set("ops", [_COMPARISONS[type(op)]()])
        case ast.BoolOp(op=op):
            yield _set("op", ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.BinOp(op=op) if type(op) in _OPERATORS:
            yield _set("op", _OPERATORS[type(op)]())
        case ast.AugAssign(op=op) if type(op) in _OPERATORS:
            yield _set("op", _OPERATORS[type(op)]())
        case ast.Constant(value=bool() as value):
            yield _set("value", not value)
        case ast.Constant(value=int() as value):
            yield _set("value", value + 1)
        case ast.IfExp():
            yield _swap
        case ast.If():
            yield _negate
        case ast.Expr(value=ast.Call()):
            yield _set("value", ast.Constant(None))


def _set(field: str, value: object) -> Callable[[ast.AST], str]:
    def change(node: ast.AST) -> str:
        setattr(node, field, value)
        return ast.unparse(node)

    return change


def _swap(node: ast.AST) -> str:
    assert isinstance(node, ast.IfExp)
    node.body, node.orelse = node.orelse, node.body
    return ast.unparse(node)


def _negate(node: ast.AST) -> str:
    assert isinstance(node, ast.If)
    node.test = ast.UnaryOp(ast.Not(), node.test)
    return f"if {ast.unparse(node.test)}"
