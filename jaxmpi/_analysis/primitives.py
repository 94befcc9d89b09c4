"""Table of the primitives that jaxmpi knows by name, with their properties.

A primitive has one operation (`Op`), by which the analyses select a rule, and any number of traits
(`Trait`), which it shares with others. All other code asks for these, and never for a name, so that
a JAX release which renames a primitive costs one line here. A primitive that is not in the table
has operation UNKNOWN and no trait: each of its results depends on all of its operands, and it is
local unless it is over a named axis.
"""

from enum import Enum, Flag, auto
from typing import NamedTuple

from jax.extend.core import JaxprEqn

__all__ = [
    "PRIMITIVES",
    "Op",
    "Properties",
    "Trait",
    "function_of",
    "has",
    "is_arithmetic",
    "is_sum",
    "op_of",
    "properties",
    "properties_of_function",
    "reduction_of",
]


class Op(Enum):
    """Operation of a primitive. Those that no rule distinguishes share OTHER."""

    UNKNOWN = auto()  # not in the table, or of unknown effect
    OTHER = auto()  # arithmetic without a rule of its own
    # equations that contain jaxprs
    CALL = auto()
    LINEAR_SOLVE = auto()  # a call with several jaxprs
    SCAN = auto()
    WHILE = auto()
    COND = auto()
    MESH = auto()  # a program over a mesh of devices, whose axes it names itself
    # communication over named axes
    ALLREDUCE = auto()
    ALL_GATHER = auto()
    REDUCE_SCATTER = auto()
    ALL_TO_ALL = auto()
    PERMUTE = auto()
    BROADCAST = auto()
    SEND_AHEAD = auto()  # starts a message that a later call of the program waits for
    SENT_AHEAD = auto()  # an identity on the arrays of a message that an earlier call started
    AXIS_INDEX = auto()
    REPLICATION_TYPE = auto()  # changes the replication type in a `shard_map`, and no number
    TRACED_COLLECTIVE = auto()  # a call of the backend, in the function that `jax.jit` compiles
    # references
    NEW_REFERENCE = auto()
    GET = auto()
    SWAP = auto()
    ADD_UPDATE = auto()
    FREEZE = auto()
    # PRNG keys
    MAKE_KEY = auto()  # keys from the numbers that are in them
    # calls of Python or of foreign code
    CALLBACK = auto()
    # arithmetic, see ARITHMETIC
    MARK = auto()  # an identity with a `_marks.Mark`
    ADD = auto()
    SUBTRACT = auto()
    DIVIDE = auto()
    CONVERT = auto()
    SELECT = auto()
    CLAMP = auto()
    BROADCAST_SHAPE = auto()  # along array axes; BROADCAST is the one between ranks
    BARRIER = auto()
    INNER_PRODUCT = auto()
    REDUCE = auto()


class Trait(Flag):
    """A property that several primitives share."""

    NONE = 0
    # What a result depends on
    ELEMENTWISE = auto()  # element i of the result depends only on element i of each operand
    REARRANGES = auto()  # each element of the result is an element of an operand
    RESHAPES = auto()  # REARRANGES, and keeps the order of the elements
    IDENTITY = auto()  # result i equals operand i
    # If every operand has one number in all of its elements, so has the result.
    KEEPS_CONSTANTS = auto()
    # How XLA rounds. Computing two equations in one fused loop may change the rounding of a sum; so
    # these tell which values may be separated from the equations around them (`messages_of`).
    # A sum among the operands is rounded the same whether it is fused with this equation or not.
    PLACES_NUMBERS = auto()
    # The result may be a product, computed here or passed through from an operand. A product is
    # rounded differently when it is fused with a sum.
    MAY_SCALE = auto()
    # How it runs
    TAKES_TIME = auto()  # long enough to send a message meanwhile
    MATRIX_PRODUCT = auto()  # the order of its sums depends on the number of threads
    CALLS_PYTHON = auto()  # calls Python, or foreign code: it may return anything


class Properties(NamedTuple):
    """Properties of a primitive.

    Attributes:
      op: the operation.
      traits: the traits.
      reduction: "sum", "max", "min" or "prod" for a reduction over ranks or elements, else "".
      jaxpr: the name of the parameter that holds the jaxpr of a call.
      is_jit: whether the primitive is the call of a `jax.jit`.
      root: the name of the parameter that holds the root of a broadcast.
    """

    op: Op = Op.OTHER
    traits: Trait = Trait.NONE
    reduction: str = ""
    jaxpr: str = ""
    is_jit: bool = False
    root: str = ""


