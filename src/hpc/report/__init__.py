"""What became of runs, in the terminal and as pages, and TensorBoard in a browser.

Offers `overview` (one run, also as report.html; a table of runs, with the trials of a search or the points of a scaling
study) and `board` (curves). It reads run directories through the rooms run, monitor and jobs, draws with charts, and
writes nothing but report.html, scaling.csv and scaling.html.
"""
