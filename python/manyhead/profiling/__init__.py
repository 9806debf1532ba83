"""What the commands that measure do, without their options. `manyhead profile`, in the order of a run:

cases.py        which problems, in which dtypes, on which instruction sets, by how many threads; presets.toml, model.py
instruments.py  what it measures with
limits.py       what the machine can do at best, and how steady it is
sweep.py        the rows, measured in turn
run.py          limits and rows, into one document
document.py     the JSON document: made, saved, loaded
show.py         all of it on a terminal, or in a pipe

The others: compare.py, two or more documents, row by row; explain.py, a plan in words, and the time that predict.py
says it should take (show_explain.py); replay.py, the calls of a log, measured again (show_replay.py).
"""
