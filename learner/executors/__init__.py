"""Starts the replicas of a learner somewhere else: as processes here, as jobs at Hugging Face, as Modal sandboxes."""
