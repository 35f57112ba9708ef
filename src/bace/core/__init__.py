"""A stream of tasks, a method, and the loop that brings them together."""
