"""Graders: they share nothing with the agent, so that a reward cannot be faked."""
