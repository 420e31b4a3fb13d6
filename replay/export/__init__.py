"""Episodes of a journal in the formats of others: data sets of TRL (``hf``) and agent trajectories (``atif``)."""
