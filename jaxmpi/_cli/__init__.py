"""The commands `jaxmpi doctor` and `jaxmpi timeline`.

doctor    is everything there, does it fit together, and how fast is it?
checks    what it looks at
speed     what it measures
finding   what it says of each
timeline  the flight records of all ranks, put together
records   which are read and checked
picture   a timeline as a picture
"""