# Short names and constructors for the table below
ELEMENTWISE = Trait.ELEMENTWISE
REARRANGES = Trait.REARRANGES
IDENTITY = Trait.IDENTITY
KEEPS_CONSTANTS = Trait.KEEPS_CONSTANTS
PLACES_NUMBERS = Trait.PLACES_NUMBERS
MAY_SCALE = Trait.MAY_SCALE
TAKES_TIME = Trait.TAKES_TIME
MATRIX_PRODUCT = Trait.MATRIX_PRODUCT
CALLS_PYTHON = Trait.CALLS_PYTHON
RESHAPES = Trait.RESHAPES


def _plain(traits: Trait) -> Properties:
    return Properties(traits=traits)


def _call(jaxpr: str) -> Properties:
    return Properties(Op.CALL, jaxpr=jaxpr)


def _reduction(reduction: str) -> Properties:
    """Return the properties of a reduction over elements."""
    return Properties(Op.REDUCE, reduction=reduction)


PRIMITIVES: dict[str, Properties] = {
    # calls
    "jit": _call("jaxpr")._replace(is_jit=True),
    "pjit": _call("jaxpr")._replace(is_jit=True),
    "call": _call("call_jaxpr"),
    "closed_call": _call("call_jaxpr"),
    "core_call": _call("call_jaxpr"),
    "eval_jaxpr": _call("call_jaxpr"),  # jax 0.12
    "remat2": _call("jaxpr"),
    "checkpoint": _call("jaxpr"),
    "custom_jvp_call": _call("call_jaxpr"),
    "custom_vjp_call": _call("call_jaxpr"),
    "custom_linear_solve": Properties(Op.LINEAR_SOLVE, jaxpr="jaxprs"),
    # loops and branches
    "scan": Properties(Op.SCAN, TAKES_TIME),
    "while": Properties(Op.WHILE, TAKES_TIME),
    "cond": Properties(Op.COND, TAKES_TIME),
    # programs over a mesh of devices
    "shard_map": Properties(Op.MESH),
    "xla_pmap": Properties(Op.MESH),
    # collectives
    "psum": Properties(Op.ALLREDUCE, reduction="sum"),
    "pmax": Properties(Op.ALLREDUCE, reduction="max"),
    "pmin": Properties(Op.ALLREDUCE, reduction="min"),
    "all_gather": Properties(Op.ALL_GATHER),
    "reduce_scatter": Properties(Op.REDUCE_SCATTER, reduction="sum"),
    "all_to_all": Properties(Op.ALL_TO_ALL),
    "ppermute": Properties(Op.PERMUTE),
    "pbroadcast": Properties(Op.BROADCAST, root="source"),
    "jaxmpi_bcast": Properties(Op.BROADCAST, root="root"),
    "axis_index": Properties(Op.AXIS_INDEX),
    "pcast": Properties(Op.REPLICATION_TYPE),
    "jaxmpi_send_ahead": Properties(Op.SEND_AHEAD),
    "jaxmpi_sent_ahead": Properties(Op.SENT_AHEAD),
    "jaxmpi_collective": Properties(Op.TRACED_COLLECTIVE),
    # references
    "new_ref": Properties(Op.NEW_REFERENCE),
    "empty_ref": Properties(Op.NEW_REFERENCE),
    "get": Properties(Op.GET),
    "swap": Properties(Op.SWAP),
    "addupdate": Properties(Op.ADD_UPDATE),
    "freeze": Properties(Op.FREEZE),
    # PRNG keys
    "random_wrap": Properties(Op.MAKE_KEY),
    # calls of Python functions and of foreign code
    "pure_callback": Properties(Op.CALLBACK, CALLS_PYTHON),
    "io_callback": Properties(Op.CALLBACK, CALLS_PYTHON),
    "debug_callback": Properties(Op.CALLBACK, CALLS_PYTHON),
    "debug_print": Properties(Op.CALLBACK, CALLS_PYTHON),
    "ffi_call": Properties(Op.CALLBACK, CALLS_PYTHON | TAKES_TIME),
    # identities, conversions included
    "jaxmpi_mark": Properties(Op.MARK, ELEMENTWISE | IDENTITY),
    "name": _plain(ELEMENTWISE | IDENTITY),
    "copy": _plain(ELEMENTWISE | IDENTITY | KEEPS_CONSTANTS | MAY_SCALE),
    "copy_p": _plain(ELEMENTWISE | IDENTITY | KEEPS_CONSTANTS | MAY_SCALE),
    "optimization_barrier": Properties(Op.BARRIER, REARRANGES | IDENTITY),
    "convert_element_type": Properties(Op.CONVERT, ELEMENTWISE | KEEPS_CONSTANTS | MAY_SCALE),
    "reduce_precision": _plain(ELEMENTWISE),
    "stop_gradient": _plain(ELEMENTWISE),
    # elementwise arithmetic
    "add": Properties(Op.ADD, ELEMENTWISE | KEEPS_CONSTANTS),
    "add_any": _plain(ELEMENTWISE | KEEPS_CONSTANTS),
    "sub": Properties(Op.SUBTRACT, ELEMENTWISE | KEEPS_CONSTANTS),
    "mul": _plain(ELEMENTWISE | KEEPS_CONSTANTS | MAY_SCALE),
    "div": Properties(Op.DIVIDE, ELEMENTWISE | KEEPS_CONSTANTS),
    "neg": _plain(ELEMENTWISE | KEEPS_CONSTANTS | MAY_SCALE),
    "max": _plain(ELEMENTWISE),
    "min": _plain(ELEMENTWISE),
    "clamp": Properties(Op.CLAMP, ELEMENTWISE),
    "select_n": Properties(Op.SELECT, ELEMENTWISE | PLACES_NUMBERS),
    "integer_pow": _plain(ELEMENTWISE | MAY_SCALE),
    "square": _plain(ELEMENTWISE | MAY_SCALE),
    "abs": _plain(ELEMENTWISE),
    "acos": _plain(ELEMENTWISE),
    "acosh": _plain(ELEMENTWISE),
    "and": _plain(ELEMENTWISE),
    "asin": _plain(ELEMENTWISE),
    "asinh": _plain(ELEMENTWISE),
    "atan": _plain(ELEMENTWISE),
    "atan2": _plain(ELEMENTWISE),
    "atanh": _plain(ELEMENTWISE),
    "bessel_i0e": _plain(ELEMENTWISE),
    "bessel_i1e": _plain(ELEMENTWISE),
    "bitcast_convert_type": _plain(ELEMENTWISE),
    "cbrt": _plain(ELEMENTWISE),
    "ceil": _plain(ELEMENTWISE),
    "clz": _plain(ELEMENTWISE),
    "complex": _plain(ELEMENTWISE),
    "conj": _plain(ELEMENTWISE),
    "cos": _plain(ELEMENTWISE),
    "cosh": _plain(ELEMENTWISE),
    "digamma": _plain(ELEMENTWISE),
    "eq": _plain(ELEMENTWISE),
    "erf": _plain(ELEMENTWISE),
    "erf_inv": _plain(ELEMENTWISE),
    "erfc": _plain(ELEMENTWISE),
    "exp": _plain(ELEMENTWISE),
    "exp2": _plain(ELEMENTWISE),
    "expm1": _plain(ELEMENTWISE),
    "floor": _plain(ELEMENTWISE),
    "ge": _plain(ELEMENTWISE),
    "gt": _plain(ELEMENTWISE),
    "igamma": _plain(ELEMENTWISE),
    "igammac": _plain(ELEMENTWISE),
    "imag": _plain(ELEMENTWISE),
    "is_finite": _plain(ELEMENTWISE),
    "le": _plain(ELEMENTWISE),
    "lgamma": _plain(ELEMENTWISE),
    "log": _plain(ELEMENTWISE),
    "log1p": _plain(ELEMENTWISE),
    "logistic": _plain(ELEMENTWISE),
    "lt": _plain(ELEMENTWISE),
    "ne": _plain(ELEMENTWISE),
    "nextafter": _plain(ELEMENTWISE),
    "not": _plain(ELEMENTWISE),
    "or": _plain(ELEMENTWISE),
    "polygamma": _plain(ELEMENTWISE),
    "population_count": _plain(ELEMENTWISE),
    "pow": _plain(ELEMENTWISE),
    "real": _plain(ELEMENTWISE),
    "regularized_incomplete_beta": _plain(ELEMENTWISE),
    "rem": _plain(ELEMENTWISE),
    "round": _plain(ELEMENTWISE),
    "rsqrt": _plain(ELEMENTWISE),
    "shift_left": _plain(ELEMENTWISE),
    "shift_right_arithmetic": _plain(ELEMENTWISE),
    "shift_right_logical": _plain(ELEMENTWISE),
    "sign": _plain(ELEMENTWISE),
    "sin": _plain(ELEMENTWISE),
    "sinh": _plain(ELEMENTWISE),
    "sqrt": _plain(ELEMENTWISE),
    "tan": _plain(ELEMENTWISE),
    "tanh": _plain(ELEMENTWISE),
    "xor": _plain(ELEMENTWISE),
    # elements at other indices
    "broadcast_in_dim": Properties(
        Op.BROADCAST_SHAPE, REARRANGES | RESHAPES | KEEPS_CONSTANTS | MAY_SCALE
    ),
    "reshape": _plain(REARRANGES | RESHAPES | KEEPS_CONSTANTS | MAY_SCALE),
    "expand_dims": _plain(REARRANGES | RESHAPES | KEEPS_CONSTANTS | MAY_SCALE),
    "squeeze": _plain(REARRANGES | RESHAPES | KEEPS_CONSTANTS | MAY_SCALE),
    "transpose": _plain(REARRANGES | KEEPS_CONSTANTS | MAY_SCALE),
    "slice": _plain(REARRANGES | MAY_SCALE),
    "concatenate": _plain(REARRANGES | PLACES_NUMBERS),
    "dynamic_update_slice": _plain(REARRANGES | PLACES_NUMBERS),
    "pad": _plain(REARRANGES | PLACES_NUMBERS),
    "dynamic_slice": _plain(REARRANGES),
    "gather": _plain(REARRANGES),
    "rev": _plain(REARRANGES),
    "split": _plain(REARRANGES),
    "scatter": _plain(PLACES_NUMBERS),
    "scatter-add": _plain(PLACES_NUMBERS),
    # reductions over elements
    "reduce_sum": _reduction("sum"),
    "reduce_prod": _reduction("prod"),
    "reduce_max": _reduction("max"),
    "reduce_min": _reduction("min"),
    "reduce_or": _reduction("max"),
    "reduce_and": _reduction("min"),
    # products and decompositions of matrices
    "dot_general": Properties(Op.INNER_PRODUCT, TAKES_TIME | MATRIX_PRODUCT),
    "conv_general_dilated": _plain(TAKES_TIME | MATRIX_PRODUCT),
    "ragged_dot_general": _plain(TAKES_TIME | MATRIX_PRODUCT),
    "pallas_call": Properties(Op.UNKNOWN, TAKES_TIME),
    "cholesky": _plain(MATRIX_PRODUCT),
    "eig": _plain(MATRIX_PRODUCT),
    "eigh": _plain(MATRIX_PRODUCT),
    "geqrf": _plain(MATRIX_PRODUCT),
    "hessenberg": _plain(MATRIX_PRODUCT),
    "householder_product": _plain(MATRIX_PRODUCT),
    "lu": _plain(MATRIX_PRODUCT),
    "qr": _plain(MATRIX_PRODUCT),
    "schur": _plain(MATRIX_PRODUCT),
    "svd": _plain(MATRIX_PRODUCT),
    "triangular_solve": _plain(MATRIX_PRODUCT),
    "tridiagonal": _plain(MATRIX_PRODUCT),
    "tridiagonal_solve": _plain(MATRIX_PRODUCT),
}
# Functions of `jax.lax` whose primitives have other names
FUNCTIONS = {"pmean": "psum", "psum_scatter": "reduce_scatter"}

