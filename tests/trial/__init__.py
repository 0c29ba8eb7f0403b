"""Trials: programs of a baked project are run, struck and compared; what they meet is drawn.

    project.py   a baked project, and a process that has imported the libraries
    program.py   words, ranks, environment, node, deadline: forked from that process
    patience.py  deadlines on a machine that is busy with others
    strike.py    place, count, rank → signal, raise, exit, hold, slow
    same.py      whether two runs are the same: the one comparison
    ground.py    files, processes and ports of others, and a canary, none of which a program may touch
    campaign.py  draws by seed and number: outcomes, a line that repeats one, shrinking, controls, floors

The tables of draws are twins/, neighbours/, hostile/, chaos/ and ports.py. `python tests/trial NAME --help` runs one.
modules/ holds the modules, callbacks and patches that trials put into a project, as files.
"""
