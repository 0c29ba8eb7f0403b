"""Packed: one large file in the place of many small ones: packing, reading, tokens, staging.

Others use
    pack_command        tools/pack.py: one large file from many small ones, and its verification
    checks              the checks that configs of packed data and of text name, run on the login node
    staged_data, next_token, datasets   base classes and datasets for a researcher's data
    packed_images, packed_file          what a packed file holds
    staging             copies on a node's own storage, and their progress
It needs config, data, launch, run and system. Modules that say so import no torch: the login node runs them.
"""
