"""The channels, carried into trainers that other people run: one module each, and what they share."""
