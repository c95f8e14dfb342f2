"""The gates against what no file may have: formats that run code, code from text, ambient time and dice in actors,
queues without a limit.

Every gate is shown to close by a specimen of what it refuses, then held against every file of the tree.
"""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from engine.types.errors import EngineDied, PluginError, WeightsError
from server.http.replies import as_request_error, error_response

ROOT = Path(__file__).parents[1]
TREES = ("callboard", "engine", "server", "benchmarks", "examples")
# What simulations run: here time, dice and names come from outside.
REPLAYED = (
    "engine/actors/",
    "engine/scheduling/",
    "engine/kv/",
    *(f"engine/workers/{name}.py" for name in ("executors", "frontend", "group", "limits", "routing", "tokenizers")),
)

Gate = Callable[[ast.AST], bool]

# pickle and its kin, and what speaks it: multiprocessing's queues, pipes and connections all do.
PICKLING = {
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "multiprocessing", "yaml",
}  # fmt: skip
AMBIENT = {"time", "random", "secrets", "uuid", "datetime"}
QUEUES = {"Queue", "PriorityQueue", "LifoQueue"}
# Queues that have no limit of their own -> what bounds each of them.
BOUNDED = {
    "engine/actors/executor.py: self._steps": "scheduler.overlap_depth steps in flight",
    "engine/actors/executor.py: self._waiting": "scheduler.overlap_depth steps in flight",
    "engine/features/images/rank.py: self._work": "pictures that the cache of the planner has room for",
    "engine/features/lora/reader.py: self._work": "as many adapters as there are slots, by the planner",
    "engine/features/kv_store/pages.py: self._to_read": "those that wait for it, which the scheduler limits",
    "engine/features/kv_store/pages.py: self._to_write": "BUFFER_BYTES of pages",
}

LOOP_MAKERS = {"run", "Runner", "new_event_loop"}
# Files of tests that make an event loop themselves -> which one.
OWN_LOOPS = {
    "tests/extensions/images/test_media.py": "asyncio's, because uvloop looks names up by itself",
    "tests/features/handover/link.py": "a link's, on a thread",
    "tests/fuzz/uploads.py": "a reader's, which a fuzzer calls",
    "tests/server/edges.py": "a program's",
    "tests/server/test_access_page.py": "a program's, which writes a page",
    "tests/server/engine_server.py": "a server's, on a thread",
    "tests/server/live_server.py": "a server's, on a thread",
    "tests/server/live_system.py": "a server's, on a thread",
    "tests/server/serve_fake.py": "a server's, in a process",
    "tests/sim/test_loop.py": "virtual time",
    "tests/test_closing_loop.py": "the subject",
    "tests/workers/server.py": "the streams of a client, for threads and fixtures of modules",
    "tests/workers/test_pool_faults.py": "virtual time",
    "tests/workers/test_recovery.py": "an engine's that fixtures of a module compare with",
}


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of an attribute or a name; what is computed is a question mark."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def imports(node: ast.AST) -> set[str]:
    """The packages that a statement imports."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and not node.level:
        return {(node.module or "").partition(".")[0]}
    return set()


def called(node: ast.AST) -> str:
    return dotted(node.func) if isinstance(node, ast.Call) else ""


def pickles(node: ast.AST) -> bool:
    """Whether it pickles; numpy.load does so with an argument alone."""
    if bool(imports(node) & PICKLING) or called(node) == "torch.load" or called(node).endswith("_pyobj"):
        return True
    return isinstance(node, ast.keyword) and node.arg == "allow_pickle"


def runs_text(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and any(
        keyword.arg == "shell" and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
        for keyword in node.keywords
    ):
        return True
    return called(node) in {"eval", "exec", "compile", "os.system", "os.popen", "builtins.eval", "builtins.exec"}


def templates_without_a_sandbox(node: ast.AST) -> bool:
    names = {"Environment", "Template", "NativeEnvironment", "SandboxedEnvironment"}
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jinja2"):
        return any(alias.name in names for alias in node.names)
    return called(node).startswith("jinja2.") and called(node).rpartition(".")[2] in names


def asks_the_world(node: ast.AST) -> bool:
    """A call; to hand over ``time.monotonic`` as a clock, or to seed a generator, is what is wanted."""
    name = called(node)
    if isinstance(node, ast.ImportFrom) and node.module in AMBIENT:
        return True
    return (name.partition(".")[0] in AMBIENT and name != "random.Random") or name == "os.urandom"


def queues_without_limit(node: ast.AST) -> bool:
    """Whether a queue has no limit: a maxsize of 0 is none, and a SimpleQueue never has one."""
    if called(node) in {"queue.SimpleQueue", "SimpleQueue"}:
        return True
    if called(node) not in {f"{module}.{name}" for module in ("asyncio", "queue") for name in QUEUES} | QUEUES:
        return False
    assert isinstance(node, ast.Call)
    limits = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "maxsize")]
    return not limits or (isinstance(limits[0], ast.Constant) and limits[0].value == 0)


def drops_a_task(node: ast.AST) -> bool:
    """The loop holds tasks weakly: one that is not kept may vanish, and its exception with it.  Groups keep theirs."""
    name = called(node.value) if isinstance(node, ast.Expr) else ""
    owner, _, method = name.rpartition(".")
    if method == "ensure_future":
        return True
    return method == "create_task" and ("loop" in owner or owner in ("asyncio", "?", ""))


def catches_everything(node: ast.AST) -> bool:
    """Even the task's own cancellation and Ctrl-C, without saying so."""
    return isinstance(node, ast.ExceptHandler) and node.type is None


