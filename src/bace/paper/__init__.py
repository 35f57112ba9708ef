"""The paper's tables, figures and claims: the runs that they need, the printed numbers, and our results."""
