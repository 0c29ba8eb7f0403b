"""Stop between two optimizer steps and go on exactly."""
