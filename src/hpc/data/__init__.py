"""Data: one global order of samples for every layout, loaders that resume, packed files, and their copies on nodes.

Others use
    data_module, next_token, image_datasets     base classes and datasets for a researcher's data
    image_files, text_files, packed_files       lists of files, their splits, and what a packed file holds
    file_checks         the checks that configs of data name, run on the login node
    pack_command        tools/pack.py: one large file from many small ones
    position, position_checks, loader_places, loader_making    the place in the data where a run resumes
    sample_randomness   random numbers of samples, as a function of their place; what watches fetches
    batch_contents      the number of samples of a batch of any kind
    pending_batches     what an interrupted prediction has still to compute
    same_data           a comparison of the data with those of the last checkpoint
    shared_loaders, loader_agreement    a researcher's own loaders, shared out among ranks, which must agree on them
    staging, staging_progress       copies of packed files on a node's own storage
It needs config, launch, run, state and system. Modules that say so import no torch: the login node runs them.
"""
