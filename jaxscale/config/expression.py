"""Small expressions over the fields of a document, such as `language == "en" and score >= 0.5`.

The syntax is Python's; only what is listed here is understood, so an expression can neither call nor reach anything.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, container: item in container,
    ast.NotIn: lambda item, container: item not in container,
}
_CONSTANTS = {"true": True, "false": False, "null": None}

ALLOWED = "fields (lang, meta.lang), text, numbers, lists, true, false, null, == != < <= > >= in, and, or, not, len()"
"""What an expression may consist of, for messages."""


@dataclass(frozen=True)
class Expression:
    """A condition on the fields of one document; `text` is checked when it is made, and raises ValueError if wrong."""

    text: str

    def __post_init__(self) -> None:
        _check(self._tree)

    @cached_property
    def fields(self) -> frozenset[str]:
        """The fields that are named, those inside others by the outermost name."""
        names = (node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name))
        return frozenset(names) - {*_CONSTANTS, "len"}

    def holds(self, fields: Mapping[str, Any]) -> bool:
        """Whether it is true of a document; a field that is not there is null.

        Raises ValueError where it cannot be evaluated, such as a comparison of null with a number.
        """
        try:
            return bool(_value(self._tree, fields))
        except TypeError as error:
            raise ValueError(f"{self.text!r} cannot be evaluated ({error})") from error

    @cached_property
    def _tree(self) -> ast.expr:
        try:
            return ast.parse(self.text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"is no expression ({getattr(error, 'msg', error)}); allowed: {ALLOWED}") from None


def _check(node: ast.AST) -> None:
    """Raise ValueError unless `node` consists of what is allowed."""
    match node:
        case ast.Name() | ast.Constant(value=str() | int() | float()):
            return
        case ast.Attribute(value=ast.Name() | ast.Attribute()):
            _check(node.value)
        case ast.Call(func=ast.Name(id="len"), args=[argument], keywords=[]):
            _check(argument)
        case ast.List() | ast.Tuple():
            list(map(_check, node.elts))
        case ast.BoolOp():
            list(map(_check, node.values))
        case ast.UnaryOp(op=ast.Not()) | ast.UnaryOp(op=ast.USub()):
            _check(node.operand)
        case ast.Compare() if all(type(operation) in _COMPARE for operation in node.ops):
            list(map(_check, (node.left, *node.comparators)))
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is not understood; allowed: {ALLOWED}")


def _value(node: ast.expr, fields: Mapping[str, Any]) -> Any:
    """The value of a checked expression; raises TypeError for an operation on values of the wrong kinds."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return _CONSTANTS[node.id] if node.id in _CONSTANTS else fields.get(node.id)
        case ast.Attribute():
            outer = _value(node.value, fields)
            return outer.get(node.attr) if isinstance(outer, Mapping) else None
        case ast.Call():
            return len(_value(node.args[0], fields))
        case ast.List() | ast.Tuple():
            return [_value(item, fields) for item in node.elts]
        case ast.UnaryOp(op=ast.Not()):
            return not _value(node.operand, fields)
        case ast.UnaryOp():
            return -_value(node.operand, fields)
        case ast.BoolOp(op=ast.And()):
            return all(_value(part, fields) for part in node.values)
        case ast.BoolOp():
            return any(_value(part, fields) for part in node.values)
        case ast.Compare():
            values = [node.left, *node.comparators]
            return all(
                _COMPARE[type(operation)](_value(left, fields), _value(right, fields))
                for operation, left, right in zip(node.ops, values, values[1:], strict=False)
            )
    raise AssertionError(f"unchecked: {node}")