SPECIMENS: dict[Gate, list[str]] = {
    pickles: [
        "import pickle",
        "import pickle as json",
        "from multiprocessing import Queue",
        "import multiprocessing.connection",
        "from shelve import open",
        "import os, marshal",
        "import dill",
        "torch.load(path)",
        "np.load(path, allow_pickle=True)",
        "socket.recv_pyobj()",
        "import yaml",
    ],
    runs_text: ["eval(text)", "exec(text)", "os.system(text)", "subprocess.run(text, shell=True)", "f(shell=flag)"],
    templates_without_a_sandbox: [
        "jinja2.Environment()",
        "from jinja2 import Environment",
        "from jinja2.sandbox import SandboxedEnvironment",
        "jinja2.Template(text)",
    ],
    asks_the_world: [
        "time.time()",
        "time.sleep(1)",
        "from time import monotonic",
        "random.random()",
        "random.shuffle(x)",
        "uuid.uuid4()",
        "datetime.datetime.now()",
        "os.urandom(8)",
    ],
    queues_without_limit: [
        "asyncio.Queue()",
        "asyncio.Queue[int]()",
        "asyncio.Queue(0)",
        "queue.Queue(maxsize=0)",
        "queue.SimpleQueue()",
        "SimpleQueue[int]()",
    ],
    drops_a_task: ["asyncio.create_task(f())", "loop.create_task(f())", "asyncio.ensure_future(f())"],
    catches_everything: ["try:\n    f()\nexcept:\n    pass"],
}
FINE: dict[Gate, list[str]] = {
    pickles: ["import json", "from engine.pickle import x", "np.load(path)"],
    runs_text: ["model.eval()", "re.compile(x)", "run(x, shell=False)"],
    templates_without_a_sandbox: ["from jinja2.sandbox import ImmutableSandboxedEnvironment"],
    asks_the_world: ["Planner(time.monotonic)", "random.Random(7)", "self.clock()", "asyncio.sleep(1)"],
    queues_without_limit: ["asyncio.Queue(maxsize=8)", "asyncio.Queue(8)", "asyncio.Queue(maxsize=len(x))"],
    drops_a_task: ["task = asyncio.create_task(f())", "group.create_task(f())"],
    catches_everything: ["try:\n    f()\nexcept Exception:\n    pass"],
}


