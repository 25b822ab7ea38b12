"""Every message that the program has for its user, read from its source.

    python scripts/messages.py      # writes them into docs/troubleshooting.md

Capitals stand for what is filled in when it happens. tests/test_messages.py wants of each what happened, where, and
what to do about it, and compares the page with this list, so that neither can drift. Collecting the messages in one
table of the program was rejected: a message belongs beside the check that it explains.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from penstock import errors

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "penstock"
PAGE = ROOT / "docs" / "troubleshooting.md"
BEGIN, END = "<!-- written by scripts/messages.py: begin -->", "<!-- end -->"
KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.UserError) and kind is not errors.UserError
}
TITLES = {
    "RecipeError": "Recipe, flags, environment: exit 2",
    "DataError": "Data: exit 2",
    "ModelError": "Model and tokenizer: exit 2",
    "OutputError": "Output directory: exit 2",
    "DoesNotFit": "Memory or disk too small: exit 3",
    "Diverged": "Training diverged: exit 4",
    "CheckpointError": "Checkpoints and runs: exit 5",
    "RankLost": "Several ranks: exit 6",
    "Interrupted": "Interrupted: exit 129, 130 or 143",
}
CAUGHT = {"error": "REASON", "strerror": "REASON"}


@dataclass(frozen=True)
class Message:
    """One place that makes an error for a user."""

    kind: str
    what: str
    where: str
    remedy: str
    file: str
    line: int

    @property
    def place(self) -> str:
        """For a test's name."""
        return f"{self.file}:{self.line} {self.kind}"


@dataclass(frozen=True)
class Module:
    """A file of the program."""

    name: str
    tree: ast.Module

    def scopes(self) -> Iterator[tuple[ast.AST, list[ast.AST]]]:
        """Every node with all that it is in, outermost first."""
        waiting: list[tuple[ast.AST, list[ast.AST]]] = [(self.tree, [])]
        while waiting:
            node, around = waiting.pop()
            yield node, around
            waiting += [(child, [*around, node]) for child in ast.iter_child_nodes(node)]


@cache
def modules() -> list[Module]:
    """Every file of the program but the one that defines the errors."""
    paths = [path for path in sorted(SOURCE.rglob("*.py")) if path.name != "errors.py"]
    return [Module(str(p.relative_to(SOURCE)), ast.parse(p.read_text(encoding="utf-8"))) for p in paths]


@cache
def messages() -> list[Message]:
    """All of them, in the order of the files."""
    found: list[Message] = []
    files = modules()
    constants = {t.id: n.value for m in files for n in m.tree.body if isinstance(n, ast.Assign)
                 for t in n.targets if isinstance(t, ast.Name)}  # fmt: skip
    for module in files:
        functions = {n.name: n for n in module.tree.body if isinstance(n, ast.FunctionDef)}
        for node, around in module.scopes():
            if isinstance(node, ast.Call) and called(node) in KINDS:
                found += _message(node, module, Reader(node, around, constants, functions))
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_rules"):
                found += _rules(node, module, constants)
    return sorted(found, key=lambda message: (message.file, message.line))


def called(node: ast.Call) -> str:
    """The name of what is called."""
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def _message(node: ast.Call, module: Module, reader: Reader) -> list[Message]:
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    what = node.args[0] if node.args else None
    passed_on = isinstance(what, ast.Attribute) and what.attr == "what"  # raised again, with more to say
    by_rule = isinstance(what, ast.Name) and what.id == "rule"  # of a recipe: each rule is listed itself
    if passed_on or by_rule:
        return []
    texts = [reader.text(part) if part else "" for part in (what, given.get("where"), given.get("remedy"))]
    return [Message(called(node), *texts, file=module.name, line=node.lineno)]


def _rules(function: ast.FunctionDef, module: Module, constants: dict[str, ast.expr]) -> list[Message]:
    """The rules of a recipe: (holds, field, rule, remedy)."""
    found = []
    for node in ast.walk(function):
        if not isinstance(node, ast.Tuple) or len(node.elts) != 4 or isinstance(node.elts[0], ast.Name | ast.Constant):
            continue  # the loop over all of them, or a list of fields
        field, rule, remedy = (Reader(node, [function], constants, {}).text(part) for part in node.elts[1:])
        field = "FIELD" if isinstance(node.elts[1], ast.Name) else field
        found.append(Message("RecipeError", rule, f"{field} = VALUE", remedy, module.name, node.lineno))
    return found


