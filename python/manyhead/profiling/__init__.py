"""What `manyhead profile` and `manyhead compare` do, without their options: the modules in the order of a run.

cases.py      which problems, in which dtypes, on which instruction sets, by how many threads; presets.toml, model.py
limits.py     what the machine can do at best, and how steady it is
sweep.py      the rows, measured in turn
document.py   the JSON document: made, saved, loaded
compare.py    two or more documents, row by row
show.py       all of it on a terminal, or in a pipe
"""
