"""``match`` as the chain of conditions that it is, as far as its patterns are values."""

from __future__ import annotations

import ast

_ANY = "the pattern"


def chain_of_match(node: ast.Match) -> ast.stmt:
    """``if subject == value: ... elif ...``; a pattern that is no value is a condition that cannot
    be told, and its names are not known."""
    chain: list[ast.stmt] = []
    for case in reversed(node.cases):
        test = _test_of(case.pattern, node.subject)
        if case.guard is not None:
            test = case.guard if test is None else ast.BoolOp(ast.And(), [test, case.guard])
        if test is None:
            chain = list(case.body)
            continue
        made = ast.If(test, list(case.body), chain)
        chain = [ast.fix_missing_locations(ast.copy_location(made, case.pattern))]
    if len(chain) == 1:
        return chain[0]
    always = ast.If(ast.Constant(True), chain or [ast.Pass()], [])
    return ast.fix_missing_locations(ast.copy_location(always, node))


def _test_of(pattern: ast.pattern, subject: ast.expr) -> ast.expr | None:
    """The condition under which a pattern fits; None where it always does."""
    match pattern:
        case ast.MatchValue():
            return ast.Compare(subject, [ast.Eq()], [pattern.value])
        case ast.MatchSingleton():
            return ast.Compare(subject, [ast.Is()], [ast.Constant(pattern.value)])
        case ast.MatchOr():
            tests = [_test_of(part, subject) for part in pattern.patterns]
            known = [test for test in tests if test is not None]
            return ast.BoolOp(ast.Or(), known) if len(known) == len(tests) else None
        case ast.MatchAs(pattern=None):
            return None
        case _:
            return ast.Call(ast.Name("matches", ast.Load()), [subject, ast.Constant(_ANY)], [])
