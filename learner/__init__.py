"""The learner: trains on a journal's episodes by reward, hints and preferences, and publishes weights."""
