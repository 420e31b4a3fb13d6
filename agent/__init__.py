"""What makes a model an agent: the token-level conversation, hints, and one episode from reset to reward."""
