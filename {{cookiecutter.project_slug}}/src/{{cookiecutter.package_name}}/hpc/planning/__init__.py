"""Memory, step time and cost before the job: from a traced network and a machine."""
