"""Kinds, operations, dtypes and layouts of records: Python takes them from the extension."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmpi._backends import extension, native_calls, sent_ahead
from jaxmpi._backends.base import Collective, Place
from jaxmpi._job.process import live_record

native = extension.load()


class Backend:
    place = Place(rank=0, size=2, local_rank=0, local_size=2, node=0)
    native = native

    def transport_of(self, call):
        return 0


def attributes(kind="allreduce", op="sum"):
    return native_calls._attributes(Collective(kind, op=op), Backend(), 1)


@pytest.mark.parametrize("kind", native.kinds)
def test_a_call_has_the_number_of_its_kind(kind):
    assert attributes(kind, "")["kind"] == native.kinds[kind]


@pytest.mark.parametrize("op", [*native.operations, "mean", ""])
def test_a_call_has_the_number_of_its_operation(op):
    found = attributes(op=op)
    assert found["op"] == native.operations[op if op in native.operations else "sum"]
    assert found["divisor"] == (2 if op == "mean" else 1)


def test_an_unknown_kind_or_operation_is_refused():
    with pytest.raises(ValueError, match=r"no collective 'gather'\. Use one of allreduce, "):
        attributes("gather")
    with pytest.raises(ValueError, match=r"no operation 'median'\. Use one of sum, "):
        attributes(op="median")


def call(**changed):
    """Call the handler of the host outside of any job: it decodes the attributes first."""
    jax.ffi.register_ffi_target("jaxmpi_test_host", native.handler("host"), platform="cpu")
    out = jax.ffi.ffi_call("jaxmpi_test_host", jax.ShapeDtypeStruct((), jnp.float32))
    given = {
        name: value for name, value in {**attributes(), **changed}.items() if value is not None
    }
    jax.block_until_ready(out(jnp.float32(1), **given))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kind": np.int32(len(native.kinds))}, "no kind of collective of number 6"),
        ({"op": np.int32(-1)}, "no reduce operation of number -1"),
        ({"op": np.int64(0)}, "Wrong scalar data type"),
        ({"bucket": None}, "Wrong number of attributes: expected 9 attributes but got 8"),
        ({"other": np.int32(0)}, "Wrong number of attributes: expected 9 attributes but got 10"),
    ],
)
def test_the_extension_refuses_attributes_that_it_does_not_know(changed, said):
    with pytest.raises(Exception, match=said):
        call(**changed)


def test_dtypes_are_those_of_jax():
    for name in native.dtypes:
        assert jnp.dtype(name).name == name
    assert "float8_e5m2" not in native.dtypes and "bool" not in native.dtypes


def test_the_number_of_a_message_has_64_bits():
    assert sent_ahead.NUMBER.dtype == np.uint32 and sent_ahead.NUMBER.shape == (2,)


def test_the_record_is_found_and_described():
    assert native.record_name == live_record.EVENTS
    layout = json.loads(native.record_layout)
    assert set(live_record.FIELDS) == set(layout["events"]["fields"])
    assert len(native.record_layout) < layout["counters"]["started"] <= live_record.LAYOUT_BYTES