@dataclass(frozen=True)
class Reader:
    """Reads the texts of one message, as far as the source tells them."""

    node: ast.AST
    around: list[ast.AST]
    constants: dict[str, ast.expr]
    functions: dict[str, ast.FunctionDef]

    def text(self, node: ast.expr) -> str:
        """A text as it reads, with capitals for what is only known when it happens."""
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            return self._joined(node)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.text(node.left) + self.text(node.right)
        if isinstance(node, ast.IfExp):
            return _either(self.text(part) for part in (node.body, node.orelse))
        if isinstance(node, ast.Call) and called(node) == "did_you_mean":
            return "Did you mean WORD? / Known: WORDS."
        if isinstance(node, ast.Call) and called(node) in self.functions:
            returned = [n.value for n in ast.walk(self.functions[called(node)]) if isinstance(n, ast.Return)]
            return _either(self.text(value) for value in returned if value is not None)
        if isinstance(node, ast.Name):
            values = self._assigned(node.id) or ([self.constants[node.id]] if node.id in self.constants else [])
            return _either(self.text(value) for value in values) or _placeholder(node)
        return _placeholder(node)

    def _joined(self, node: ast.JoinedStr) -> str:
        text = ""
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                constant = isinstance(part.value, ast.Name) and part.value.id in self.constants
                word = self.text(part.value) if constant else _placeholder(part.value)
                text += f" {word}" if re.search("[a-z]{2}$", text) else word
            else:
                more = self.text(part)
                text += f" {more}" if re.search("[A-Z]$", text) and re.match(r"\w|--", more) else more
        return text

    def _assigned(self, name: str) -> list[ast.expr]:
        """What a name may be here: its last sure assignment, those in branches after that, or an argument's default."""
        function = next((n for n in reversed(self.around) if isinstance(n, ast.FunctionDef)), None)
        if function is None:
            return []
        arguments = function.args.args[len(function.args.args) - len(function.args.defaults) :]
        found = [value for a, value in zip(arguments, function.args.defaults, strict=True) if a.arg == name]
        assigned = [(n, parent) for parent in ast.walk(function) for n in ast.iter_child_nodes(parent)
                    if isinstance(n, ast.Assign) and n.lineno <= self.node.lineno]  # fmt: skip
        for statement, parent in sorted(assigned, key=lambda pair: pair[0].lineno):
            for value in _given_to(name, statement):
                found = [value] if parent in self.around else [*found, value]
        return found


def _given_to(name: str, statement: ast.Assign) -> list[ast.expr]:
    target, value = statement.targets[0], statement.value
    pairs = [(target, value)]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = list(zip(target.elts, value.elts, strict=True))
    return [v for t, v in pairs if isinstance(t, ast.Name) and t.id == name]


def _either(texts: Iterable[str]) -> str:
    return " / ".join(dict.fromkeys(filter(None, texts)))


def _placeholder(node: ast.expr) -> str:
    """A word for a value: the nearest name in it."""
    if isinstance(node, ast.Name):
        return CAUGHT.get(node.id, node.id.strip("_").upper())
    if isinstance(node, ast.Attribute):
        word = CAUGHT.get(node.attr, node.attr.strip("_").upper())
        return _placeholder(node.value) if node.attr.startswith("__") else word
    if isinstance(node, ast.Call):
        values = [a for a in node.args if not isinstance(a, ast.Constant) and getattr(a, "id", "") != "str"]
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("split", "splitlines", "group", "max"):
            values.append(node.func.value)
        return _placeholder(values[0] if values else node.func)
    inner = {"BinOp": "left", "Subscript": "value", "IfExp": "body", "GeneratorExp": "elt", "ListComp": "elt"}
    if name := inner.get(type(node).__name__):
        return _placeholder(getattr(node, name))
    if isinstance(node, ast.BoolOp):
        return _placeholder(node.values[0])
    return str(node.value) if isinstance(node, ast.Constant) else "VALUE"


def listed() -> str:
    """The part of the page that lists messages."""
    found = messages()
    lines: list[str] = []
    for kind, title in TITLES.items():
        lines += ["", f"## {title}", ""]
        entries = [f"- {_code(f'{m.where}: {m.what}')}<br>{_plain(m.remedy)}" for m in found if m.kind == kind]
        lines += dict.fromkeys(entries)  # the same message may be given in two places
    return "\n".join([BEGIN, *lines, "", END])


def _code(text: str) -> str:
    text = text.replace("\n", " ")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _plain(text: str) -> str:
    """Prose that Markdown leaves as it is. A command on a line of its own follows the sentence."""
    for mark in "<*_[":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())


def with_list(page: str) -> str:
    """The page with the list as it is now."""
    before, _, rest = page.partition(BEGIN)
    return before + listed() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(with_list(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
