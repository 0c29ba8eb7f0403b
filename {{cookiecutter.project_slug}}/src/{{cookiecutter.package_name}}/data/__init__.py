"""Datasets, one LightningDataModule per file of configs/data.

A subclass of `hpc.data.data_module.DataModule` has `dataset(split)`. It may have
    augment(inputs, draws)      changes training inputs on their device; draws: `num_draws` random numbers per sample
    prepare_inputs(inputs)      normalizes inputs of all splits on their device, after `augment`
    describe(split)             identifies the samples: a resumed run rejects other ones
A subclass of `hpc.packed.staged_data.StagedDataModule` may also have
    files_to_stage()            packed files that `data.stage=true` copies to the node
A subclass of `hpc.packed.next_token.NextToken` has only `list_files()`: the files of a text.
"""
