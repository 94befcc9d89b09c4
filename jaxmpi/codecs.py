"""Codecs: what is sent for a mean over ranks, in fewer bytes.

    tx = jaxmpi.distributed(optax.adam(1e-3), codec=jaxmpi.codecs.int8())

A codec is a pair of functions. `mean(updates, state)` communicates, with the collectives of
`jaxmpi`, and returns the mean and its new state; the mean must be equal on all ranks, the state is
each rank's own. Where a method has error feedback (Seide et al. 2014; Karimireddy et al. 2019), the
state holds what was not sent yet, and it is added before the next mean: nothing is lost, only late.
"""

from jaxmpi._optim.compression import Codec, bf16, check_codec, f16
from jaxmpi._optim.int8_codec import int8
from jaxmpi._optim.low_rank_codec import powersgd
from jaxmpi._optim.topk_codec import topk

__all__ = ["Codec", "bf16", "check_codec", "f16", "int8", "powersgd", "topk"]
