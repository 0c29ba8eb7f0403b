"""Datasets, one LightningDataModule per file of configs/data."""
