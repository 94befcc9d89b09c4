"""Parts of JAX that are not public; no other folder imports `jax._src`.

If a version of JAX lacks what a file uses, the file does it in a slower way or leaves it out. The
imports below are the list of names of this folder; the rest of jaxmpi calls `_jaxcompat.name`.
The names of JAX's primitives are in `_analysis/primitives.py`.

jaxprs    read, compare and edit jaxprs
retrace   put equations into a function that is being traced
lanes     loops with a predicate for each lane of a `vmap`
source    source lines of equations, calls and errors
compiled  modules as text, and entries of JAX's compilation cache
ordered   effects that keep the order of messages in a program
runtime   what JAX does in this process: starts, traces, compiles, waits
"""

from jaxmpi._jaxcompat.compiled import (
    Entries,
    compile_entry,
    keep_compiled,
    load_entry,
    module_digest,
    module_text,
)
from jaxmpi._jaxcompat.jaxprs import (
    AnyJaxpr,
    axis_effect,
    behind,
    closed,
    definition,
    has_forward_rule,
    has_reverse_rule,
    is_axis_effect,
    is_reference,
    kept_with_jaxpr,
    may_have_rule,
    needs_one_device,
    new_variable,
    parts,
    scan_counts,
    with_axis_renamed,
    with_equations,
)
from jaxmpi._jaxcompat.lanes import has_lanes, with_scalar_predicate
from jaxmpi._jaxcompat.ordered import (
    allow_in_checkpoint,
    can_hide_effects,
    ffi_call_in_order,
    lower_with_tokens,
    ordered_effect,
    rewrite_branches,
)
from jaxmpi._jaxcompat.retrace import as_function, as_weak, at_source, bind, can_keep, keep
from jaxmpi._jaxcompat.runtime import (
    at_top_level,
    backends_started,
    binding_axes,
    callbacks,
    compiling,
    dispatch_in_c,
    gloo_listens_at,
    leave_as_it_is,
    started_without,
    trace_context,
    tracing,
    wait_for_effects,
    watch_communication,
    watch_pmap,
)
from jaxmpi._jaxcompat.source import (
    LIBRARY_LINE,
    CallSite,
    call_site,
    called_at,
    caller,
    caller_line,
    failed_collective,
    function_names,
    in_library,
    is_transposed,
    library_function,
    lowered_line,
    source_line,
    source_place,
    warn,
)

# versions of JAX that these files were tested with
TESTED = ("0.10.2", "0.11.2", "0.12.0.1")
