"""Checkpoints: the files of a training run, which any number of ranks can read back.

| module | |
|---|---|
| tree_leaves | a pytree as the leaves of a checkpoint, and back: names, layouts, values |
| manifest | the description of a checkpoint: its leaves, and where their numbers are in the files |
| array_files | the file of a rank: arrays, written in pieces, read and verified |
| folders | the folder of a checkpoint: unfinished and locked, whole and checked, removed |
| memory | the folder in a host's memory that belongs to a folder of checkpoints |
| agreement | what the ranks compare, and errors that all of them raise |
| saving | a save: the arrays and the manifest of each rank, and the thread that writes them |
| restoring | a restore: the newest whole checkpoint, does it fit, and what each rank gets of it |

How a save becomes visible:

1. `jaxmpi.save` copies the arrays (`saving.prepare`), and compares the call and the values on all
   ranks (`agreement.agree`).
2. Rank 0 makes an unfinished folder, which has a lock (`folders.begin`), and tells the others.
3. A thread on each rank that has arrays to write (rank 0 alone where all leaves are replicated)
   writes its file (`array_files.write`), and tells rank 0 what is in it through the monitor
   (`saving.Saves`).
4. Rank 0's thread writes the manifest, and renames the folder (`folders.commit`): from then on
   `latest` and `restore` find it.
"""