def nodes(source: str) -> Iterator[ast.AST]:
    """A subscript such as ``Queue[int]`` is what it is of."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            node.func = node.func.value
        yield node


def kept_as(place: str) -> str:
    """'<file>: <what the line assigns to>' of a '<file>:<line>'."""
    name, _, line = place.partition(":")
    source = (ROOT / name).read_text().splitlines()[int(line) - 1]
    return f"{name}: {source.partition(':')[0].partition(' =')[0].strip()}"


@pytest.fixture(scope="module")
def found() -> dict[Gate, list[str]]:
    """'<file>:<line>' of what each gate refuses in the whole tree, which is read once for all gates."""
    refused: dict[Gate, list[str]] = {gate: [] for gate in SPECIMENS}
    paths = sorted(path for tree in TREES for path in (ROOT / tree).rglob("*.py"))
    assert len(paths) > 400
    assert sum(str(path.relative_to(ROOT)).startswith(REPLAYED) for path in paths) > 20
    for path in paths:
        name = str(path.relative_to(ROOT))
        gates = [gate for gate in SPECIMENS if gate is not asks_the_world or name.startswith(REPLAYED)]
        for node in nodes(path.read_text()):
            for gate in gates:
                if gate(node):
                    refused[gate].append(f"{name}:{getattr(node, 'lineno', 0)}")
    return refused


@pytest.mark.reliability("G1", "every file searched for what none may do")
@pytest.mark.parametrize("gate", SPECIMENS, ids=lambda gate: gate.__name__)
def test_no_file_does_it(found: dict[Gate, list[str]], gate: Gate) -> None:
    for specimen in SPECIMENS[gate]:
        assert any(map(gate, nodes(specimen))), f"the gate lets {specimen!r} through"
    for specimen in FINE[gate]:
        assert not any(map(gate, nodes(specimen))), f"the gate refuses {specimen!r}"
    expected = set(BOUNDED) if gate is queues_without_limit else set()
    assert {kept_as(one) for one in found[gate]} == expected, found[gate]


def makes_a_loop(node: ast.AST) -> bool:
    module, _, name = called(node).rpartition(".")
    if isinstance(node, ast.ImportFrom) and node.module in ("asyncio", "uvloop"):
        return any(alias.name in LOOP_MAKERS for alias in node.names)
    return name == "run_until_complete" or (module in ("asyncio", "uvloop") and name in LOOP_MAKERS)


def test_coroutines_of_tests_run_on_the_loop_of_pytest_asyncio() -> None:
    for specimen in ("asyncio.run(f())", "uvloop.run(f())", "loop.run_until_complete(f())", "from asyncio import run"):
        assert any(map(makes_a_loop, nodes(specimen))), f"the gate lets {specimen!r} through"
    for specimen in ("subprocess.run(x)", "asyncio.run_coroutine_threadsafe(f(), loop)", "import asyncio"):
        assert not any(map(makes_a_loop, nodes(specimen))), f"the gate refuses {specimen!r}"
    files = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    assert {name for name, source in files.items() if any(map(makes_a_loop, nodes(source)))} == set(OWN_LOOPS)


@pytest.mark.reliability("G4", "exceptions that hold paths, code and traces, sent to a client")
@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "No such file or directory", "/srv/secret/model.safetensors"),
        RuntimeError('Traceback (most recent call last):\n  File "/srv/secret/engine.py", line 3'),
        EngineDied("executor0 crashed: ValueError: secret"),
        PluginError("plugin policy.odd raised ValueError('secret') in rank (/srv/secret/odd.py:3)"),
        WeightsError("/srv/secret/config.json: no such file"),
        web.HTTPNotFound(text="/srv/secret"),
        web.HTTPInternalServerError(text="/srv/secret", reason="Internal Server Error"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_body_holds_no_path_and_no_trace(error: Exception) -> None:
    response = error_response(as_request_error(error))
    body = msgspec.json.decode(response.body)["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert response.status in (404, 500)
    assert not any(part in response.text for part in ("secret", "Traceback", ".py", "srv"))
