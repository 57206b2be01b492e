"""Optimizers, schedules, and what they need of distributed matrices."""
