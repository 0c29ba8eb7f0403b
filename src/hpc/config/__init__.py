"""One composed config, typed and checked, from configs/ and what a person types. Imports neither torch nor lightning.

Offers, in the order of a run:
compose            the config of a command line; defaults and personal_clusters, which Hydra takes
parse              the `Config` that everybody gets, or all that is wrong with it (sections, rules)
arguments          the arguments of classes (signatures), and the files
build              the objects that a config names
freezing           the config as it is written beside a run
layout             what is derived from it: world size, micro-batch size
trust              which classes the config of a run directory may name
versions           the versions of torch and lightning that pyproject.toml supports
errors             `ConfigError`, which ends a program with exit code 2 and without a traceback; all exit codes
walltime, conversion, project, yaml_files for whoever needs them

Needs the room system, and the project's folder configs/.
"""
