"""Asynchronous actor-learner reinforcement learning for Mixture-of-Experts language models."""

__version__ = "0.1.0"