# Operations that compute arrays from arrays and do nothing else: they never communicate, and no
# analysis looks at a jaxpr among their parameters.
ARITHMETIC = frozenset(
    {
        Op.OTHER,
        Op.MARK,
        Op.ADD,
        Op.SUBTRACT,
        Op.DIVIDE,
        Op.CONVERT,
        Op.SELECT,
        Op.CLAMP,
        Op.BROADCAST_SHAPE,
        Op.BARRIER,
        Op.INNER_PRODUCT,
        Op.REDUCE,
    }
)
_UNKNOWN = Properties(Op.UNKNOWN)
_UNKNOWN_PYTHON = Properties(Op.UNKNOWN, CALLS_PYTHON)


def properties(name: str) -> Properties:
    """Return the properties of the primitive with this name.

    Other libraries define callbacks and calls of foreign functions of their own. A primitive that
    is not in the table counts as one if its name contains "callback" or "ffi".
    """
    known = PRIMITIVES.get(name)
    if known is not None:
        return known
    return _UNKNOWN_PYTHON if "callback" in name or "ffi" in name else _UNKNOWN


def properties_of_function(name: str) -> Properties:
    """Return the properties of the primitive behind a collective function of `jax.lax`."""
    return properties(FUNCTIONS.get(name, name))


def function_of(name: str) -> str:
    """Return the function of `jax.lax` that users call for the primitive with this name."""
    return "psum_scatter" if properties(name).op is Op.REDUCE_SCATTER else name


def op_of(eqn: JaxprEqn) -> Op:
    """Return the operation of an equation's primitive."""
    return properties(eqn.primitive.name).op


def reduction_of(eqn: JaxprEqn) -> str:
    """Return the `Properties.reduction` of an equation: "" if it is no reduction."""
    return properties(eqn.primitive.name).reduction


def is_sum(eqn: JaxprEqn) -> bool:
    """Return whether an equation is an allreduce that sums."""
    return op_of(eqn) is Op.ALLREDUCE and reduction_of(eqn) == "sum"


def is_arithmetic(eqn: JaxprEqn) -> bool:
    """Return whether an equation's operation is one of ARITHMETIC."""
    return PRIMITIVES.get(eqn.primitive.name, _UNKNOWN).op in ARITHMETIC


def has(eqn: JaxprEqn, trait: Trait) -> bool:
    """Return whether the primitive of an equation has a trait."""
    return trait in properties(eqn.primitive.name).traits
