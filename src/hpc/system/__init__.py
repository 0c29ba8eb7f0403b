"""Read and write files that may be damaged, find the home directory, identify processes, and format tables.

Imports no other room.

files            text, JSON and checksums of regular files; files that are written whole or not at all
home             the home directory and the user's name, also where the account has neither
private_folder   folders on shared storage that only this user can write
former_names     `import pytorch_lightning` gives `lightning.pytorch`
process          identity, start time and traffic of a process
tables           tables for the terminal
"""
