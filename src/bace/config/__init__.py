"""Settings: which there are, how they are read, and how they are explained."""
