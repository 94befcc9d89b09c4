"""The rooms of the package, and what may be where. CONTRIBUTING.md has a line for each."""

import ast
import graphlib
import importlib.util
from pathlib import Path

import pytest

import jaxmpi
from jaxmpi._backends.interface import Processes, Ranks, Transport

PACKAGE = Path(jaxmpi.__file__).parent
FOUNDATION = {
    "_axis",
    "_barriers",
    "_marks",
    "_errors",
    "_leaves",
    "_per_rank_state",
    "_votes",
    "_devices",
    "_jaxcompat",
    "_job.process",
    "_data",
}
FOLDERS = [
    *("_backends", "_consistency", "_analysis", "_lowering", "_job.monitor", "_world", "_jit"),
    *("_collectives", "_optim", "_nn", "_checkpoint", "_job.launch", "_job.tools"),
]
PUBLIC = {
    "data",
    "nn",
    "codecs",
    "console",
    "checkpoint",
    "diagnose",
    "testing",
    "__main__",
    "__init__",
}
# the one list: each imports from itself and from those before
LAYERS = [FOUNDATION, *({folder} for folder in FOLDERS), PUBLIC]


def modules():
    """List the name and the file of each module below `jaxmpi`."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield (
            ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"),
            path,
        )


def folder(name):
    """Return the folder that orders a module in LAYERS; within `_job`, the inner folder."""
    first, *rest = name.split(".")
    return f"_job.{rest[0]}" if first == "_job" and rest else first


def imports(path):
    """Return the modules of jaxmpi that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "jaxmpi":
            module = node.module.removeprefix("jaxmpi").removeprefix(".")
            for alias in node.names:
                name = f"{module}.{alias.name}".removeprefix(".")
                file = PACKAGE.joinpath(*name.split("."))
                if file.with_suffix(".py").exists() or file.is_dir():
                    yield name
                elif module:
                    yield module


def test_every_module_stands_in_a_layer():
    assert {folder(name) for name, _ in modules()} - {"_job"} == set().union(*LAYERS)


def test_modules_import_from_their_own_layer_or_below():
    layer = {name: i for i, names in enumerate(LAYERS) for name in names}
    for name, path in modules():
        for imported in imports(path):
            assert layer[folder(imported)] <= layer[folder(name)], (
                f"{name} imports {imported}, above it"
            )


def test_no_two_files_import_each_other():
    graph = {}
    for name, path in modules():
        if name != "testing":
            graph[name] = {found for found in imports(path) if found != name}
    assert list(graphlib.TopologicalSorter(graph).static_order())


