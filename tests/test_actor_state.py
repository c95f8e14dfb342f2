"""The state of an actor: no other object assigns to it.  What changes an actor is a message or a call of its method.

The test reads source: an attribute that some actor assigns to itself is an actor's, and an assignment to an attribute
of this name through anything but ``self`` is a write from outside.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TREES = ("callboard", "engine", "server")
# Attributes with the name of an actor's attribute, which belong to other objects -> what these are.
OTHERS = {
    "engine/features/handover/lender.py: loan.slot": "an entry of the lender's table",
    "engine/features/recording/shrinking.py: scheduler.on_plan": "a scheduler without a mailbox, which its owner plays",
    "engine/features/states/rank.py: states.slot": "the states of a rank's rows, as the rank is built",
    "engine/sampling/constraints.py: row.failure": "a row of a sampler",
    "engine/workers/executors.py: link.slot": "a link, which its own actor makes",
    "engine/workers/group.py: life.ready": "a worker's start",
    "engine/workers/tokenizers.py: request.slot": "an entry of the pool's table",
    "server/extensions/chaos/sim/assembly.py: actor.inbox": "the end of a simulated link, before the start",
    "server/extensions/chaos/sim/recovery_mutants.py: one.ready": "a worker's start",
    "server/extensions/chaos/sim/world.py: self.engine.executor.broke": "a simulated device's, before the start",
}


def base_name(base: ast.expr) -> str:
    """The last name of a base class, without what it is subscripted with."""
    base = base.value if isinstance(base, ast.Subscript) else base
    return base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""


def actor_classes(trees: list[ast.Module]) -> list[ast.ClassDef]:
    """``Actor`` and the classes that derive from it."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names = {"Actor"}
    while len(names) < len(names := names | {one.name for one in classes if names & set(map(base_name, one.bases))}):
        pass
    return [one for one in classes if one.name in names]


def is_setattr(node: ast.AST) -> bool:
    """A call with a written name; a name that is computed is not known here."""
    if not isinstance(node, ast.Call) or base_name(node.func) not in ("setattr", "delattr", "__setattr__"):
        return False
    return isinstance(node.args[1], ast.Constant)


def assigned(node: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes that a node assigns to or deletes, also one by one in a tuple, in a loop and by ``setattr``."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store | ast.Del):
            yield part
        elif is_setattr(part):
            yield ast.Attribute(part.args[0], part.args[1].value, ast.Store())


def is_own(attribute: ast.Attribute) -> bool:
    return isinstance(attribute.value, ast.Name) and attribute.value.id == "self"


def state_of_actors(classes: list[ast.ClassDef]) -> set[str]:
    """The attributes that actors assign to themselves, and their properties with a setter."""
    setters = {
        method.name
        for one in classes
        for method in one.body
        if isinstance(method, ast.FunctionDef)
        and any(isinstance(by, ast.Attribute) and by.attr == "setter" for by in method.decorator_list)
    }
    return setters | {one.attr for actor in classes for one in assigned(actor) if is_own(one)}


def writes(tree: ast.Module, state: set[str]) -> Iterator[str]:
    """The assignments of a file to the state of actors from outside."""
    for one in assigned(tree):
        if one.attr in state and not is_own(one):
            yield ast.unparse(one)


SPECIMEN = """
class Scheduler(Actor[Step]):
    def __init__(self):
        self.depth, self.planner = 2, None

    @property
    def limits(self): ...

    @limits.setter
    def limits(self, value): ...

class Recorded(Scheduler):
    def handle(self, message):
        self.count += 1

def change(system, recorded):
    system.scheduler.depth = 1
    system.scheduler.planner, other = None, 2
    recorded.count += 1
    del system.scheduler.limits
    setattr(recorded, "depth", 3)
    for system.scheduler.depth in (1, 2): ...
"""


def test_the_gate_finds_every_way_to_write() -> None:
    tree = ast.parse(SPECIMEN)
    found = list(writes(tree, state_of_actors(actor_classes([tree]))))
    assert sorted(found) == [
        "recorded.count",
        "recorded.depth",
        "system.scheduler.depth",
        "system.scheduler.depth",
        "system.scheduler.limits",
        "system.scheduler.planner",
    ]


def test_no_object_writes_an_attribute_of_an_actor() -> None:
    paths = sorted(path for tree in TREES for path in (ROOT / tree).rglob("*.py"))
    trees = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in paths}
    classes = actor_classes(list(trees.values()))
    assert {"Executor", "Ingress", "Scheduler", "Tokenizer", "TokenizerPool"} <= {one.name for one in classes}
    state = state_of_actors(classes)
    found = {f"{name}: {write}" for name, tree in trees.items() for write in writes(tree, state)}
    assert found == set(OTHERS)
