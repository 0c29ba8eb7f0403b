"""The report of a run, in the terminal and as a page, and TensorBoard in a browser.

Offers `overview` (one run, also as report.html, or a table of runs) and `board` (curves).
It reads run directories through the rooms run, monitor and jobs, draws with charts, and writes nothing but report.html.
"""
