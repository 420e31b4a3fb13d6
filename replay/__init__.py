"""What is kept: the episode schema, the journal of finished episodes, and the store of weight versions.

Everything here knows nothing of agents, environments or learners, and imports without torch.
"""
