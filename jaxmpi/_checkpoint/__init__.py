"""What a checkpoint is made of.

| module | |
|---|---|
| manifest | what the leaves are, and where in which file their numbers are, with checksums |
| manifest_format | the text of a manifest, written and parsed |
| parts | a tree as leaves: which numbers of each this rank has |
| leaf_values | the value of a leaf, on the host or on its device |
| resharding | what a rank gets of a leaf that any number of ranks have saved |
| compatibility | whether a checkpoint fits the tree that it is to be restored into |
| files | a rank's file: written in pieces; read and verified, as it may be damaged |
| commit | a folder that is begun, locked, and renamed when it is whole |
| folders | the folders of checkpoints: found, and checked |
| memory | the folder in the memory of the host that belongs to such a folder |
| rank_checks | what the ranks say to each other about it |
| writing | a save in the background |
| reading | on the ranks that there are now |
"""
