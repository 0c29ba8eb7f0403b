"""Data: one global order of samples for every layout, loaders that resume, streams.

Others use
    data_module, image_datasets     base class and datasets for a researcher's data
    image_files, text_files         lists of files, and their splits
    file_checks         the checks that configs of data name, run on the login node
    position, position_checks, loader_places, loader_making    the place in the data where a run resumes
    sample_randomness   random numbers of samples, as a function of their place; what watches fetches
    batch_contents      the number of samples of a batch of any kind
    same_data           a comparison of the data with those of the last checkpoint
    shared_loaders, loader_agreement    a researcher's own loaders, shared out among ranks, which must agree on them
It needs config, launch, run, state and system. Modules that say so import no torch: the login node runs them.
"""
