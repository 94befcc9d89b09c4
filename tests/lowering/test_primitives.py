"""Names of JAX's primitives are in one table; all other code asks for properties."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax._src import core
from jax._src.interpreters import partial_eval

import jaxmpi
from jaxmpi._analysis.primitives import PRIMITIVES, Op, Trait, has, op_of, properties

PACKAGE = Path(jaxmpi.__file__).parent
TABLE = PACKAGE / "_analysis" / "primitives.py"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != TABLE)
# Names that other things have, too: operations, parameters, functions of jaxmpi.
AMBIGUOUS = {"add", "call", "copy", "get", "jit", "name", "reduce_scatter", "sub"}
NAMES = {
    name
    for name, known in PRIMITIVES.items()
    if ("_" in name or known.op not in (Op.OTHER, Op.UNKNOWN)) and not name.startswith("jaxmpi_")
} - AMBIGUOUS

# Primitives that contain a jaxpr which jaxmpi does not look into: a collective there is refused.
OPAQUE = {
    "call_hi_primitive",  # of a high-level type that a user defines
    "call_hi_primitive_linearized",
    "free_ref",
    "remat_opt",  # of an optimization that is off by default
    "linear_call",
    "run_state",
    "custom_vmap_call",
    "composite",
    "core_map",  # of Pallas
    "custom_partitioning",
}


def _containing_jaxprs():
    """Return the names of the primitives for which JAX has rules that look into their jaxprs."""
    tables = (
        partial_eval.dce_rules,
        partial_eval.partial_eval_jaxpr_custom_rules,
        core.custom_typechecks,
    )
    calls = {
        primitive.name
        for primitive in vars(core).values()
        if isinstance(primitive, core.Primitive) and getattr(primitive, "call_primitive", False)
    }
    names = {primitive.name for table in tables for primitive in table} | calls
    # JAX 0.12 makes one for each primitive that it differentiates, when it does; it is not traced.
    return {name for name in names if not name.startswith("vjp_node[")}


def test_every_primitive_that_contains_a_jaxpr_is_known():
    # JAX has rules for these, too, but they contain no jaxpr.
    plain = {"addupdate", "debug_callback", "debug_print", "get", "new_ref", "swap"}
    plain |= {"broadcast_in_dim", "dynamic_slice", "iota", "reshape"}
    assert _containing_jaxprs() - plain - OPAQUE - set(PRIMITIVES) == set()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_names_of_primitives_are_in_the_table_only(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare | ast.Match):
            text = ast.unparse(node.subject if isinstance(node, ast.Match) else node)
            assert "primitive.name" not in text, f"{path.name}:{node.lineno}: {text}"
        if isinstance(node, ast.Tuple | ast.Set | ast.List | ast.Dict | ast.Compare):
            constants = [
                child.value
                for child in ast.iter_child_nodes(node)
                if isinstance(child, ast.Constant) and isinstance(child.value, str)
            ]
            found = NAMES.intersection(constants)
            assert not found, f"{path.name}:{node.lineno}: {found}"


def test_properties_of_a_primitive_outside_the_table_are_none_or_calls_python():
    unknown = properties("a primitive of another library")
    assert unknown.op is Op.UNKNOWN and unknown.traits is Trait.NONE
    assert Trait.CALLS_PYTHON in properties("my_callback").traits


def _facts(primitive, *args):
    """Return (operation, whether it keeps constants) of a primitive's equation."""
    (eqn,) = jax.make_jaxpr(lambda *xs: primitive.bind(*xs))(*args).jaxpr.eqns
    return op_of(eqn), has(eqn, Trait.KEEPS_CONSTANTS)


def test_one_line_of_the_table_restores_a_renamed_primitive(monkeypatch):
    x = jnp.ones(3)
    before = _facts(lax.add_p, x, x)
    monkeypatch.setattr(lax.add_p, "name", "plus")
    assert _facts(lax.add_p, x, x) != before
    monkeypatch.setitem(PRIMITIVES, "plus", PRIMITIVES["add"])
    assert _facts(lax.add_p, x, x) == before


def test_one_line_of_the_table_restores_a_renamed_loop_with_a_collective(monkeypatch):
    @jaxmpi.jit
    def mean(x):
        return lax.scan(lambda c, _: (lax.pmean(c, jaxmpi.AXIS), None), x, None, length=2)[0]

    def result():
        with jaxmpi.simulate(2):
            return mean(jaxmpi.PerRank(jnp.array([1.0, 3.0])))

    monkeypatch.setattr(lax.scan_p, "name", "loop")
    with pytest.raises(NotImplementedError, match=r"loop at .* communicates over 'ranks'"):
        result()
    monkeypatch.setitem(PRIMITIVES, "loop", PRIMITIVES["scan"])
    assert result() == 2.0
