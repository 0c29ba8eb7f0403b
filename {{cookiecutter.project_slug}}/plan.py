"""Predict memory, time and cost of a run, and how it scales: python plan.py [group=choice] [key=value] [words]"""

import env

env.use_library()

from hpc.programs import plan

if __name__ == "__main__":
    plan.run()
