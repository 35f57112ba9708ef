"""Models in use, exported to one file or behind an HTTP server."""
