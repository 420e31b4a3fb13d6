"""Coding environments: tasks, tools, tool errors, sandboxes, graders and the OpenEnv server around them."""
