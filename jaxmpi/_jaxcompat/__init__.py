"""The one folder that touches `jax._src`: what jaxmpi needs of JAX beyond its public functions.

Each file falls back on a slower way, or on none, where a version of JAX lacks what it uses.

jaxprs    jaxprs, and what stands in them
retrace   equations put into a function that is being traced
source    where an equation or an error comes from
compiled  modules as text, and the entries of JAX's compilation cache
ordered   order inside of a program
runtime   what JAX does in this process
versions  of JAX, that these were tested with
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
    closed,
    is_axis_effect,
    is_reference,
    kept_with_jaxpr,
    needs_one_device,
    new_variable,
    parts,
    scan_counts,
    with_axis_renamed,
    with_equations,
)
from jaxmpi._jaxcompat.ordered import (
    allow_in_checkpoint,
    can_hide_effects,
    ffi_call_in_order,
    lower_with_tokens,
    ordered_effect,
)
from jaxmpi._jaxcompat.retrace import as_function, as_weak, at_source, bind, can_keep, keep
from jaxmpi._jaxcompat.runtime import (
    at_top_level,
    backends_started,
    binding_axes,
    compiling,
    dispatch_in_c,
    gloo_listens_at,
    leave_as_it_is,
    started_without,
    tracing,
    wait_for_effects,
    watch_communication,
    watch_pmap,
)
from jaxmpi._jaxcompat.source import (
    CallSite,
    call_site,
    called_at,
    caller,
    caller_line,
    failed_collective,
    function_names,
    in_library,
    source_line,
    source_place,
)
from jaxmpi._jaxcompat.versions import TESTED

__all__ = [
    "TESTED",
    "AnyJaxpr",
    "CallSite",
    "Entries",
    "allow_in_checkpoint",
    "as_function",
    "as_weak",
    "at_source",
    "at_top_level",
    "axis_effect",
    "backends_started",
    "bind",
    "binding_axes",
    "call_site",
    "called_at",
    "caller",
    "caller_line",
    "can_hide_effects",
    "can_keep",
    "closed",
    "compile_entry",
    "compiling",
    "dispatch_in_c",
    "failed_collective",
    "ffi_call_in_order",
    "function_names",
    "gloo_listens_at",
    "in_library",
    "is_axis_effect",
    "is_reference",
    "keep",
    "keep_compiled",
    "kept_with_jaxpr",
    "leave_as_it_is",
    "load_entry",
    "lower_with_tokens",
    "module_digest",
    "module_text",
    "needs_one_device",
    "new_variable",
    "ordered_effect",
    "parts",
    "scan_counts",
    "source_line",
    "source_place",
    "started_without",
    "tracing",
    "wait_for_effects",
    "watch_communication",
    "watch_pmap",
    "with_axis_renamed",
    "with_equations",
]
