"""Blocks that the model families share. A layer calls ops through their public functions only."""
