"""What several methods are made of."""
