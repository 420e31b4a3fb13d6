"""Engines: what samples from the policy, behind ``hintloop.agent.engine.Engine``."""
