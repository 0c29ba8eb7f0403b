"""Queue a run on the cluster: python submit.py [group=choice] [key=value]"""

import env

env.use_library()

from hpc.programs import submit

if __name__ == "__main__":
    submit.run()
