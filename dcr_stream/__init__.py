"""Bit-exact delta-compressed weight refit for reinforcement learning across clusters."""

__version__ = "0.1.0"
