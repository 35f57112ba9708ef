"""Settings: what there is to set, how it is read, and how it is explained."""
