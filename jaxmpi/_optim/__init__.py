"""optax transforms that work with the gradients and parameters of all ranks.

Means over ranks:
distributed     `distributed`: an optimizer that gets the gradients of all ranks
average         `average_gradients` and `average_loss`
weights         weighted means, for batches of different sizes
objective       the loss and its functions that `update` gets beside the gradients
adasum          Adasum, the adaptive sum of gradients
noise_scale     `measure_noise_scale`: the gradient noise scale
codec           the interface of a codec; the codecs are in `jaxmpi.codecs`
int8_blocks     blocks of 8-bit numbers with a scale each, for `codecs.int8`
deterministic   `micro_batch_grads`: the same bits for any number of ranks

Fewer messages:
accumulate      `accumulate`: gradient accumulation, one communication for several steps
local_sgd       `local_sgd`: local SGD and DiLoCo
streaming_diloco  Streaming DiLoCo: `local_sgd` with fragments or a delay

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
float_leaves    the leaves of floats in a tree, and checks of arguments
"""
