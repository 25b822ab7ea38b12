"""Every message for a user says what happened, where, and what to do; the troubleshooting page lists them all."""

import ast
import copy
import importlib.util
import sys
from pathlib import Path

from penstock.errors import Interrupted, UserError
from penstock.recipe.recipe import FIELDS, Recipe
from penstock.recipe.rules import broken_rules

ROOT = Path(__file__).parents[1]

WITHOUT: dict[str, str] = {}
"""Messages that may lack a part: the text, and the reason. There is none."""

INTERNAL = {
    "AttributeError": "Python's own protocol: a name that the package does not have",
    "ConstructorError": "becomes `is not YAML`",
    "EOFError": "a checkpoint that was whole a moment ago is changed while it is read: not the user's to mend",
    "KeyboardInterrupt": "becomes `stopped by SIGTERM`",
    "ValueError": "becomes a damaged manifest, a damaged header, or a line of a benchmark's table",
    "Unwritable": "becomes `tokenized rows cannot be written`",
    "_Refused": "becomes a row that is refused",
}
"""What else is raised, and why no user sees it."""


def load_list():
    spec = importlib.util.spec_from_file_location("penstock_messages", ROOT / "scripts" / "messages.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


LIST = load_list()  # the messages themselves take seconds: whoever only collects this file does without


def test_all_of_them_are_found():
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src" / "penstock").rglob("*.py"))
    for kind in LIST.KINDS:
        made = text.count(f"{kind}(") - text.count(f"class {kind}(")
        found = sum(message.kind == kind for message in LIST.messages())
        by_rule = sum(m.file.endswith("recipe/rules.py") for m in LIST.messages() if m.kind == kind)
        passed_on = {"RecipeError": 2, "CheckpointError": 2}.get(kind, 0)  # see scripts/messages.py
        assert found - by_rule == made - passed_on, kind


def test_the_rules_of_a_recipe_are_listed():
    """Every rule that a recipe may break is a line of the page."""
    listed = {(m.where.removesuffix(" = VALUE"), m.what) for m in LIST.messages() if m.file.endswith("recipe/rules.py")}
    assert len(listed) > 60
    assert {field for field, _ in listed} - {"FIELD"} < set(FIELDS)
    broken = {"lr": 0, "rope": "yarn:1", "tile": "64", "weights": "many", "bucket_size": 0, "engine": "deepspeed"}
    for field, value in broken.items():
        recipe = copy.copy(Recipe())
        object.__setattr__(recipe, field, value)
        for where, what, _ in broken_rules(recipe):
            assert (where, what) in listed or ("FIELD", what) in listed


def lacks(message):
    """What a message should have and has not."""
    if message.what in WITHOUT:
        return []
    rules = {
        "what": message.what.strip(),
        "where: the file and line, the field or flag, the step, the directory": message.where.strip(),
        "remedy: what the user can do now": message.remedy.strip(),
        "no full stop after what: the remedy follows on a line of its own": not message.what.rstrip().endswith("."),
    }
    return [rule for rule, holds in rules.items() if not holds]


def test_every_message_has_what_where_and_remedy():
    assert len(LIST.messages()) > 250
    assert not [(message.place, lacks(message)) for message in LIST.messages() if lacks(message)]


def test_what_lacks_a_part_is_still_there():
    assert set(WITHOUT) <= {message.what for message in LIST.messages()}


def test_nothing_else_is_raised_at_a_user():
    """Whatever is raised is an error for users, made by a function that returns one, or internal."""
    known = LIST.KINDS.keys() | INTERNAL.keys() | makers()
    for module in LIST.modules():
        for node, _ in module.scopes():
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                assert LIST.called(node.exc) in known, f"{module.name}:{node.lineno}"


def makers():
    """Functions of the program that return an error for users."""
    functions = [n for module in LIST.modules() for n, _ in module.scopes() if isinstance(n, ast.FunctionDef)]
    return {f.name for f in functions if isinstance(f.returns, ast.Name) and f.returns.id in LIST.KINDS}


def test_the_page_lists_every_message_as_it_is():
    page = LIST.PAGE.read_text(encoding="utf-8")
    assert LIST.with_list(page) == page, "run: python scripts/messages.py"


def test_the_page_has_every_kind_with_its_exit_code():
    for name, kind in LIST.KINDS.items():
        code = "129, 130 or 143" if kind is Interrupted else kind.exit_code
        assert LIST.TITLES[name].endswith(f"exit {code}")


def test_an_error_reads_where_what_remedy():
    assert str(UserError("is empty", where="my.jsonl:3", remedy="Fill it.")) == "my.jsonl:3: is empty\n  Fill it."
    stopped = Interrupted("stopped", signal_number=15, where="step 2 of 9", remedy="Go on with --resume.")
    assert str(stopped) == "step 2 of 9: stopped\n  Go on with --resume."
    assert stopped.exit_code == 143
