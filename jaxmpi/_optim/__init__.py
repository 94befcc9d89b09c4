"""optax transforms that work with the gradients and parameters of all ranks.

Means over ranks:
mean            `Mean`, the interface of all means; plain and weighted ones
codec           means by a codec; the codecs are in `jaxmpi.codecs`
adasum          Adasum, the adaptive sum of gradients
deterministic   means with the same bits for any number of ranks; `micro_batch_grads`
loss            `average_loss`; the loss, and functions of it, as extra arguments of `update`
distributed     `distributed`, `average_gradients`: the gradients of all ranks for an optimizer
noise_scale     `measure_noise_scale`: the gradient noise scale
int8_blocks     blocks of 8-bit numbers with a scale each, for `codecs.int8`

Fewer messages:
accumulate      `accumulate`: gradient accumulation, one communication for several steps
local_sgd       `local_sgd`: local SGD, DiLoCo and Streaming DiLoCo

Shards:
zero1           `sharded`: ZeRO-1, the optimizer's state in shards
sharded_state   `ShardedState`, `reshard`: the state of `sharded`
fsdp            `fully_shard`, `unshard`: FSDP (ZeRO-3), the parameters in shards
sharded_array   `ShardedArray`: an array in equal shards, one on each rank
partition       functions of whole arrays, evaluated on shards

Checks and guards:
clip            `clip_by_global_norm`: gradient clipping
nonfinite       `skip_nonfinite`, `dynamic_loss_scale`, `any_rank`: non-finite steps, loss scaling
replicas        `watch_replicas`, `check_replicas`: parameters that differ between ranks

For all of them:
float_leaves    the leaves of floats in a tree: maps, sums, dtypes
transform_arguments  checks of arguments; branches; fields that optax's maps leave out
"""
