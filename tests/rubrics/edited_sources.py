"""A source with one edit each, and sources of any form with their names renamed."""

import ast


class _Renamer(ast.NodeTransformer):
    """Renames every variable of the generated functions; attributes, keywords and texts keep the same words."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for name in ("id", "name"):
            if isinstance(value := getattr(node, name, None), str):
                setattr(node, name, self.names.get(value, value))
        if isinstance(node, ast.Nonlocal):
            node.names = [self.names.get(name, name) for name in node.names]
        return super().generic_visit(node)


def renamed(text: str, names: dict[str, str]) -> str:
    return ast.unparse(_Renamer(names).visit(ast.parse(text)))
