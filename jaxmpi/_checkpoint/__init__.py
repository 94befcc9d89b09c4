"""How a training run is written to files, and read back on any number of ranks.

| module | |
|---|---|
| tree_leaves | a pytree as the leaves of a checkpoint, and back: names, layouts, values |
| manifest | the description of a checkpoint: its leaves, and where their numbers are in the files |
| array_files | the file of a rank: arrays, written in pieces, read and verified |
| folders | the folder of a checkpoint: unfinished and locked, whole and checked, removed |
| memory | the folder in a host's memory that belongs to a folder of checkpoints |
| agreement | what the ranks compare and tell each other before a call takes effect |
| saving | a save: what is written, and the thread that writes it |
| restoring | a restore: the newest whole checkpoint, does it fit, and what each rank gets of it |
"""
