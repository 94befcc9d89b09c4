"""The commands `jaxmpi doctor`, `jaxmpi top` and `jaxmpi timeline`.

doctor    is everything there, does it fit together, and how fast is it?
probes    what doctor tries in processes of its own
top       the ranks of running jobs, live
observe   what the ranks show of themselves, on this host and on others
timeline  the flight records of all ranks as one trace, and which rank is late
picture   a timeline as a picture
"""