def imported(node):
    """Return the names of the modules that a statement imports; none if it is no import."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def test_what_a_rank_is_as_a_process_needs_no_jax():
    for path in (PACKAGE / "_job" / "process").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = imported(node)
            packages = {name.partition(".")[0] for name in names}
            assert packages.isdisjoint({"jax", "jaxlib", "flax", "optax"}), path
            assert {"jaxmpi._jaxcompat", "jaxmpi._devices"}.isdisjoint(names), path


STATE = {  # what modules hold that changes, and why it is not in the Session
    "_world.session": {"_session": "it is the Session"},
    "_job.launch.pool": {
        "_pools": "the ranks of `launch` and of tests outlive the calls, in a process that is "
        "no rank"
    },
    "_job.launch.plain_jax": {
        "_taken": "ports of JAX's coordinator, which the launcher holds until it ends"
    },
    "_data.prefetch": {
        "_left": "what was read ahead of an iterator belongs to the iterator, whatever the job"
    },
    "_job.process.at_exit": {
        "_calls": "calls for the end of the process, not of the job",
        "_threads": "threads that end before the process does, in a job or not",
    },
    "_job.process.garbage": {
        "_pauses": "Python has one garbage collector for all threads of a process",
        "_was_on": "the same",
        "_lock": "the same; a forked child makes a new one",
        "_process": "the process whose pauses these are",
    },
}


EMPTY = ("[]", "{}", "set()", "dict()", "list()", "threading.Condition()", "threading.Lock()")


def test_the_state_of_a_job_is_in_the_session():
    for name, path in modules():
        tree = ast.parse(path.read_text())
        found = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                found.update(node.names)
        for node in tree.body:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            target = (
                node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            )
            if isinstance(target, ast.Name) and not target.id.isupper():
                empty = isinstance(value, ast.List | ast.Dict | ast.Set) or (
                    isinstance(value, ast.Constant) and value.value is None
                )
                if (
                    empty or ast.unparse(value) in ("set()", "dict()", "list()")
                ) and not target.id.startswith("__"):
                    found.add(target.id)
        assert found == set(STATE.get(name, {})), path


def test_no_class_holds_state():
    """A container on a class is filled later: it belongs in the Session."""
    for _, path in modules():
        for found in ast.walk(ast.parse(path.read_text())):
            for line in found.body if isinstance(found, ast.ClassDef) else ():
                value = line.value if isinstance(line, ast.Assign | ast.AnnAssign) else None
                assert value is None or ast.unparse(value) not in EMPTY, (
                    f"{path}, line {line.lineno}"
                )


def test_no_code_asks_for_the_name_of_a_backend():
    """Code asks `Ranks` and their `Transport` to do something, whichever they are."""
    for name, path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and not name.startswith("_backends"):
                for part in ast.walk(node):
                    if isinstance(part, ast.Attribute) and part.attr == "name":
                        owner = ast.unparse(part.value)
                        assert "backend" not in owner and "current(" not in owner, path


def classes_of(folder):
    """List the classes that the modules of a folder define."""
    found = []
    for name, _ in modules():
        if name.startswith(f"{folder}."):
            module = importlib.import_module(f"jaxmpi.{name}")
            for cls in vars(module).values():
                if isinstance(cls, type) and cls.__module__ == module.__name__:
                    found.append(cls)
    return found


@pytest.mark.parametrize("folder", ["_backends"])
def test_no_method_overrides_one_that_does_something(folder):
    for cls in classes_of(folder):
        for name, member in vars(cls).items():
            inherited = [
                base.__dict__[name]
                for base in cls.__mro__[1:]
                if name in base.__dict__ and base.__module__.startswith("jaxmpi.")
            ]
            ours = callable(member) and name != "__init__" and not name.startswith("_abc")
            if ours and inherited:
                assert all(getattr(f, "__isabstractmethod__", False) for f in inherited), (
                    f"{cls.__module__}.{cls.__name__}.{name}"
                )


def test_no_attribute_says_what_a_backend_is():
    """Callers ask to do something; a yes or no of the MPI library is one of its facts."""
    for interface in (Ranks, Processes, Transport):
        yes_or_no = {
            name
            for name, kind in vars(interface).get("__annotations__", {}).items()
            if kind is bool
        }
        assert yes_or_no <= {"concurrent"}


def test_each_folder_has_a_line_for_each_of_its_files():
    for path in PACKAGE.glob("_*/**/*.py"):
        described = (path.parent / "__init__.py").read_text()
        assert path.stem == "__init__" or path.stem in described, path


def test_file_names_are_told_apart_by_more_than_a_line_below():
    names = [path.stem.strip("_") for name, path in modules() if path.stem != "__init__"]
    twice = {name for name in names if names.count(name) > 1}
    assert twice <= {"simulate", "files", "nnx", "preemption", "preempted"}, twice


@pytest.mark.parametrize(
    ("words", "home"),
    [(("mpi4py", "mpi4jax"), "_backends/mpi_library.py"), (("jax._src",), "_jaxcompat")],
    ids=["mpi", "jax._src"],
)
def test_what_is_imported_in_one_place_only(words, home):
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if any(name.startswith(words) for name in imported(node)):
                assert path.is_relative_to(PACKAGE / home)


def test_frames_of_other_threads_are_taken_in_one_place_only():
    """A walk from one of them to the next crashes CPython 3.11: see `_job/process/stacks.py`."""
    for name, path in modules():
        if name != "_job.process.stacks":
            assert "_current_frames" not in path.read_text(), name


def asked_of_jaxmpi(tree):
    """Yield (module, name) of all that a script imports from jaxmpi or asks of a module of it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module.split(".")[0] == "jaxmpi":
                yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("jaxmpi."):
            *path, name = ast.unparse(node).split(".")
            if all(part.isidentifier() for part in path):
                yield ".".join(path), name


def is_module(name):
    try:
        return bool(importlib.util.find_spec(name))
    except (ModuleNotFoundError, AttributeError):  # its parent is no module
        return False


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "packaging", "tests"])
def test_scripts_ask_for_names_that_exist(folder):
    """Long benchmarks and tests run seldom: a name that has moved is found here."""
    missing = [
        f"{path}: {module}.{name}"
        for path in (PACKAGE.parent / folder).rglob("*.py")
        for module, name in set(asked_of_jaxmpi(ast.parse(path.read_text())))
        if is_module(module)
        and not hasattr(importlib.import_module(module), name)
        and not is_module(f"{module}.{name}")
    ]
    assert not missing, missing


def test_public_names_are_documented():
    for name in jaxmpi.__all__:
        assert (getattr(jaxmpi, name).__doc__ or "").strip(), name


# A first line that begins so does not stand alone in an index: it leans on the line above it.
RIDDLES = ("Of", "That of", "Those", "Such", "As", "The same", "What", "How", "Which")
SENTENCES = {  # what no docstring or message says: what it says instead
    "with whatever else": "For each output, the inputs that are added into it.",
    "Of a word that was sent": "Return (program fingerprint, description) for a fingerprint.",
    "Begin anew": "Rebuild the jitted function if the active backend changed.",
    "the start of a program after a meeting": "Mark this rank as inside a collective.",
    "says a number": "Before communicating, each rank shares a fingerprint of its next program.",
    "is to be equal on all ranks, and it may differ": "is declared replicated but may differ",
    "it does not get on": "all ranks entered the collective; no progress",
    "There is no function for": "`update` then takes no callables such as `value_fn`.",
    "what was received what is to be done": "after: consumes the receive buffer",
    "the ranks do not do the same": "collective mismatch between ranks",
}


def docstrings(tree):
    """The docstrings of a file, each with the line that it begins at."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


@pytest.mark.parametrize("words", RIDDLES)
def test_docstrings_begin_with_a_verb_or_a_name(words):
    found = []
    for path in PACKAGE.rglob("*.py"):
        for line, text in docstrings(ast.parse(path.read_text())):
            if f"{text} ".startswith((f"{words} ", f"{words}\n")):
                found.append(f"{path}:{line}: {text.splitlines()[0]}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_no_riddle_stands_in_a_docstring_or_a_message(sentence):
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and sentence in " ".join(node.value.split()):
                found.append(f"{path}:{node.lineno}: better: {SENTENCES[sentence]}")
    assert not found, "\n".join(found)
