"""What replay/, timeline/ and equivalence/ share: run a program, look at it, join the notes.

    command.py    reads the command line
    program.py    runs a program unchanged, as `python train.py` would; says where it stands
    observer.py   what an instrument wants to know of the program
    hooks.py      tells observers what it does: loads, computes, makes a step
    ranks.py      starts one process per rank, and collects what each has noted
    rank.py       what each of them does: it runs the program, and leaves its notes
    meeting.py    where the ranks leave their notes: a folder, or torchrun's store

Only torch and the standard library are needed.
"""
