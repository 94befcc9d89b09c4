"""What a checkpoint is made of.

| module | |
|---|---|
| parts | a tree as leaves: which numbers of each this rank has, and how it gets them back |
| files | the folder of a checkpoint: written so that it is there as a whole or not at all, and checked |
| together | what the ranks say to each other about it |
| writing | a save in the background |
| reading | on the ranks that there are now |
"""
