"""A stream of tasks, a method, and the loop that trains the method on the stream."""
